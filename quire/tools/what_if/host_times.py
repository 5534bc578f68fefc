"""How long the host has to do with a step before the device can begin: deciding what is in it, and
launching it.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.step import Step
from quire.tools.what_if.step_parts import TimedStep, Timeline, is_split, was_idle

Array = npt.NDArray[np.float64]
_NEAR = 12
"""Steps of a moment, whose noise a step may have."""
_ALIKE = 1.2
"""Times that differ by less, as a factor, may have the same noise."""


class HostTimes:
    """Seconds of a step's launching, and of what the host does between two turns. A host is slower
    for a while (of other programs, of a lower clock rate), and what it does in that while is slower
    together: requests wait for many slow steps in a row, not for one. So noise is that of a moment
    of the log.
    """

    def __init__(
        self, timeline: Timeline, graph_tokens: int, others: Sequence[TimedStep] = ()
    ) -> None:
        """`others`: of sizes that the log does not have."""
        self._graph_tokens = graph_tokens
        own = [one for one in (*timeline.steps, *timeline.empty_steps) if one.host > 0]
        steps = [*own, *(one for one in others if one.host > 0)]
        inputs = np.array([self._features(one.step) for one in steps])
        times = np.array([one.host for one in steps])
        scale = np.maximum(inputs.max(0), 1e-12)
        self._weights: Array = _fit_weights(inputs / scale, times) / scale
        ratios = times / np.maximum(inputs @ self._weights, 1e-12)
        self._start = min(one.step.now for one in own)
        self._seconds = max(one.step.now for one in own) - self._start
        self._noise: dict[int, _Moments] = {}
        for one, fitted, ratio in zip(own, inputs @ self._weights, ratios, strict=False):
            self._noise.setdefault(_kind(fitted), _Moments()).add(one.step.now, float(ratio))
        self._pauses = _Moments()
        for moment, pause in timeline.pauses:
            self._pauses.add(moment, pause)
        for moments in (*self._noise.values(), self._pauses):
            moments.sort()
        self._turn = timeline.turn
        self.fetch = timeline.fetch
        self.restart()

    def restart(self, seed: int = 0) -> None:
        """Another moment of the log is the first."""
        self._source = random.Random(seed)
        self._first = self._source.random() * self._seconds

    def expected(self, step: Step) -> float:
        """As steps that take about as long did, in the median."""
        fitted = self._fitted(step)
        return fitted * float(np.median(self._near(fitted).values))

    def draw(self, step: Step) -> float:
        """With the noise of one of them."""
        fitted = self._fitted(step)
        return fitted * self._near(fitted).draw(self._moment(step.now), self._source)

    def draw_pause(self, now: float, has_result: bool) -> float:
        """Until the next turn, after one that had a result or one that only launched a step."""
        if not has_result or not self._pauses.values:
            return self._turn
        return self._pauses.draw(self._moment(now), self._source)

    def _moment(self, now: float) -> float:
        return self._start + math.fmod(now + self._first, self._seconds)

    def _near(self, fitted: float) -> _Moments:
        kind = _kind(fitted)
        if kind not in self._noise:
            kind = min(self._noise, key=lambda one: abs(one - kind))
        return self._noise[kind]

    def _fitted(self, step: Step) -> float:
        return float(np.dot(self._weights, self._features(step)))

    def _features(self, step: Step) -> list[float]:
        """That it computes something; more than answers; more than a graph can; for an engine that
        was idle. Requests, those that are set up, their tokens, those that ended, copies.
        """
        computes = bool(step.scheduled)
        is_more = len(step.scheduled) > step.num_decodes
        return [
            1.0,
            float(computes),
            float(is_more),
            float(is_more and is_split(step, self._graph_tokens)),
            float(computes and was_idle(step)),
            float(len(step.scheduled)),
            float(len(step.admitted)),
            float(sum(len(one.token_ids) for one in step.admitted)),
            float(len(step.finished)),
            float(len(step.copies)),
        ]


class _Moments:
    """Values with their times."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float]] = []
        self._times: list[float] = []
        self.values: list[float] = []

    def add(self, time: float, value: float) -> None:
        self._found.append((time, value))

    def sort(self) -> None:
        self._found.sort()
        self._times = [one[0] for one in self._found]
        self.values = [one[1] for one in self._found]

    def draw(self, time: float, source: random.Random) -> float:
        """One of about that time."""
        first = max(0, min(bisect_left(self._times, time) - _NEAR // 2, len(self.values) - _NEAR))
        return self.values[source.randrange(first, min(first + _NEAR, len(self.values)))]


def _kind(fitted: float) -> int:
    return round(math.log(max(fitted, 1e-9)) / math.log(_ALIKE))


def _fit_weights(inputs: Array, times: Array) -> Array:
    """The weights of at least 0 with the least relative errors, each time counting for as long as
    it is, and single outliers little.
    """
    weight = np.sqrt(times / times.mean())
    matter = weight
    weights = np.zeros(inputs.shape[1])
    for _ in range(3):
        weights = _least_squares(inputs / times[:, None] * matter[:, None], matter)
        errors = np.abs(inputs @ weights / times - 1)
        usual = max(float(np.median(errors)), 1e-6)
        matter = weight * np.sqrt(np.minimum(1.0, 3 * usual / np.maximum(errors, 1e-12)))
    return weights


def _least_squares(rows: Array, wanted: Array) -> Array:
    """The weights of at least 0 with the least squares: those that come out negative are left out,
    the worst first.
    """
    active = list(range(rows.shape[1]))
    weights = np.zeros(rows.shape[1])
    while active:
        solution = np.linalg.lstsq(rows[:, active], wanted, rcond=None)[0]
        if (solution >= 0).all():
            weights[active] = solution
            break
        del active[int(np.argmin(solution))]
    return weights
