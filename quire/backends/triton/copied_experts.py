"""Products of experts that have many rows each, on Hopper: the bits of `many_rows_experts.py`, in less
time.

A program has three parts that run at the same time (warp specialisation). Four warps copy tiles of
rows and weights to shared memory, as far ahead as there is room, also those of the next item of work
while this one is stored. Two groups of four warps multiply 64 rows each with 256 weights; a group
without rows leaves the tensor core to the other.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from quire.backends.triton.direct_launch import gluon_jit
from quire.backends.triton.grouping import Tiles
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, num_multiprocessors
from quire.backends.triton.prompt_tiles import barriers
from quire.backends.triton.rowwise import NUMBERS, gated
from quire.backends.triton.shapes import row_stride
from quire.kernels.ops import Activation

WIDTH = 128
"""Rows of a tile."""
_TILE = gl.constexpr(WIDTH)
_GROUP_ROWS = gl.constexpr(WIDTH // 2)
_OUTPUTS = gl.constexpr(256)
"""Weights of a tile: as many as the widest instruction takes."""
_INNER = gl.constexpr(64)
_COPYING_THREADS = gl.constexpr(128)
_STAGES = 4
_REGISTERS = 168
"""Registers per thread when the program starts; the multiplying groups then take most of the copying
warps'.
"""


@gluon.jit
def _copy_tiles(
    x,
    weight,
    row_tiles,
    weight_boxes,
    full,
    empty,
    tile_experts,
    tile_counts,
    order,
    x_stride,
    bound,
    INNER: gl.constexpr,
    OUTER: gl.constexpr,
    TOP_K: gl.constexpr,
    SIDES: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """The program of the copying warps."""
    as_copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BLOCK: gl.constexpr = _OUTPUTS // SIDES
    BLOCKS: gl.constexpr = OUTER // BLOCK
    if PDL:
        cuda.gdc_wait()
    slot = gl.arange(0, _TILE, gl.SliceLayout(1, as_copied))
    inner = gl.arange(0, _INNER, gl.SliceLayout(0, as_copied))
    num_items = gl.load(tile_counts + bound) * BLOCKS
    copied = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = item // BLOCKS
        first = item % BLOCKS * BLOCK
        expert = gl.load(tile_experts + tile)
        occupied = slot < gl.load(tile_counts + tile)
        pair = gl.load(order + tile * _TILE + slot, mask=occupied, other=0)
        rows = x + (pair // TOP_K).to(gl.int64)[:, None] * x_stride + inner[None, :]
        for k in range(0, INNER, _INNER):
            stage = copied % STAGES
            mbarrier.wait(empty.index(stage), copied // STAGES & 1 ^ 1)
            mbarrier.expect(full.index(stage), _OUTPUTS * _INNER * 2)
            for side in gl.static_range(SIDES):
                row = (SIDES * expert + side) * OUTER + first
                box = weight_boxes.index(stage * SIDES + side)
                tma.async_copy_global_to_shared(weight, [row, k], full.index(stage), box)
            async_copy.async_copy_global_to_shared(
                row_tiles.index(stage), rows + k, mask=occupied[:, None]
            )
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            copied += 1


@gluon.jit
def _sides(total, SIDES: gl.constexpr):
    """The numbers of gate and of up, which a thread has both, or all twice."""
    if SIDES == 1:
        return total, total
    else:  # noqa: RET505  (or the compiler sees two types of results)
        halves = gl.reshape(total, (_GROUP_ROWS, 2, _OUTPUTS // 2))
        return gl.split(gl.permute(halves, (0, 2, 1)))


@gluon.jit
def _multiply(
    NUMBER: gl.constexpr,
    row_tiles,
    weight_tiles,
    full,
    empty,
    bias,
    tile_experts,
    tile_counts,
    order,
    out,
    bound,
    INNER: gl.constexpr,
    OUTER: gl.constexpr,
    SIDES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """The program of a group of four warps; NUMBER (0 or 1) says which half of the rows it has."""
    as_product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _OUTPUTS, 16])
    dtype: gl.constexpr = out.dtype.element_ty
    BLOCK: gl.constexpr = _OUTPUTS // SIDES
    BLOCKS: gl.constexpr = OUTER // BLOCK
    if PDL:
        cuda.gdc_wait()
        if SIDES == 2 and NUMBER == 0:  # the next product reads the same work list
            cuda.gdc_launch_dependents()
    nothing = gl.zeros((_GROUP_ROWS, _OUTPUTS), gl.float32, as_product)
    sides = _sides(nothing, SIDES)
    as_result: gl.constexpr = sides[0].type.layout
    slot = NUMBER * _GROUP_ROWS + gl.arange(0, _GROUP_ROWS, gl.SliceLayout(1, as_result))
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, as_result))
    num_items = gl.load(tile_counts + bound) * BLOCKS
    seen = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = item // BLOCKS
        first = item % BLOCKS * BLOCK
        count = gl.load(tile_counts + tile)
        if count > NUMBER * _GROUP_ROWS:
            occupied = slot < count
            pair = gl.load(order + tile * _TILE + slot, mask=occupied, other=0)
            total = gl.zeros((_GROUP_ROWS, _OUTPUTS), gl.float32, as_product)
            for k in range(0, INNER, _INNER):
                stage = seen % STAGES
                mbarrier.wait(full.index(stage), seen // STAGES & 1)
                fence_async_shared()  # rows were copied by threads
                total = warpgroup_mma(
                    row_tiles.index(stage).slice(NUMBER * _GROUP_ROWS, _GROUP_ROWS),
                    weight_tiles.index(stage).permute((1, 0)),
                    total,
                    is_async=True,
                )
                total = warpgroup_mma_wait(1, deps=(total,))
                mbarrier.arrive(empty.index((seen + STAGES - 1) % STAGES), pred=k > 0)
                seen += 1
            total = warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(empty.index((seen + STAGES - 1) % STAGES))
            if BIAS:
                side = gl.arange(0, _OUTPUTS, gl.SliceLayout(0, as_product))
                expert = gl.load(tile_experts + tile)
                place = (SIDES * expert + side // BLOCK) * OUTER + first + side % BLOCK
                total += gl.load(bias + place)[None, :].to(gl.float32)
            result, up = _sides(total, SIDES)
            if SIDES == 2:
                gate = result.to(dtype).to(gl.float32)
                result = gated(gate, up.to(dtype).to(gl.float32), ACTIVATION, dtype)
            target = out + pair.to(gl.int64)[:, None] * OUTER + (first + column)[None, :]
            gl.store(target, result.to(dtype), mask=occupied[:, None])
        else:
            for _ in range(0, INNER, _INNER):
                mbarrier.wait(full.index(seen % STAGES), seen // STAGES & 1)
                mbarrier.arrive(empty.index(seen % STAGES))
                seen += 1


@gluon_jit(do_not_specialize=["bound"])
def _copied_experts_kernel(
    x,
    weight,
    bias,
    tile_experts,
    tile_counts,
    order,
    out,
    x_stride,
    bound,
    INNER: gl.constexpr,
    OUTER: gl.constexpr,
    TOP_K: gl.constexpr,
    SIDES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Tiles of one expert's pairs, each times 256 rows of its weight -> out [pairs, OUTER]; with two
    SIDES: times 128 rows of gate and of up, and x has one row for TOP_K pairs.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    as_rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_TILE, _INNER], dtype)
    as_weights: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_OUTPUTS, _INNER], dtype)
    if PDL and SIDES == 1:
        cuda.gdc_launch_dependents()
    row_tiles = gl.allocate_shared_memory(dtype, [STAGES, _TILE, _INNER], as_rows)
    weight_tiles = gl.allocate_shared_memory(dtype, [STAGES, _OUTPUTS, _INNER], as_weights)
    weight_boxes = weight_tiles._reinterpret(
        dtype, [STAGES * SIDES, _OUTPUTS // SIDES, _INNER], weight.layout
    )
    full, empty = barriers(STAGES, 1 + _COPYING_THREADS), barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    0,
                    row_tiles,
                    weight_tiles,
                    full,
                    empty,
                    bias,
                    tile_experts,
                    tile_counts,
                    order,
                    out,
                    bound,
                    INNER,
                    OUTER,
                    SIDES,
                    ACTIVATION,
                    BIAS,
                    STAGES,
                    PDL,
                ),
            ),
            (
                _multiply,
                (
                    1,
                    row_tiles,
                    weight_tiles,
                    full,
                    empty,
                    bias,
                    tile_experts,
                    tile_counts,
                    order,
                    out,
                    bound,
                    INNER,
                    OUTER,
                    SIDES,
                    ACTIVATION,
                    BIAS,
                    STAGES,
                    PDL,
                ),
            ),
            (
                _copy_tiles,
                (
                    x,
                    weight,
                    row_tiles,
                    weight_boxes,
                    full,
                    empty,
                    tile_experts,
                    tile_counts,
                    order,
                    x_stride,
                    bound,
                    INNER,
                    OUTER,
                    TOP_K,
                    SIDES,
                    STAGES,
                    PDL,
                ),
            ),
        ],
        [4, 4],
        [224, 56],
    )


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def copied_experts_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    top_k: int,
    activation: Activation | None,
) -> Tensor:
    """`many_rows_experts.many_rows_product` on Hopper."""
    _, size, inner = weight.shape
    sides = 1 if activation is None else 2
    outer = size // sides
    out = torch.empty(tiles.pairs, outer, dtype=x.dtype, device=x.device)
    block = _OUTPUTS.value // sides
    box = [block, _INNER.value]
    layout = gl.NVMMASharedLayout.get_default_for(
        box, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    )
    programs = min(tiles.bound * (outer // block), num_multiprocessors(x.device))
    _copied_experts_kernel[(programs,)](
        x=x,
        weight=TensorDescriptor.from_tensor(weight.view(-1, inner), box, layout),
        bias=weight if bias is None else bias,
        tile_experts=tiles.experts,
        tile_counts=tiles.counts,
        order=tiles.order,
        out=out,
        x_stride=row_stride(x),
        bound=tiles.bound,
        INNER=inner,
        OUTER=outer,
        TOP_K=top_k if sides == 2 else 1,
        SIDES=sides,
        ACTIVATION=0 if activation is None else NUMBERS[activation],
        BIAS=bias is not None,
        STAGES=_STAGES,
        PDL=USE_PDL,
        num_warps=4,
        maxnreg=_REGISTERS,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return out
