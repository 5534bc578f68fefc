"""Divides a step's latent attention into items of work: one list for decode steps and prompts
(called `prompts` where a kernel for these is to compute it, `single` where one for single queries
is), and one for single queries of few sequences.

An item is a tile of (query, head) rows of one sequence, which all look at the same latents, and some
of the splits of the keys that the tile sees. The list has the name and the fields of the list
`decode` (`attention_work.py`), so that graphs and steps that run ahead treat it alike; its eighth
field is the tile's first row; in the list `single`, where that is always 0, the number of keys that
the step writes. An item of the list `small` has a single split and some heads of a single query; its
fourth field is the number of keys that the step writes.
"""

from __future__ import annotations

import numpy as np

from quire.backends.triton.attention_work import KEY_TILE, SPLIT, _best_run, new_keys
from quire.kernels.ops import HeadShape, Int32Array

LATENT_ROWS = 64
"""(query, head) rows of a tile: those of the wide tensor core instruction (wgmma)."""
MAX_LATENT_PARTIALS = 512
"""The most splits of a step that wait in memory to be merged; 128 KiB each."""

MAX_SMALL_TILES = 384
"""Tiles of keys, of each item's heads, up to which the kernels for few sequences are the quicker ones
(H200; docs/performance.md, attempt 61).
"""
MAX_SMALL_TILES_OF_SPLITS = 640
"""The same where a sequence has several splits, with which the kernel for all takes longer."""

SINGLE_HEADS = 32
"""Heads up to which single queries have a kernel of their own: more of them fill the rows of the
kernel for all.
"""
SINGLE_PROGRAMS = 2
"""Of this kernel, on a multiprocessor."""
_PROMPTS_GAIN = 3
"""How many times as fast the kernel for prompts is, which takes whole tiles only."""


def small_rows(heads: int) -> int:
    """Heads of an item of the list `small`."""
    return 16 if heads <= 16 else 32


def latent_work(
    query_lens: Int32Array,
    context_lens: Int32Array,
    table_rows: Int32Array,
    shape: HeadShape,
    num_multiprocessors: int,
    has_small: bool = False,
    has_prompts: bool = False,
    has_single: bool = False,
) -> dict[str, Int32Array]:
    """The list of a step. `has_small`: whether it may be the list `small`; `has_prompts`: the list
    `prompts`; `has_single`: the list `single`.
    """
    if has_small and query_lens.max() == 1:
        tiles = int((-(-context_lens // KEY_TILE)).sum()) * _small_tiles(shape)
        if _is_small(tiles, int(context_lens.max())):
            return {"small": _small_work(context_lens, table_rows, shape.num_heads)}
    if has_single and query_lens.max() == 1:
        programs = SINGLE_PROGRAMS * num_multiprocessors
        work = _work_of_all(query_lens, context_lens, table_rows, shape, programs, False)
        new = new_keys(query_lens, context_lens, table_rows)
        work[1:, 7] = new[work[1:, 2]]
        return {"single": work}
    # some tile is full of one sequence's rows
    is_prompts = bool(has_prompts and query_lens.max() * shape.num_heads >= LATENT_ROWS)
    is_prompts = is_prompts and bool(query_lens.max() > 1)
    arrays = query_lens, context_lens, table_rows
    work = _work_of_all(*arrays, shape, num_multiprocessors, is_prompts)
    return {"prompts" if is_prompts else "decode": work}


def _small_tiles(shape: HeadShape) -> int:
    """Items of a query for each of its splits."""
    return -(-shape.num_heads // small_rows(shape.num_heads))


def _is_small(tiles: int, longest: int) -> bool:
    return tiles <= (MAX_SMALL_TILES if longest <= SPLIT else MAX_SMALL_TILES_OF_SPLITS)


def _small_work(context_lens: Int32Array, table_rows: Int32Array, heads: int) -> Int32Array:
    each = small_rows(heads)
    tiles = -(-heads // each)
    splits = np.repeat(-(-context_lens // SPLIT), tiles)
    tile = np.repeat(np.arange(len(splits)), splits)
    split = np.arange(len(tile)) - (np.cumsum(splits) - splits)[tile]
    partials = np.where(splits > 1, splits, 0)
    owner = tile // tiles
    new = new_keys(np.ones_like(context_lens), context_lens, table_rows)
    work = np.zeros((1 + len(tile), 8), dtype=np.int32)
    work[0, :2] = len(tile), int(partials.sum())
    fields = (
        (np.cumsum(partials) - partials)[tile],
        split,
        owner,
        new[owner],
        context_lens[owner],
        table_rows[owner],
        split + 1,
        tile % tiles * each,
    )
    for number, values in enumerate(fields):
        work[1:, number] = values
    return work


def _work_of_all(
    query_lens: Int32Array,
    context_lens: Int32Array,
    table_rows: Int32Array,
    shape: HeadShape,
    num_multiprocessors: int,
    is_prompts: bool,
) -> Int32Array:
    """Of the list `single` programs share a multiprocessor; otherwise each has one to itself."""
    heads = shape.num_heads
    first_rows = np.cumsum(query_lens) - query_lens
    tiles = -(-query_lens * heads // LATENT_ROWS)
    owner = np.repeat(np.arange(len(tiles)), tiles)
    first = (np.arange(len(owner)) - (np.cumsum(tiles) - tiles)[owner]) * LATENT_ROWS
    last = (first + LATENT_ROWS - 1) // heads
    seen = context_lens[owner] - query_lens[owner] + np.minimum(last + 1, query_lens[owner])
    splits = -(-seen // SPLIT)
    share = int(splits.sum()) / num_multiprocessors
    longest = int(splits.max())
    run = (
        longest
        if is_prompts and longest <= _PROMPTS_GAIN * share
        else _run(splits, num_multiprocessors)
    )
    pieces = -(-splits // run)
    partials = np.where(pieces > 1, splits, 0)
    tile = np.repeat(np.arange(len(pieces)), pieces)
    first_split = (np.arange(len(tile)) - (np.cumsum(pieces) - pieces)[tile]) * run
    end_split = np.minimum(first_split + run, splits[tile])
    # long items first, so that those started last are short
    lengths = np.minimum(end_split * SPLIT, seen[tile]) - first_split * SPLIT
    order = np.argsort(-lengths, kind="stable")
    tile, first_split, end_split = tile[order], first_split[order], end_split[order]
    sequence = owner[tile]
    work = np.zeros((1 + len(tile), 8), dtype=np.int32)
    work[0, :2] = len(tile), int(partials.sum())
    fields = (
        (np.cumsum(partials) - partials)[tile],
        first_split,
        first_rows[sequence],
        query_lens[sequence],
        context_lens[sequence],
        table_rows[sequence],
        end_split,
        first[tile],
    )
    for number, values in enumerate(fields):
        work[1:, number] = values
    return work


def latent_decode_lists(
    fewest: int,
    most: int,
    max_context_len: int,
    shape: HeadShape,
    has_small: bool = False,
    has_single: bool = False,
) -> dict[str, int]:
    """The lists that steps of `fewest` to `most` single queries may have, and the most items of
    each.
    """
    lists = {}
    splits = -(-max_context_len // SPLIT)
    in_one = min(max_context_len, SPLIT)
    each = _small_tiles(shape)
    # the fewest tiles: one for each query, or one query has all keys of a split and one more
    further = SPLIT // KEY_TILE * each
    if has_small and (
        _is_small(fewest * each, in_one)
        or (splits > 1 and _is_small(fewest * each + further, max_context_len))
    ):
        lists["small"] = _most_small_items(most * each, max_context_len)
    longest = (in_one, max_context_len)
    if not has_small or any(
        not _is_small(most * each * -(-length // KEY_TILE), length) for length in longest
    ):
        tiles = most * -(-shape.num_heads // LATENT_ROWS)
        name = "single" if has_single else "decode"
        lists[name] = min(tiles * splits, tiles + MAX_LATENT_PARTIALS)
    return lists


def _most_small_items(tiles_of_rows: int, max_context_len: int) -> int:
    """Every first split has a tile at least, and every further one the tiles of a whole split before
    it.
    """
    splits = -(-max_context_len // SPLIT)
    most = MAX_SMALL_TILES if splits == 1 else MAX_SMALL_TILES_OF_SPLITS
    if tiles_of_rows >= most:
        return most
    further = (most - tiles_of_rows) // (SPLIT // KEY_TILE)
    return min(tiles_of_rows * splits, tiles_of_rows + further)


def _run(splits: Int32Array, num_multiprocessors: int) -> int:
    """How many splits of a tile an item has: as for other attention, but so that those that wait to
    be merged have room.
    """
    run = _best_run(splits, 1, num_multiprocessors)
    while splits[splits > run].sum() > MAX_LATENT_PARTIALS:
        run *= 2
    return run
