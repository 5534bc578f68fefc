"""The definition of products with adapters (`low_rank.py`), in plain torch."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from quire.kernels.low_rank import (
    ExpertTables,
    LowRank,
    LowRankTable,
    PackedLowRank,
    PlainTable,
)
from quire.kernels.ops import Activation, MoeSpec
from quire.kernels.tiled_linear import tiled_linear
from quire.kernels.weights import Weight


class AdaptedProducts:
    """A part of `ReferenceKernels`; backends replace `add_low_rank_` and the layout."""

    takes_adapters = True

    @abstractmethod
    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor: ...

    @abstractmethod
    def linear_gated(
        self, x: Tensor, weight: Weight, bias: Tensor | None, activation: Activation
    ) -> Tensor: ...

    @abstractmethod
    def linear_heads(self, x: Tensor, weight: Weight) -> Tensor: ...

    @abstractmethod
    def activate(self, x: Tensor, activation: Activation) -> Tensor: ...

    @abstractmethod
    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor: ...

    def pack_low_rank(self, low_rank: LowRank) -> PackedLowRank:
        return low_rank

    def low_rank_table(self, num_slots: int) -> LowRankTable:
        return PlainTable(num_slots)

    def adapted_linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        slots: Tensor,
        table: LowRankTable,
        out: Tensor | None = None,
    ) -> Tensor:
        out = self.linear(x, weight, bias, out)
        self.add_low_rank_(out, x, slots, table)
        return out

    def adapted_linear_gated(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation,
        slots: Tensor,
        table: LowRankTable,
    ) -> Tensor:
        return self.gate(self.adapted_linear(x, weight, bias, slots, table), activation)

    def adapted_linear_heads(
        self, x: Tensor, weight: Weight, slots: Tensor, tables: ExpertTables
    ) -> Tensor:
        out = self.linear_heads(x, weight)
        for head in range(x.shape[1]):
            table = tables[head]
            if table is not None:
                self.add_low_rank_(out[:, head], x[:, head], slots, table)
        return out

    def linear_of(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        slots: Tensor,
        table: LowRankTable | None,
    ) -> Tensor:
        """`linear`, adapted where there is a table."""
        if table is None:
            return self.linear(x, weight, bias)
        return self.adapted_linear(x, weight, bias, slots, table)

    def activated_of(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        spec: MoeSpec,
        slots: Tensor,
        table: LowRankTable | None,
    ) -> Tensor:
        """What an expert's down product takes; adapted where there is a table."""
        if not spec.gated:
            return self.activate(self.linear_of(x, weight, bias, slots, table), spec.activation)
        if table is None:
            return self.linear_gated(x, weight, bias, spec.activation)
        return self.adapted_linear_gated(x, weight, bias, spec.activation, slots, table)

    def add_low_rank_(self, out: Tensor, x: Tensor, slots: Tensor, table: LowRankTable) -> None:
        """Adds to out [rows, outputs] what the rows' adapters make of x [rows, in]."""
        assert isinstance(table, PlainTable)
        for slot in sorted(set(slots.tolist()) - {-1}):
            low_rank = table.slots[slot]
            if low_rank is None:
                continue
            rows = (slots == slot).nonzero().squeeze(1)
            inner = tiled_linear(x[rows].float(), low_rank.a.float(), None) * low_rank.scale
            for part in low_rank.parts:
                count, rank = part.b.shape
                taken = inner[:, part.first_rank : part.first_rank + rank]
                columns = slice(part.first, part.first + count)
                value = out[rows, columns].float() + tiled_linear(taken, part.b.float(), None)
                if part.factor is not None and part.offset is not None:
                    value = value * part.factor + part.offset
                out[rows, columns] = value.to(out.dtype)
