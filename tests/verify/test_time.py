"""How the time is divided: every axis comes to its turn, those that start slowly or take longer
than expected, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from quire.sampling_params import SamplingParams
from quire.tools.verify import check
from quire.tools.verify.answers import Answer
from quire.tools.verify.cases import Case
from quire.tools.verify.check import verify
from quire.tools.verify.subject import Answers, Axis, AxisComparison, Sizes, pairs_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Timed:
    """Takes a second for a request alone; on each axis, as long as `seconds` says: to start, and
    for a request.
    """

    sizes = Sizes(fewest=6, first=12, most=48, least=3)
    notes = ()

    def __init__(self, clock: Clock, seconds: dict[str, tuple[float, float]]) -> None:
        self._clock = clock
        self._seconds = seconds

    def axes(self) -> list[Axis]:
        return [
            Axis(name, "", self._compare(name), None, 1.0, start)
            for name, (start, _) in self._seconds.items()
        ]

    def draw(self, count: int, seed: int, is_first: bool) -> list[Case]:
        return [Case("greedy", (number,), SamplingParams()) for number in range(count)]

    def reference(self, cases: Sequence[Case]) -> Answers:
        self._clock.now += len(cases)
        return [[Answer({"tokens": [1]})] for _ in cases]

    def tidy(self) -> None:
        pass

    def _compare(self, name: str) -> Callable[[Sequence[Case], Answers], AxisComparison]:
        def compare(cases: Sequence[Case], alone: Answers) -> AxisComparison:
            start, each = self._seconds[name]
            self._clock.now += start + each * len(cases)
            return AxisComparison(pairs_of(alone, alone))

        return compare


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(check, "time", clock)
    return clock


def test_axes_that_start_slowly_have_their_time_kept_for_them(clock: Clock) -> None:
    subject = Timed(clock, {"a": (0, 1), "b": (0, 1), "devices": (20, 1), "restarted": (10, 1)})
    verdict = verify(subject, 75.0, max_rounds=1)
    assert verdict.is_exact
    assert [axis.requests for axis in verdict.axes] == [7, 7, 7, 7]
    assert [axis.seconds for axis in verdict.axes] == [7, 7, 27, 17]
    assert verdict.seconds < 75


def test_axes_that_take_longer_than_expected_leave_the_others_some_requests(clock: Clock) -> None:
    subject = Timed(clock, {"slow": (0, 3), "slower": (0, 4), "b": (0, 1), "last": (5, 1)})
    verdict = verify(subject, 60.0, max_rounds=1)
    assert verdict.is_exact
    counts = [axis.requests for axis in verdict.axes]
    assert counts[0] == max(counts)
    assert min(counts) >= 3
    assert verdict.seconds < 75


def test_an_axis_for_which_no_time_is_left_has_no_requests(clock: Clock) -> None:
    verdict = verify(Timed(clock, {"endless": (0, 30), "last": (0, 1)}), 60.0, max_rounds=1)
    assert [axis.state for axis in verdict.axes] == ["equal", "not reached"]
    assert not verdict.is_exact


def test_time_that_is_left_goes_into_more_rounds(clock: Clock) -> None:
    verdict = verify(Timed(clock, {"a": (0, 0.1), "b": (0, 0.1)}), 120.0)
    assert verdict.rounds > 2
    assert verdict.axes[0].requests > 30
    assert verdict.seconds < 121
