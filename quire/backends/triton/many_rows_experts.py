"""Products of experts that have many rows each, as in steps of long prompts.

Here rows are on the left of a product and weights on the right, 256 of them at once: then a tensor
core reads fewer bytes of shared memory for a product, and a program fewer of the L2 cache, than with
tiles of 128 by 128 (`tile_product.py`). Weights come by the tensor memory accelerator, whole tiles
for one instruction. The inner dimension is walked in order with one accumulator, so products have the
bits of those in `tile_product.py`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.grouping import GROUPED, Tiles, group_pairs
from quire.backends.triton.launch import (
    INTERPRETED,
    LAUNCH,
    ROUND_ALWAYS,
    USE_PDL,
    begin,
    num_multiprocessors,
)
from quire.backends.triton.linear import Tile
from quire.backends.triton.rowwise import NUMBERS, gated
from quire.backends.triton.shapes import ALIGNMENT, row_stride
from quire.backends.triton.tested import has_gluon, is_exact, random_numbers
from quire.backends.triton.tile_product import tile_product
from quire.kernels.ops import Activation
from quire.kernels.weights import Weight

WIDTH = 128
"""Rows of a tile."""
_MANY = 128
"""Pairs that an expert has on average."""
_INNER = 64
_OUTPUTS = 128


class Block(NamedTuple):
    """What a program computes of a tile; bits don't depend on it."""

    outputs: int
    """Of a gated product: as many gates as ups."""
    stages: int
    warps: int
    stays: bool
    """One program on each multiprocessor, which goes on to further tiles."""


GATED = Block(_OUTPUTS, 4, 8, False)
PLAIN = Block(2 * _OUTPUTS, 4, 8, False)
SHORT = Block(2 * _OUTPUTS, 3, 8, True)
"""Of an inner dimension of fewer turns than it takes to begin and end."""
_LONG = 1024


@jit(do_not_specialize=["bound"])
def _many_rows_kernel(
    x,
    weight,
    tile_experts,
    tile_counts,
    order,
    out,
    x_stride,
    bound,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of one expert's pairs times BLOCK rows of its weight -> out [pairs, OUTER]; IS_GATED:
    times BLOCK rows of gate and of up, and x has one row for TOP_K pairs. STAYS: there are more of
    these than programs, which go on to further ones, and copy their first inputs meanwhile.
    """
    SIDES: tl.constexpr = 2 if IS_GATED else 1
    BLOCKS: tl.constexpr = OUTER // BLOCK
    dtype: tl.constexpr = out.dtype.element_ty
    begin(PDL, SHARES_INPUT=IS_GATED)  # the next product reads the same work list
    slot = tl.arange(0, TILE)
    num_items = tl.load(tile_counts + bound) * BLOCKS
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), flatten=STAYS):
        tile = item // BLOCKS
        first = (item % BLOCKS) * BLOCK
        expert = tl.load(tile_experts + tile)
        occupied = slot < tl.load(tile_counts + tile)
        pair = tl.load(order + tile * TILE + slot, mask=occupied, other=0)
        # Slots without a pair are computed as copies of the first pair and not stored.
        inputs = x + (pair // TOP_K if IS_GATED else pair).to(tl.int64)[:, None] * x_stride
        inputs += tl.arange(0, BLOCK_K)[None, :]
        total = tl.zeros((TILE, SIDES * BLOCK), tl.float32)
        for k in range(0, INNER, BLOCK_K):
            input_tile = tl.load(inputs + k)
            weight_tile = tl.reshape(
                weight.load([SIDES * expert, first, k]), (SIDES * BLOCK, BLOCK_K)
            )
            total = tl.dot(input_tile, tl.trans(weight_tile), total)
        if IS_GATED:
            gate, up = tl.split(tl.permute(tl.reshape(total, (TILE, 2, BLOCK)), (0, 2, 1)))
            total = gated(
                gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype
            )
        column = first + tl.arange(0, BLOCK)
        target = out + pair.to(tl.int64)[:, None] * OUTER + column[None, :]
        tl.store(target, total.to(dtype), mask=occupied[:, None])


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles) -> bool:
    """Whether these are products of many rows of x with weights [experts, outputs, inputs] that the
    kernel can compute. (No published model whose experts have biases has such sizes.)
    """
    experts, outputs, inner = weight.shape
    return (
        bias is None
        and tiles.listed == GROUPED.value
        and tiles.width == WIDTH
        and tiles.pairs >= _MANY * experts
        and weight.dtype == x.dtype != torch.float32
        and weight.is_contiguous()
        and weight.data_ptr() % ALIGNMENT == 0
        and inner % _INNER == 0
        and outputs % (2 * _OUTPUTS) == 0
        and (INTERPRETED or are_exact(x.device, x.dtype))
    )


@cache
def are_exact(device: torch.device, dtype: torch.dtype) -> bool:
    """Tests all forms, once."""
    return (
        has_gluon(device, dtype)
        and torch.cuda.get_device_capability(device)[0] >= 9  # the tensor memory accelerator
        and is_exact("prompts through experts", lambda: _same_products(device, dtype))
    )


def _same_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether each form has the bits of the kernel for all, where programs go on to further tiles,
    too.
    """
    rows, experts = (2 + num_multiprocessors(device)) * WIDTH, 2
    expert_ids = torch.arange(rows, dtype=torch.int32, device=device) % experts
    tiles = group_pairs(expert_ids, experts, rows, WIDTH)
    found = []
    for inner, activation in ((128, Activation.SILU), (_LONG // 2, None), (_LONG, None)):
        x = random_numbers(rows, inner, device=device, dtype=dtype)
        weight = random_numbers(experts, 2 * _OUTPUTS, inner, device=device, dtype=dtype)
        tile = Tile(WIDTH, 64, 64, 3, 8)
        expected = tile_product(x, Weight.dense(weight), None, tiles, tile, dtype, 1, activation)
        found.append(torch.equal(many_rows_product(x, weight, tiles, 1, activation), expected))
    return all(found)


def many_rows_product(
    x: Tensor,
    weight: Tensor,
    tiles: Tiles,
    top_k: int,
    activation: Activation | None,
) -> Tensor:
    """[pairs, outputs]: `tile_product` of what `takes` says yes to."""
    _, size, inner = weight.shape
    is_gated = activation is not None
    outer = size // 2 if is_gated else size
    block = GATED if is_gated else PLAIN if inner >= _LONG else SHORT
    out = torch.empty(tiles.pairs, outer, dtype=x.dtype, device=x.device)
    sides = weight.view(-1, outer, inner)  # a gate and an up of each expert, or one matrix
    box = [2 if is_gated else 1, block.outputs, _INNER]
    programs = tiles.bound * (outer // block.outputs)
    if block.stays:
        programs = min(programs, num_multiprocessors(x.device))
    _many_rows_kernel[(programs,)](
        x=x,
        weight=TensorDescriptor.from_tensor(sides, box),
        tile_experts=tiles.experts,
        tile_counts=tiles.counts,
        order=tiles.order,
        out=out,
        x_stride=row_stride(x),
        bound=tiles.bound,
        INNER=inner,
        OUTER=outer,
        TOP_K=top_k,
        IS_GATED=is_gated,
        ACTIVATION=0 if activation is None else NUMBERS[activation],
        BLOCK=block.outputs,
        TILE=WIDTH,
        BLOCK_K=_INNER,
        STAYS=block.stays,
        PDL=USE_PDL,
        num_stages=block.stages,
        num_warps=block.warps,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return out
