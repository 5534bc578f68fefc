"""Mixture of experts: route, group the (row, expert) pairs by expert, two grouped products, combine.

Nothing is decided on the host: grids are upper bounds that the number of rows gives, and work lists lie on the
device, so the whole can be captured in a CUDA graph. A pair's product doesn't depend on who shares its tile:
weights are the left operand of every product (64 or 128 rows of them, one `wgmma` shape) and pairs the right one,
the inner dimension is walked in order with one accumulator, and a row adds its experts in ascending order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from quire.kernels.ops import Between, ExpertWeights, MoeSpec
from quire.kernels.triton.grouping import Tiles, group_pairs
from quire.kernels.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin
from quire.kernels.triton.rowwise import NUMBERS, gated
from quire.kernels.triton.shapes import as_rows, next_power_of_2, row_stride

_COMBINE_BLOCK = 1024
_PREFETCHED_LINES = 16
"""Lines of 128 bytes of each weight row that are asked for ahead of time."""


@triton.jit
def _route_kernel(
    router_logits, bias, expert_ids, weights, stride, weight_scale,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The TOP_K experts of one row in ascending order, and their weights."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    exists = expert < EXPERTS
    logit = tl.load(router_logits + row * stride + expert, mask=exists, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-logit))
    else:
        weight = tl.exp(logit - tl.max(logit, 0))
        weight = weight / tl.sum(weight, 0)
    rank = weight
    if BIAS:
        rank += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    # A number's bits, the lower ones turned over where it is negative, are in its order as integers (-0 is made 0), and
    # a warp finds the highest integer in one instruction. NaN ranks highest, so that even such a row gets TOP_K
    # different experts (and NaN for its output).
    bits = tl.where(rank == 0.0, 0.0, rank).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(rank == rank, key, 0x7FFFFFFF)
    NONE: tl.constexpr = -2147483647
    key = tl.where(exists, key, NONE)
    chosen = expert < 0
    for _ in tl.static_range(TOP_K):
        best = tl.min(tl.where((key == tl.max(key, 0)) & exists & ~chosen, expert, BLOCK), 0)
        chosen = chosen | (expert == best)
        key = tl.where(expert == best, NONE, key)
    if NORMALIZE:
        weight = weight / tl.sum(tl.where(chosen, weight, 0.0), 0)
    weight *= weight_scale
    place = row * TOP_K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(expert_ids + place, expert, mask=chosen)
    tl.store(weights + place, weight, mask=chosen)


@triton.jit
def _prefetch(weight, rows, within, SIZE: tl.constexpr, LINES: tl.constexpr):
    """Asks for the first LINES lines of some weight rows to be brought into the L2 cache."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    column = tl.arange(0, LINES)[None, :] * LINE
    addresses = (weight + rows[:, None] * SIZE + column).to(tl.int64)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, (within[:, None] & (column < SIZE)).to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _expert_kernel(
    x, weight, bias, tile_experts, tile_counts, order, out, x_stride,
    EXPERTS: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, TOP_K: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, GROUPED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's pairs times BLOCK rows of its weight [EXPERTS, rows, INNER] -> out [pairs, OUTER].

    GATED: the weight has 2 * OUTER rows, gate and up, and a program takes BLOCK / 2 of each; x has one row for
    TOP_K pairs. Otherwise x has a row for each pair. Without GROUPED every pair is a tile of its own.
    """
    HALF: tl.constexpr = BLOCK // 2 if GATED else BLOCK
    ROWS: tl.constexpr = 2 * OUTER if GATED else OUTER
    tile = tl.program_id(1)
    local = tl.arange(0, BLOCK)
    output = tl.program_id(0) * HALF + local % HALF
    weight_row = output + (local // HALF) * OUTER
    if PDL:
        if GATED:
            # In this order, when the next kernel starts, the work list (from before this one) is complete.
            cuda.gdc_wait()
            cuda.gdc_launch_dependents()
        else:
            cuda.gdc_launch_dependents()
            # So it may be read ahead of time, past the first-level cache; what is read here is only a hint.
            likely = tl.load(tile_experts + tile, volatile=True)
            valid = (likely >= 0) & (likely < EXPERTS)
            rows = tl.where(valid, likely, 0).to(tl.int64) * ROWS + weight_row
            _prefetch(weight, rows, (output < OUTER) & valid, INNER, LINES)
            cuda.gdc_wait()

    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    slot = tl.arange(0, TILE)
    if GROUPED:
        occupied = slot < tl.load(tile_counts + tile)
        pair = tl.load(order + tile * TILE + slot, mask=occupied, other=0)
    else:
        occupied = slot < 1
        pair = tile + tl.zeros((TILE,), tl.int32)
    x_row = (pair // TOP_K if GATED else pair).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)[None, :]
    weights = weight + (expert * ROWS + weight_row)[:, None] * INNER + inner
    inputs = x + x_row[:, None] * x_stride + inner
    weight_mask = (output < OUTER)[:, None]
    input_mask = occupied[:, None]
    total = tl.zeros((BLOCK, TILE), tl.float32)
    for k in range(0, INNER, BLOCK_K):
        if INNER % BLOCK_K == 0:
            weight_tile = tl.load(weights, mask=weight_mask, other=0.0)
            input_tile = tl.load(inputs, mask=input_mask, other=0.0)
        else:
            within = inner < INNER - k
            weight_tile = tl.load(weights, mask=weight_mask & within, other=0.0)
            input_tile = tl.load(inputs, mask=input_mask & within, other=0.0)
        total = tl.dot(weight_tile, tl.trans(input_tile), total, input_precision="ieee")
        weights += BLOCK_K
        inputs += BLOCK_K

    if BIAS:
        added = tl.load(bias + expert * ROWS + weight_row, mask=output < OUTER, other=0.0)
        total += added[:, None].to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, HALF, TILE)), (1, 2, 0)))
        total = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype)
    output = tl.program_id(0) * HALF + tl.arange(0, HALF)
    target = out + pair.to(tl.int64)[None, :] * OUTER + output[:, None]
    tl.store(target, total.to(dtype), mask=occupied[None, :] & (output < OUTER)[:, None])


@triton.jit
def _combine_kernel(
    products, weights, out, SIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The weighted sum of a row's pairs, which lie in the order of their experts."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        pair = row * TOP_K + i
        product = tl.load(products + pair * SIZE + column, mask=exists, other=0.0)
        total += product.to(tl.float32) * tl.load(weights + pair)
    tl.store(out + row * SIZE + column, total.to(out.dtype.element_ty), mask=exists)


def moe(
    x: Tensor, router_logits: Tensor, experts: ExpertWeights, spec: MoeSpec, between: Between | None = None
) -> Tensor:
    """Each row of x [rows, hidden] through its top_k experts by router_logits [rows, experts] (in float32, the lowest
    index first among equals), their outputs weighted and added in ascending order of the experts."""
    gate_up, down, top_k = experts.gate_up.tensor, experts.down.tensor, spec.top_k
    source = as_rows(x)
    rows = source.shape[0]
    num_experts, hidden, _ = down.shape
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    expert_ids, weights = route(router_logits, spec, experts.choice_bias)
    width = tile_width(rows * top_k, num_experts, x.dtype)
    tiles = group_pairs(expert_ids, num_experts, rows, width)
    activated = _expert_product(source, gate_up, experts.gate_up_bias, tiles, spec, is_gated=True)
    if between is not None:
        activated = between(activated)
    products = _expert_product(activated, down, experts.down_bias, tiles, spec, is_gated=False)
    block = min(_COMBINE_BLOCK, next_power_of_2(hidden))
    _combine_kernel[(rows, triton.cdiv(hidden, block))](
        products, weights, out, hidden, top_k, block, USE_PDL, num_warps=4, **LAUNCH
    )
    return out


def route(router_logits: Tensor, spec: MoeSpec, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int32 [rows * top_k] experts, in ascending order in each row, and float32 weights beside them."""
    logits = as_rows(router_logits)
    (rows, num_experts), top_k = logits.shape, spec.top_k
    expert_ids = torch.empty(rows * top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows * top_k, dtype=torch.float32, device=logits.device)
    block = next_power_of_2(num_experts)
    _route_kernel[(rows,)](
        logits, logits if choice_bias is None else choice_bias, expert_ids, weights, row_stride(logits),
        spec.weight_scale, num_experts, block, top_k, spec.normalize_weights, spec.sigmoid_scores,
        choice_bias is not None, USE_PDL, num_warps=1, **LAUNCH,
    )  # fmt: skip
    return expert_ids, weights


def tile_width(pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """How many pairs share a tile: few where weights must be read for a handful, many where products take time.
    Bits don't depend on it."""
    each = pairs / num_experts
    if dtype == torch.float32 or each <= 8:
        return 16
    return 64 if each <= 48 else 128


def _expert_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles, spec: MoeSpec, is_gated: bool
) -> Tensor:
    num_experts, weight_rows, inner = weight.shape
    outer = weight_rows // 2 if is_gated else weight_rows
    out = torch.empty(tiles.pairs, outer, dtype=x.dtype, device=x.device)
    # The inner block is one for all widths: it is part of the order of additions.
    block, block_k, stages, warps = {16: (64, 128, 5, 4), 64: (128, 128, 4, 8), 128: (128, 128, 3, 8)}[tiles.width]
    if x.dtype == torch.float32:
        block_k, stages = 32, 2
    grid = (triton.cdiv(outer, block // 2 if is_gated else block), tiles.bound)
    _expert_kernel[grid](
        x, weight, weight if bias is None else bias, tiles.experts, tiles.counts, tiles.order, out, row_stride(x),
        num_experts, inner, outer, spec.top_k, is_gated, NUMBERS[spec.activation], bias is not None, tiles.is_grouped,
        block, tiles.width, block_k, _PREFETCHED_LINES, USE_PDL,
        num_warps=warps, num_stages=stages, **ROUND_ALWAYS, **LAUNCH,
    )  # fmt: skip
    return out
