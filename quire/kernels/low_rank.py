"""What adapters add to products: pairs of small matrices, and which row of a step has which.

An adapter's part of a product y = x W' + bias is y + (x A') * scale B', and with DoRA that sum times
a factor per output. Rows of one step may have different adapters: each row names a slot of a table,
and the table knows what lies in the slot. A table's memory stays where it is, so recorded steps find
what was put there after they were recorded.
"""

from __future__ import annotations

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
