"""Rounds of requests over all axes until the time is up, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire.tools.verify.answers import Answer, Difference, Pair, differences
from quire.tools.verify.cases import Case
from quire.tools.verify.shrink import Smallest, shrink
from quire.tools.verify.subject import Answers, Axis, AxisComparison, Subject


@dataclass(slots=True)
class AxisResult:
    """One line of the table."""

    name: str
    about: str
    requests: int = 0
    values: int = 0
    """Numbers compared."""
    different_requests: int = 0
    differences: int = 0
    first: Difference | None = None
    seconds: float = 0.0
    note: str = ""
    """What happened there; where it was not tried, why."""
    state: str = "not reached"
    """equal, different, not applicable, did not happen, or not reached."""

    def take(self, pairs: Sequence[Pair], found: Sequence[Difference]) -> None:
        self.requests += len({pair.case for pair in pairs})
        self.values += sum(pair.expected.num_values for pair in pairs)
        self.differences += len(found)
        self.different_requests += len({one.case for one in found})
        if found and self.first is None:
            self.first = found[0]

    def as_json(self) -> Mapping[str, Any]:
        whole = {name: getattr(self, name) for name in self.__slots__}
        return whole | {"first": None if self.first is None else self.first.as_json()}


@dataclass(slots=True)
class Verdict:
    """All that was found."""

    axes: list[AxisResult]
    seconds: float = 0.0
    rounds: int = 0
    smallest: Smallest | None = None
    smallest_axis: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """Nothing differed, and every axis there is was tried."""
        return all(axis.state in ("equal", "not applicable") for axis in self.axes)


Report = Callable[[str, float], None]
"""Called with what is being done and how many seconds it has taken so far."""


@dataclass(slots=True)
class _Pace:
    """How long a request takes here, by all that was computed so far: so an axis can be given as
    many as leave those after it their time. A twentieth is kept for what takes longer than that.
    """

    seconds: float = 0.0
    passes: float = 0.0

    def note(self, seconds: float, passes: float) -> None:
        self.seconds += max(0.0, seconds)
        self.passes += passes

    def fits(self, axes: Sequence[Axis], room: float, more_passes: float = 0.0) -> float:
        """How many requests each of the axes may have in so many seconds."""
        each = max(self.seconds, 1e-6) / self.passes
        room = 0.95 * room - sum(axis.start_seconds for axis in axes)
        return room / (each * max(sum(axis.passes for axis in axes) + more_passes, 1e-3))


def verify(
    subject: Subject,
    seconds: float,
    seed: int = 0,
    report: Report = lambda what, spent: None,
    max_rounds: int | None = None,
    shrink_seconds: float | None = None,
) -> Verdict:
    """Round after round over all axes, as many requests in each as the time allows; then, where
    something differs, half as long again for the smallest case of it.
    """
    started = time.monotonic()

    def spent() -> float:
        return time.monotonic() - started

    results = {axis.name: AxisResult(axis.name, axis.about) for axis in subject.axes()}
    verdict = Verdict(list(results.values()), notes=list(subject.notes))
    for axis in subject.axes():
        if axis.missing is not None:
            results[axis.name].state = "not applicable"
            results[axis.name].note = axis.missing
    failed: tuple[str, list[Case], Difference] | None = None
    report("one request alone", 0.0)
    pace = _measure_pace(subject, seed)
    sizes = subject.sizes
    axes = [axis for axis in subject.axes() if axis.missing is None]
    size = int(
        min(max(sizes.fewest, pace.fits(axes, seconds - spent(), more_passes=1)), sizes.first)
    )
    while True:
        began = spent()
        cases = subject.draw(size, seed + verdict.rounds, is_first=verdict.rounds == 0)
        report(f"round {verdict.rounds + 1}: {size} requests alone", spent())
        alone = subject.reference(cases)
        pace.note(spent() - began, size)
        for number, axis in enumerate(axes):
            result = results[axis.name]
            start = spent()
            if start > seconds:
                break
            count = int(min(max(sizes.least, pace.fits(axes[number:], seconds - start)), size))
            report(f"round {verdict.rounds + 1}: {axis.name}, {count} requests", start)
            found = _try(axis, cases[:count], alone[:count], result)
            subject.tidy()
            result.seconds += spent() - start
            pace.note(spent() - start - axis.start_seconds, count * axis.passes)
            if found is not None and failed is None:
                failed = axis.name, cases[:count], found
        verdict.rounds += 1
        room = seconds - spent()
        # Later requests are longer, so a guess must leave some room.
        growth = min(2.0, room / max(spent() - began, 1e-3) * 0.5)
        if (
            failed is not None
            or room <= 0
            or growth * size < sizes.fewest
            or verdict.rounds == max_rounds
        ):
            break
        size = int(min(growth * size, sizes.most))
    if failed is not None:
        name, cases, found = failed
        report(f"looking for the smallest case on {name}", spent())
        verdict.smallest = shrink(
            cases, found, partial(_first_difference, subject, name), shrink_seconds or seconds / 2
        )
        verdict.smallest_axis = name
    verdict.seconds = spent()
    return verdict


def _measure_pace(subject: Subject, seed: int) -> _Pace:
    """Of two requests; they are computed twice, and the first time warms everything up."""
    probe = subject.draw(2, seed + 2**32, is_first=True)
    subject.reference(probe)
    started = time.monotonic()
    subject.reference(probe)
    pace = _Pace()
    pace.note(time.monotonic() - started, len(probe))
    return pace


def _try(
    axis: Axis, cases: Sequence[Case], alone: Answers, result: AxisResult
) -> Difference | None:
    """One axis with one round's requests; the first difference."""
    try:
        comparison = axis.compare(cases, alone)
    except Exception as error:  # whatever breaks here does not break alone
        comparison = AxisComparison(
            [Pair(0, 0, Answer(end="an answer"), Answer(end=f"{type(error).__name__}: {error}"))]
        )
    found = differences(comparison.pairs)
    result.take(comparison.pairs, found)
    if comparison.happened or not result.note:
        result.note = comparison.evidence
    if result.differences:
        result.state = "different"
    elif comparison.happened:
        result.state = "equal"
    elif result.state == "not reached":
        result.state = "did not happen"
    return found[0] if found else None


def _first_difference(subject: Subject, name: str, cases: Sequence[Case]) -> Difference | None:
    axis = next(one for one in subject.axes() if one.name == name)
    found = _try(axis, cases, subject.reference(cases), AxisResult(name, axis.about))
    subject.tidy()
    return found
