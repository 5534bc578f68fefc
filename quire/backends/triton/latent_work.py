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

from typing import NamedTuple

import numpy as np

from quire.backends.triton.attention_work import KEY_TILE, SPLIT, _best_run, new_keys
from quire.kernels.ops import HeadShape, Int32Array

LATENT_ROWS = 64
"""(query, head) rows of a tile: those of the wide tensor core instruction (wgmma)."""
MAX_LATENT_PARTIALS = 512
"""The most splits of a step that wait in memory to be merged; 128 KiB each."""


class SmallLimit(NamedTuple):
    """The work up to which the kernels for few sequences are quicker than another one (H200)."""

    unit: int
    """Work is counted in so many keys of an item's heads, rounded up for each sequence."""
    most: int
    long: int
    """Where a sequence has more keys than this, the other kernel takes longer."""
    most_of_long: int

    def units(self, length: int) -> int:
        return -(-length // self.unit)

    def holds(self, units: int, longest: int) -> bool:
        return units <= self.most_for(longest)

    def most_for(self, longest: int) -> int:
        return self.most_of_long if longest > self.long else self.most


BESIDE_ALL = SmallLimit(unit=KEY_TILE, most=384, long=SPLIT, most_of_long=640)
"""Beside the kernel for all (docs/performance.md, attempt 61)."""
BESIDE_SINGLE = SmallLimit(unit=SPLIT, most=32, long=16 * SPLIT, most_of_long=64)
"""Beside the kernel for single queries (attempt 72): up to 32 splits, each of their programs has one
part of an output. That kernel merges the splits of a sequence by one program.
"""

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
    arrays = query_lens, context_lens, table_rows
    if query_lens.max() == 1:
        limit = BESIDE_SINGLE if has_single else BESIDE_ALL
        if has_small and _is_small(context_lens, shape, limit):
            return {"small": _small_work(context_lens, table_rows, shape.num_heads)}
        if has_single:
            programs = SINGLE_PROGRAMS * num_multiprocessors
            work = _work_of_all(*arrays, shape, programs, is_prompts=False)
            work[1:, 7] = new_keys(*arrays)[work[1:, 2]]
            return {"single": work}
    # some tile is full of one sequence's rows
    is_prompts = bool(has_prompts and query_lens.max() * shape.num_heads >= LATENT_ROWS)
    is_prompts = is_prompts and bool(query_lens.max() > 1)
    work = _work_of_all(*arrays, shape, num_multiprocessors, is_prompts)
    return {"prompts" if is_prompts else "decode": work}


def _small_tiles(shape: HeadShape) -> int:
    """Items of a query for each of its splits."""
    return -(-shape.num_heads // small_rows(shape.num_heads))


def _is_small(context_lens: Int32Array, shape: HeadShape, limit: SmallLimit) -> bool:
    units = int((-(-context_lens // limit.unit)).sum()) * _small_tiles(shape)
    return limit.holds(units, int(context_lens.max()))


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
    limit = BESIDE_SINGLE if has_single else BESIDE_ALL
    splits = -(-max_context_len // SPLIT)
    short = min(max_context_len, limit.long)
    each = _small_tiles(shape)
    # the least work: one unit for each query, or one query is long
    of_long = (fewest + limit.units(limit.long)) * each
    if has_small and (
        limit.holds(fewest * each, short)
        or (max_context_len > limit.long and limit.holds(of_long, max_context_len))
    ):
        lists["small"] = _most_small_items(most * each, max_context_len, limit)
    if not has_small or any(
        not limit.holds(most * each * limit.units(length), length)
        for length in (short, max_context_len)
    ):
        tiles = most * -(-shape.num_heads // LATENT_ROWS)
        name = "single" if has_single else "decode"
        lists[name] = min(tiles * splits, tiles + MAX_LATENT_PARTIALS)
    return lists


def _most_small_items(first_splits: int, max_context_len: int, limit: SmallLimit) -> int:
    """Every first split has a unit of work at least, and every further one the units of a whole split
    before it.
    """
    splits = -(-max_context_len // SPLIT)
    most = limit.most_for(max_context_len)
    if first_splits >= most:
        return most
    further = (most - first_splits) // limit.units(SPLIT)
    return min(first_splits * splits, first_splits + further)


def _run(splits: Int32Array, num_multiprocessors: int) -> int:
    """How many splits of a tile an item has: as for other attention, but so that those that wait to
    be merged have room.
    """
    run = _best_run(splits, 1, num_multiprocessors)
    while splits[splits > run].sum() > MAX_LATENT_PARTIALS:
        run *= 2
    return run
