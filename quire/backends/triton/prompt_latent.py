"""Latent attention of prompts on Hopper: the same bits as `latent_attention._latent_kernel`, in less
time.

A program has three parts that run at the same time (warp specialisation). One warp copies queries
and latents to shared memory. Two groups of four warps share a tile of 64 (query, head) rows: each
has half of the output's columns in its registers, and computes the scores and weights of every
second tile of keys, which it hands to the other one through shared memory. So the tensor core
multiplies for one group while the other computes its softmax, and no score is computed twice. Both
add the tiles up in their order.

What is copied are halves of latents: the first, the second and what is rotated, each with barriers
of its own, as they are used up at different times, and there is room for two tiles only.

Results of splits are merged in memory that a program has for itself (128 KiB, in the L2 cache): every
thread stores and loads its own numbers. Nothing is scaled within a split: an item that would need it
(see `attention_tile.raised`), which is rare in bfloat16, is marked, and so are those that are a
part of a tile's splits only; `_latent_kernel` computes these.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from quire.backends.triton.attention_tile import raised
from quire.backends.triton.attention_work import KEY_TILE, SPLIT
from quire.backends.triton.latent_attention import latent_attention
from quire.backends.triton.latent_work import LATENT_ROWS
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL
from quire.backends.triton.prompt_tiles import COPIED, barriers, item_of
from quire.kernels.latent import LatentHeads, LatentSpec
from quire.kernels.ops import LayerCache

_BLOCK_SIZES = (16, 32, 64)
_RANKS = (256, 512)
_ROPE = 64
_ROWS = gl.constexpr(LATENT_ROWS)
_TILE = gl.constexpr(KEY_TILE)
_PAIRS = gl.constexpr(SPLIT // KEY_TILE // 2)
"""Pairs of tiles in a split."""
_HUGE = gl.constexpr(30)
"""A number of tiles shifted right by it is 0, which compilers don't know: they would compute the
addresses of all operands once for all tiles, more than there are registers for.
"""
_ONES = gl.constexpr(8)
_REGISTERS = 168
"""Registers per thread when the program starts; the computing groups then take most of the copying
warp's.
"""


def takes(heads: LatentHeads, dtype: torch.dtype) -> bool:
    """Whether this kernel can compute such heads for a model in this dtype."""
    sizes = heads.rank, heads.head_dim - heads.rank
    return dtype == torch.bfloat16 and sizes[0] in _RANKS and sizes[1] == _ROPE


def takes_cache(query: Tensor, cache: LayerCache) -> bool:
    """FP8 would have to be converted between the copy and the product; it stays with the kernel for
    all.
    """
    return (
        cache.keys.dtype == query.dtype
        and cache.block_size in _BLOCK_SIZES
        and cache.keys.is_contiguous()
        and torch.cuda.get_device_capability(query.device)[0] == 9
    )


def prompt_latent(
    query: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    work: Tensor,
    spec: LatentSpec,
    max_context_len: int,
    num_multiprocessors: int,
) -> Tensor:
    """`latent_attention.latent_attention` for a list `prompts`, where `takes_cache` says yes."""
    rows, heads, size = query.shape
    out = torch.empty(rows, heads, spec.rank, dtype=query.dtype, device=query.device)
    most = len(work) - 1
    if not most:
        return out
    programs = min(most, num_multiprocessors)
    failed = torch.empty(most * 2, dtype=torch.int32, device=query.device)
    _prompt_latent_kernel[(programs,)](
        query=_descriptor(query.view(-1, size), LATENT_ROWS),
        keys=_descriptor(cache.keys.view(-1, size), cache.block_size),
        out=out,
        block_tables=block_tables,
        work=work,
        failed=failed,
        stored=query.new_empty(
            programs * LATENT_ROWS * spec.rank if max_context_len > SPLIT else 1,
            dtype=torch.float32,
        ),
        table_stride=block_tables.stride(0),
        # log2(e) is a part of the scale, as weights are computed with exp2
        scale=spec.scale * math.log2(math.e),
        **constants(heads, spec, cache.block_size),
        PDL=USE_PDL,
        num_warps=4,
        maxnreg=_REGISTERS,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return latent_attention(
        query,
        cache,
        block_tables,
        work,
        spec,
        max_context_len,
        num_multiprocessors,
        out=out,
        failed=failed,
    )


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    box = [rows, COPIED.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor, box, layout)


def constants(heads: int, spec: LatentSpec, block_size: int) -> dict[str, Any]:
    return {
        "HEADS": heads,
        "HALF": spec.rank // 2,
        "ROPE": spec.rope_dim,
        "BLOCK_SIZE": block_size,
    }


@gluon.jit
def _read_item(item, work, HEADS: gl.constexpr):
    """Returns: first row of the batch, first of the (query, head) rows, number of queries, context
    length, row of the block table, number of tiles of keys, and whether the item has all of them.
    """
    entry = work + (1 + item) * 8
    first_split = gl.load(entry + 1)
    first_row = gl.load(entry + 2)
    num_queries = gl.load(entry + 3)
    context_len = gl.load(entry + 4)
    table_row = gl.load(entry + 5)
    end_split = gl.load(entry + 6)
    first = gl.load(entry + 7)
    last_query = gl.minimum((first + _ROWS - 1) // HEADS, num_queries - 1)
    num_tiles = gl.cdiv(context_len - num_queries + last_query + 1, _TILE)
    is_whole = (first_split == 0) & (end_split * (2 * _PAIRS) >= num_tiles)
    return first_row, first, num_queries, context_len, table_row, num_tiles, is_whole


@gluon.jit
def _copy_boxes(
    source,
    boxes,
    barrier,
    stage,
    rows,
    first_column,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Starts to copy WIDTH columns of a tile whose blocks begin at these rows of the cache."""
    BLOCKS: gl.constexpr = _TILE // BLOCK_SIZE
    PARTS: gl.constexpr = WIDTH // COPIED
    mbarrier.expect(barrier, _TILE * WIDTH * 2)
    for i in gl.static_range(BLOCKS):
        for part in gl.static_range(PARTS):
            box = boxes.index((stage * PARTS + part) * BLOCKS + i)
            place = [rows[i], first_column + part * COPIED]
            tma.async_copy_global_to_shared(source, place, barrier, box)


@gluon.jit
def _copy(
    query,
    keys,
    query_boxes,
    query_rope,
    first_boxes,
    second_boxes,
    rope_boxes,
    query_full,
    query_empty,
    first_full,
    first_empty,
    second_full,
    second_empty,
    rope_full,
    rope_empty,
    block_tables,
    work,
    table_stride,
    HEADS: gl.constexpr,
    HALF: gl.constexpr,
    ROPE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PDL: gl.constexpr,
):
    """The program of the copying warp."""
    BLOCKS: gl.constexpr = _TILE // BLOCK_SIZE
    if PDL:
        cuda.gdc_wait()
    count = gl.load(work)
    num_items = 0
    num_pairs = 0
    for turn in range(0, gl.cdiv(count, gl.num_programs(0))):
        item = item_of(turn)
        if item < count:
            first_row, first, _, context_len, table_row, num_tiles, is_whole = _read_item(
                item, work, HEADS
            )
            if is_whole:
                table = block_tables + table_row.to(gl.int64) * table_stride
                mbarrier.wait(query_empty.index(0), num_items & 1 ^ 1)
                mbarrier.expect(query_full.index(0), _ROWS * (2 * HALF + ROPE) * 2)
                query_row = first_row * HEADS + first
                for part in gl.static_range(2 * HALF // COPIED):
                    tma.async_copy_global_to_shared(
                        query,
                        [query_row, part * COPIED],
                        query_full.index(0),
                        query_boxes.index(part),
                    )
                tma.async_copy_global_to_shared(
                    query, [query_row, 2 * HALF], query_full.index(0), query_rope
                )
                num_items += 1
                for pair in range(0, gl.cdiv(num_tiles, 2)):
                    before = num_pairs & 1 ^ 1
                    for stage in gl.static_range(2):
                        rows = ()
                        for i in gl.static_range(BLOCKS):
                            # After the sequence's end block 0 is read, which belongs to no request.
                            number = (pair * 2 + stage) * BLOCKS + i
                            exists = number * BLOCK_SIZE < context_len
                            block = gl.load(table + number, mask=exists, other=0)
                            rows = rows + (block * BLOCK_SIZE,)  # type: ignore  # noqa: RUF005
                        mbarrier.wait(first_empty.index(stage), before)
                        _copy_boxes(
                            keys,
                            first_boxes,
                            first_full.index(stage),
                            stage,
                            rows,
                            0,
                            HALF,
                            BLOCK_SIZE,
                        )
                        mbarrier.wait(rope_empty.index(stage), before)
                        _copy_boxes(
                            keys,
                            rope_boxes,
                            rope_full.index(stage),
                            stage,
                            rows,
                            2 * HALF,
                            ROPE,
                            BLOCK_SIZE,
                        )
                        mbarrier.wait(second_empty.index(stage), before)
                        _copy_boxes(
                            keys,
                            second_boxes,
                            second_full.index(stage),
                            stage,
                            rows,
                            HALF,
                            HALF,
                            BLOCK_SIZE,
                        )
                    num_pairs += 1


@gluon.jit
def _clear_rows(tile, end, HALF: gl.constexpr):
    """Sets rows from `end` on to zero: values after the sequence's end may be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    for start in gl.static_range(0, _TILE, 16):
        part = tile.slice(start, 16)
        row = start + gl.arange(0, 16, gl.SliceLayout(1, layout))
        found = part.load(layout)
        part.store(gl.where((row < end)[:, None], found, gl.zeros_like(found)))
    fence_async_shared()
    tl.debug_barrier()  # explicit here, or the compiler adds one that all tiles go through


@gluon.jit
def _weights(scores, scale, before, first_key, position, first_position, dtype: gl.constexpr):
    """The weights of a tile; what they are relative to (`before`: those before them); and whether a
    row needs another factor for earlier weights than 1.
    """
    key = first_key + gl.arange(0, _TILE, gl.SliceLayout(0, scores.type.layout))
    if first_key + _TILE > first_position + 1:
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    highest = raised(before, gl.max(scores, 1) * scale, gl.bfloat16)
    # Where no key is visible yet this is -inf, and -inf - -inf would be NaN.
    reference = gl.where(highest == float("-inf"), 0.0, highest)
    weights = gl.exp2(gl.fma(scores, scale, -reference[:, None]))
    change = (highest != before) & (before != float("-inf"))
    return weights.to(dtype), highest, change.to(gl.int32)


@gluon.jit
def _places(base, HALF: gl.constexpr, layout: gl.constexpr):
    """Where the numbers of a group lie in its memory: those that the threads of a warp store together
    side by side.
    """
    row = gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    of_row = row // 16 * (16 * HALF) + row // 8 % 2 * 64 + row % 8 * 8
    return base + of_row[:, None] + (column // 8 * 128 + column % 8)[None, :]


@gluon.jit
def _merge(highest, output, split_highest, places, is_first, is_last, as_output: gl.constexpr):
    """`attention_splits.merge`, of what was stored and a split's output; stores it if more follow.
    Also returns the factors for earlier weights and for the split's.
    """
    split_highest = gl.convert_layout(split_highest, gl.SliceLayout(1, as_output))
    new_highest = gl.maximum(highest, split_highest)
    reference = gl.where(new_highest == float("-inf"), 0.0, new_highest)
    old = gl.exp2(highest - reference)
    new = gl.exp2(split_highest - reference)
    if not is_first:  # merging with an empty result would change no bit
        merged = gl.load(places, cache_modifier=".cg")
        output = merged * old[:, None] + output * new[:, None]
    if not is_last:
        gl.store(places, output)
    return new_highest, output, old, new


@gluon.jit
def _store_rows(
    out,
    output,
    divisor,
    first_place,
    num_used,
    first_column,
    HALF: gl.constexpr,
    dtype: gl.constexpr,
):
    layout: gl.constexpr = output.type.layout
    row = gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    result = output / gl.where(divisor == 0.0, 1.0, divisor)[:, None]
    target = out + (first_place + row)[:, None] * (2 * HALF) + column[None, :]
    gl.store(target, result.to(dtype), mask=(row < num_used)[:, None])


@gluon.jit
def _attend_first(
    query_halves,
    query_rope,
    first,
    second,
    rope,
    shared_weights,
    shared_highest,
    shared_divisor,
    ones,
    query_full,
    query_empty,
    first_full,
    first_empty,
    second_full,
    rope_full,
    rope_empty,
    weights_full,
    divisor_full,
    out,
    work,
    failed,
    stored,
    scale,
    HEADS: gl.constexpr,
    HALF: gl.constexpr,
    PDL: gl.constexpr,
):
    """The program of the group that has the first half of the columns, the scores of even tiles, and
    the sums of weights.
    """
    as_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16])
    as_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    as_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _ONES, 16])
    as_left: gl.constexpr = gl.DotOperandLayout(0, as_output, 2)
    as_left_of_ones: gl.constexpr = gl.DotOperandLayout(0, as_total, 2)
    rows: gl.constexpr = gl.SliceLayout(1, as_scores)
    dtype: gl.constexpr = out.dtype.element_ty
    if PDL:
        cuda.gdc_wait()
    count = gl.load(work)
    num_items = 0
    num_seen = 0
    places = _places(stored + gl.program_id(0) * (2 * _ROWS * HALF), HALF, as_output)
    nothing = gl.zeros((_ROWS, _TILE), gl.float32, as_scores)
    for turn in range(0, gl.cdiv(count, gl.num_programs(0))):
        item = item_of(turn)
        if item < count:
            first_row, row, num_queries, context_len, _, num_tiles, is_whole = _read_item(
                item, work, HEADS
            )
            num_used = num_queries * HEADS - row
            place = first_row.to(gl.int64) * HEADS + row
            first_position = context_len - num_queries + row // HEADS
            own_row = gl.arange(0, _ROWS, rows)
            position = context_len - num_queries + (row + own_row) // HEADS
            if not is_whole:
                gl.store(failed + item * 2, 1)
            else:
                num_pairs = gl.cdiv(num_tiles, 2)
                even = num_tiles >> _HUGE
                highest = gl.full((_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, as_output))
                total = gl.zeros((_ROWS, _ONES), gl.float32, as_total)
                split_total = gl.zeros((_ROWS, _ONES), gl.float32, as_total)
                output = gl.zeros((_ROWS, HALF), gl.float32, as_output)
                mbarrier.wait(query_full.index(0), num_items & 1)
                num_items += 1
                mbarrier.wait(first_full.index(0), num_seen & 1)
                scores = warpgroup_mma(
                    query_halves.index(even),
                    first.index(even).permute((1, 0)),
                    nothing,
                    use_acc=False,
                    is_async=True,
                )
                mbarrier.wait(second_full.index(0), num_seen & 1)
                scores = warpgroup_mma(
                    query_halves.index(1 + even),
                    second.index(even).permute((1, 0)),
                    scores,
                    is_async=True,
                )
                mbarrier.wait(rope_full.index(0), num_seen & 1)
                scores = warpgroup_mma(
                    query_rope, rope.index(even).permute((1, 0)), scores, is_async=True
                )
                scores = warpgroup_mma_wait(0, deps=(scores,))
                mbarrier.arrive(rope_empty.index(0))
                mbarrier.arrive(query_empty.index(0), pred=num_pairs == 1)
                before = gl.full((_ROWS,), float("-inf"), gl.float32, rows)
                weights, reference, has_failed = _weights(
                    scores, scale, before, 0, position, first_position, dtype
                )
                shared_weights.store(weights)
                shared_highest.store(reference)
                tl.debug_barrier()
                mbarrier.arrive(weights_full.index(0))
                for pair in range(0, num_pairs):
                    phase = num_seen & 1
                    even = pair >> _HUGE
                    num_seen += 1
                    has_next = pair + 1 < num_pairs
                    ends_split = (pair + 1) % _PAIRS == 0
                    continues = pair % _PAIRS != 0
                    end = context_len - pair * (2 * _TILE)
                    if end < _TILE:
                        _clear_rows(first.index(0), end, HALF)
                    left = gl.convert_layout(weights, as_left)
                    left_of_ones = gl.convert_layout(weights, as_left_of_ones)
                    adding_total = warpgroup_mma(
                        left_of_ones,
                        ones.permute((1, 0)),
                        split_total,
                        use_acc=continues,
                        is_async=True,
                    )
                    adding = warpgroup_mma(
                        left, first.index(0), output, use_acc=continues, is_async=True
                    )
                    mbarrier.wait(weights_full.index(1), phase)
                    mbarrier.wait(first_full.index(1), phase)
                    others = shared_weights.load(as_left)
                    reference = shared_highest.load(rows)
                    if end < 2 * _TILE:
                        _clear_rows(first.index(1), end - _TILE, HALF)
                    others_of_ones = gl.convert_layout(others, as_left_of_ones)
                    adding_total = warpgroup_mma(
                        others_of_ones, ones.permute((1, 0)), adding_total, is_async=True
                    )
                    adding = warpgroup_mma(others, first.index(1), adding, is_async=True)
                    # the products of the first tile are done
                    left = warpgroup_mma_wait(2, deps=(left,))
                    mbarrier.arrive(first_empty.index(0))
                    split_highest = reference
                    if has_next:
                        mbarrier.wait(first_full.index(0), phase ^ 1)
                        scores = warpgroup_mma(
                            query_halves.index(even),
                            first.index(even).permute((1, 0)),
                            nothing,
                            use_acc=False,
                            is_async=True,
                        )
                        mbarrier.wait(second_full.index(0), phase ^ 1)
                        scores = warpgroup_mma(
                            query_halves.index(1 + even),
                            second.index(even).permute((1, 0)),
                            scores,
                            is_async=True,
                        )
                        mbarrier.wait(rope_full.index(0), phase ^ 1)
                        scores = warpgroup_mma(
                            query_rope, rope.index(even).permute((1, 0)), scores, is_async=True
                        )
                        split_total, output = warpgroup_mma_wait(3, deps=(adding_total, adding))
                        mbarrier.arrive(first_empty.index(1))
                        scores = warpgroup_mma_wait(0, deps=(scores,))
                        mbarrier.arrive(rope_empty.index(0))
                        mbarrier.arrive(query_empty.index(0), pred=pair + 2 == num_pairs)
                        before = gl.where(ends_split, float("-inf"), reference)
                        weights, reference, change = _weights(
                            scores,
                            scale,
                            before,
                            (pair + 1) * (2 * _TILE),
                            position,
                            first_position,
                            dtype,
                        )
                        has_failed = has_failed | change
                        shared_weights.store(weights)
                        shared_highest.store(reference)
                        tl.debug_barrier()
                        mbarrier.arrive(weights_full.index(0))
                    else:
                        split_total, output = warpgroup_mma_wait(0, deps=(adding_total, adding))
                        mbarrier.arrive(first_empty.index(1))
                    if ends_split | (not has_next):
                        highest, output, old, new = _merge(
                            highest,
                            output,
                            split_highest,
                            places,
                            pair < _PAIRS,
                            not has_next,
                            as_output,
                        )
                        old = gl.convert_layout(old, gl.SliceLayout(1, as_total))
                        new = gl.convert_layout(new, gl.SliceLayout(1, as_total))
                        total = total * old[:, None] + split_total * new[:, None]
                # its columns are the same
                divisor = gl.convert_layout(gl.max(total, 1), gl.SliceLayout(1, as_output))
                shared_divisor.store(divisor)
                tl.debug_barrier()
                mbarrier.arrive(divisor_full.index(0))
                _store_rows(out, output, divisor, place, num_used, 0, HALF, dtype)
                has_failed = gl.where(own_row < num_used, has_failed, 0)
                gl.store(failed + item * 2, gl.max(has_failed, 0))


@gluon.jit
def _attend_second(
    query_halves,
    query_rope,
    first,
    second,
    rope,
    shared_weights,
    shared_highest,
    shared_divisor,
    query_full,
    query_empty,
    first_full,
    second_full,
    second_empty,
    rope_full,
    rope_empty,
    weights_full,
    divisor_full,
    out,
    work,
    failed,
    stored,
    scale,
    HEADS: gl.constexpr,
    HALF: gl.constexpr,
    PDL: gl.constexpr,
):
    """The program of the group that has the second half of the columns and the scores of odd tiles.
    An item's last tile may be one that no row sees, which changes nothing.
    """
    as_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16])
    as_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    as_left: gl.constexpr = gl.DotOperandLayout(0, as_output, 2)
    rows: gl.constexpr = gl.SliceLayout(1, as_scores)
    dtype: gl.constexpr = out.dtype.element_ty
    if PDL:
        cuda.gdc_wait()
    count = gl.load(work)
    num_items = 0
    num_seen = 0
    places = _places(stored + gl.program_id(0) * (2 * _ROWS * HALF) + _ROWS * HALF, HALF, as_output)
    nothing = gl.zeros((_ROWS, _TILE), gl.float32, as_scores)
    for turn in range(0, gl.cdiv(count, gl.num_programs(0))):
        item = item_of(turn)
        if item < count:
            first_row, row, num_queries, context_len, _, num_tiles, is_whole = _read_item(
                item, work, HEADS
            )
            num_used = num_queries * HEADS - row
            place = first_row.to(gl.int64) * HEADS + row
            first_position = context_len - num_queries + row // HEADS
            own_row = gl.arange(0, _ROWS, rows)
            position = context_len - num_queries + (row + own_row) // HEADS
            if not is_whole:
                gl.store(failed + item * 2 + 1, 1)
            else:
                num_pairs = gl.cdiv(num_tiles, 2)
                even = num_tiles >> _HUGE
                highest = gl.full((_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, as_output))
                output = gl.zeros((_ROWS, HALF), gl.float32, as_output)
                has_failed = gl.zeros((_ROWS,), gl.int32, rows)
                mbarrier.wait(query_full.index(0), num_items & 1)
                mbarrier.wait(first_full.index(1), num_seen & 1)
                scores = warpgroup_mma(
                    query_halves.index(even),
                    first.index(1 + even).permute((1, 0)),
                    nothing,
                    use_acc=False,
                    is_async=True,
                )
                mbarrier.wait(second_full.index(1), num_seen & 1)
                scores = warpgroup_mma(
                    query_halves.index(1 + even),
                    second.index(1 + even).permute((1, 0)),
                    scores,
                    is_async=True,
                )
                mbarrier.wait(rope_full.index(1), num_seen & 1)
                scores = warpgroup_mma(
                    query_rope, rope.index(1 + even).permute((1, 0)), scores, is_async=True
                )
                scores = warpgroup_mma_wait(0, deps=(scores,))
                mbarrier.arrive(rope_empty.index(1))
                mbarrier.arrive(query_empty.index(0), pred=num_pairs == 1)
                for pair in range(0, num_pairs):
                    phase = num_seen & 1
                    even = pair >> _HUGE
                    num_seen += 1
                    has_next = pair + 1 < num_pairs
                    end = context_len - pair * (2 * _TILE)
                    mbarrier.wait(weights_full.index(0), phase)
                    mbarrier.wait(second_full.index(0), phase)
                    others = shared_weights.load(as_left)
                    reference = shared_highest.load(rows)
                    tl.debug_barrier()  # all have read what this group is going to overwrite
                    if end < _TILE:
                        _clear_rows(second.index(0), end, HALF)
                    output = warpgroup_mma(
                        others,
                        second.index(0),
                        output,
                        use_acc=pair % _PAIRS != 0,
                        is_async=True,
                    )
                    # always so: the branch keeps the compilers from moving the softmax after the end
                    # of the product
                    if num_used > 0:
                        weights, reference, change = _weights(
                            scores,
                            scale,
                            reference,
                            pair * (2 * _TILE) + _TILE,
                            position,
                            first_position,
                            dtype,
                        )
                        has_failed = has_failed | change
                        shared_weights.store(weights)
                        shared_highest.store(reference)
                        tl.debug_barrier()
                        mbarrier.arrive(weights_full.index(1))
                    else:
                        weights = scores.to(dtype)
                    output = warpgroup_mma_wait(0, deps=(output,))
                    mbarrier.arrive(second_empty.index(0))
                    if end < 2 * _TILE:
                        _clear_rows(second.index(1), end - _TILE, HALF)
                    left = gl.convert_layout(weights, as_left)
                    output = warpgroup_mma(left, second.index(1), output, is_async=True)
                    output = warpgroup_mma_wait(0, deps=(output,))
                    mbarrier.arrive(second_empty.index(1))
                    if ((pair + 1) % _PAIRS == 0) | (not has_next):
                        highest, output, _old, _new = _merge(
                            highest,
                            output,
                            reference,
                            places,
                            pair < _PAIRS,
                            not has_next,
                            as_output,
                        )
                    if has_next:
                        mbarrier.wait(first_full.index(1), phase ^ 1)
                        scores = warpgroup_mma(
                            query_halves.index(even),
                            first.index(1 + even).permute((1, 0)),
                            nothing,
                            use_acc=False,
                            is_async=True,
                        )
                        mbarrier.wait(second_full.index(1), phase ^ 1)
                        scores = warpgroup_mma(
                            query_halves.index(1 + even),
                            second.index(1 + even).permute((1, 0)),
                            scores,
                            is_async=True,
                        )
                        mbarrier.wait(rope_full.index(1), phase ^ 1)
                        scores = warpgroup_mma(
                            query_rope, rope.index(1 + even).permute((1, 0)), scores, is_async=True
                        )
                        scores = warpgroup_mma_wait(0, deps=(scores,))
                        mbarrier.arrive(rope_empty.index(1))
                        mbarrier.arrive(query_empty.index(0), pred=pair + 2 == num_pairs)
                mbarrier.wait(divisor_full.index(0), num_items & 1)
                num_items += 1
                divisor = shared_divisor.load(gl.SliceLayout(1, as_output))
                _store_rows(out, output, divisor, place, num_used, HALF, HALF, dtype)
                has_failed = gl.where(own_row < num_used, has_failed, 0)
                gl.store(failed + item * 2 + 1, gl.max(has_failed, 0))


@gluon.jit(do_not_specialize=["table_stride"])
def _prompt_latent_kernel(
    query,
    keys,
    out,
    block_tables,
    work,
    failed,
    stored,
    table_stride,
    scale,
    HEADS: gl.constexpr,
    HALF: gl.constexpr,
    ROPE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PDL: gl.constexpr,
):
    """`work` is the list of `latent_work.py`. Sets two flags of each item in `failed`, which are 0 if
    its output was computed.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    as_half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_TILE, HALF], dtype)
    as_rope: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_TILE, ROPE], dtype)
    as_weights: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, _TILE], dtype)
    as_ones: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ONES, _TILE], dtype)
    as_vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BOXES: gl.constexpr = 2 * (_TILE // BLOCK_SIZE)
    if PDL:
        cuda.gdc_launch_dependents()
    query_halves = gl.allocate_shared_memory(dtype, [2, _ROWS, HALF], as_half)
    query_rope = gl.allocate_shared_memory(dtype, [_ROWS, ROPE], as_rope)
    first = gl.allocate_shared_memory(dtype, [2, _TILE, HALF], as_half)
    second = gl.allocate_shared_memory(dtype, [2, _TILE, HALF], as_half)
    rope = gl.allocate_shared_memory(dtype, [2, _TILE, ROPE], as_rope)
    query_boxes = query_halves._reinterpret(
        dtype, [2 * HALF // COPIED, _ROWS, COPIED], query.layout
    )
    in_boxes: gl.constexpr = [BOXES * (HALF // COPIED), BLOCK_SIZE, COPIED]
    first_boxes = first._reinterpret(dtype, in_boxes, keys.layout)
    second_boxes = second._reinterpret(dtype, in_boxes, keys.layout)
    rope_boxes = rope._reinterpret(
        dtype, [BOXES * (ROPE // COPIED), BLOCK_SIZE, COPIED], keys.layout
    )
    shared_weights = gl.allocate_shared_memory(dtype, [_ROWS, _TILE], as_weights)
    shared_highest = gl.allocate_shared_memory(gl.float32, [_ROWS], as_vector)
    shared_divisor = gl.allocate_shared_memory(gl.float32, [_ROWS], as_vector)
    ones = gl.allocate_shared_memory(dtype, [_ONES, _TILE], as_ones)
    as_filled: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ones.store(gl.full((_ONES, _TILE), 1.0, dtype, as_filled))
    query_full, query_empty = barriers(1, 1), barriers(1, 2)
    first_full, first_empty = barriers(2, 1), barriers(2, 1)
    second_full, second_empty = barriers(2, 1), barriers(2, 1)
    rope_full, rope_empty = barriers(2, 1), barriers(2, 1)
    weights_full, divisor_full = barriers(2, 1), barriers(1, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _attend_first,
                (
                    query_halves,
                    query_rope,
                    first,
                    second,
                    rope,
                    shared_weights,
                    shared_highest,
                    shared_divisor,
                    ones,
                    query_full,
                    query_empty,
                    first_full,
                    first_empty,
                    second_full,
                    rope_full,
                    rope_empty,
                    weights_full,
                    divisor_full,
                    out,
                    work,
                    failed,
                    stored,
                    scale,
                    HEADS,
                    HALF,
                    PDL,
                ),
            ),
            (
                _attend_second,
                (
                    query_halves,
                    query_rope,
                    first,
                    second,
                    rope,
                    shared_weights,
                    shared_highest,
                    shared_divisor,
                    query_full,
                    query_empty,
                    first_full,
                    second_full,
                    second_empty,
                    rope_full,
                    rope_empty,
                    weights_full,
                    divisor_full,
                    out,
                    work,
                    failed,
                    stored,
                    scale,
                    HEADS,
                    HALF,
                    PDL,
                ),
            ),
            (
                _copy,
                (
                    query,
                    keys,
                    query_boxes,
                    query_rope,
                    first_boxes,
                    second_boxes,
                    rope_boxes,
                    query_full,
                    query_empty,
                    first_full,
                    first_empty,
                    second_full,
                    second_empty,
                    rope_full,
                    rope_empty,
                    block_tables,
                    work,
                    table_stride,
                    HEADS,
                    HALF,
                    ROPE,
                    BLOCK_SIZE,
                    PDL,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
