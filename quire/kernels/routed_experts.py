"""The whole MLP of a layer with experts: the definition of `Kernels.routed_experts`, by the
operations that it consists of.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.kernels.ops import ExpertWeights, MoeSpec, Router, SharedExpert


def routed_experts(
    self: Any,
    x: Tensor,
    router: Router,
    experts: ExpertWeights,
    spec: MoeSpec,
    shared: SharedExpert | None,
) -> Tensor:
    """`self`: the kernels, whose method this is."""
    inputs = x.float() if spec.has_float32_router else x
    output: Tensor = self.moe(x, self.linear(inputs, *router), experts, spec)
    if shared is None:
        return output
    if spec.gated:
        hidden = self.linear_gated(x, shared.up, None, spec.activation)
    else:
        hidden = self.activate(self.linear(x, shared.up), spec.activation)
    from_shared = self.linear(hidden, shared.down)
    if shared.gate is None:
        added: Tensor = self.scale_add(from_shared, 1.0, output)
    else:
        added = self.sigmoid_mul_add(self.linear(x, shared.gate), from_shared, output)
    return added
