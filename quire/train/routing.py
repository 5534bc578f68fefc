"""An engine's kernels that remember which experts they took: gradients go through the same ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.kernels.low_rank import ExpertAdapters
from quire.kernels.ops import ExpertWeights, Kernels, MoeSpec
from quire.kernels.routed_experts import routed_experts


class RoutedKernels:
    """Another's methods, with a list of the choices of `moe`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.chosen: list[Tensor] = []
        """By call: int64 [rows, top_k]."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    routed_experts = routed_experts

    def moe(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: ExpertWeights,
        spec: MoeSpec,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        own = self._kernels
        self.chosen.append(own.choose_experts(router_logits, spec, experts.choice_bias))
        return own.moe(x, router_logits, experts, spec, adapters=adapters)
