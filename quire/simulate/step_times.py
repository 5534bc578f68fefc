"""How long a step takes, by what is in it: fitted to the steps of a log, and tried on those the fit has not seen."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidRequestError
from quire.step import Step, StepLogEntry

Array = npt.NDArray[np.float64]
_FEWEST = 30
"""Steps, below which there is nothing to fit."""
_KNEES = tuple(2**power for power in range(13))
"""Numbers of tokens from which on one more may cost more or less: a GPU multiplies for nothing while it reads weights,
and many rows take a CPU less time each than few."""
_SMOOTH = 0.0005
"""How much it counts that one more token costs as much above a knee as below it, where no step says otherwise."""
_FIRST_SLOPE = 1
"""Among the features, those of the knees."""
_ROUNDS = 20
_HELD_OUT = 0.2
_NEAR = 25
"""Steps whose noise a step may have."""


def features(step: Step, head_share: float = 0.0) -> list[float]:
    """What a step's time depends on: tokens, between each two knees; keys that are read, products of queries and keys,
    blocks that are copied. A token that samples costs more by `head_share`, as its scores are products, too."""
    tokens = step.num_tokens
    samples = sum(one.samples for one in step.scheduled)
    slopes = [_between(tokens, knee) + head_share * _between(samples, knee) for knee in _KNEES]
    keys = sum(one.start + one.num_tokens for one in step.scheduled)
    products = sum(one.num_tokens * (one.start + one.num_tokens / 2) for one in step.scheduled if one.num_tokens > 1)
    return [1.0, *slopes, float(keys), products, float(len(step.copies))]


def _between(count: int, knee: int) -> float:
    """So many of them are above a knee and not above the next; above the last, all."""
    most = math.inf if knee == _KNEES[-1] else knee
    return float(min(max(0, count - knee), most))


@dataclass(frozen=True, slots=True)
class FitQuality:
    """How far predictions are off, as a part of what was measured, for steps the fit has not seen."""

    num_steps: int
    median_error: float
    p95_error: float
    total_error: float
    """Of their times' sum; negative: predicted too short."""


class StepTimes:
    """Seconds of a step, and of the pause before the next."""

    def __init__(
        self,
        weights: Array,
        inputs: Array,
        times: Array,
        sizes: tuple[int, int],
        head_share: float,
        pause: float = 0.0,
        quality: FitQuality | None = None,
    ) -> None:
        """`sizes`: the most tokens, and tokens that sample, of a step that was measured."""
        self._weights = weights
        self._head_share = head_share
        fitted = inputs @ weights
        order = np.argsort(fitted, kind="stable")
        self._fitted: list[float] = fitted[order].tolist()
        self._ratios: list[float] = (times / np.maximum(fitted, 1e-12))[order].tolist()
        """How the measured times differ from the fit, by what that says: noise is part of what is replayed, and small
        steps have another one than large ones."""
        self._most_tokens, self._most_samples = sizes
        self.restart()
        self.pause = pause
        self._quality = quality

    @property
    def quality(self) -> FitQuality:
        assert self._quality is not None
        return self._quality

    def expected(self, given: Sequence[float]) -> float:
        """Of a step with these features: as steps that are about as long were, in the median."""
        fitted = float(np.dot(self._weights, given))
        return fitted * float(np.median(self._near(fitted)))

    def draw(self, step: Step) -> float:
        """With the noise of one of the steps that are about as long."""
        fitted = float(np.dot(self._weights, features(step, self._head_share)))
        self.num_drawn += 1
        tokens, samples = _sizes(step)
        self.num_beyond += tokens > self._most_tokens or samples > self._most_samples
        return fitted * self._source.choice(self._near(fitted))

    def restart(self) -> None:
        """The same noise from the beginning."""
        self._source = random.Random(0)
        self.num_drawn = self.num_beyond = 0
        """Steps, and those with more tokens or answers in them than any that was measured."""

    def _near(self, fitted: float) -> list[float]:
        place = bisect_left(self._fitted, fitted)
        first = max(0, min(place - _NEAR // 2, len(self._ratios) - _NEAR))
        return self._ratios[first : first + _NEAR]


def fit_step_times(entries: Sequence[StepLogEntry], head_share: float = 0.0, seed: int = 0) -> StepTimes:
    """From the steps of a log that succeeded and computed something; `head_share` as the log says it."""
    measured: list[tuple[list[float], float, tuple[int, int]]] = []
    pauses: list[float] = []
    last = float("-inf")
    for entry in entries:
        step = entry.step
        if step.now > last and last > float("-inf") and not _was_idle(step):
            pauses.append(step.now - last)
        seconds = entry.committed - max(step.now, last)
        last = entry.committed
        if entry.result is not None and step.scheduled and seconds > 0:
            measured.append((features(step, head_share), seconds, _sizes(step)))
    if len(measured) < _FEWEST:
        raise InvalidRequestError(
            "LOG", f"has {len(measured)} steps that computed something; {_FEWEST} are needed to tell what a step takes"
        )
    order = list(range(len(measured)))
    random.Random(seed).shuffle(order)
    cut = max(1, int(len(order) * _HELD_OUT))
    inputs = np.array([measured[index][0] for index in order])
    times = np.array([measured[index][1] for index in order])
    most = max(one[2][0] for one in measured), max(one[2][1] for one in measured)
    known = StepTimes(_fit(inputs[cut:], times[cut:]), inputs[cut:], times[cut:], most, head_share)
    predicted = np.array([known.expected(one) for one in inputs[:cut]])
    errors = np.abs(predicted / times[:cut] - 1)
    quality = FitQuality(
        cut, float(np.median(errors)), float(np.quantile(errors, 0.95)), float(predicted.sum() / times[:cut].sum() - 1)
    )
    pause = float(np.median(pauses)) if pauses else 0.0
    return StepTimes(_fit(inputs, times), inputs, times, most, head_share, pause, quality)


def _sizes(step: Step) -> tuple[int, int]:
    """Tokens, and those that sample."""
    return step.num_tokens, sum(one.samples for one in step.scheduled)


def _was_idle(step: Step) -> bool:
    """Whether the engine had waited for requests before this step."""
    return len(step.admitted) == len(step.scheduled)


def _fit(inputs: Array, times: Array) -> Array:
    """Weights of at least 0 with the least relative errors, each step counting for as long as it took and single
    outliers little."""
    scale: Array = np.maximum(np.abs(inputs).max(0), 1e-12)
    slopes = slice(_FIRST_SLOPE, _FIRST_SLOPE + len(_KNEES))
    scale[slopes] = inputs[:, slopes].sum(1).max()  # one for all, so that they can be compared
    smooth = np.zeros((len(_KNEES) - 1, inputs.shape[1]))
    for knee in range(len(smooth)):
        smooth[knee, _FIRST_SLOPE + knee : _FIRST_SLOPE + knee + 2] = -1.0, 1.0
    weight = np.sqrt(times / times.mean())
    smooth *= _SMOOTH * np.sqrt(len(times)) / np.median(times)
    matter = weight
    weights = np.zeros(inputs.shape[1])
    for _ in range(3):
        rows = np.concatenate([inputs / scale / times[:, None] * matter[:, None], smooth])
        weights = _least_squares(rows, np.concatenate([matter, np.zeros(len(smooth))]))
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
