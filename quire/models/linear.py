"""The only door to a model's matrices: products, experts and the embedding's rows.

Whatever is computed with a matrix is a method here, and each is told of the rows that it computes.
So what differs from row to row (whose adapter a row has) is added in this file, and nothing that
multiplies can be forgotten: `tests/test_structure.py` finds a product that goes past it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.low_rank import (
    ExpertAdapters,
    ExpertTables,
    LowRankTable,
    PackedExperts,
    PackedHeads,
    PackedLowRank,
)
from quire.kernels.ops import (
    Activation,
    ExpertWeights,
    Kernels,
    LatentNorm,
    LayerCache,
    MoeSpec,
    Router,
    SharedExpert,
)
from quire.kernels.weights import Weight

RowsBySlot = Mapping[int, Tensor]
"""int64: which rows have the adapter in a slot. Of slots whose adapters change embedding or head as
graphs and recordings can't compute it; found on the host, so that no step waits to read it.
"""
NOT_LISTED: RowsBySlot = {}


@dataclass(frozen=True, slots=True)
class Rows:
    """What a product is told of the rows that it computes: those of a step, or of its hidden states
    that are scored.
    """

    kernels: Kernels
    adapters: Tensor | None = field(default=None, kw_only=True)
    """int32 [rows]: the slot of each row's adapter, -1 where it has none; None: none has one."""
    by_slot: RowsBySlot = field(default_factory=dict, kw_only=True)


class TrainedRows(NamedTuple):
    """An adapter's own rows of the embedding or of the head: PEFT's `modules_to_save` and
    `trainable_token_indices`. Which rows of a step have them is found out by Python, so that step is
    never computed by a graph or a recording: see `AdapterSlots.are_captured`. It lies in the memory
    of the host, and is copied to the device when it gets a slot.
    """

    weight: Weight
    """[rows, hidden]; of the head as the kernels packed it."""
    tokens: Tensor | None = None
    """int64 [rows], ascending: whose rows they are; None: of all tokens."""
    bias: Tensor | None = None
    """Of the head."""

    @property
    def nbytes(self) -> int:
        further = sum(one.nbytes for one in (self.tokens, self.bias) if one is not None)
        return self.weight.nbytes + further

    def to(self, device: torch.device) -> TrainedRows:
        tokens, bias = (None if one is None else one.to(device) for one in (self.tokens, self.bias))
        return TrainedRows(self.weight.to(device), tokens, bias)

    def looked_up(self, kernels: Kernels, token_ids: Tensor, known: Tensor) -> Tensor:
        """The rows of these tokens, `known` where the adapter has none."""
        if self.tokens is None:
            return kernels.embedding(token_ids, self.weight).to(known.dtype)
        at = torch.searchsorted(self.tokens, token_ids).clamp(max=len(self.tokens) - 1)
        has_own = (self.tokens[at] == token_ids).unsqueeze(1)
        return torch.where(has_own, self.weight.tensor[at].to(known.dtype), known)

    def multiplied(self, kernels: Kernels, x: Tensor, known: Tensor) -> Tensor:
        """The products of x with the rows, `known` where the adapter has none."""
        product = kernels.linear(x, self.weight, self.bias)
        return product if self.tokens is None else known.index_copy(1, self.tokens, product)


class EmbeddingPair(NamedTuple):
    """A pair of matrices for the embedding: to a token's row A's column of that token times the scale
    times B' is added, in float32; with DoRA the sum is multiplied by a factor for each number. Lies
    where `TrainedRows` do.
    """

    a: Tensor
    """[vocab, rank]: turned, in the model's dtype."""
    b: Weight
    """float32 [hidden, rank], packed."""
    scale: float
    factor: Tensor | None = None
    """float32 [hidden]."""

    @property
    def nbytes(self) -> int:
        factor = 0 if self.factor is None else self.factor.nbytes
        return self.a.nbytes + self.b.nbytes + factor

    def to(self, device: torch.device) -> EmbeddingPair:
        factor = None if self.factor is None else self.factor.to(device)
        return EmbeddingPair(self.a.to(device), self.b.to(device), self.scale, factor)

    def looked_up(self, kernels: Kernels, token_ids: Tensor, known: Tensor) -> Tensor:
        """The rows of these tokens, which the model itself knows as `known`."""
        inner = self.a[token_ids].float() * self.scale
        total = known.float() + kernels.linear(inner, self.b)
        if self.factor is not None:
            total = total * self.factor
        return total.to(known.dtype)


AdapterPart = PackedLowRank | PackedExperts | TrainedRows | EmbeddingPair
"""What an adapter changes of one product, or of the embedding."""


class Linear:
    """A product with a weight [out, in], perhaps with a bias."""

    __slots__ = ("_bias", "_weight", "adapters")

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self.adapters: LowRankTable | None = None
        """What adapters add; None: the engine takes none."""

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def take_adapters(self, kernels: Kernels, num_slots: int) -> None:
        """From here on rows may have adapters."""
        self.adapters = kernels.low_rank_table(num_slots)

    def put_adapter(self, slot: int, packed: AdapterPart | None) -> None:
        """Puts an adapter's part into a slot; None: it has none, or has left."""
        assert self.adapters is not None
        assert not isinstance(packed, PackedExperts | TrainedRows | EmbeddingPair)
        self.adapters.put(slot, packed)

    def __call__(self, rows: Rows, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [rows, in] times the weight transposed, plus bias; into `out` if there is one."""
        if rows.adapters is not None and self.adapters is not None:
            return rows.kernels.adapted_linear(
                x, self._weight, self._bias, rows.adapters, self.adapters, out
            )
        return rows.kernels.linear(x, self._weight, self._bias, out)

    def gated(self, rows: Rows, x: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up, of a product whose first half of outputs is gate and whose second
        half is up.
        """
        if rows.adapters is not None and self.adapters is not None:
            return rows.kernels.adapted_linear_gated(
                x, self._weight, self._bias, activation, rows.adapters, self.adapters
            )
        return rows.kernels.linear_gated(x, self._weight, self._bias, activation)


def linear_pair(rows: Rows, x: Tensor, first: Linear, second: Linear) -> tuple[Tensor, Tensor]:
    """Both products of the same rows."""
    is_watched = not (isinstance(first, Linear) and isinstance(second, Linear))  # `quire inspect`
    if rows.adapters is not None or is_watched:
        return first(rows, x), second(rows, x)
    return rows.kernels.linear_pair(x, first._weight, first.bias, second._weight, second.bias)


class Head(Linear):
    """The product that scores tokens, of which adapters may have rows of their own."""

    __slots__ = ("_trained",)

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._trained: dict[int, TrainedRows] = {}
        """By slot."""

    def take_adapters(self, kernels: Kernels, num_slots: int) -> None:
        super().take_adapters(kernels, num_slots)
        self._trained.clear()

    def put_adapter(self, slot: int, packed: AdapterPart | None) -> None:
        self._trained.pop(slot, None)
        if isinstance(packed, TrainedRows):
            self._trained[slot] = packed.to(self._weight.device)
            packed = None
        super().put_adapter(slot, packed)

    def __call__(self, rows: Rows, x: Tensor, out: Tensor | None = None) -> Tensor:
        scores = super().__call__(rows, x, out)
        for slot, own in rows.by_slot.items():
            if (trained := self._trained.get(slot)) is not None:
                scores[own] = trained.multiplied(rows.kernels, x[own], scores[own])
        return scores


class HeadLinear:
    """A product for each head, with its own matrix of a stack [heads, out, in]."""

    __slots__ = ("_weight", "adapters", "is_turned", "num_heads")

    def __init__(self, weight: Weight, num_heads: int, is_turned: bool) -> None:
        """`is_turned`: in the model's files out and in are exchanged."""
        self._weight = weight
        self.num_heads = num_heads
        self.is_turned = is_turned
        self.adapters: ExpertTables | None = None
        """What adapters add to each head; None: the engine takes none."""

    def take_adapters(self, kernels: Kernels, num_slots: int) -> None:
        self.adapters = ExpertTables(self.num_heads, lambda: kernels.low_rank_table(num_slots))

    def put_adapter(self, slot: int, packed: AdapterPart | None) -> None:
        assert self.adapters is not None
        assert packed is None or isinstance(packed, PackedHeads)
        self.adapters.put(slot, packed)

    def __call__(self, rows: Rows, x: Tensor) -> Tensor:
        """[rows, heads, out] of x [rows, heads, in]."""
        if rows.adapters is not None and self.adapters:
            return rows.kernels.adapted_linear_heads(x, self._weight, rows.adapters, self.adapters)
        return rows.kernels.linear_heads(x, self._weight)

    def queries_(
        self,
        rows: Rows,
        plain: Tensor,
        rotated: Tensor,
        latent: Tensor,
        norm: LatentNorm,
        positions: Tensor,
        cos_sin: Tensor | None,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> Tensor:
        """What latent attention asks with: this product of `plain` beside what is rotated. Latents
        go to the cache.
        """
        where = latent, norm, positions, cos_sin, cache, slot_mapping
        if rows.adapters is not None and self.adapters:
            return rows.kernels.latent_to_cache_(self(rows, plain), rotated, *where)
        return rows.kernels.latent_queries_(plain, rotated, self._weight, *where)


class ExpertsLinear:
    """One of the experts' two products, as adapters see it."""

    __slots__ = ("_num_experts", "adapters")

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self.adapters: ExpertTables | None = None
        """What adapters add; None: the engine takes none."""

    def take_adapters(self, kernels: Kernels, num_slots: int) -> None:
        self.adapters = ExpertTables(self._num_experts, lambda: kernels.low_rank_table(num_slots))

    def put_adapter(self, slot: int, packed: AdapterPart | None) -> None:
        assert self.adapters is not None
        assert packed is None or isinstance(packed, PackedExperts)
        self.adapters.put(slot, packed)


class Experts:
    """Products with stacked weights, of which each row takes those of its own experts."""

    __slots__ = ("_weights", "down", "gate_up", "spec")

    def __init__(self, weights: ExpertWeights, spec: MoeSpec) -> None:
        self._weights = weights
        self.spec = spec
        self.gate_up = ExpertsLinear(spec.num_experts)
        self.down = ExpertsLinear(spec.num_experts)

    def __call__(self, rows: Rows, x: Tensor, router_logits: Tensor) -> Tensor:
        """The sum of each row's experts, chosen and weighed by its router logits."""
        gate_up, down = self.gate_up.adapters, self.down.adapters
        adapters = None
        if (
            rows.adapters is not None
            and gate_up is not None
            and down is not None
            and (gate_up or down)
        ):
            adapters = ExpertAdapters(rows.adapters, gate_up, down)
        return rows.kernels.moe(x, router_logits, self._weights, self.spec, adapters=adapters)

    def routed(
        self,
        rows: Rows,
        x: Tensor,
        router: Linear,
        shared: tuple[Linear, Linear, Linear | None] | None,
    ) -> Tensor:
        """The router's product, the experts that it chooses, and the shared one, if there is one
        (its up and down products, and its gate), for rows of which none has an adapter.
        """
        assert rows.adapters is None
        beside: SharedExpert | None = None
        if shared is not None:
            up, down, gate = shared
            gate_weight = None if gate is None else gate._weight
            beside = SharedExpert(up._weight, down._weight, gate_weight)
        product = Router(router._weight, router.bias)
        return rows.kernels.routed_experts(x, product, self._weights, self.spec, beside)


class Embedding:
    """Rows of a weight [vocab, hidden], by token."""

    __slots__ = ("_adapted", "_weight")

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._adapted: dict[int, TrainedRows | EmbeddingPair] = {}
        """By slot."""

    def take_adapters(self, kernels: Kernels, num_slots: int) -> None:
        self._adapted.clear()

    def put_adapter(self, slot: int, packed: AdapterPart | None) -> None:
        self._adapted.pop(slot, None)
        if packed is not None:
            assert isinstance(packed, TrainedRows | EmbeddingPair)
            self._adapted[slot] = packed.to(self._weight.device)

    def __call__(self, rows: Rows, token_ids: Tensor) -> Tensor:
        """The rows of int64 token_ids [rows], as plain numbers."""
        found = rows.kernels.embedding(token_ids, self._weight)
        for slot, own in rows.by_slot.items():
            if (part := self._adapted.get(slot)) is not None:
                found[own] = part.looked_up(rows.kernels, token_ids[own], found[own])
        return found
