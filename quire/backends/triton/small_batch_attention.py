"""Decode attention of a small batch with one query per sequence, for the lowest latency.

It has the same bits as `attention._decode_kernel` in less time: a program's warps compute the
scores of a whole split at once instead of tile by tile, and only then walk the tiles to add up the
values. Keys and values of earlier steps are loaded before the kernel before this one has finished
(PDL); only the keys that it writes are loaded after that. A program occupies a whole
multiprocessor, so with many sequences the other kernel reads more per second.

Written in Gluon, Triton's lower level, because keys go from memory straight to the registers in
which the tensor core wants them. A thread loads 4 neighbouring numbers of a head (8 bytes) and uses
them as its 4 of the 16 numbers of one instruction. The instruction's own layout has 2 and 2 with 6
between them; but it adds all 16 products at once, so any order is right as long as queries and keys
have the same.
"""

from __future__ import annotations

import math

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra import cuda

from quire.backends.triton.attention import read_entry
from quire.backends.triton.attention_splits import (
    MERGED_AT_ONCE,
    MERGED_ROWS,
    counters,
    merge,
    merge_stored,
    partial_results,
)
from quire.backends.triton.attention_tile import raised
from quire.backends.triton.attention_work import DECODE_ROWS, KEY_TILE, SPLIT
from quire.backends.triton.direct_launch import gluon_jit
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL
from quire.backends.triton.shapes import is_wide
from quire.kernels.ops import AttentionSpec, LayerCache

_WARPS = 8
_HEAD_DIMS = (64, 128)


def takes(query: Tensor, cache: LayerCache) -> bool:
    """Whether this kernel can compute these heads; the list of work says whether it is the quickest
    for them.
    """
    has_kind = query.itemsize == 2 and cache.keys.dtype == query.dtype
    return (
        has_kind
        and query.shape[2] in _HEAD_DIMS
        and query.shape[1] // cache.keys.shape[1] <= DECODE_ROWS
    )


def small_batch_attention(
    query: Tensor,
    out: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    work: Tensor,
    num_partials: int,
    spec: AttentionSpec,
    num_multiprocessors: int,
    sinks: Tensor | None = None,
) -> None:
    """`attention.decode_attention` where `takes` says yes, for a list whose items are single splits
    or whole sequences. Before the step's first kernel, all must be written but the keys and values
    that the list calls new.
    """
    _, num_heads, head_dim = query.shape
    num_kv_heads = cache.keys.shape[1]
    partial_output, partial_state = partial_results(query, num_kv_heads, num_partials, head_dim)
    _small_batch_kernel[(min((len(work) - 1) * num_kv_heads, num_multiprocessors),)](
        query=query,
        out=out,
        keys=cache.keys,
        values=cache.values,
        sinks=query if sinks is None else sinks,
        block_tables=block_tables,
        work=work,
        partial_output=partial_output,
        partial_state=partial_state,
        arrived=counters(query.device, num_kv_heads),
        table_stride=block_tables.stride(0),
        block_stride=cache.keys.stride(0),
        head_stride=cache.keys.stride(1),
        scale=spec.scale * math.log2(math.e),
        window=spec.sliding_window or 0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        D=head_dim,
        BLOCK_SIZE=cache.block_size,
        KEYS=KEY_TILE,
        SPLIT=SPLIT,
        WINDOW=spec.sliding_window is not None,
        SINKS=sinks is not None,
        WIDE=is_wide(cache.keys),
        PDL=USE_PDL,
        num_warps=_WARPS,
        **ROUND_ALWAYS,
        **LAUNCH,
    )


@gluon.constexpr_function
def _query_layout(head_dim):
    """[16 rows, head_dim], the same in all warps; a thread has 4 neighbouring numbers of every 16."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]]
        + [[0, 1 << bit] for bit in range(4, head_dim.bit_length() - 1)],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0]] * 3,
        block_bases=[],
        shape=[16, head_dim],
    )


@gluon.constexpr_function
def _keys_layout(head_dim, split):
    """[head_dim, keys of a split]: 8 keys of every tile of 64 in each warp."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0]]
        + [[1 << bit, 0] for bit in range(4, head_dim.bit_length() - 1)]
        + [[0, 1 << bit] for bit in range(6, split.bit_length() - 1)],
        lane_bases=[[4, 0], [8, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 8], [0, 16], [0, 32]],
        block_bases=[],
        shape=[head_dim, split],
    )


@gluon.jit
def _places(
    key,
    exists,
    table,
    kv_head,
    block_stride,
    head_stride,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WIDE: gl.constexpr,
):
    """The offset of each key in the cache. What is read before `gdc_wait` is not read through the
    L1 cache, which may hold an earlier step's.
    """
    block = gl.load(table + key // BLOCK_SIZE, mask=exists, other=0, cache_modifier=".cg")
    if WIDE:
        block = block.to(gl.int64)
    return block * block_stride + kv_head * head_stride + (key % BLOCK_SIZE) * D


@gluon.jit
def _copy_values(
    staged,
    values,
    table,
    first_key,
    until,
    kv_head,
    block_stride,
    head_stride,
    NUM_KEYS: gl.constexpr,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Starts to copy the values of keys `first_key` to `until` to shared memory [NUM_KEYS, D], and
    zeros after them.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [8, 1], [1, 0])
    key = first_key + gl.arange(0, NUM_KEYS, gl.SliceLayout(1, layout))
    exists = key < until
    place = _places(key, exists, table, kv_head, block_stride, head_stride, D, BLOCK_SIZE, WIDE)
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(
        staged, values + place[:, None] + column[None, :], mask=exists[:, None]
    )
    async_copy.commit_group()


@gluon.jit
def _load_query(
    query, first_row, num_queries, kv_head, num_heads, GROUP: gl.constexpr, D: gl.constexpr
):
    layout: gl.constexpr = _query_layout(D)
    row = gl.arange(0, 16, gl.SliceLayout(1, layout))
    place = (first_row + row // GROUP).to(gl.int64) * num_heads + kv_head * GROUP + row % GROUP
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    return gl.load(
        query + place[:, None] * D + column[None, :],
        mask=(row < num_queries * GROUP)[:, None],
        other=0.0,
    )


@gluon.jit
def _scores(
    q,
    k,
    first_key,
    first_position,
    rows,
    window,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    KEYS: gl.constexpr,
    SPLIT: gl.constexpr,
    WINDOW: gl.constexpr,
    ACC: gl.constexpr,
):
    """Scores [16, tiles, KEYS] of a split, -inf where a row does not see a key. Of every 16 numbers
    of a head, index (t, h, j) of queries and keys is renamed to (h, t, j), the instruction's order
    (see the module's docstring).
    """
    q = q.reshape(16, D // 16, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(16, D)
    k = k.reshape(D // 16, 4, 2, 2, SPLIT).permute(0, 2, 1, 3, 4).reshape(D, SPLIT)
    left = gl.convert_layout(q, gl.DotOperandLayout(0, ACC, 2), assert_trivial=True)
    right = gl.convert_layout(k, gl.DotOperandLayout(1, ACC, 2), assert_trivial=True)
    scores = mma_v2(left, right, gl.zeros((16, SPLIT), gl.float32, ACC))
    key = first_key + gl.arange(0, SPLIT, gl.SliceLayout(0, ACC))[None, :]
    position = (first_position + rows // GROUP)[:, None]
    visible = key <= position
    if WINDOW:
        visible = visible & (key > position - window)
    return gl.where(visible, scores, float("-inf")).reshape(16, SPLIT // KEYS, KEYS)


@gluon.jit
def _references(tile_highest, tiles, TILES: gl.constexpr, NUMBER: gl.constexpr):
    """What the weights of each tile are relative to, from the tiles' maxima, of which a thread has
    all of its rows.
    """
    reference = gl.max(gl.where((tiles == 0)[None, :], tile_highest, float("-inf")), 1)
    found = (reference,)
    for tile in gl.static_range(1, TILES):
        highest = gl.max(gl.where((tiles == tile)[None, :], tile_highest, float("-inf")), 1)
        reference = raised(reference, highest, NUMBER)
        found = found + (reference,)  # type: ignore  # noqa: RUF005
    return found


@gluon.jit
def _attend_split(
    scores,
    scale,
    staged_weights,
    value_tiles,
    num_keys,
    D: gl.constexpr,
    KEYS: gl.constexpr,
    TILES: gl.constexpr,
    ACC: gl.constexpr,
):
    """The same result as `attention_tile.attend_tile` for one tile after the other: highest, total
    and output of a split of `num_keys` keys, from its scores [16, TILES, KEYS], which are -inf
    where no key is visible.
    """
    dtype: gl.constexpr = staged_weights.dtype
    tile_highest = gl.max(scores, 2) * scale
    tiles = gl.arange(0, TILES, gl.SliceLayout(0, gl.SliceLayout(2, scores.type.layout)))
    references = _references(tile_highest, tiles, TILES, dtype)
    running = tile_highest
    for tile in gl.static_range(1, TILES):
        running = gl.where((tiles == tile)[None, :], references[tile][:, None], running)
    # Where no key is visible yet this is -inf, and -inf - -inf would be NaN.
    reference = gl.where(running == float("-inf"), 0.0, running)
    all_weights = gl.exp2(gl.fma(scores, scale, -reference[:, :, None]))
    staged_weights.store(all_weights.to(dtype).reshape(16, TILES * KEYS))

    async_copy.wait_group(0)
    as_left: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    as_right: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    ones = gl.full((KEYS, 16), 1.0, dtype, as_right)
    highest = gl.full((16,), float("-inf"), gl.float32, gl.SliceLayout(1, ACC))
    total = gl.zeros((16, 16), gl.float32, ACC)
    output = gl.zeros((16, D), gl.float32, ACC)
    for tile in gl.static_range(TILES):
        if tile * KEYS < num_keys:
            new_highest = gl.convert_layout(references[tile], gl.SliceLayout(1, ACC))
            decay = gl.exp2(highest - gl.where(new_highest == float("-inf"), 0.0, new_highest))
            weights = staged_weights.slice(tile * KEYS, KEYS, dim=1).load(as_left)
            total = mma_v2(weights, ones, total * decay[:, None])
            output = mma_v2(
                weights, value_tiles.index(tile).load(as_right), output * decay[:, None]
            )
            highest = new_highest
    return highest, total, output


@gluon.jit
def _store_result(target, used, highest, total, output, sinks, heads, SINKS: gl.constexpr):
    """As `attention._store_output`; `heads` are the rows' query heads."""
    divisor = gl.max(total, 1)  # its columns are the same
    if SINKS:
        sink = gl.load(sinks + heads) * 1.4426950408889634
        top = gl.maximum(highest, sink)
        old = gl.exp2(highest - top)
        divisor = divisor * old + gl.exp2(sink - top)
        output = output * old[:, None]
    result = output / gl.where(divisor == 0.0, 1.0, divisor)[:, None]
    gl.store(target, result.to(target.dtype.element_ty), mask=used)


@gluon.jit
def _merge_splits(
    partial_output,
    partial_state,
    out,
    sinks,
    first_slot,
    first_split,
    num_splits,
    num_rows,
    first_row,
    kv_head,
    num_heads,
    num_kv_heads,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    SINKS: gl.constexpr,
):
    """Merges all splits of a sequence, which are stored, in their order and stores the result."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [512 // D, D // 64], [1, 0])
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    for first in range(0, num_rows, MERGED_ROWS):
        rows = first + gl.arange(0, MERGED_ROWS, gl.SliceLayout(1, layout))
        used = (rows < num_rows)[:, None]
        highest, total, output = merge_stored(
            partial_output,
            partial_state,
            first_slot,
            num_kv_heads,
            first_split,
            num_splits,
            rows,
            column,
            used,
            gl.full((MERGED_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, layout)),
            gl.zeros((MERGED_ROWS, 1), gl.float32, layout),
            gl.zeros((MERGED_ROWS, D), gl.float32, layout),
            16,
            D,
            MERGED_AT_ONCE,
        )
        heads = kv_head * GROUP + rows % GROUP
        place = (first_row + rows // GROUP).to(gl.int64) * num_heads + heads
        _store_result(
            out + place[:, None] * D + column[None, :],
            used,
            highest,
            total,
            output,
            sinks,
            heads,
            SINKS,
        )


@gluon_jit(do_not_specialize=["table_stride"])
def _small_batch_kernel(
    query,
    out,
    keys,
    values,
    sinks,
    block_tables,
    work,
    partial_output,
    partial_state,
    arrived,
    table_stride,
    block_stride,
    head_stride,
    scale,
    window,
    num_heads,
    num_kv_heads,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
    SPLIT: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
    WIDE: gl.constexpr,
    PDL: gl.constexpr,
):
    """`work` is the list that `attention._decode_kernel` takes."""
    TILES: gl.constexpr = SPLIT // KEYS
    acc: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8])
    read_keys: gl.constexpr = _keys_layout(D, SPLIT)
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    dtype: gl.constexpr = keys.dtype.element_ty
    staged_values = gl.allocate_shared_memory(dtype, [SPLIT, D], shared)
    value_tiles = staged_values._reinterpret(dtype, [TILES, KEYS, D], shared)
    staged_weights = gl.allocate_shared_memory(dtype, [16, SPLIT], shared)
    rows = gl.arange(0, 16, gl.SliceLayout(1, acc))
    column = gl.arange(0, D, gl.SliceLayout(0, acc))
    item = gl.program_id(0)
    count = gl.load(work, cache_modifier=".cg") * num_kv_heads
    while item < count:
        kv_head = item % num_kv_heads
        entry = work + (1 + item // num_kv_heads) * 8
        partial, first_split, first_row, num_queries, context_len, table_row, end_split = (
            read_entry(entry)
        )
        item += gl.num_programs(0)
        table = block_tables + table_row.to(gl.int64) * table_stride
        # The number of keys of earlier steps; the newest are written by the kernel before this one.
        old = context_len - gl.load(entry + 7, cache_modifier=".cg")
        position = context_len - num_queries
        highest = gl.full((16,), float("-inf"), gl.float32, gl.SliceLayout(1, acc))
        total = gl.zeros((16, 16), gl.float32, acc)
        output = gl.zeros((16, D), gl.float32, acc)
        first_visible = gl.maximum(position - window + 1, 0) // SPLIT if WINDOW else 0
        for split in range(gl.maximum(first_split, first_visible), end_split):
            _copy_values(
                staged_values,
                values,
                table,
                split * SPLIT,
                old // KEYS * KEYS,
                kv_head,
                block_stride,
                head_stride,
                SPLIT,
                D,
                BLOCK_SIZE,
                WIDE,
            )
            key = split * SPLIT + gl.arange(0, SPLIT, gl.SliceLayout(0, read_keys))
            place = _places(
                key,
                key < context_len,
                table,
                kv_head,
                block_stride,
                head_stride,
                D,
                BLOCK_SIZE,
                WIDE,
            )
            source = keys + place[None, :] + gl.arange(0, D, gl.SliceLayout(1, read_keys))[:, None]
            k = gl.load(source, mask=(key < old)[None, :], other=0.0, cache_modifier=".cg")
            if PDL:
                cuda.gdc_wait()
                cuda.gdc_launch_dependents()
            is_new = (key >= old) & (key < context_len)
            k = gl.load(source, mask=is_new[None, :], other=k, cache_modifier=".cg")
            q = _load_query(query, first_row, num_queries, kv_head, num_heads, GROUP, D)
            # before the zeros in place of the newest values are overwritten
            async_copy.wait_group(0)
            end_tile = gl.minimum(gl.cdiv(context_len, KEYS), (split + 1) * TILES)
            for tile in range(gl.maximum(old // KEYS, split * TILES), end_tile):
                _copy_values(
                    value_tiles.index(tile - split * TILES),
                    values,
                    table,
                    tile * KEYS,
                    context_len,
                    kv_head,
                    block_stride,
                    head_stride,
                    KEYS,
                    D,
                    BLOCK_SIZE,
                    WIDE,
                )
            scores = _scores(
                q, k, split * SPLIT, position, rows, window, GROUP, D, KEYS, SPLIT, WINDOW, acc
            )
            found = _attend_split(
                scores,
                scale,
                staged_weights,
                value_tiles,
                context_len - split * SPLIT,
                D,
                KEYS,
                TILES,
                acc,
            )
            highest, total, output = merge(highest, total, output, found[0], found[1], found[2])

        if PDL:  # for programs that computed no split
            cuda.gdc_wait()
        used = (rows < num_queries * GROUP)[:, None]
        num_splits = gl.cdiv(context_len, SPLIT)
        if end_split - first_split == num_splits:
            heads = kv_head * GROUP + rows % GROUP
            target = (first_row + rows // GROUP).to(gl.int64) * num_heads + heads
            target = out + target[:, None] * D + column[None, :]
            _store_result(target, used, highest, total, output, sinks, heads, SINKS)
        else:
            first_slot = partial * num_kv_heads + kv_head
            slot = (first_slot + first_split * num_kv_heads).to(gl.int64)
            state = partial_state + slot * 32 + rows
            gl.store(
                partial_output + (slot * 16 + rows[:, None]) * D + column[None, :],
                output,
                mask=used,
            )
            gl.store(state, highest)
            gl.store(state + 16, gl.max(total, 1))
            # all threads' stores must come before the atomic count, which makes them visible
            tl.debug_barrier()
            if gl.atomic_add(arrived + first_slot, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                _merge_splits(
                    partial_output,
                    partial_state,
                    out,
                    sinks,
                    first_slot,
                    first_visible,
                    num_splits,
                    num_queries * GROUP,
                    first_row,
                    kv_head,
                    num_heads,
                    num_kv_heads,
                    GROUP,
                    D,
                    SINKS,
                )
                gl.store(arrived + first_slot, 0)
    if PDL and count == 0:  # programs with work have waited already
        cuda.gdc_wait()
