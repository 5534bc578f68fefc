"""What adapters add to products: pairs of small matrices, and which row of a step has which.

An adapter's part of a product y = x W' + bias is y + (x A') * scale B', and with DoRA that sum times
a factor per output. Rows of one step may have different adapters: each row names a slot of a table,
and the table knows what lies in the slot. A table's memory stays where it is, so recorded steps find
what was put there after they were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

MAX_RANK = 256


class LowRankPart(NamedTuple):
    """What is added to a run of a product's outputs."""

    first: int
    """The first of these outputs."""
    first_rank: int
    """The first of the rows of A that this part takes."""
    b: Tensor
    """[outputs, rank]."""
    factor: Tensor | None = None
    """float32 [outputs]: multiplies base and adapter (DoRA); None: 1."""
    offset: Tensor | None = None
    """float32 [outputs], with a factor only: gives the bias back what the factor took of it."""


class LowRank(NamedTuple):
    """An adapter's part of one product."""

    a: Tensor
    """[ranks, in]: the A of all parts, one below the other."""
    scale: Tensor
    """float32 [ranks]: factors of the products with A."""
    parts: tuple[LowRankPart, ...]
    """Of different outputs each."""

    @property
    def nbytes(self) -> int:
        tensors = [self.a, self.scale]
        for part in self.parts:
            tensors += [one for one in (part.b, part.factor, part.offset) if one is not None]
        return sum(tensor.nbytes for tensor in tensors)


class PackedLowRank(Protocol):
    """A `LowRank` in a backend's layout."""

    @property
    def nbytes(self) -> int: ...


class LowRankTable(Protocol):
    """What the adapters in all slots add to one product."""

    def put(self, slot: int, packed: PackedLowRank | None) -> None:
        """Puts what `Kernels.pack_low_rank` made into a slot; None: the adapter there adds nothing
        to this product.
        """


class PlainTable:
    """A list of them: of the definition."""

    def __init__(self, num_slots: int) -> None:
        self.slots: list[LowRank | None] = [None] * num_slots

    def put(self, slot: int, packed: PackedLowRank | None) -> None:
        assert packed is None or isinstance(packed, LowRank)
        self.slots[slot] = packed


class PackedExperts:
    """What an adapter adds to a stacked product: something packed for each expert it changes."""

    def __init__(self, experts: Mapping[int, PackedLowRank]) -> None:
        self.experts = experts

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.experts.values())


class PackedHeads(PackedExperts):
    """The same for a product in which each head has a matrix of its own."""


class ExpertTables:
    """What the adapters in all slots add to a stacked product: a table for each expert (or head) that
    one of them changed.
    """

    def __init__(self, num_experts: int, make: Callable[[], LowRankTable]) -> None:
        self._make = make
        self._tables: list[LowRankTable | None] = [None] * num_experts
        self._changed: dict[int, tuple[int, ...]] = {}
        """By slot, the experts that the adapter there changes."""

    def __bool__(self) -> bool:
        """Whether some adapter adds anything."""
        return bool(self._changed)

    def __getitem__(self, expert: int) -> LowRankTable | None:
        """The expert's table; None: nothing was ever added to it."""
        return self._tables[expert]

    def put(self, slot: int, packed: PackedExperts | None) -> None:
        for expert in self._changed.pop(slot, ()):
            table = self._tables[expert]
            assert table is not None
            table.put(slot, None)
        if packed is None:
            return
        self._changed[slot] = tuple(packed.experts)
        for expert, one in packed.experts.items():
            table = self._tables[expert]
            if table is None:
                table = self._tables[expert] = self._make()
            table.put(slot, one)


class ExpertAdapters(NamedTuple):
    """What adapters add to the experts of a layer, in one step."""

    slots: Tensor
    """int32 [rows]: the slot of each row's adapter, -1 where it has none."""
    gate_up: ExpertTables
    down: ExpertTables
