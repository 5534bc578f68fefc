"""How long a step takes, by what is in it: fitted to the steps of a log, and tried on those the fit has not seen."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidRequestError
from quire.observe.step_costs import StepCosts
from quire.simulate.step_shapes import SeenSteps, StepShape
from quire.step import Step, StepLogEntry

Array = npt.NDArray[np.float64]
_FEWEST = 30
"""Steps, below which there is nothing to fit."""
_KNEES = (0.0, *(2.0**power for power in range(13)))
"""Rows from which on one more may cost more or less: a GPU multiplies for nothing while it reads weights, and many rows
take a CPU less time each than few."""
_SMOOTH = (0.3, 0.1, 0.03, 0.01, 0.003)
"""How much it may count that one more row costs as much above a knee as below it, the most first."""
_AS_GOOD = 0.005
"""Of all time: of two fits whose errors differ by less, the smoother one knows more of steps the log does not have."""
_SLOPES = slice(2, 3 + len(_KNEES))
"""Among the features, those of the knees, and of pairs of queries and keys: all count rows."""
_UNKNOWN = StepCosts()
_ROUNDS = 20
_HELD_OUT = 0.2
_NEAR = 25
"""Steps whose noise a step may have."""
_MATTER = 0.5
"""Steps that were measured beside the log count as so much of its time."""
_FAR_ERROR = 0.3
"""What steps of twice the size are taken to be off by where the log can't say."""


class TimedStep(NamedTuple):
    """A step, and how long it took."""

    step: Step
    seconds: float


def features(step: Step, costs: StepCosts) -> list[float]:
    """What a step's time depends on: whether it is more than answers, which are computed by graphs or recorded calls;
    the work of rows and of their scores, between each two knees; pairs of queries and keys in prompts, as rows;
    requests; keys that are read; blocks that are copied."""
    tokens, drawn = _sizes(step)
    rows = costs.work(tokens, drawn)
    slopes = [_between(rows, *ends) for ends in zip(_KNEES, (*_KNEES[1:], math.inf), strict=True)]
    pairs = sum(one.num_tokens * (one.start + one.num_tokens / 2) for one in step.scheduled if one.num_tokens > 1)
    others = len(step.scheduled) - 1
    keys = sum(one.start + one.num_tokens for one in step.scheduled)
    is_more = float(tokens > drawn)
    return [1.0, is_more, *slopes, costs.pair_share * pairs, float(others), float(keys), float(len(step.copies))]


def _between(rows: float, low: float, high: float) -> float:
    """How many are above one knee and not above the next."""
    return min(max(0.0, rows - low), high - low)


@dataclass(frozen=True, slots=True)
class FitQuality:
    """How far predictions are off, as a part of what was measured, for steps the fit has not seen."""

    num_steps: int
    median_error: float
    p95_error: float
    total_error: float
    """Of their times' sum; negative: predicted too short."""
    beyond_error: float | None = None
    """In the median, of steps about twice as large as any that a fit was made of: what larger steps than the log's are
    off by, as far as that can be told. None where the log has too few."""


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
    ) -> None:
        """`seen`: the sizes of the steps that were measured."""
        self._inner: tuple[StepTimes, float] | None = None
        self._weights = weights
        self._costs = costs
        fitted = inputs @ weights
        order = np.argsort(fitted, kind="stable")
        self._fitted: list[float] = fitted[order].tolist()
        self._ratios: list[float] = (times / np.maximum(fitted, 1e-12))[order].tolist()
        """How the measured times differ from the fit, by what that says: noise is part of what is replayed, and small
        steps have another one than large ones."""
        self.seen = seen
        self.restart()
        self.pause = pause
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
        """These for steps of sizes that the log does not have, off by about `error`, and the log's own for all others:
        a measurement beside other work must not make those worse."""
        self._inner = log, error
        return self

    def expected(self, step: Step) -> float:
        """As steps that are about as long were, in the median."""
        inner = self._inner
        if inner is not None and not inner[0].seen.distance(StepShape.of(step)):
            return inner[0].expected(step)
        return self.expected_of(features(step, self._costs))

    def expected_of(self, given: Sequence[float]) -> float:
        """The same, by its features."""
        fitted = float(np.dot(self._weights, given))
        return fitted * float(np.median(self._near(fitted)))

    def draw(self, step: Step) -> float:
        """With the noise of one of the steps that are about as long."""
        shape, fit, error = StepShape.of(step), self, 0.0
        distance = self.seen.distance(shape)
        if distance:
            error = (1 + self.far_error) ** distance - 1
        elif self._inner is not None:
            log, known = self._inner
            fit, error = (self, known) if log.seen.distance(shape) else (log, 0.0)
        fitted = float(np.dot(fit._weights, features(step, self._costs)))
        seconds = fitted * self._scale * self._source.choice(fit._near(fitted)) * math.pow(1 + error, self._far)
        if distance:
            self.outside[shape] = self.outside.get(shape, 0.0) + seconds
            self.tokens_outside += shape.tokens
        self.seconds += seconds
        self.tokens += shape.tokens
        return seconds

    def restart(self, seed: int = 0, scale: float = 1.0, far: float = 0.0) -> None:
        """Noise from the beginning; with a `scale` all steps are so many times as long. Those of sizes that the log
        does not have are as much longer (`far` 1) or shorter (-1) as they may be off."""
        self._source, self._scale, self._far = random.Random(seed), scale, far
        self.seconds, self.tokens = 0.0, 0
        """Of the steps drawn since."""
        self.outside: dict[StepShape, float] = {}
        """The seconds of those among them whose sizes are outside of what was measured."""
        self.tokens_outside = 0

    def _near(self, fitted: float) -> list[float]:
        place = bisect_left(self._fitted, fitted)
        first = max(0, min(place - _NEAR // 2, len(self._ratios) - _NEAR))
        return self._ratios[first : first + _NEAR]


def fit_step_times(
    entries: Sequence[StepLogEntry], costs: StepCosts = _UNKNOWN, seed: int = 0, others: Sequence[TimedStep] = ()
) -> StepTimes:
    """From the steps of a log that succeeded and computed something, and `others`, of sizes that it does not have;
    `costs` as the log says them."""
    measured, pause = timed_steps(entries)
    if len(measured) < _FEWEST:
        raise InvalidRequestError(
            "LOG", f"has {len(measured)} steps that computed something; {_FEWEST} are needed to tell what a step takes"
        )
    random.Random(seed).shuffle(measured)
    cut = max(1, int(len(measured) * _HELD_OUT))
    inputs, times = _arrays([*measured, *others], costs)
    counts = np.ones(len(times))
    if others:
        counts[len(measured) :] = _MATTER * times[: len(measured)].sum() / times[len(measured) :].sum()
    seen = SeenSteps(StepShape.of(one.step) for one in [*measured, *others])
    smooth = _choose_smooth(inputs[cut:], times[cut:], counts[cut:])
    known = StepTimes(_fit(inputs[cut:], times[cut:], smooth, counts[cut:]), inputs[cut:], times[cut:], seen, costs)
    predicted = np.array([known.expected_of(one) for one in inputs[:cut]])
    errors = np.abs(predicted / times[:cut] - 1)
    quality = FitQuality(
        cut,
        float(np.median(errors)),
        float(np.quantile(errors, 0.95)),
        float(predicted.sum() / times[:cut].sum() - 1),
        _beyond_error(inputs, times, np.array([_sizes(one.step) for one in [*measured, *others]]), smooth),
    )
    return StepTimes(_fit(inputs, times, smooth, counts), inputs, times, seen, costs, pause, quality)


def timed_steps(entries: Sequence[StepLogEntry]) -> tuple[list[TimedStep], float]:
    """Those that succeeded and computed something, and the usual pause between two."""
    measured: list[TimedStep] = []
    pauses: list[float] = []
    last = float("-inf")
    for entry in entries:
        step = entry.step
        if step.now > last and last > float("-inf") and not _was_idle(step):
            pauses.append(step.now - last)
        seconds = entry.committed - max(step.now, last)
        last = entry.committed
        if entry.result is not None and step.scheduled and seconds > 0:
            measured.append(TimedStep(step, seconds))
    return measured, float(np.median(pauses)) if pauses else 0.0


def _arrays(steps: Sequence[TimedStep], costs: StepCosts) -> tuple[Array, Array]:
    return np.array([features(one.step, costs) for one in steps]), np.array([one.seconds for one in steps])


def _sizes(step: Step) -> tuple[int, int]:
    """Tokens, and those behind which one is drawn."""
    return step.num_tokens, sum(1 + len(one.guesses) for one in step.scheduled if one.samples)


def _was_idle(step: Step) -> bool:
    """Whether the engine had waited for requests before this step."""
    return len(step.admitted) == len(step.scheduled)


def _beyond_error(inputs: Array, times: Array, sizes: npt.NDArray[np.int64], smooth: float) -> float | None:
    """The larger half of the steps as a fit to the smaller one has them: by tokens, and by those behind which one is
    drawn, whichever is worse."""
    found = []
    for size in sizes.T:
        is_small = size <= size.max() / 2
        if is_small.sum() >= _FEWEST and (~is_small).any():
            counts = np.ones(int(is_small.sum()))
            fitted = inputs[~is_small] @ _fit(inputs[is_small], times[is_small], smooth, counts)
            found.append(float(np.median(np.abs(fitted / times[~is_small] - 1))))
    return max(found, default=None)


def _choose_smooth(inputs: Array, times: Array, counts: Array) -> float:
    """The most of it with which the fit is as good as any on steps it has not seen, and on those that were measured
    because the log does not have them: there are too few of these to hold some out."""
    cut = max(1, int(len(times) * _HELD_OUT))
    fits = [_fit(inputs[cut:], times[cut:], smooth, counts[cut:]) for smooth in _SMOOTH]
    tried = (np.arange(len(times)) < cut) | (counts != 1.0)
    matter = counts[tried]
    total = float((times[tried] * matter).sum())
    errors = [float((np.abs(inputs[tried] @ weights - times[tried]) * matter).sum() / total) for weights in fits]
    return next(smooth for smooth, error in zip(_SMOOTH, errors, strict=True) if error <= min(errors) + _AS_GOOD)


def _fit(inputs: Array, times: Array, smooth: float, counts: Array) -> Array:
    """Weights of at least 0 with the least relative errors, each step counting for as long as it took, `counts` times,
    and single outliers little."""
    scale: Array = np.maximum(np.abs(inputs).max(0), 1e-12)
    # One for all, so that they can be compared: as parts of what a row takes on average.
    scale[_SLOPES] = ((1 + inputs[:, _SLOPES].sum(1)) * counts).sum() / (times * counts).sum()
    equal = np.zeros((len(_KNEES), inputs.shape[1]))
    for place in range(len(equal)):
        equal[place, _SLOPES.start + place : _SLOPES.start + place + 2] = -1.0, 1.0
    equal *= smooth * np.sqrt(counts.sum())
    weight = np.sqrt(counts * times / np.average(times, weights=counts))
    matter = weight
    weights = np.zeros(inputs.shape[1])
    for _ in range(3):
        rows = np.concatenate([inputs / scale / times[:, None] * matter[:, None], equal])
        weights = _least_squares(rows, np.concatenate([matter, np.zeros(len(equal))]))
        errors = np.abs(inputs / scale @ weights / times - 1)
        usual = max(float(np.median(errors)), 1e-6)
        matter = weight * np.sqrt(np.minimum(1.0, 3 * usual / np.maximum(errors, 1e-12)))
    fitted: Array = weights / scale
    return fitted


def _least_squares(rows: Array, wanted: Array) -> Array:
    """The weights of at least 0 with the least squares: those that come out negative are left out, the worst first."""
    active = list(range(rows.shape[1]))
    weights = np.zeros(rows.shape[1])
    for _ in range(_ROUNDS):
        solution = np.linalg.lstsq(rows[:, active], wanted, rcond=None)[0]
        if (solution >= 0).all():
            weights[active] = solution
            break
        del active[int(np.argmin(solution))]
        if not active:
            break
    return weights
