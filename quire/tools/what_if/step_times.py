"""How long a step takes, by what is in it: fitted to the steps of a log, and tried on those the fit
has not seen.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidRequestError
from quire.observe.step_costs import StepCosts
from quire.step import Step, StepLogEntry
from quire.tools.what_if.host_times import HostTimes
from quire.tools.what_if.least_squares import Array, fit_weights
from quire.tools.what_if.step_parts import TimedStep, Timeline, is_split, timed_steps
from quire.tools.what_if.step_shapes import SeenSteps, StepShape

_FEWEST = 30
"""Steps, below which there is nothing to fit."""
_KNEES = (0.0, *(2.0**power for power in range(13)))
"""Rows from which on one more may cost more or less: a GPU multiplies for nothing while it reads
weights, and many rows take a CPU less time each than few.
"""
_SPANS = tuple(zip(_KNEES, (*_KNEES[1:], math.inf), strict=True))
_SMOOTH = (0.3, 0.1, 0.03, 0.01, 0.003)
"""How much it may count that one more row costs as much above a knee as below it, the most first."""
_AS_GOOD = 0.005
"""Of all time: of two fits whose errors differ by less, the smoother one knows more of steps the
log does not have.
"""
_SLOPES = slice(2, 3 + len(_KNEES))
"""Among the features, those of the knees, and of pairs of queries and keys: all count rows."""
_PLAIN = 6 + len(_KNEES)
"""Features of any step; behind them those of a device that has a time of its own."""
_UNKNOWN = StepCosts()
_TIMES_BOUND = 3
"""A fit is made again where it has steps longer than they can have been."""
_HELD_OUT = 0.2
_NEAR = 25
"""Steps whose noise a step may have, or more."""
_ALIKE = 0.1
"""Of a device, which computes many steps of the same size: those that differ by less have the same
noise.
"""
_MATTER = 0.5
"""Steps that were measured beside the log count as so much of its time."""
_FAR_ERROR = 0.3
"""What steps of twice the size are taken to be off by where the log can't say."""


def features(step: Step, costs: StepCosts, graph_tokens: int | None = None) -> list[float]:
    """What a step's time depends on: whether it is more than answers, which are computed by graphs
    or recorded calls; the work of rows and of their scores, between each two knees; pairs of
    queries and keys in prompts, as rows; requests; keys that are read; blocks that are copied. With
    `graph_tokens`, where the device has a time of its own: whether it is answers alone, and whether
    it is more than a graph can.
    """
    tokens, drawn = _sizes(step)
    rows = costs.work(tokens, drawn)
    pairs = sum(
        one.num_tokens * (one.start + one.num_tokens / 2)
        for one in step.scheduled
        if one.num_tokens > 1
    )
    others = len(step.scheduled) - 1
    keys = sum(one.start + one.num_tokens for one in step.scheduled)
    is_more = tokens > drawn
    found = [
        1.0,
        is_more,
        *_slopes(rows),
        costs.pair_share * pairs,
        float(others),
        float(keys),
        float(len(step.copies)),
    ]
    if graph_tokens is not None:
        found += [not is_more, is_more and is_split(step, graph_tokens)]
    return [float(one) for one in found]


def _slopes(rows: float) -> list[float]:
    """How many are above each knee and not above the next."""
    found = [0.0] * len(_KNEES)
    for place, (low, high) in enumerate(_SPANS):
        if rows <= low:
            break
        found[place] = min(rows, high) - low
    return found


@dataclass(frozen=True, slots=True)
class FitQuality:
    """How far predictions are off, as a part of what was measured, for steps the fit has not seen."""

    num_steps: int
    median_error: float
    p95_error: float
    total_error: float
    """Of their times' sum; negative: predicted too short."""
    beyond_error: float | None = None
    """In the median, of steps about twice as large as any that a fit was made of: what larger steps
    than the log's are off by, as far as that can be told. None where the log has too few.
    """


class Noise:
    """How measured times differ from what was fitted, by the latter."""

    def __init__(self, fitted: Array, times: Array, alike: float) -> None:
        """Those that differ by a part of at most `alike` are all as good; 0: the nearest."""
        self._alike = alike
        order = np.argsort(fitted, kind="stable")
        self._fitted: list[float] = fitted[order].tolist()
        self._ratios: list[float] = (times / np.maximum(fitted, 1e-12))[order].tolist()

    def near(self, fitted: float) -> list[float]:
        """Of the times that are about as long."""
        first, end = self._range(fitted)
        return self._ratios[first:end]

    def draw(self, fitted: float, source: random.Random) -> float:
        """One of them."""
        return self._ratios[source.randrange(*self._range(fitted))]

    def _range(self, fitted: float) -> tuple[int, int]:
        place = bisect_left(self._fitted, fitted)
        first = max(0, min(place - _NEAR // 2, len(self._ratios) - _NEAR))
        end = min(first + _NEAR, len(self._ratios))
        if not self._alike:
            return first, end
        low = bisect_left(self._fitted, fitted * (1 - self._alike))
        high = bisect_right(self._fitted, fitted * (1 + self._alike))
        return min(first, low), max(end, high)


class Drawn(NamedTuple):
    """What a step takes."""

    host: float
    device: float


class StepTimes:
    """Seconds of a step, and of the pause before the next."""

    def __init__(
        self,
        weights: Array,
        inputs: Array,
        times: Array,
        seen: SeenSteps,
        costs: StepCosts,
        pause: float = 0.0,
        quality: FitQuality | None = None,
        host: HostTimes | None = None,
        graph_tokens: int | None = None,
    ) -> None:
        """`seen`: the sizes of the steps that were measured. With `host`, the others are the
        device's times.
        """
        self._inner: tuple[StepTimes, float] | None = None
        self._weights = weights
        self._costs, self._graph_tokens = costs, graph_tokens
        self._noise = Noise(inputs @ weights, times, 0.0 if graph_tokens is None else _ALIKE)
        """Part of what is replayed, and small steps have another one than large ones."""
        self.seen = seen
        self.pause, self.host = pause, host
        self.restart()
        self._quality = quality

    @property
    def quality(self) -> FitQuality:
        assert self._quality is not None
        return self._quality

    @property
    def is_calibrated(self) -> bool:
        return self._inner is not None

    @property
    def far_error(self) -> float:
        """By how much a step may be off that is twice as large as any that was measured."""
        known = None if self._quality is None else self._quality.beyond_error
        return _FAR_ERROR if known is None else known

    def outside_of(self, log: StepTimes, error: float) -> StepTimes:
        """These for steps of sizes that the log does not have, off by about `error`, and the log's
        own for all others: a measurement beside other work must not make those worse.
        """
        self._inner = log, error
        return self

    def expected(self, step: Step) -> Drawn:
        """As steps that are about as long were, in the median."""
        inner = self._inner
        if inner is not None and not inner[0].seen.distance(StepShape.of(step)):
            return inner[0].expected(step)
        device = self.expected_of(self._features(step))
        return Drawn(self.host.expected(step) if self.host is not None else 0.0, device)

    def expected_of(self, given: Sequence[float]) -> float:
        """The device's, by its features."""
        fitted = float(np.dot(self._weights, given))
        return fitted * float(np.median(self._noise.near(fitted)))

    def draw(self, step: Step) -> Drawn:
        """With the noise of one of the steps that are about as long."""
        shape, fit, error = StepShape.of(step), self, 0.0
        distance = self.seen.distance(shape) if step.scheduled else 0.0
        if distance:
            error = (1 + self.far_error) ** distance - 1
        elif self._inner is not None:
            log, known = self._inner
            fit, error = (
                (self, known) if step.scheduled and log.seen.distance(shape) else (log, 0.0)
            )
        host = device = 0.0
        if step.scheduled:
            fitted = float(np.dot(fit._weights, self._features(step)))
            device = (
                fitted
                * self._scale
                * fit._noise.draw(fitted, self._source)
                * math.pow(1 + error, self._far)
            )
        if fit.host is not None:
            host = fit.host.draw(step) * self._scale * math.pow(1 + error, self._far)
        if distance:
            self.outside[shape] = self.outside.get(shape, 0.0) + host + device
            self.tokens_outside += shape.tokens
        self.seconds += host + device
        self.tokens += shape.tokens
        return Drawn(host, device)

    def draw_pause(self, now: float, has_result: bool) -> float:
        """Until the next turn, after one that had a result or not."""
        return self.pause if self.host is None else self.host.draw_pause(now, has_result)

    def is_split(self, step: Step) -> bool:
        """Whether the device begins while the host is still launching it."""
        return self._graph_tokens is not None and is_split(step, self._graph_tokens)

    def restart(self, seed: int = 0, scale: float = 1.0, far: float = 0.0) -> None:
        """Noise from the beginning; with a `scale` all steps are so many times as long. Those of
        sizes that the log does not have are as much longer (`far` 1) or shorter (-1) as they may be
        off.
        """
        self._source, self._scale, self._far = random.Random(seed), scale, far
        for one in (self,) if self._inner is None else (self, self._inner[0]):
            if one.host is not None:
                one.host.restart(seed)
        self.seconds, self.tokens = 0.0, 0
        """Of the steps drawn since."""
        self.outside: dict[StepShape, float] = {}
        """The seconds of those among them whose sizes are outside of what was measured."""
        self.tokens_outside = 0

    def _features(self, step: Step) -> list[float]:
        return features(step, self._costs, self._graph_tokens)


def fit_step_times(
    entries: Sequence[StepLogEntry],
    costs: StepCosts = _UNKNOWN,
    seed: int = 0,
    others: Sequence[TimedStep] = (),
    graph_tokens: int = 0,
) -> StepTimes:
    """From the steps of a log that succeeded and computed something, and `others`, of sizes that it
    does not have; `costs` as the log says them, `graph_tokens` those of the largest step that is
    launched as a whole.
    """
    timeline = timed_steps(entries, graph_tokens)
    if len(timeline.steps) < _FEWEST:
        raise InvalidRequestError(
            "LOG",
            f"has {len(timeline.steps)} steps that computed something; {_FEWEST} are needed to tell what a step takes",
        )
    limit = graph_tokens if timeline.has_parts else None
    measured, bounds = _known(timeline)
    seen = SeenSteps((StepShape.of(one.step) for one in [*timeline.steps, *others]), limit)
    hosts = others
    bounds += [one for one in others if one.is_bound]
    others = [one for one in others if not one.is_bound]
    random.Random(seed).shuffle(measured)
    cut = max(1, int(len(measured) * _HELD_OUT))
    inputs, times = _arrays([*measured, *others], costs, limit)
    most = _arrays(bounds, costs, limit) if bounds else None
    counts = np.ones(len(times))
    if others:
        counts[len(measured) :] = (
            _MATTER * times[: len(measured)].sum() / times[len(measured) :].sum()
        )
    smooth = _choose_smooth(inputs[cut:], times[cut:], counts[cut:])
    weights = _fit(inputs[cut:], times[cut:], smooth, counts[cut:], most)
    known = StepTimes(weights, inputs[cut:], times[cut:], seen, costs, graph_tokens=limit)
    predicted = np.array([known.expected_of(one) for one in inputs[:cut]])
    held = times[:cut]
    host = None
    if timeline.has_parts:
        host = HostTimes(timeline._replace(steps=[*measured[cut:], *bounds]), graph_tokens)
        predicted += np.array([host.expected(one.step) for one in measured[:cut]])
        held = held + np.array([one.host for one in measured[:cut]])
        host = HostTimes(timeline, graph_tokens, hosts)
    errors = np.abs(predicted / held - 1)
    quality = FitQuality(
        cut,
        float(np.median(errors)),
        float(np.quantile(errors, 0.95)),
        float(predicted.sum() / held.sum() - 1),
        _beyond_error(
            inputs, times, np.array([_sizes(one.step) for one in [*measured, *others]]), smooth
        ),
    )
    weights = _fit(inputs, times, smooth, counts, most)
    return StepTimes(weights, inputs, times, seen, costs, timeline.pause, quality, host, limit)


def _known(timeline: Timeline) -> tuple[list[TimedStep], list[TimedStep]]:
    """Those whose times are known, and those that took at most as long as they say. Where the host
    hardly ever waits for the device, what a step takes at most is what it takes.
    """
    known = [one for one in timeline.steps if not one.is_bound]
    if len(known) < _FEWEST:
        return list(timeline.steps), []
    return known, [one for one in timeline.steps if one.is_bound]


def _arrays(
    steps: Sequence[TimedStep], costs: StepCosts, graph_tokens: int | None
) -> tuple[Array, Array]:
    inputs = np.array([features(one.step, costs, graph_tokens) for one in steps])
    return inputs, np.array([one.seconds for one in steps])


def _sizes(step: Step) -> tuple[int, int]:
    """Tokens, and those behind which one is drawn."""
    return step.num_tokens, sum(1 + len(one.guesses) for one in step.scheduled if one.samples)


def _beyond_error(
    inputs: Array, times: Array, sizes: npt.NDArray[np.int64], smooth: float
) -> float | None:
    """The larger half of the steps as a fit to the smaller one has them: by tokens, and by those
    behind which one is drawn, whichever is worse.
    """
    found = []
    for size in sizes.T:
        is_small = size <= size.max() / 2
        if is_small.sum() >= _FEWEST and (~is_small).any():
            counts = np.ones(int(is_small.sum()))
            fitted = inputs[~is_small] @ _fit(inputs[is_small], times[is_small], smooth, counts)
            found.append(float(np.median(np.abs(fitted / times[~is_small] - 1))))
    return max(found, default=None)


def _choose_smooth(inputs: Array, times: Array, counts: Array) -> float:
    """The most of it with which the fit is as good as any on steps it has not seen, and on those
    that were measured because the log does not have them: there are too few of these to hold some
    out.
    """
    cut = max(1, int(len(times) * _HELD_OUT))
    fits = [_fit(inputs[cut:], times[cut:], smooth, counts[cut:]) for smooth in _SMOOTH]
    tried = (np.arange(len(times)) < cut) | (counts != 1.0)
    matter = counts[tried]
    total = float((times[tried] * matter).sum())
    errors = [
        float((np.abs(inputs[tried] @ weights - times[tried]) * matter).sum() / total)
        for weights in fits
    ]
    return next(
        smooth
        for smooth, error in zip(_SMOOTH, errors, strict=True)
        if error <= min(errors) + _AS_GOOD
    )


def _fit(
    inputs: Array,
    times: Array,
    smooth: float,
    counts: Array,
    most: tuple[Array, Array] | None = None,
) -> Array:
    """Weights of at least 0 with the least relative errors; `most`: steps that took at most so
    long, which count where the fit has them longer.
    """
    fitted = _fit_known(inputs, times, smooth, counts)
    for _ in range(_TIMES_BOUND if most is not None else 0):
        assert most is not None
        over = most[0] @ fitted > most[1]
        if not over.any():
            break
        more = np.concatenate([inputs, most[0][over]]), np.concatenate([times, most[1][over]])
        fitted = _fit_known(*more, smooth, np.concatenate([counts, np.ones(int(over.sum()))]))
    return fitted


def _fit_known(inputs: Array, times: Array, smooth: float, counts: Array) -> Array:
    scale: Array = np.maximum(np.abs(inputs).max(0), 1e-12)
    # One for all, so that they can be compared: as parts of what a row takes on average.
    scale[_SLOPES] = ((1 + inputs[:, _SLOPES].sum(1)) * counts).sum() / (times * counts).sum()
    equal = np.zeros((len(_KNEES), inputs.shape[1]))
    for place in range(len(equal)):
        equal[place, _SLOPES.start + place : _SLOPES.start + place + 2] = -1.0, 1.0
    equal *= smooth * np.sqrt(counts.sum())
    # What all steps have is nothing that tells them apart.
    is_same = (inputs[:, _PLAIN:] == 1).all(0)
    if is_same.any():
        inputs = inputs.copy()
        inputs[:, _PLAIN:][:, is_same] = 0.0
    fitted: Array = fit_weights(inputs / scale, times, counts, equal) / scale
    return fitted
