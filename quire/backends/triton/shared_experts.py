"""Layers in which all rows share an expert, for few rows: it is one more of each row's experts, so
that its two products need no launches of their own; its gate's product is made beside the router's,
and its output is added where the others' are. The numbers are those of the separate operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.backends.triton.linear import MEDIUM_ROWS, linear
from quire.backends.triton.linear_pair import linear_pair
from quire.backends.triton.moe import moe
from quire.backends.triton.router_linear import MAX_INNER, router_linear
from quire.kernels.ops import ExpertWeights, MoeSpec, Router, SharedExpert


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
        and (not spec.has_float32_router or (shared.gate is None and widens(x, router)))
        and shared.up.shape == up.shape[1:]
        and shared.down.shape == down.shape[1:]
        and experts.gate_up_bias is None
        and experts.down_bias is None
        and spec.num_groups == 1
    )


def widens(x: Tensor, router: Router) -> bool:
    """Whether the kernel of routers in float32 takes x as it is."""
    weight = router.weight
    return (
        x.dtype != torch.float32
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
    if shared.gate is None:
        logits = linear(x, router.weight.tensor, router.bias)
        return moe(x, logits, experts, spec, shared=shared)
    logits, gate = linear_pair(x, router.weight, shared.gate, router.bias)
    return moe(x, logits, experts, spec, shared=shared, shared_gate=gate)
