"""Statistics of repeated measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """What repeats of one measurement gave, as they came."""

    values: tuple[float, ...]
    unit: str

    @classmethod
    def of(cls, values: Iterable[float], unit: str = "s") -> Spread:
        return cls(tuple(values), unit)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def per(self, amount: float, unit: str = "tok/s") -> Spread:
        """`amount` over each value: tokens over seconds gives tokens per second."""
        return Spread(tuple(amount / value for value in self.values), unit)

    def each(self, amount: float) -> Spread:
        """Milliseconds for one of `amount`, from seconds for all."""
        return Spread(tuple(1000 * value / amount for value in self.values), "ms")


def percentile_of(ordered: Sequence[float], percentile: float) -> float:
    """Between two values, on the line from one to the other."""
    place = (len(ordered) - 1) * percentile / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
