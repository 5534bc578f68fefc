"""Mixture of experts: route, group the (row, expert) pairs by expert, two grouped products,
combine. An expert that all rows share can be among the others, the last one of each row.

Nothing is decided on the host: grids are upper bounds for a number of rows, and work lists lie on
the device, so all of it can be captured in a CUDA graph. A pair's product does not depend on the
other pairs of its tile (`tile_product.py`), and a row adds its experts' outputs in ascending order
of the experts.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.backends.cuda import experts as many_rows
from quire.backends.triton.direct_launch import jit
from quire.backends.triton.grouping import Tiles, group_pairs
from quire.backends.triton.launch import HAS_GLUON, LAUNCH, ROUND_ALWAYS, USE_PDL, begin
from quire.backends.triton.linear import Tile
from quire.backends.triton.rowwise import sigmoid
from quire.backends.triton.shapes import as_rows, cdiv, next_power_of_2, row_stride
from quire.backends.triton.tile_product import quantize_rows, tile_product
from quire.kernels.ops import (
    Activation,
    ExpertWeights,
    MoeSpec,
    SharedExpert,
    TransformActivated,
)
from quire.kernels.routing import route as reference_route
from quire.kernels.weights import Weight

if HAS_GLUON:
    from quire.backends.triton import streamed_experts

_COMBINE_BLOCK = 1024
TILES = {16: (64, 5, 4), 32: (64, 4, 4), 64: (128, 4, 8), 128: (128, 3, 8)}
"""Rows of a weight, stages and warps, by the width of tiles."""
FP8_TILES = dict(TILES)
"""Of weights of half the bytes."""


@jit
def _route_kernel(
    router_logits,
    bias,
    expert_ids,
    weights,
    stride,
    weight_scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The TOP_K experts of one row in ascending order, and their weights; with SHARED, behind them
    expert EXPERTS.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    exists = expert < EXPERTS
    logit = tl.load(router_logits + row * stride + expert, mask=exists, other=float("-inf")).to(
        tl.float32
    )
    if SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-logit))
    else:
        weight = tl.exp(logit - tl.max(logit, 0))
        weight = weight / tl.sum(weight, 0)
    rank = weight
    if BIAS:
        rank += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    # The bits of a float, the lower 31 inverted where it is negative, are integers in the same
    # order (-0 is made 0), and a warp finds the highest integer in one instruction. NaN ranks
    # highest, so that a row with NaN still gets TOP_K different experts (and NaN as its output).
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
    first = row * (TOP_K + 1 if SHARED else TOP_K)
    place = first + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(expert_ids + place, expert, mask=chosen)
    tl.store(weights + place, weight, mask=chosen)
    if SHARED:
        tl.store(expert_ids + first + TOP_K, EXPERTS)


@jit
def _combine_kernel(
    products,
    weights,
    shared,
    gate,
    out,
    shared_stride,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    SHARED: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weighted sum of TOP_K of a row's PAIRS, which lie in the order of their experts. With
    SHARED, what the shared expert gave is added to the rounded sum, times the sigmoid of the row's
    gate if there is one (GATE).
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < SIZE
    dtype: tl.constexpr = out.dtype.element_ty
    first = row * PAIRS
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        product = tl.load(products + (first + i) * SIZE + column, mask=exists, other=0.0)
        total += product.to(tl.float32) * tl.load(weights + first + i)
    total = total.to(dtype)
    if SHARED:
        added = tl.load(shared + row * shared_stride + column, mask=exists, other=0.0)
        if GATE:
            share = sigmoid(tl.load(gate + row).to(tl.float32))
            added = (share.to(dtype).to(tl.float32) * added.to(tl.float32)).to(dtype)
        total = (total.to(tl.float32) + added.to(tl.float32)).to(dtype)
    tl.store(out + row * SIZE + column, total, mask=exists)


def moe(
    x: Tensor,
    router_logits: Tensor,
    experts: ExpertWeights,
    spec: MoeSpec,
    transform_activated: TransformActivated | None = None,
    shared: SharedExpert | Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """`Kernels.moe`, and the output of an expert that all rows share, times the sigmoid of
    `shared_gate` [rows, 1] if there is one. It is given as [rows, hidden], or by its weights, which
    must be as the others' then (`shared_experts.joins`).
    """
    gate_up, down = experts.gate_up, experts.down
    source = as_rows(x)
    rows = source.shape[0]
    num_experts, hidden, _ = down.shape
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    joined = shared if isinstance(shared, SharedExpert) else None
    is_joined = joined is not None
    expert_ids, weights = route(router_logits, spec, experts.choice_bias, is_joined)
    pairs = len(expert_ids)
    pairs_of_row = pairs // rows
    has_many = not is_joined and many_rows.takes(source, experts, spec.activation, pairs)
    if has_many:
        width = many_rows.tile_width(pairs, num_experts)
    elif _is_streamed(gate_up) and _is_streamed(down):
        width = streamed_experts.tile_width(pairs, num_experts)
    else:
        width = tile_width(pairs, num_experts, x.dtype)
    tiles = group_pairs(expert_ids, num_experts + is_joined, rows, width)
    if has_many:
        activated = many_rows.experts_product(
            source, gate_up.tensor, tiles, pairs_of_row, is_gated=True
        )
    else:
        activated = _expert_product(
            source,
            gate_up,
            experts.gate_up_bias,
            tiles,
            pairs_of_row,
            spec.activation,
            joined and joined.up.tensor,
        )
    if transform_activated is not None:
        activated = transform_activated(activated)
    if has_many:
        products = many_rows.experts_product(activated, down.tensor, tiles, 1, is_gated=False)
    else:
        products = _expert_product(
            activated, down, experts.down_bias, tiles, 1, None, joined and joined.down.tensor
        )
    added = products
    if joined is not None:
        added = products.view(rows, -1, hidden)[:, -1]
    elif isinstance(shared, Tensor):
        added = as_rows(shared)
    block = min(_COMBINE_BLOCK, next_power_of_2(hidden))
    _combine_kernel[(rows, cdiv(hidden, block))](
        products=products,
        weights=weights,
        shared=added,
        gate=weights if shared_gate is None else shared_gate,
        out=out,
        shared_stride=added.stride(0),
        SIZE=hidden,
        TOP_K=spec.top_k,
        PAIRS=pairs_of_row,
        SHARED=shared is not None,
        GATE=shared_gate is not None,
        BLOCK=block,
        PDL=USE_PDL,
        num_warps=4,
        **ROUND_ALWAYS,  # as where rows have adapters (`TritonKernels.moe`)
        **LAUNCH,
    )
    return out


def route(
    router_logits: Tensor,
    spec: MoeSpec,
    choice_bias: Tensor | None = None,
    has_shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """int32 [rows * top_k] experts, in ascending order in each row, and float32 weights beside
    them. With a shared expert [rows * (top_k + 1)], the last of each row, whose weight means
    nothing.
    """
    if spec.num_groups > 1:  # no kernel of its own; sorted as the kernel leaves them
        assert not has_shared
        by_score, chosen = reference_route(router_logits, spec, choice_bias)
        ascending = chosen.sort(dim=-1)
        return ascending.values.flatten().int(), by_score.gather(1, ascending.indices).flatten()
    logits = as_rows(router_logits)
    (rows, num_experts), top_k = logits.shape, spec.top_k
    pairs = rows * (top_k + has_shared)
    expert_ids = torch.empty(pairs, dtype=torch.int32, device=logits.device)
    weights = torch.empty(pairs, dtype=torch.float32, device=logits.device)
    block = next_power_of_2(num_experts)
    _route_kernel[(rows,)](
        router_logits=logits,
        bias=logits if choice_bias is None else choice_bias,
        expert_ids=expert_ids,
        weights=weights,
        stride=row_stride(logits),
        weight_scale=spec.weight_scale,
        EXPERTS=num_experts,
        BLOCK=block,
        TOP_K=top_k,
        NORMALIZE=spec.normalize_weights,
        SIGMOID=spec.sigmoid_scores,
        BIAS=choice_bias is not None,
        SHARED=has_shared,
        PDL=USE_PDL,
        num_warps=1,
        **LAUNCH,
    )
    return expert_ids, weights


def tile_width(pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """How many pairs share a tile: few where each expert has few pairs and the time goes to reading
    weights, many where it goes to the products. Bits don't depend on it.
    """
    each = pairs / num_experts
    if dtype == torch.float32 or each <= 8:
        return 16
    return 32 if each <= 24 else 64 if each <= 48 else 128


def _is_streamed(weight: Weight) -> bool:
    """Whether a weight is packed for `streamed_experts.py`."""
    return weight.parts[0].tensors[0].dtype == torch.int32


def _expert_product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    tiles: Tiles,
    top_k: int,
    activation: Activation | None,
    shared: Tensor | None,
) -> Tensor:
    """`top_k`: how many pairs have the same row of x, where there is an activation."""
    if _is_streamed(weight):
        return streamed_experts.expert_product(x, weight, bias, tiles, top_k, activation)
    # The inner block of 128 is the group size of FP8 weights with groups. Bits of plain weights
    # don't depend on it.
    format = weight.parts[0].format
    is_fp8 = format.codes == torch.float8_e4m3fn
    block, stages, warps = (FP8_TILES if is_fp8 else TILES)[tiles.width]
    inner, stages = (32, 2) if x.dtype == torch.float32 else (128, stages)
    tile = Tile(tiles.width, block // 2 if activation else block, inner, stages, warps)
    rows, scales = x, None
    if format.codes is not None and not format.has_zeros:
        rows, scales = quantize_rows(x, format.codes, format.group)
    return tile_product(
        rows, weight, bias, tiles, tile, x.dtype, top_k, activation, scales, shared=shared
    )
