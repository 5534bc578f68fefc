"""The only door to a model's matrices: products, experts and the embedding's rows.

Whatever is computed with a matrix is a method here, and each is told of the rows that it computes.
So what differs from row to row (whose adapter a row has) is added in this file, and nothing that
multiplies can be forgotten: `tests/test_structure.py` finds a product that goes past it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.ops import Activation, ExpertWeights, Kernels, MoeSpec
from quire.kernels.weights import Weight


@dataclass(frozen=True, slots=True)
class Rows:
    """What a product is told of the rows that it computes: those of a step, or of its hidden states
    that are scored.
    """

    kernels: Kernels


class Linear:
    """A product with a weight [out, in], perhaps with a bias."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Rows, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [rows, in] times the weight transposed, plus bias; into `out` if there is one."""
        return rows.kernels.linear(x, self._weight, self._bias, out)

    def gated(self, rows: Rows, x: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up, of a product whose first half of outputs is gate and whose second
        half is up.
        """
        return rows.kernels.linear_gated(x, self._weight, self._bias, activation)


class HeadLinear:
    """A product for each head, with its own matrix of a stack [heads, out, in]."""

    __slots__ = ("_weight",)

    def __init__(self, weight: Weight) -> None:
        self._weight = weight

    def __call__(self, rows: Rows, x: Tensor) -> Tensor:
        """[rows, heads, out] of x [rows, heads, in]."""
        return rows.kernels.linear_heads(x, self._weight)


class Experts:
    """Products with stacked weights, of which each row takes those of its own experts."""

    __slots__ = ("_weights", "spec")

    def __init__(self, weights: ExpertWeights, spec: MoeSpec) -> None:
        self._weights = weights
        self.spec = spec

    def __call__(self, rows: Rows, x: Tensor, router_logits: Tensor) -> Tensor:
        """The sum of each row's experts, chosen and weighed by its router logits."""
        return rows.kernels.moe(x, router_logits, self._weights, self.spec)


class Embedding:
    """Rows of a weight [vocab, hidden], by token."""

    __slots__ = ("_weight",)

    def __init__(self, weight: Weight) -> None:
        self._weight = weight

    def __call__(self, rows: Rows, token_ids: Tensor) -> Tensor:
        """The rows of int64 token_ids [rows], as plain numbers."""
        return rows.kernels.embedding(token_ids, self._weight)
