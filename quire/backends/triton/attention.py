"""Attention over the paged cache: one tile body for one query or a thousand.

A sequence's keys are read in tiles of KEY_TILE (fewer on a device where these don't fit), and tiles
form splits of SPLIT keys. Within a split the softmax is updated tile by tile (online softmax); the
splits' results are then merged in order. Neither size depends on the batch, so a query's bits
depend neither on how many queries are computed with it nor on which program computes which split:

- `_decode_kernel` is for sequences with one query or a few. Their splits go to one program or
  several, of which the last to finish merges the results. It walks a list of (sequence, splits)
  items, so its grid fits any lengths.
- `_prefill_kernel` gives each tile of queries to one program, which walks all splits one after the
  other.

The two use different tensor-core instructions (mma for 16 rows, wgmma for 64), which add in the
same order. A reduction over a tile would add in an order that depends on its layout, which differs
between them; so the softmax's weights are summed by a matrix product with ones. Query heads that
share a key head are rows of one tile: row r of a sequence is query r // group, head r % group.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from quire.backends.triton.attention_splits import (
    MERGED_AT_ONCE,
    MERGED_ROWS,
    counters,
    merge,
    merge_stored,
    partial_results,
    store_split,
)
from quire.backends.triton.attention_tile import attend_tile, halves
from quire.backends.triton.attention_work import DECODE_ROWS, PROGRAMS, PROMPT_ROWS, SPLIT
from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin, num_multiprocessors
from quire.backends.triton.shapes import is_wide, next_power_of_2
from quire.kernels.ops import AttentionSpec, LayerCache

_ONES = 16
_STAGES = 2
_TILES = (64, 64), (32, 64), (32, 32), (16, 32)
"""(keys of a tile, query rows of a prompt's program): the first of these that fits into shared
memory is used.
"""
_SCRATCH = 20 << 10
"""The most bytes of shared memory that the compiler uses besides the tiles."""
_DECODE_REGISTERS = 128
"""Registers per thread, so that four programs fit on a multiprocessor."""


@triton.jit
def _load_queries(
    query,
    keys,
    first_row,
    rows,
    num_queries,
    kv_head,
    num_heads,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Rows of (query, head of the group) pairs, [rows, D_PAD], with zeros after the sequence's last
    query; in float16 where keys are FP8, which are converted to float16 in one instruction.
    """
    column = tl.arange(0, D_PAD)
    place = (first_row + rows // GROUP).to(tl.int64) * num_heads + kv_head * GROUP + rows % GROUP
    mask = (rows < num_queries * GROUP)[:, None] & (column < D)[None, :]
    found = tl.load(query + place[:, None] * D + column[None, :], mask=mask, other=0.0)
    return found.to(tl.float16) if keys.dtype.element_ty == tl.int16 else found


@triton.jit
def _slope(slopes, kv_head, rows, GROUP: tl.constexpr, SLOPES: tl.constexpr):
    """What each row's scores rise by from key to key."""
    return tl.load(slopes + kv_head * GROUP + rows % GROUP) * 1.4426950408889634 if SLOPES else 0.0


@triton.jit
def _store_output(
    out,
    keys,
    output,
    total,
    highest,
    sinks,
    first_row,
    rows,
    num_queries,
    kv_head,
    num_heads,
    value_scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
):
    column = tl.arange(0, D_PAD)
    place = (first_row + rows // GROUP).to(tl.int64) * num_heads + kv_head * GROUP + rows % GROUP
    mask = (rows < num_queries * GROUP)[:, None] & (column < D)[None, :]
    divisor = tl.max(total, 1)  # its columns are the same
    if SINKS:
        sink = tl.load(sinks + kv_head * GROUP + rows % GROUP) * 1.4426950408889634
        top = tl.maximum(highest, sink)
        old = tl.exp2(highest - top)
        divisor = divisor * old + tl.exp2(sink - top)
        output = output * old[:, None]
    result = output / tl.where(divisor == 0.0, 1.0, divisor)[:, None]
    if SCALED:
        result = result * value_scale
    if keys.dtype.element_ty == tl.int16:
        even, odd = halves(result)
        result = tl.join(even, odd).reshape(result.shape[0], D_PAD)
    tl.store(out + place[:, None] * D + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def read_entry(entry):
    """Reads one item of work, not through the L1 cache, which may hold an earlier step's."""
    numbers = ()
    for i in tl.static_range(7):
        numbers = numbers + (tl.load(entry + i, cache_modifier=".cg"),)  # type: ignore  # noqa: RUF005
    return numbers


@jit(do_not_specialize=["table_stride", "window"])
def _decode_kernel(
    query,
    out,
    keys,
    values,
    sinks,
    slopes,
    block_tables,
    work,
    partial_output,
    partial_state,
    arrived,
    table_stride,
    block_stride,
    head_stride,
    scale,
    value_scale,
    window,
    cap,
    num_heads,
    num_kv_heads,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SLOPES: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    ONES: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """`work` is int32 [1 + items, 8]; its first entry has the number of items. An item is some
    splits of a sequence, or all of them, which are then merged here without going through memory.
    Its fields: index of the sequence's partial results, first split, first row, number of queries,
    context length, row of the block table, end of the splits, and how many of the keys this step
    writes. There are at least as many entries as programs, so that each program can read one before
    it knows the number of items.
    """
    rows = tl.arange(0, ROWS)
    column = tl.arange(0, D_PAD)
    item = tl.program_id(0)
    if PDL:
        cuda.gdc_launch_dependents()
    # The lists were written before the step's first kernel, so they can be read before the last
    # kernel has finished.
    count = tl.load(work, cache_modifier=".cg") * num_kv_heads
    entry = work + (1 + item // num_kv_heads) * 8
    partial, first_split, first_row, num_queries, context_len, table_row, end_split = read_entry(
        entry
    )
    if PDL:
        cuda.gdc_wait()
    while item < count:
        kv_head = item % num_kv_heads
        item += tl.num_programs(0)
        # The next entry is loaded ahead, to be there when this item is done (after the last one,
        # the same again).
        following = work + (1 + tl.minimum(item, count - 1) // num_kv_heads) * 8
        next_entry = read_entry(following)
        table = block_tables + table_row.to(tl.int64) * table_stride
        position = context_len - num_queries + rows // GROUP
        num_tiles = tl.cdiv(context_len, KEYS)
        num_splits = tl.cdiv(num_tiles, TILES)
        q = _load_queries(
            query, keys, first_row, rows, num_queries, kv_head, num_heads, GROUP, D, D_PAD
        )
        slope = _slope(slopes, kv_head, rows, GROUP, SLOPES)
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS, ONES), tl.float32)
        output = tl.zeros((ROWS, D_PAD), tl.float32)
        first_tile = first_split * TILES
        if WINDOW:
            first_tile = tl.maximum(
                first_tile, tl.maximum(context_len - num_queries - window + 1, 0) // KEYS
            )
        last_tile = tl.minimum(end_split * TILES, num_tiles)
        is_whole = end_split - first_split == num_splits
        first_slot = partial * num_kv_heads + kv_head
        used = (rows < num_queries * GROUP)[:, None]
        split_highest, split_total, split_output = highest, total, output
        # One loop over the tiles of all splits, so that loads are pipelined across the splits'
        # borders too.
        for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
            split_highest, split_total, split_output = attend_tile(
                q,
                split_highest,
                split_total,
                split_output,
                tile * KEYS,
                context_len,
                position,
                keys,
                values,
                table,
                kv_head,
                block_stride,
                head_stride,
                scale,
                window,
                cap,
                slope,
                D,
                D_PAD,
                BLOCK_SIZE,
                KEYS,
                WINDOW,
                CAP,
                SLOPES,
                ONES,
                WIDE,
            )
            if ((tile + 1) % TILES == 0) | (tile + 1 == last_tile):
                if is_whole:
                    highest, total, output = merge(
                        highest, total, output, split_highest, split_total, split_output
                    )
                else:
                    slot = first_slot + tile // TILES * num_kv_heads
                    store_split(
                        partial_output,
                        partial_state,
                        slot,
                        split_highest,
                        split_total,
                        split_output,
                        rows,
                        used,
                        ROWS,
                        D_PAD,
                    )
                split_highest = tl.full((ROWS,), float("-inf"), tl.float32)
                split_total = tl.zeros((ROWS, ONES), tl.float32)
                split_output = tl.zeros((ROWS, D_PAD), tl.float32)
        if is_whole:
            _store_output(
                out,
                keys,
                output,
                total,
                highest,
                sinks,
                first_row,
                rows,
                num_queries,
                kv_head,
                num_heads,
                value_scale,
                GROUP,
                D,
                D_PAD,
                SINKS,
                SCALED,
            )
        else:
            # all threads' stores must come before the atomic count, which makes them visible
            tl.debug_barrier()
            done = end_split - first_split
            before = tl.atomic_add(arrived + first_slot, done, sem="acq_rel", scope="gpu")
            if before + done == num_splits:
                first_visible = 0
                if WINDOW:  # splits before the window were not computed
                    first_visible = tl.maximum(context_len - num_queries - window + 1, 0) // (
                        KEYS * TILES
                    )
                for first in range(0, num_queries * GROUP, MERGED_ROWS):
                    some = first + tl.arange(0, MERGED_ROWS)
                    merged_highest, merged_total, merged = merge_stored(
                        partial_output,
                        partial_state,
                        first_slot,
                        num_kv_heads,
                        first_visible,
                        num_splits,
                        some,
                        column,
                        (some < num_queries * GROUP)[:, None],
                        tl.full((MERGED_ROWS,), float("-inf"), tl.float32),
                        tl.zeros((MERGED_ROWS, 1), tl.float32),
                        tl.zeros((MERGED_ROWS, D_PAD), tl.float32),
                        ROWS,
                        D_PAD,
                        MERGED_AT_ONCE,
                    )
                    _store_output(
                        out,
                        keys,
                        merged,
                        merged_total,
                        merged_highest,
                        sinks,
                        first_row,
                        some,
                        num_queries,
                        kv_head,
                        num_heads,
                        value_scale,
                        GROUP,
                        D,
                        D_PAD,
                        SINKS,
                        SCALED,
                    )
                tl.store(arrived + first_slot, 0)
        partial, first_split, first_row, num_queries, context_len, table_row, end_split = next_entry


@jit(do_not_specialize=["table_stride", "window"])
def _prefill_kernel(
    query,
    out,
    keys,
    values,
    sinks,
    slopes,
    block_tables,
    work,
    failed,
    table_stride,
    block_stride,
    head_stride,
    scale,
    value_scale,
    window,
    cap,
    num_heads,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SLOPES: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    ONES: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Fields of an item of `work` int32 [items, 8]: first of the tile's (query, head) rows, unused,
    first row, number of queries, context length, row of the block table. A program computes ROWS of
    a tile's PROMPT_ROWS rows. AGAIN: only items and key heads for which one of two flags in
    `failed` [items, key heads, 2] is set.
    """
    begin(PDL)
    kv_head = tl.program_id(1)
    if AGAIN:
        flags = failed + (tl.program_id(0) // PARTS * tl.num_programs(1) + kv_head) * 2
        if tl.load(flags) + tl.load(flags + 1) == 0:
            return
    entry = work + tl.program_id(0) // PARTS * 8
    first = tl.load(entry) + tl.program_id(0) % PARTS * ROWS
    first_row = tl.load(entry + 2)
    num_queries = tl.load(entry + 3)
    if first >= num_queries * GROUP:
        return
    context_len = tl.load(entry + 4)
    table = block_tables + tl.load(entry + 5).to(tl.int64) * table_stride
    rows = first + tl.arange(0, ROWS)
    position = context_len - num_queries + rows // GROUP
    q = _load_queries(
        query, keys, first_row, rows, num_queries, kv_head, num_heads, GROUP, D, D_PAD
    )
    slope = _slope(slopes, kv_head, rows, GROUP, SLOPES)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, ONES), tl.float32)
    output = tl.zeros((ROWS, D_PAD), tl.float32)
    # No query of the tile sees keys after its last query.
    last_position = tl.minimum(
        context_len - num_queries + (first + ROWS - 1) // GROUP, context_len - 1
    )
    num_tiles = last_position // KEYS + 1
    first_tile = 0
    if WINDOW:
        first_tile = tl.maximum(context_len - num_queries + first // GROUP - window + 1, 0) // KEYS
    for split in range(first_tile // TILES, tl.cdiv(num_tiles, TILES)):
        split_highest = tl.full((ROWS,), float("-inf"), tl.float32)
        split_total = tl.zeros((ROWS, ONES), tl.float32)
        split_output = tl.zeros((ROWS, D_PAD), tl.float32)
        begin_tile = tl.maximum(split * TILES, first_tile)
        end_tile = tl.minimum((split + 1) * TILES, num_tiles)
        for tile in tl.range(begin_tile, end_tile, num_stages=STAGES):
            split_highest, split_total, split_output = attend_tile(
                q,
                split_highest,
                split_total,
                split_output,
                tile * KEYS,
                context_len,
                position,
                keys,
                values,
                table,
                kv_head,
                block_stride,
                head_stride,
                scale,
                window,
                cap,
                slope,
                D,
                D_PAD,
                BLOCK_SIZE,
                KEYS,
                WINDOW,
                CAP,
                SLOPES,
                ONES,
                WIDE,
            )
        highest, total, output = merge(
            highest, total, output, split_highest, split_total, split_output
        )
    _store_output(
        out,
        keys,
        output,
        total,
        highest,
        sinks,
        first_row,
        rows,
        num_queries,
        kv_head,
        num_heads,
        value_scale,
        GROUP,
        D,
        D_PAD,
        SINKS,
        SCALED,
    )


def prefill_attention(
    query: Tensor,
    out: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    work: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    failed: Tensor | None = None,
) -> None:
    """Attention of the items of a list `prefill`, or of those that `failed`: writes their rows of
    `out`.
    """
    num_items = work.shape[0]
    if not num_items:
        return
    cache = _pairs(cache)
    d_pad = _padded_dim(query, cache)
    _, rows = _tiles(query.device, d_pad * query.itemsize)
    parts = PROMPT_ROWS // rows
    _prefill_kernel[(parts * num_items, cache.keys.shape[1])](
        query=query,
        out=out,
        keys=cache.keys,
        values=cache.values,
        sinks=out if sinks is None else sinks,
        slopes=out if slopes is None else slopes,
        block_tables=block_tables,
        work=work,
        failed=work if failed is None else failed,
        PARTS=parts,
        ROWS=rows,
        AGAIN=failed is not None,
        **_arguments(query, cache, block_tables, spec, has_sinks=sinks is not None),
        num_warps=4 if d_pad <= 128 else 8,
        **ROUND_ALWAYS,
        **LAUNCH,
    )


def decode_attention(
    query: Tensor,
    out: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    work: Tensor,
    num_partials: int,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Attention of the items of a list `decode` or `small`: writes their rows of `out`."""
    num_items = work.shape[0] - 1
    if num_items < 1:
        return
    num_kv_heads = cache.keys.shape[1]
    cache = _pairs(cache)
    d_pad = _padded_dim(query, cache)
    partial_output, partial_state = partial_results(query, num_kv_heads, num_partials, d_pad)
    _decode_kernel[(min(num_items * num_kv_heads, most_programs(query.device)),)](
        query=query,
        out=out,
        keys=cache.keys,
        values=cache.values,
        sinks=out if sinks is None else sinks,
        slopes=out if slopes is None else slopes,
        block_tables=block_tables,
        work=work,
        partial_output=partial_output,
        partial_state=partial_state,
        arrived=counters(query.device, num_kv_heads),
        num_kv_heads=num_kv_heads,
        ROWS=DECODE_ROWS,
        **_arguments(query, cache, block_tables, spec, has_sinks=sinks is not None),
        num_warps=4,
        maxnreg=_DECODE_REGISTERS if d_pad <= 128 else None,
        **ROUND_ALWAYS,
        **LAUNCH,
    )


def _pairs(cache: LayerCache) -> LayerCache:
    """An FP8 cache viewed as int16: the kernels read two numbers at a time."""
    if cache.keys.dtype != torch.float8_e4m3fn:
        return cache
    return replace(cache, keys=cache.keys.view(torch.int16), values=cache.values.view(torch.int16))


def _padded_dim(query: Tensor, cache: LayerCache) -> int:
    return max(32 if cache.keys.dtype == torch.int16 else 16, next_power_of_2(query.shape[2]))


def _arguments(
    query: Tensor, cache: LayerCache, block_tables: Tensor, spec: AttentionSpec, has_sinks: bool
) -> dict[str, Any]:
    """What both kernels take, by the names they have for it."""
    _, num_heads, head_dim = query.shape
    d_pad = _padded_dim(query, cache)
    keys, _ = _tiles(query.device, d_pad * query.itemsize)
    log2e = math.log2(math.e)  # part of the scale, as the kernels compute weights with exp2
    key_scale, value_scale = cache.fp8_scales
    return {
        "table_stride": block_tables.stride(0),
        "block_stride": cache.keys.stride(0),
        "head_stride": cache.keys.stride(1),
        "scale": spec.scale * key_scale * log2e,
        "value_scale": value_scale,
        "window": spec.sliding_window or 0,
        "cap": spec.soft_cap * log2e or 1.0,
        "num_heads": num_heads,
        "GROUP": num_heads // cache.keys.shape[1],
        "D": head_dim,
        "D_PAD": d_pad,
        "BLOCK_SIZE": cache.block_size,
        "KEYS": keys,
        "TILES": SPLIT // keys,
        "WINDOW": spec.sliding_window is not None,
        "CAP": spec.soft_cap > 0,
        "SLOPES": bool(spec.slopes),
        "SINKS": has_sinks,
        "SCALED": value_scale != 1,
        "ONES": _ONES,
        "STAGES": _STAGES,
        # 64-bit offsets only where needed: they take twice the registers
        "WIDE": is_wide(cache.keys),
        "PDL": USE_PDL,
    }


def fitting_tiles(row_bytes: int, shared_memory: int) -> tuple[int, int]:
    """Keys of a tile and rows of a prompt's program, for heads of so many bytes and a program's
    shared memory.
    """
    fitting = (
        each for each in _TILES if (2 * each[0] + each[1]) * row_bytes + _SCRATCH <= shared_memory
    )
    return next(fitting, _TILES[-1])


@cache
def _tiles(device: torch.device, row_bytes: int) -> tuple[int, int]:
    if device.type != "cuda":
        return _TILES[0]
    has = torch.cuda.get_device_properties(device)
    return fitting_tiles(
        row_bytes, getattr(has, "shared_memory_per_block_optin", has.shared_memory_per_block)
    )


@cache
def most_programs(device: torch.device) -> int:
    """How many programs run at once; each takes further items when it is done with one."""
    return PROGRAMS * num_multiprocessors(device)
