"""Attention of prompts on Hopper: the same bits as `attention._prefill_kernel`, in less time, for what
`prompt_rules.py` says.

A program has three parts that run at the same time (warp specialisation). One warp copies tiles of
keys and values to shared memory, block by block of the paged cache, as far ahead as there is room.
Two groups of four warps compute 64 rows each: while one group computes its softmax, the tensor core
multiplies for the other. Each group also starts the product with the next tile's keys before it
computes the softmax of this tile. A program takes several items of work.

In bfloat16 what was added up before is not scaled; an item that would need it (see
`attention_tile.raised`) is marked, and computed again by `attention._prefill_kernel`. So two tiles
can be computed at once, but for heads of 256, whose outputs fill half of the registers.

Written in Gluon, as Triton itself can neither divide a program this way nor keep products running
during a softmax.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from quire.backends.triton.attention import prefill_attention
from quire.backends.triton.attention_tile import raised
from quire.backends.triton.attention_work import KEY_TILE, PROMPT_ROWS, SPLIT
from quire.backends.triton.direct_launch import gluon_jit
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL
from quire.backends.triton.prompt_merge import LARGE_SHARED, PIECE, merge
from quire.backends.triton.prompt_tiles import (
    COPIED,
    GROUP_ROWS,
    barriers,
    copy_tiles,
    item_of,
    read_item,
)
from quire.kernels.ops import AttentionSpec, LayerCache

_STAGES = 2
_TILE = gl.constexpr(KEY_TILE)
_ONES = gl.constexpr(8)
_HUGE = gl.constexpr(30)
"""A number of tiles shifted right by it is 0, which compilers don't know. Otherwise they compute the
addresses of all operands once for all tiles, and keep more of them than there are registers for.
"""
_REGISTERS = 168
"""Registers per thread when the program starts; the computing groups then take most of the copying
warp's.
"""


class _Memory(NamedTuple):
    """As much of a tensor as a description for copies needs, so that it holds no memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@lru_cache(maxsize=1024)
def _described(
    address: int, dtype: torch.dtype, rows: int, head_dim: int, block_size: int
) -> TensorDescriptor:
    """A layer's keys or values as rows that are copied by blocks."""
    box = [block_size, COPIED.value]
    layout = gl.NVMMASharedLayout.get_default_for(
        box, gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    )
    shape, strides = [rows, head_dim], [head_dim, 1]
    return TensorDescriptor(_Memory(address, dtype), shape, strides, box, layout)


def prompt_attention(
    query: Tensor,
    out: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    work: Tensor,
    spec: AttentionSpec,
    num_multiprocessors: int,
    sinks: Tensor | None = None,
) -> None:
    """Attention of the items of a list `prefill`, where `prompt_rules.takes` says yes: writes their rows
    of `out`.
    """
    _, num_heads, head_dim = query.shape
    num_kv_heads, block_size = cache.keys.shape[1], cache.block_size
    keys, values = (
        _described(side.data_ptr(), side.dtype, side.numel() // head_dim, head_dim, block_size)
        for side in (cache.keys, cache.values)
    )
    is_large = head_dim > 128
    # In float16 what was added up may have to be scaled after each tile; outputs of large heads take
    # the registers that scores of a second tile would need.
    scales = query.dtype == torch.float16
    keys_at_once = KEY_TILE if scales or is_large else 2 * KEY_TILE
    shared_columns = LARGE_SHARED if is_large else head_dim
    num_tiles = work.shape[0]
    num_programs = min(num_tiles * num_kv_heads, num_multiprocessors)
    num_stored = num_programs * PROMPT_ROWS * (head_dim - shared_columns)
    failed = torch.empty(num_tiles * num_kv_heads * 2, dtype=torch.int32, device=query.device)
    _prompt_kernel[(num_programs,)](
        query=query,
        out=out,
        keys=keys,
        values=values,
        sinks=out if sinks is None else sinks,
        block_tables=block_tables,
        work=work,
        failed=failed,
        stored=query.new_empty(num_stored, dtype=torch.float32) if num_stored else failed,
        num_tiles=num_tiles,
        table_stride=block_tables.stride(0),
        scale=spec.scale * math.log2(math.e),
        window=spec.sliding_window or 0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        D=head_dim,
        SHARED=shared_columns,
        BLOCK_SIZE=block_size,
        ROWS=PROMPT_ROWS,
        KEYS=keys_at_once,
        TILES=SPLIT // keys_at_once,
        WINDOW=spec.sliding_window is not None,
        SINKS=sinks is not None,
        STAGES=_STAGES,
        PDL=USE_PDL,
        num_warps=4,
        maxnreg=_REGISTERS,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    if not scales:
        prefill_attention(query, out, cache, block_tables, work, spec, sinks, failed=failed)


@gluon.jit
def _clear_rows(tile, first, end, KEYS: gl.constexpr, D: gl.constexpr):
    """Sets rows before `first` and from `end` on to zero: values that no query sees may be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    for start in gl.static_range(0, KEYS, 16):
        part = tile.slice(start, 16)
        row = start + gl.arange(0, 16, gl.SliceLayout(1, layout))
        found = part.load(layout)
        part.store(gl.where(((row >= first) & (row < end))[:, None], found, gl.zeros_like(found)))
    fence_async_shared()
    tl.debug_barrier()  # explicit here, or the compiler adds one that all tiles go through


@gluon.jit
def _softmax(
    scores,
    scale,
    before,
    first_key,
    position,
    first_position,
    last_position,
    window,
    KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
    dtype: gl.constexpr,
):
    """The weights of a tile, or of two; what they are relative to (`before`: those before them); and
    in float16 the factor for earlier weights, in bfloat16 whether a row needs another one than 1,
    which is rare.
    """
    layout: gl.constexpr = scores.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    key = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
    is_partial = first_key + KEYS > first_position + 1
    if WINDOW:
        is_partial |= first_key <= last_position - window
    # A single branch: of two, the compiler makes one into selects, which all tiles go through.
    if is_partial:
        visible = key[None, :] <= position[:, None]
        if WINDOW:
            visible &= key[None, :] > position[:, None] - window
        scores = gl.where(visible, scores, float("-inf"))
    # Where no key is visible yet a reference is -inf, and -inf - -inf would be NaN.
    if KEYS == _TILE:
        highest = raised(before, gl.max(scores, 1) * scale, dtype)
        used = gl.where(highest == float("-inf"), 0.0, highest)
        weights = gl.exp2(gl.fma(scores, scale, -used[:, None]))
        if dtype == gl.float16:
            change = gl.exp2(before - used)
        else:
            change = ((highest != before) & (before != float("-inf"))).to(gl.int32)
    else:
        tiles = scores.reshape(GROUP_ROWS, 2, _TILE)
        found = gl.max(tiles, 2) * scale
        is_first = (gl.arange(0, 2, gl.SliceLayout(0, found.type.layout)) == 0)[None, :]
        before = gl.convert_layout(before, gl.SliceLayout(1, found.type.layout))
        middle = raised(before, gl.max(gl.where(is_first, found, float("-inf")), 1), dtype)
        highest = raised(middle, gl.max(gl.where(is_first, float("-inf"), found), 1), dtype)
        used = gl.where(is_first, middle[:, None], highest[:, None])
        used = gl.where(used == float("-inf"), 0.0, used)
        weights = gl.exp2(gl.fma(tiles, scale, -used[:, :, None])).reshape(GROUP_ROWS, KEYS)
        change = (middle != before) & (before != float("-inf")) | (highest != middle) & (
            middle != float("-inf")
        )
        change = gl.convert_layout(change.to(gl.int32), rows)
    weights = gl.convert_layout(weights, layout).to(dtype)
    return weights, gl.convert_layout(highest, rows), change


@gluon.jit
def _rows_of(
    tensor,
    first,
    first_row,
    num_queries,
    kv_head,
    num_heads,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    layout: gl.constexpr,
):
    """Where the numbers of a group's rows lie in queries or outputs [rows, heads, D], and which
    rows there are.
    """
    row = first + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    place = (first_row + row // GROUP).to(gl.int64) * num_heads + kv_head * GROUP + row % GROUP
    exists = (row < num_queries * GROUP)[:, None]
    return tensor + place[:, None] * D + column[None, :], exists


@gluon.jit
def _attend_rows(
    NUMBER: gl.constexpr,
    staged_query,
    merged,
    stored,
    query,
    out,
    sinks,
    key_tiles,
    value_tiles,
    ones,
    keys_full,
    keys_empty,
    values_full,
    values_empty,
    work,
    failed,
    num_tiles,
    scale,
    window,
    num_heads,
    num_kv_heads,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    SHARED: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    TILES: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """The program of a group of four warps; NUMBER (0 or 1) says which half of the tile's rows it
    computes.
    """
    as_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    as_read: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = query.dtype.element_ty
    if PDL:
        cuda.gdc_wait()
    num_items = num_tiles * num_kv_heads
    num_seen = 0
    for turn in range(0, gl.cdiv(num_items, gl.num_programs(0))):
        item = item_of(turn)
        if item < num_items:
            kv_head, first, first_row, num_queries, context_len, _, first_tile, end_tile = (
                read_item(item, work, num_kv_heads, window, GROUP, ROWS, KEYS, WINDOW)
            )
            first_seen = (
                gl.maximum(context_len - num_queries + first // GROUP - window + 1, 0)
                if WINDOW
                else 0
            )
            first += NUMBER * GROUP_ROWS
            rows, exists = _rows_of(
                query, first, first_row, num_queries, kv_head, num_heads, GROUP, D, as_read
            )
            staged_query.index(NUMBER).store(gl.load(rows, mask=exists, other=0.0))
            fence_async_shared()
            tl.debug_barrier()
            highest, total, output, has_failed, num_seen = _attend_tiles(
                NUMBER,
                staged_query,
                merged,
                stored,
                key_tiles,
                value_tiles,
                ones,
                keys_full,
                keys_empty,
                values_full,
                values_empty,
                num_seen,
                first,
                num_queries,
                context_len,
                first_seen,
                first_tile,
                end_tile,
                scale,
                window,
                GROUP,
                D,
                SHARED,
                KEYS,
                TILES,
                WINDOW,
                STAGES,
                dtype,
            )
            # its columns are the same
            divisor = gl.convert_layout(gl.max(total, 1), gl.SliceLayout(1, as_output))
            if SINKS:
                row = first + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, as_output))
                sink = gl.load(sinks + kv_head * GROUP + row % GROUP) * 1.4426950408889634
                top = gl.maximum(highest, sink)
                old = gl.exp2(highest - top)
                divisor = divisor * old + gl.exp2(sink - top)
                output = output * old[:, None]
            result = output / gl.where(divisor == 0.0, 1.0, divisor)[:, None]
            # the queries' place is free: from there a thread stores 16 bytes at once
            staged_query.index(NUMBER).store(result.to(dtype))
            tl.debug_barrier()
            rows, exists = _rows_of(
                out,
                first + (num_seen >> _HUGE),  # or queries' addresses would be kept until here
                first_row,
                num_queries,
                kv_head,
                num_heads,
                GROUP,
                D,
                as_read,
            )
            gl.store(rows, staged_query.index(NUMBER).load(as_read), mask=exists)
            if dtype == gl.bfloat16:
                gl.store(failed + item * 2 + NUMBER, gl.max(has_failed, 0))


@gluon.jit
def _attend_tiles(
    NUMBER: gl.constexpr,
    staged_query,
    merged,
    stored,
    key_tiles,
    value_tiles,
    ones,
    keys_full,
    keys_empty,
    values_full,
    values_empty,
    num_seen,
    first,
    num_queries,
    context_len,
    first_seen,
    first_tile,
    end_tile,
    scale,
    window,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    SHARED: gl.constexpr,
    KEYS: gl.constexpr,
    TILES: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
    dtype: gl.constexpr,
):
    """Attention of 64 rows to all tiles that an item has, of which `num_seen` came before in this
    program. Returns what weights are relative to, what outputs are to be divided by (in every
    column), outputs, which rows have failed, and the tiles seen now.
    """
    as_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    as_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    as_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ONES, 16])
    as_left: gl.constexpr = gl.DotOperandLayout(0, as_output, 2)
    as_left_of_ones: gl.constexpr = gl.DotOperandLayout(0, as_total, 2)
    row = first + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, as_scores))
    position = context_len - num_queries + row // GROUP
    first_position = context_len - num_queries + first // GROUP
    last_position = context_len - num_queries + (first + GROUP_ROWS - 1) // GROUP
    highest = gl.full((GROUP_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, as_output))
    total = gl.zeros((GROUP_ROWS, _ONES), gl.float32, as_total)
    split_highest = gl.full((GROUP_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, as_scores))
    split_total = gl.zeros((GROUP_ROWS, _ONES), gl.float32, as_total)
    output = gl.zeros((GROUP_ROWS, D), gl.float32, as_output)
    nothing = gl.zeros((GROUP_ROWS, KEYS), gl.float32, as_scores)

    stage = num_seen % STAGES
    mbarrier.wait(keys_full.index(stage), num_seen // STAGES & 1)
    scores = warpgroup_mma(
        staged_query.index(NUMBER),
        key_tiles.index(stage).permute((1, 0)),
        nothing,
        use_acc=False,
        is_async=True,
    )
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(keys_empty.index(stage))
    weights, split_highest, change = _softmax(
        scores,
        scale,
        split_highest,
        first_tile * KEYS,
        position,
        first_position,
        last_position,
        window,
        KEYS,
        WINDOW,
        dtype,
    )
    has_failed = change
    for tile in range(first_tile, end_tile):
        # The values of this tile are multiplied while the softmax of the next tile is computed.
        # After the last tile, old keys in shared memory are multiplied once more, and the result is
        # not used.
        has_next = tile + 1 < end_tile
        continues = tile % TILES != 0
        ends_split = (tile + 1) % TILES == 0
        next_stage = (num_seen + 1) % STAGES
        mbarrier.wait(keys_full.index(next_stage), (num_seen + 1) // STAGES & 1, pred=has_next)
        scores = warpgroup_mma(
            staged_query.index(NUMBER + (tile >> _HUGE)),
            key_tiles.index(next_stage).permute((1, 0)),
            nothing,
            use_acc=False,
            is_async=True,
        )
        stage = num_seen % STAGES
        mbarrier.wait(values_full.index(stage), num_seen // STAGES & 1)
        first_key = tile * KEYS
        if (first_key < first_seen) | (first_key + KEYS > context_len):
            _clear_rows(
                value_tiles.index(stage), first_seen - first_key, context_len - first_key, KEYS, D
            )
        left = gl.convert_layout(weights, as_left)
        left_of_ones = gl.convert_layout(weights, as_left_of_ones)
        split_total = warpgroup_mma(
            left_of_ones,
            ones.index(tile >> _HUGE).permute((1, 0)),
            split_total,
            use_acc=continues,
            is_async=True,
        )
        output = warpgroup_mma(
            left, value_tiles.index(stage), output, use_acc=continues, is_async=True
        )
        scores = warpgroup_mma_wait(2, deps=(scores,))
        # this branch keeps the compilers from moving the softmax after the end of all products
        if has_next:
            before = gl.where(ends_split, float("-inf"), split_highest)
            weights, next_highest, change = _softmax(
                scores,
                scale,
                before,
                (tile + 1) * KEYS,
                position,
                first_position,
                last_position,
                window,
                KEYS,
                WINDOW,
                dtype,
            )
        else:
            weights = gl.zeros_like(weights)  # not used
            next_highest = split_highest
            change = gl.full_like(change, 1.0 if dtype == gl.float16 else 0)
        left, split_total, output = warpgroup_mma_wait(0, deps=(left, split_total, output))
        mbarrier.arrive(keys_empty.index(next_stage), pred=has_next)
        mbarrier.arrive(values_empty.index(stage))
        num_seen += 1
        if ends_split | (not has_next):
            highest, total, output = merge(
                highest,
                total,
                merged,
                stored,
                split_highest,
                split_total,
                output,
                tile // TILES == first_tile // TILES,
                not has_next,
                NUMBER,
                SHARED,
                as_total,
                as_output,
            )
        split_highest = next_highest
        if dtype == gl.float16:
            split_total = (
                split_total * gl.convert_layout(change, gl.SliceLayout(1, as_total))[:, None]
            )
            output = output * gl.convert_layout(change, gl.SliceLayout(1, as_output))[:, None]
        else:
            has_failed = has_failed | change
    return highest, total, output, has_failed, num_seen


# Specialised, it would be compiled again for a value of 1, and for multiples of 16.
@gluon_jit(do_not_specialize=["num_tiles", "table_stride"])
def _prompt_kernel(
    query,
    out,
    keys,
    values,
    sinks,
    block_tables,
    work,
    failed,
    stored,
    num_tiles,
    table_stride,
    scale,
    window,
    num_heads,
    num_kv_heads,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    SHARED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    TILES: gl.constexpr,
    WINDOW: gl.constexpr,
    SINKS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """`work` is the list that `attention._prefill_kernel` takes, with items of 2 * 64 rows."""
    dtype: gl.constexpr = query.dtype.element_ty
    as_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], dtype)
    as_ones: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ONES, KEYS], dtype)
    as_merged: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BOXES: gl.constexpr = STAGES * (KEYS // BLOCK_SIZE) * (D // COPIED)
    if PDL:
        cuda.gdc_launch_dependents()
    key_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], as_tile)
    value_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], as_tile)
    key_boxes = key_tiles._reinterpret(dtype, [BOXES, BLOCK_SIZE, COPIED], keys.layout)
    value_boxes = value_tiles._reinterpret(dtype, [BOXES, BLOCK_SIZE, COPIED], values.layout)
    staged_query = gl.allocate_shared_memory(dtype, [2, GROUP_ROWS, D], as_tile)
    PIECES: gl.constexpr = SHARED // PIECE
    merged = gl.allocate_shared_memory(gl.float32, [2 * PIECES, GROUP_ROWS * PIECE], as_merged)
    second_stored = stored + (2 * gl.program_id(0) + 1) * (GROUP_ROWS * (D - SHARED))
    stored += 2 * gl.program_id(0) * (GROUP_ROWS * (D - SHARED))
    ones = gl.allocate_shared_memory(dtype, [1, _ONES, KEYS], as_ones)
    as_filled: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ones.index(0).store(gl.full((_ONES, KEYS), 1.0, dtype, as_filled))
    keys_full, keys_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    values_full, values_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _attend_rows,
                (
                    0,
                    staged_query,
                    merged,
                    stored,
                    query,
                    out,
                    sinks,
                    key_tiles,
                    value_tiles,
                    ones,
                    keys_full,
                    keys_empty,
                    values_full,
                    values_empty,
                    work,
                    failed,
                    num_tiles,
                    scale,
                    window,
                    num_heads,
                    num_kv_heads,
                    GROUP,
                    D,
                    SHARED,
                    ROWS,
                    KEYS,
                    TILES,
                    WINDOW,
                    SINKS,
                    STAGES,
                    PDL,
                ),
            ),
            (
                _attend_rows,
                (
                    1,
                    staged_query,
                    merged,
                    second_stored,
                    query,
                    out,
                    sinks,
                    key_tiles,
                    value_tiles,
                    ones,
                    keys_full,
                    keys_empty,
                    values_full,
                    values_empty,
                    work,
                    failed,
                    num_tiles,
                    scale,
                    window,
                    num_heads,
                    num_kv_heads,
                    GROUP,
                    D,
                    SHARED,
                    ROWS,
                    KEYS,
                    TILES,
                    WINDOW,
                    SINKS,
                    STAGES,
                    PDL,
                ),
            ),
            (
                copy_tiles,
                (
                    keys,
                    values,
                    key_boxes,
                    value_boxes,
                    keys_full,
                    keys_empty,
                    values_full,
                    values_empty,
                    block_tables,
                    work,
                    num_tiles,
                    table_stride,
                    window,
                    num_kv_heads,
                    GROUP,
                    D,
                    BLOCK_SIZE,
                    ROWS,
                    KEYS,
                    WINDOW,
                    STAGES,
                    PDL,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
