"""What can be tried: a model here or a server elsewhere, and the things that must not matter to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.tools.verify.answers import Answer, Pair
from quire.tools.verify.cases import Case

Answers = list[list[Answer]]
"""By request, then by answer."""


@dataclass(frozen=True, slots=True)
class AxisComparison:
    """What an axis found."""

    pairs: list[Pair]
    evidence: str = ""
    """What happened that makes it this axis."""
    happened: bool = True
    """False where it did not happen, and nothing is proved."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One thing that must not matter."""

    name: str
    about: str
    compare: Callable[[Sequence[Case], Answers], AxisComparison]
    """Runs the requests under this condition and holds them beside their answers alone."""
    missing: str | None = None
    """Why there is no such thing here, if so."""
    passes: float = 1.0
    """What it computes, in requests alone: so many for each."""
    start_seconds: float = 0.0
    """Before its first request."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many requests a round has."""

    fewest: int
    first: int
    """In the first round, if they are quick."""
    most: int
    least: int
    """That an axis tries when time is short: the first ones of the round."""


class Subject(Protocol):
    """Whatever answers requests."""

    @property
    def sizes(self) -> Sizes: ...

    @property
    def notes(self) -> Sequence[str]:
        """What can't be tried, and why."""

    def axes(self) -> Sequence[Axis]:
        """In the order they are tried, which is that of the table."""

    def draw(self, count: int, seed: int, is_first: bool) -> list[Case]:
        """Requests for a round; those of the first one are short."""

    def reference(self, cases: Sequence[Case]) -> Answers:
        """Each request alone."""

    def tidy(self) -> None:
        """After a part of a round: gives back what is no longer needed."""


def pairs_of(expected: Answers, got: Answers) -> list[Pair]:
    return [
        Pair(number, index, one, other)
        for number, (ours, theirs) in enumerate(zip(expected, got, strict=True))
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True))
    ]
