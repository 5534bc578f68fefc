"""Divides the attention of a step into items of work for programs: lists made on the host, which
knows the lengths.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quire.kernels.ops import HeadShape, Int32Array

KEY_TILE = 64
"""Keys of a tile (fewer where shared memory is too small)."""
SPLIT = 512
"""Keys of a split: the smallest part of a sequence that a program of its own may compute."""
DECODE_ROWS = 16
"""Sequences with at most this many (query, head) rows per key head go to the list `decode`."""
PROMPT_ROWS = 128
"""(query, head) rows of one item of the list `prefill`, for sequences with more rows."""
MAX_PARTIALS = 1 << 16
"""The most splits of a step that wait to be merged."""
PROGRAMS = 4
"""Programs of the decode kernel that run on a multiprocessor at once."""
_ENTRY = 8
"""Numbers per item of work; `_decode_kernel` and `_prefill_kernel` in attention.py list them."""


def attention_work(
    query_lens: Int32Array,
    context_lens: Int32Array,
    table_rows: Int32Array,
    shape: HeadShape,
    num_multiprocessors: int,
) -> dict[str, Int32Array]:
    """The lists that the kernels walk: `decode` for sequences with up to DECODE_ROWS rows,
    `prefill` for the others. If all are single queries and there is a multiprocessor for every
    split, the list is called `small`, not `decode`.
    """
    first_rows = np.zeros_like(query_lens)
    np.cumsum(query_lens[:-1], out=first_rows[1:])
    group = shape.num_heads // shape.num_kv_heads
    is_decode = query_lens * group <= DECODE_ROWS
    if is_decode.all():
        of_all = first_rows, query_lens, context_lens, table_rows
        num_splits = int((-(-context_lens // SPLIT)).sum())
        is_small = query_lens.max() == 1 and num_splits * shape.num_kv_heads <= num_multiprocessors
        return {
            "small" if is_small else "decode": _decode_work(
                *of_all, shape.num_kv_heads, num_multiprocessors
            )
        }
    work = {}
    rest = ~is_decode
    work["prefill"] = _prefill_work(
        first_rows[rest], query_lens[rest], context_lens[rest], table_rows[rest], group
    )
    if is_decode.any():
        chosen = (
            first_rows[is_decode],
            query_lens[is_decode],
            context_lens[is_decode],
            table_rows[is_decode],
        )
        work["decode"] = _decode_work(*chosen, shape.num_kv_heads, num_multiprocessors)
    return work


def decode_lists(
    fewest: int, most: int, max_context_len: int, shape: HeadShape, num_multiprocessors: int
) -> dict[str, int]:
    """The lists that steps of `fewest` to `most` single queries may have, and the most items of
    each.
    """
    lists = {}
    if fewest * shape.num_kv_heads <= num_multiprocessors:
        lists["small"] = num_multiprocessors // shape.num_kv_heads
    splits = most * -(-max_context_len // SPLIT)
    if splits * shape.num_kv_heads > num_multiprocessors:
        lists["decode"] = splits
    return lists


def _decode_work(
    first_rows: Int32Array,
    query_lens: Int32Array,
    context_lens: Int32Array,
    table_rows: Int32Array,
    num_kv_heads: int,
    num_multiprocessors: int,
) -> Int32Array:
    splits = -(-context_lens // SPLIT)
    run = _best_run(splits, num_kv_heads, PROGRAMS * num_multiprocessors)
    return divided(first_rows, query_lens, context_lens, table_rows, np.full_like(splits, run))


def _best_run(splits: Int32Array, num_kv_heads: int, num_programs: int) -> int:
    """How many splits of a sequence an item should have, for the step to be done soonest. The
    costs, in units of one split's time, were measured on an H200 (docs/performance.md, attempt 20):
    0.15 for each item, 0.3 to merge a divided sequence, and, if there are more items than programs,
    a quarter of an item for programs that idle at the end.
    """
    longest = int(splits.max())
    if longest == 1:
        return 1
    # sizes that divide the longest sequence about evenly
    runs = np.unique(-(-longest // np.arange(1, longest + 1)))
    rounds = (-(-splits // runs[:, None])).sum(1) * num_kv_heads / num_programs
    share = int(splits.sum()) * num_kv_heads / num_programs
    costs = (
        np.where(rounds <= 1, runs, share + 0.25 * runs) + 0.15 * rounds + 0.3 * (runs < longest)
    )
    return int(runs[costs.argmin()])


def divided(
    first_rows: Int32Array,
    query_lens: Int32Array,
    context_lens: Int32Array,
    table_rows: Int32Array,
    runs: Int32Array,
) -> Int32Array:
    """The list `decode`: each sequence is divided into items of `runs` splits, the last one perhaps
    with fewer.
    """
    splits = -(-context_lens // SPLIT)
    runs = np.minimum(runs, splits)
    pieces = -(-splits // runs)
    owner = np.repeat(np.arange(len(pieces)), pieces)
    first_split = (np.arange(len(owner)) - (np.cumsum(pieces) - pieces)[owner]) * runs[owner]
    end_split = np.minimum(first_split + runs[owner], splits[owner])
    lengths = np.minimum(end_split * SPLIT, context_lens[owner]) - first_split * SPLIT
    # long items first, so that those started last are short
    order = np.argsort(-lengths, kind="stable")
    owner, first_split, end_split = owner[order], first_split[order], end_split[order]
    partials = np.where(pieces > 1, splits, 0)
    num_partials = int(partials.sum())
    work = np.zeros((1 + max(len(owner), num_partials), _ENTRY), dtype=np.int32)
    work[0, :2] = len(owner), num_partials
    filled = work[1 : 1 + len(owner)]
    filled[:, 0] = (np.cumsum(partials) - partials)[owner]
    filled[:, 1] = first_split
    filled[:, 2] = first_rows[owner]
    filled[:, 3] = query_lens[owner]
    filled[:, 4] = context_lens[owner]
    filled[:, 5] = table_rows[owner]
    filled[:, 6] = end_split
    filled[:, 7] = new_keys(query_lens, context_lens, table_rows)[owner]
    return work


def new_keys(
    query_lens: Int32Array, context_lens: Int32Array, table_rows: Int32Array
) -> Int32Array:
    """How many of the keys of each sequence the step writes: where draft tokens are checked as single
    queries, several of the same, not just the last one.
    """
    first_new = np.full(1 + table_rows.max(initial=0), np.iinfo(np.int32).max, np.int32)
    np.minimum.at(first_new, table_rows, context_lens - query_lens)
    return context_lens - first_new[table_rows]


def _prefill_work(
    first_rows: Int32Array,
    query_lens: Int32Array,
    context_lens: Int32Array,
    table_rows: Int32Array,
    num_groups: int,
) -> Int32Array:
    tiles = -(-query_lens * num_groups // PROMPT_ROWS)
    owner = np.repeat(np.arange(len(tiles)), tiles)
    first = (np.arange(len(owner)) - (np.cumsum(tiles) - tiles)[owner]) * PROMPT_ROWS
    last_position = (context_lens - query_lens)[owner] + first // num_groups
    order = np.argsort(-last_position, kind="stable")
    owner, first = owner[order], first[order]
    work = np.zeros((len(owner), _ENTRY), dtype=np.int32)
    for field, values in enumerate((None, None, first_rows, query_lens, context_lens, table_rows)):
        if values is not None:
            work[:, field] = values[owner]
    work[:, 0] = first
    return work


def shorten_attention_work_(work: Mapping[str, Tensor], lag: Tensor) -> None:
    """`Kernels.shorten_attention_work_`, without waiting for the device."""
    prefill = work.get("prefill")
    names = ("decode", "small", "prompts", "single")
    decode = next((work[name] for name in names if name in work), None)
    if prefill is not None:
        prefill[:, 4] -= lag[prefill[:, 5].long()]
    if decode is not None:
        items = decode[1:].clone()
        items[:, 4] -= lag[items[:, 5].long()]
        num_splits = (items[:, 4] + SPLIT - 1) // SPLIT
        items[:, 6] = torch.minimum(items[:, 6], num_splits)
        # Items that now begin after their sequence's end are moved to the end of the list and not
        # counted.
        exists = (torch.arange(len(items), device=items.device) < decode[0, 0]) & (
            items[:, 1] < num_splits
        )
        decode[1:] = items[(~exists).int().argsort(stable=True)]
        decode[0, 0] = exists.sum()
