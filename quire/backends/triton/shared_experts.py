"""Layers in which all rows share an expert, for few rows: it is one more of each row's experts, so
that its two products need no launches of their own; its gate's product is made beside the router's,
and its output is added where the others' are. The numbers are those of the separate operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin
from quire.backends.triton.linear import MEDIUM_ROWS, MEMORY_BOUND_ROWS
from quire.backends.triton.moe import moe
from quire.backends.triton.router_linear import MAX_INNER, router_linear
from quire.backends.triton.shapes import as_rows, cdiv, row_stride
from quire.kernels.ops import ExpertWeights, MoeSpec, Router, SharedExpert
from quire.kernels.weights import Weight

_OUTPUTS = 16
"""Of the router, in a program."""


@triton.jit(do_not_specialize=["rows"])
def _gated_router_kernel(
    x,
    router,
    bias,
    gate,
    logits,
    gates,
    rows,
    x_stride,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """`linear._linear_kernel` with the router's weight; with GATE the last program of some rows has
    the gate's one output.
    """
    begin(PDL)
    is_gate = GATE & (tl.program_id(0) == tl.num_programs(0) - 1)
    count = 1 if is_gate else EXPERTS
    weight = gate if is_gate else router
    output = tl.arange(0, BLOCK_N) + (0 if is_gate else tl.program_id(0) * BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    # rows and outputs past the last are computed as copies of it and not stored
    weights = weight + tl.minimum(output, count - 1)[:, None] * K + inner[None, :]
    inputs = x + tl.minimum(row, rows - 1)[:, None].to(tl.int64) * x_stride + inner[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        within = None if K % BLOCK_K == 0 else inner[None, :] < K - k
        other = None if K % BLOCK_K == 0 else 0.0
        x_tile = tl.trans(tl.load(inputs, mask=within, other=other))
        weight_tile = tl.load(weights, mask=within, other=other)
        total = tl.dot(weight_tile, x_tile, total, input_precision="ieee")
        inputs += BLOCK_K
        weights += BLOCK_K
    if BIAS:
        added = tl.load(bias + output, mask=(output < count) & (is_gate == 0), other=0.0)
        total += added.to(tl.float32)[:, None]
    out = gates if is_gate else logits
    target = out + row[None, :].to(tl.int64) * count + output[:, None]
    stored = (row[None, :] < rows) & (output < count)[:, None]
    tl.store(target, total.to(logits.dtype.element_ty), mask=stored)


def joins(
    x: Tensor, router: Router, experts: ExpertWeights, spec: MoeSpec, shared: SharedExpert
) -> bool:
    """Whether the shared expert can be one of the others, and there are so few rows that it should
    be.
    """
    up, down = experts.gate_up, experts.down
    matrices = [up, down, shared.up, shared.down]
    matrices += [] if shared.gate is None else [shared.gate]
    matrices += [] if spec.has_float32_router else [router.weight]
    return (
        0 < len(x) <= MEDIUM_ROWS
        and x.dtype != torch.float32
        and all(one.is_dense and one.tensor.dtype == x.dtype for one in matrices)
        and (not spec.has_float32_router or _is_float32_router(router, shared))
        and shared.up.shape == up.shape[1:]
        and shared.down.shape == down.shape[1:]
        and experts.gate_up_bias is None
        and experts.down_bias is None
        and spec.num_groups == 1
    )


def _is_float32_router(router: Router, shared: SharedExpert) -> bool:
    weight = router.weight
    return (
        shared.gate is None
        and weight.is_dense
        and weight.tensor.dtype == torch.float32
        and weight.shape[1] <= MAX_INNER
    )


def routed_experts(
    x: Tensor, router: Router, experts: ExpertWeights, spec: MoeSpec, shared: SharedExpert
) -> Tensor:
    """`Kernels.routed_experts`, of what `joins` takes."""
    if spec.has_float32_router:  # of x as it is: the kernel makes it wider
        logits = router_linear(x, router.weight.tensor, router.bias)
        return moe(x, logits, experts, spec, shared=shared)
    logits, gate = _products(as_rows(x), router, shared.gate)
    return moe(x, logits, experts, spec, shared=shared, shared_gate=gate)


def _products(x: Tensor, router: Router, gate: Weight | None) -> tuple[Tensor, Tensor | None]:
    """The router's logits [rows, experts], and the gate's [rows, 1]."""
    weight = router.weight.tensor
    (count, inner), rows = weight.shape, len(x)
    logits = weight.new_empty(rows, count)
    gates = None if gate is None else weight.new_empty(rows, 1)
    block = 16 if rows <= MEMORY_BOUND_ROWS else 32
    programs = cdiv(count, _OUTPUTS) + (gate is not None)
    _gated_router_kernel[(programs, cdiv(rows, block))](
        x=x,
        router=weight,
        bias=weight if router.bias is None else router.bias,
        gate=weight if gate is None else gate.tensor,
        logits=logits,
        gates=logits if gates is None else gates,
        rows=rows,
        x_stride=row_stride(x),
        EXPERTS=count,
        K=inner,
        BIAS=router.bias is not None,
        GATE=gate is not None,
        BLOCK_M=block,
        BLOCK_N=_OUTPUTS,
        BLOCK_K=256,
        PDL=USE_PDL,
        num_stages=4,
        num_warps=4,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return logits, gates
