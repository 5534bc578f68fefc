"""How a layer's mixer is divided among ranks: each mixer says it of itself (`share`).

A rank has some heads, or some channels, of a mixer: the rows of the products in front of it, and
what is kept of them in the cache. Behind it, ranks gather the whole output, of which each computes
some rows of the output's product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

_UNITS = (64, 16)
"""Rows are divided in runs of so many where there are enough of them: kernels work on whole tiles,
and some formats are computed with in runs of 16 rows only.
"""

MixerT = TypeVar("MixerT", covariant=True)


@dataclass(frozen=True, slots=True)
class MixerShare(Generic[MixerT]):
    """One rank's part of a mixer."""

    mixer: MixerT
    """As the rank's decoder sees it: smaller."""
    rows: Mapping[str, tuple[slice, ...]]
    """Of its parameters in front of the output's product, by the first part of their names: the
    rows that the rank keeps, a run of each of the tensors stacked in one. Their products are the
    rank's own, never gathered.
    """
    output: slice
    """Which of the numbers that the output's product takes are the rank's own."""
    num_gathered: int
    """Numbers of a token that ranks gather before the output's product."""


def share_of(total: int, parts: int, index: int) -> slice:
    """Part `index` of `total` things: the first parts get one more where they don't come out even."""
    each, more = divmod(total, parts)
    start = index * each + min(index, more)
    return slice(start, start + each + (index < more))


def rows_of(total: int, parts: int, index: int) -> slice:
    """Part `index` of `total` rows, in units that suit kernels."""
    fitting = [unit for unit in _UNITS if total % unit == 0 and total // unit >= parts]
    unit = next(
        (unit for unit in fitting if total // unit % parts == 0),
        fitting[-1] if fitting else 1,
    )
    return times(share_of(total // unit, parts, index), unit)


def length(run: slice) -> int:
    return int(run.stop - run.start)


def times(run: slice, factor: int) -> slice:
    """The rows of a run of heads that have so many each."""
    return slice(run.start * factor, run.stop * factor)
