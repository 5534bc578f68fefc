"""Divides a step's latent attention into items of work: one list for decode steps and prompts, and
one for single queries of few sequences.

An item is a tile of (query, head) rows of one sequence, which all look at the same latents, and some
of the splits of the keys that the tile sees. The list has the name and the fields of the list
`decode` (`attention_work.py`), so that graphs and steps that run ahead treat it alike; its eighth
field is the tile's first row. An item of the list `small` has a single split and some heads of a
single query; its fourth field is the number of keys that the step writes.
"""

from __future__ import annotations

import numpy as np

from quire.backends.triton.attention_work import SPLIT, _best_run, new_keys
from quire.kernels.ops import HeadShape, Int32Array

LATENT_ROWS = 64
"""(query, head) rows of a tile: those of the wide tensor core instruction (wgmma)."""
MAX_LATENT_PARTIALS = 512
"""The most splits of a step that wait in memory to be merged; 128 KiB each."""

MAX_SMALL_ITEMS = 512
"""With more items the kernel for all is quicker (an estimate)."""


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
) -> dict[str, Int32Array]:
    """The list of a step. `has_small`: whether it may be the list `small`."""
    if has_small and query_lens.max() == 1:
        tiles = -(-shape.num_heads // small_rows(shape.num_heads))
        if int((-(-context_lens // SPLIT)).sum()) * tiles <= MAX_SMALL_ITEMS:
            return {"small": _small_work(context_lens, table_rows, shape.num_heads)}
    return {
        "decode": _work_of_all(query_lens, context_lens, table_rows, shape, num_multiprocessors)
    }


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
) -> Int32Array:
    """A program has a multiprocessor to itself."""
    heads = shape.num_heads
    first_rows = np.cumsum(query_lens) - query_lens
    tiles = -(-query_lens * heads // LATENT_ROWS)
    owner = np.repeat(np.arange(len(tiles)), tiles)
    first = (np.arange(len(owner)) - (np.cumsum(tiles) - tiles)[owner]) * LATENT_ROWS
    last = (first + LATENT_ROWS - 1) // heads
    seen = context_lens[owner] - query_lens[owner] + np.minimum(last + 1, query_lens[owner])
    splits = -(-seen // SPLIT)
    run = _run(splits, num_multiprocessors)
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
    fewest: int, most: int, max_context_len: int, shape: HeadShape, has_small: bool = False
) -> dict[str, int]:
    """The lists that steps of `fewest` to `most` single queries may have, and the most items of
    each.
    """
    lists = {}
    splits = -(-max_context_len // SPLIT)
    small_tiles = -(-shape.num_heads // small_rows(shape.num_heads))
    most_small = most * small_tiles * splits
    if has_small and fewest * small_tiles <= MAX_SMALL_ITEMS:
        lists["small"] = min(most_small, MAX_SMALL_ITEMS)
    if not has_small or most_small > MAX_SMALL_ITEMS:
        tiles = most * -(-shape.num_heads // LATENT_ROWS)
        lists["decode"] = min(tiles * splits, tiles + MAX_LATENT_PARTIALS)
    return lists


def _run(splits: Int32Array, num_multiprocessors: int) -> int:
    """How many splits of a tile an item has: as for other attention, but so that those that wait to
    be merged have room.
    """
    run = _best_run(splits, 1, num_multiprocessors)
    while splits[splits > run].sum() > MAX_LATENT_PARTIALS:
        run *= 2
    return run
