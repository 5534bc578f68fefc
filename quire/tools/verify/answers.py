"""An answer as the numbers it consists of, and where two of them differ: bit for bit, nothing is
rounded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.step import TokenLogprob

Value = int | float | str


@dataclass(slots=True)
class Answer:
    """What one answer must always be."""

    values: dict[str, list[Value]] = field(default_factory=dict)
    """By what they are: tokens, logprobs, and so on."""
    end: str | None = None
    """Why it ended, or its error."""

    def add_logprobs(self, kind: str, scores: Sequence[TokenLogprob]) -> None:
        """Logprobs of some tokens in a row, with their ranks and the likeliest tokens."""
        for name, found in (
            (f"{kind}logprobs", [score.logprob for score in scores]),
            (f"{kind}ranks", [score.rank for score in scores]),
            (f"{kind}likely tokens", [token for score in scores for token, _ in score.top]),
            (f"{kind}likely logprobs", [logprob for score in scores for _, logprob in score.top]),
        ):
            if found:
                self.values.setdefault(name, []).extend(found)

    @property
    def tokens(self) -> list[int]:
        return [int(token) for token in self.values.get("tokens", [])]

    @property
    def num_values(self) -> int:
        return sum(map(len, self.values.values()))


@dataclass(frozen=True, slots=True)
class Pair:
    """One answer as it came alone, and as it came otherwise."""

    case: int
    """Which request it belongs to."""
    answer: int
    """Which of the request's answers it is."""
    expected: Answer
    got: Answer


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is not what it was."""

    case: int
    answer: int
    kind: str
    place: int
    """The how-manieth value of its kind."""
    expected: Value | None
    """None where there is none."""
    got: Value | None

    def describe(self) -> str:
        return (
            f"request {self.case}, answer {self.answer}, {self.kind}[{self.place}]: "
            f"{_exactly(self.expected)} alone, {_exactly(self.got)} here"
        )

    def as_json(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def differences(pairs: Sequence[Pair]) -> list[Difference]:
    """All values that differ; of each answer the tokens first, then what is earliest."""
    return [difference for pair in pairs for difference in _differences(pair)]


def _differences(pair: Pair) -> Iterator[Difference]:
    expected = pair.expected
    got = pair.got
    for kind in dict.fromkeys((*expected.values, *got.values)):
        ours = expected.values.get(kind, [])
        theirs = got.values.get(kind, [])
        for place in range(max(len(ours), len(theirs))):
            one = ours[place] if place < len(ours) else None
            other = theirs[place] if place < len(theirs) else None
            if not _same_bits(one, other):
                yield Difference(pair.case, pair.answer, kind, place, one, other)
    if expected.end != got.end:
        yield Difference(pair.case, pair.answer, "end", 0, expected.end, got.end)


def _same_bits(one: Value | None, other: Value | None) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        # 0.0 is not -0.0, and a NaN is itself
        return struct.pack("<d", one) == struct.pack("<d", other)
    return one == other


def _exactly(value: Value | None) -> str:
    return (
        f"{value!r} ({value.hex()})"
        if isinstance(value, float)
        else "nothing"
        if value is None
        else repr(value)
    )
