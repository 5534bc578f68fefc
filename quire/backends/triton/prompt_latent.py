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
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from quire.backends.triton.attention_work import SPLIT
from quire.backends.triton.direct_launch import gluon_jit
from quire.backends.triton.latent_attention import latent_attention
from quire.backends.triton.latent_groups import (
    ONES,
    ROWS,
    TILE,
    attend_first,
    attend_second,
    read_item,
)
from quire.backends.triton.latent_work import LATENT_ROWS
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL
from quire.backends.triton.prompt_tiles import COPIED, barriers, item_of
from quire.kernels.latent import LatentHeads, LatentSpec
from quire.kernels.ops import LayerCache

_BLOCK_SIZES = (16, 32, 64)
_RANKS = (256, 512)
_ROPE = 64
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
    BLOCKS: gl.constexpr = TILE // BLOCK_SIZE
    PARTS: gl.constexpr = WIDTH // COPIED
    mbarrier.expect(barrier, TILE * WIDTH * 2)
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
    BLOCKS: gl.constexpr = TILE // BLOCK_SIZE
    if PDL:
        cuda.gdc_wait()
    count = gl.load(work)
    num_items = 0
    num_pairs = 0
    for turn in range(0, gl.cdiv(count, gl.num_programs(0))):
        item = item_of(turn)
        if item < count:
            first_row, first, _, context_len, table_row, num_tiles, is_whole = read_item(
                item, work, HEADS
            )
            if is_whole:
                table = block_tables + table_row.to(gl.int64) * table_stride
                mbarrier.wait(query_empty.index(0), num_items & 1 ^ 1)
                mbarrier.expect(query_full.index(0), ROWS * (2 * HALF + ROPE) * 2)
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


@gluon_jit(do_not_specialize=["table_stride"])
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
    as_half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, HALF], dtype)
    as_rope: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, ROPE], dtype)
    as_weights: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, TILE], dtype)
    as_ones: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ONES, TILE], dtype)
    as_vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BOXES: gl.constexpr = 2 * (TILE // BLOCK_SIZE)
    if PDL:
        cuda.gdc_launch_dependents()
    query_halves = gl.allocate_shared_memory(dtype, [2, ROWS, HALF], as_half)
    query_rope = gl.allocate_shared_memory(dtype, [ROWS, ROPE], as_rope)
    first = gl.allocate_shared_memory(dtype, [2, TILE, HALF], as_half)
    second = gl.allocate_shared_memory(dtype, [2, TILE, HALF], as_half)
    rope = gl.allocate_shared_memory(dtype, [2, TILE, ROPE], as_rope)
    query_boxes = query_halves._reinterpret(dtype, [2 * HALF // COPIED, ROWS, COPIED], query.layout)
    in_boxes: gl.constexpr = [BOXES * (HALF // COPIED), BLOCK_SIZE, COPIED]
    first_boxes = first._reinterpret(dtype, in_boxes, keys.layout)
    second_boxes = second._reinterpret(dtype, in_boxes, keys.layout)
    rope_boxes = rope._reinterpret(
        dtype, [BOXES * (ROPE // COPIED), BLOCK_SIZE, COPIED], keys.layout
    )
    shared_weights = gl.allocate_shared_memory(dtype, [ROWS, TILE], as_weights)
    shared_highest = gl.allocate_shared_memory(gl.float32, [ROWS], as_vector)
    shared_divisor = gl.allocate_shared_memory(gl.float32, [ROWS], as_vector)
    ones = gl.allocate_shared_memory(dtype, [ONES, TILE], as_ones)
    as_filled: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ones.store(gl.full((ONES, TILE), 1.0, dtype, as_filled))
    query_full, query_empty = barriers(1, 1), barriers(1, 2)
    first_full, first_empty = barriers(2, 1), barriers(2, 1)
    second_full, second_empty = barriers(2, 1), barriers(2, 1)
    rope_full, rope_empty = barriers(2, 1), barriers(2, 1)
    weights_full, divisor_full = barriers(2, 1), barriers(1, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                attend_first,
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
                attend_second,
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
