"""Attention over the paged cache: one tile body for one query or a thousand.

Keys are walked in tiles of KEY_TILE, and tiles are grouped into splits of SPLIT_TILES. Within a split the softmax
runs along from tile to tile; the splits' results are merged in order. Both numbers are constants, so a query's
bits don't depend on how many queries are computed with it or on which program computes which split:

- `_decode_kernel` gives each split of a sequence with one query, or hardly more, to a program of its own; the last
  one to finish merges them. It walks a list of (sequence, split) pairs, so its grid does not depend on the lengths.
- `_prefill_kernel` gives each tile of queries to one program, which walks all splits one after the other.

The two use different tensor-core instructions (mma for 16 rows, wgmma for 64), which add in the same order. What
a reduction over a tile's layout would make of a sum is not the same for both, so the sum of the softmax's weights
is a product with ones. Query heads that share a key head are rows of one tile: row r of a sequence is query
r // group, head r % group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from quire.kernels.ops import AttentionSpec, LayerCache
from quire.kernels.triton.attention_work import DECODE_ROWS, KEY_TILE, MAX_PARTIALS, PREFILL_ROWS, SPLIT_TILES
from quire.kernels.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin

_ONES = 16
_DECODE_REGISTERS = 128
"""Per thread, for four programs on a multiprocessor at once."""


@triton.jit
def _attend_tile(
    query, highest, total, output, first_key, context_len, position,
    keys, values, table, kv_head, block_stride, head_stride, scale,
    window, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, ONES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to the running softmax of the queries: highest [rows], total [rows, ONES] (all columns
    the same), output [rows, D_PAD]."""
    key = first_key + tl.arange(0, KEYS)
    exists = key < context_len
    block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0)
    if WIDE:
        block = block.to(tl.int64)
    place = block * block_stride + kv_head * head_stride + (key % BLOCK_SIZE) * D
    column = tl.arange(0, D_PAD)
    mask = exists[:, None] & (column < D)[None, :]
    # What lies past the sequence's end is nobody's and may be NaN: it is not read.
    k = tl.load(keys + place[:, None] + column[None, :], mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    visible = key[None, :] <= position[:, None]
    if WINDOW:
        visible = visible & (key[None, :] > position[:, None] - window)
    scores = tl.where(visible, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # Where nothing is visible yet the maximum is -inf, and -inf - -inf would be NaN.
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - reference[:, None]).to(values.dtype.element_ty)
    decay = tl.exp2(highest - reference)
    v = tl.load(values + place[:, None] + column[None, :], mask=mask, other=0.0)
    # The sum of the weights is a product too: the order of a reduction would depend on the tile's layout.
    ones = tl.full((KEYS, ONES), 1.0, values.dtype.element_ty)
    total = tl.dot(weights, ones, total * decay[:, None], input_precision="ieee")
    output = tl.dot(weights, v, output * decay[:, None], input_precision="ieee")
    return new_highest, total, output


@triton.jit
def merge(highest, total, output, split_highest, split_total, split_output):
    """Adds a split's result to those of the splits before it."""
    new_highest = tl.maximum(highest, split_highest)
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    old = tl.exp2(highest - reference)
    new = tl.exp2(split_highest - reference)
    total = total * old[:, None] + split_total * new[:, None]
    output = output * old[:, None] + split_output * new[:, None]
    return new_highest, total, output


@triton.jit
def _load_queries(
    query, first_row, rows, num_queries, kv_head, num_heads, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):
    """Rows of (query, head of the group) pairs, [rows, D_PAD], zeros past the sequence's last."""
    column = tl.arange(0, D_PAD)
    place = (first_row + rows // GROUP).to(tl.int64) * num_heads + kv_head * GROUP + rows % GROUP
    mask = (rows < num_queries * GROUP)[:, None] & (column < D)[None, :]
    return tl.load(query + place[:, None] * D + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store_output(
    out, output, total, first_row, rows, num_queries, kv_head, num_heads,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, D_PAD)
    place = (first_row + rows // GROUP).to(tl.int64) * num_heads + kv_head * GROUP + rows % GROUP
    mask = (rows < num_queries * GROUP)[:, None] & (column < D)[None, :]
    divisor = tl.max(total, 1)  # its columns are the same
    result = output / tl.where(divisor == 0.0, 1.0, divisor)[:, None]
    tl.store(out + place[:, None] * D + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def read_entry(entry):
    """One item of work, past the first-level cache, which may hold an earlier step's."""
    return (
        tl.load(entry, cache_modifier=".cg"), tl.load(entry + 1, cache_modifier=".cg"),
        tl.load(entry + 2, cache_modifier=".cg"), tl.load(entry + 3, cache_modifier=".cg"),
        tl.load(entry + 4, cache_modifier=".cg"), tl.load(entry + 5, cache_modifier=".cg"),
        tl.load(entry + 6, cache_modifier=".cg"),
    )  # fmt: skip


@triton.jit(do_not_specialize=["window"])
def _decode_kernel(
    query, out, keys, values, block_tables, work, partial_output, partial_state, arrived,
    table_stride, block_stride, head_stride, scale, window, num_heads, num_kv_heads,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr, WINDOW: tl.constexpr, ONES: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`work` int32 [1 + items, 8] begins with the number of items; then for each: where the partial results of its
    sequence begin, first split, first row, number of queries, context length, row of the block table, split after
    the last. An item is one split, or all of a sequence's, which are then merged here. There are at least as many
    entries as programs, so that the first one can be read before the number of items is known."""
    rows = tl.arange(0, ROWS)
    column = tl.arange(0, D_PAD)
    item = tl.program_id(0)
    if PDL:
        cuda.gdc_launch_dependents()
    # The lists were complete before any kernel of this step began, so they need not wait for the kernel before.
    count = tl.load(work, cache_modifier=".cg") * num_kv_heads
    entry = work + (1 + item // num_kv_heads) * 8
    partial, first_split, first_row, num_queries, context_len, table_row, end_split = read_entry(entry)
    if PDL:
        cuda.gdc_wait()
    while item < count:
        kv_head = item % num_kv_heads
        item += tl.num_programs(0)
        # The next entry is read now, so that it is there when this item is done; past the last, this one again.
        following = work + (1 + tl.minimum(item, count - 1) // num_kv_heads) * 8
        next_entry = read_entry(following)
        table = block_tables + table_row.to(tl.int64) * table_stride
        position = context_len - num_queries + rows // GROUP
        num_tiles = tl.cdiv(context_len, KEYS)
        num_splits = tl.cdiv(num_tiles, TILES)
        q = _load_queries(query, first_row, rows, num_queries, kv_head, num_heads, GROUP, D, D_PAD)
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS, ONES), tl.float32)
        output = tl.zeros((ROWS, D_PAD), tl.float32)
        first_tile = first_split * TILES
        if WINDOW:
            first_tile = tl.maximum(first_tile, tl.maximum(context_len - num_queries - window + 1, 0) // KEYS)
        last_tile = tl.minimum(end_split * TILES, num_tiles)
        split_highest, split_total, split_output = highest, total, output
        # One loop over the tiles of all splits, so that loads run ahead over their borders too.
        for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
            split_highest, split_total, split_output = _attend_tile(
                q, split_highest, split_total, split_output, tile * KEYS, context_len, position, keys, values,
                table, kv_head, block_stride, head_stride, scale, window, D, D_PAD, BLOCK_SIZE, KEYS, WINDOW, ONES,
                WIDE,
            )  # fmt: skip
            ends = ((tile + 1) % TILES == 0) | (tile + 1 == last_tile)
            # The first split is merged into nothing, which changes no bit.
            merged = merge(highest, total, output, split_highest, split_total, split_output)
            highest = tl.where(ends, merged[0], highest)
            total = tl.where(ends, merged[1], total)
            output = tl.where(ends, merged[2], output)
            split_highest = tl.where(ends, float("-inf"), split_highest)
            split_total = tl.where(ends, 0.0, split_total)
            split_output = tl.where(ends, 0.0, split_output)
        if end_split - first_split == num_splits:
            _store_output(out, output, total, first_row, rows, num_queries, kv_head, num_heads, GROUP, D, D_PAD)
        else:
            used = (rows < num_queries * GROUP)[:, None]
            slot = ((partial + first_split) * num_kv_heads + kv_head).to(tl.int64)
            state = partial_state + slot * 2 * ROWS + rows
            tl.store(partial_output + (slot * ROWS + rows[:, None]) * D_PAD + column[None, :], output, mask=used)
            tl.store(state, highest)
            tl.store(state + ROWS, tl.max(total, 1))
            tl.debug_barrier()  # all threads' stores come before the count, which makes them visible
            counter = arrived + partial * num_kv_heads + kv_head
            before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if before == num_splits - 1:
                highest = tl.full((ROWS,), float("-inf"), tl.float32)
                total = tl.zeros((ROWS, ONES), tl.float32)
                output = tl.zeros((ROWS, D_PAD), tl.float32)
                for other in range(0, num_splits):
                    slot = ((partial + other) * num_kv_heads + kv_head).to(tl.int64)
                    state = partial_state + slot * 2 * ROWS + rows
                    place = partial_output + (slot * ROWS + rows[:, None]) * D_PAD + column[None, :]
                    other_total = tl.load(state + ROWS, cache_modifier=".cg")
                    highest, total, output = merge(
                        highest, total, output, tl.load(state, cache_modifier=".cg"),
                        tl.broadcast_to(other_total[:, None], (ROWS, ONES)),
                        tl.load(place, mask=used, other=0.0, cache_modifier=".cg"),
                    )  # fmt: skip
                _store_output(out, output, total, first_row, rows, num_queries, kv_head, num_heads, GROUP, D, D_PAD)
                tl.store(counter, 0)
        partial, first_split, first_row, num_queries, context_len, table_row, end_split = next_entry


@triton.jit(do_not_specialize=["window"])
def _prefill_kernel(
    query, out, keys, values, block_tables, work,
    table_stride, block_stride, head_stride, scale, window, num_heads,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr, WINDOW: tl.constexpr, ONES: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Items of `work` int32 [items, 8]: first of the tile's (query, head) rows, -, first row, number of queries,
    context length, row of the block table."""
    begin(PDL)
    kv_head = tl.program_id(1)
    entry = work + tl.program_id(0) * 8
    first = tl.load(entry)
    first_row = tl.load(entry + 2)
    num_queries = tl.load(entry + 3)
    context_len = tl.load(entry + 4)
    table = block_tables + tl.load(entry + 5).to(tl.int64) * table_stride
    rows = first + tl.arange(0, ROWS)
    position = context_len - num_queries + rows // GROUP
    q = _load_queries(query, first_row, rows, num_queries, kv_head, num_heads, GROUP, D, D_PAD)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, ONES), tl.float32)
    output = tl.zeros((ROWS, D_PAD), tl.float32)
    # Keys after the tile's last query are invisible to all of it.
    last_position = tl.minimum(context_len - num_queries + (first + ROWS - 1) // GROUP, context_len - 1)
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
            split_highest, split_total, split_output = _attend_tile(
                q, split_highest, split_total, split_output, tile * KEYS, context_len, position, keys, values, table,
                kv_head, block_stride, head_stride, scale, window, D, D_PAD, BLOCK_SIZE, KEYS, WINDOW, ONES, WIDE,
            )  # fmt: skip
        highest, total, output = merge(highest, total, output, split_highest, split_total, split_output)
    _store_output(out, output, total, first_row, rows, num_queries, kv_head, num_heads, GROUP, D, D_PAD)


def attention(
    query: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    work: Mapping[str, Tensor],
    num_partials: int,
    spec: AttentionSpec,
) -> Tensor:
    """Attention of query [rows, num_heads, head_dim]; rows that are in no list of `work` stay unwritten.

    `num_partials`: how many splits wait to be merged at most (a bound: memory is taken for so many).
    """
    out = torch.empty_like(query)
    _, num_heads, head_dim = query.shape
    num_kv_heads, block_size = cache.keys.shape[1], cache.keys.shape[2]
    strides = block_tables.stride(0), cache.keys.stride(0), cache.keys.stride(1)
    numbers = spec.scale * math.log2(math.e), spec.sliding_window or 0
    d_pad = max(16, triton.next_power_of_2(head_dim))
    shape = num_heads // num_kv_heads, head_dim, d_pad, block_size
    tensors = query, out, cache.keys, cache.values, block_tables
    window = spec.sliding_window is not None
    wide = cache.keys.numel() >= 1 << 31  # numbers of 32 bits take half the registers
    decode, prefill = work.get("decode"), work.get("prefill")
    if prefill is not None and len(prefill):
        warps = 4 if d_pad <= 128 else 8
        _prefill_kernel[(len(prefill), num_kv_heads)](
            *tensors, prefill, *strides, *numbers, num_heads, *shape,
            PREFILL_ROWS, KEY_TILE, SPLIT_TILES, window, _ONES, 2, wide, USE_PDL,
            num_warps=warps, **ROUND_ALWAYS, **LAUNCH,
        )  # fmt: skip
    if decode is not None and len(decode) > 1:
        programs = min((len(decode) - 1) * num_kv_heads, most_programs(query.device))
        _decode_kernel[(programs,)](
            *tensors, decode, *partial_results(query, num_kv_heads, num_partials, d_pad),
            counters(query.device, num_kv_heads),
            *strides, *numbers, num_heads, num_kv_heads, *shape,
            DECODE_ROWS, KEY_TILE, SPLIT_TILES, window, _ONES, 2, wide, USE_PDL,
            num_warps=4, maxnreg=_DECODE_REGISTERS if d_pad <= 128 else None, **ROUND_ALWAYS, **LAUNCH,
        )  # fmt: skip
    return out


def partial_results(query: Tensor, num_kv_heads: int, num_partials: int, d_pad: int) -> tuple[Tensor, Tensor]:
    """Memory for the outputs and the (maximum, total) of splits that wait to be merged."""
    slots = max(num_partials, 1) * num_kv_heads * DECODE_ROWS
    return (
        torch.empty(slots * d_pad, dtype=torch.float32, device=query.device),
        torch.empty(slots * 2, dtype=torch.float32, device=query.device),
    )


@cache
def counters(device: torch.device, num_kv_heads: int) -> Tensor:
    """How many splits of a sequence and key head are done: zero between launches, whoever merges resets it."""
    return torch.zeros(MAX_PARTIALS * num_kv_heads, dtype=torch.int32, device=device)


@cache
def most_programs(device: torch.device) -> int:
    """As many as run at once; each takes further items when it is done with one."""
    return 4 * num_multiprocessors(device)


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
