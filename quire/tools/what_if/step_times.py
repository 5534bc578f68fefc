"""How long a step takes, by what is in it: a table of the steps of a log, tried on those it has not
seen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.errors import InvalidRequestError
from quire.observe.row_costs import RowCosts
from quire.step import Step, StepLogEntry
from quire.tools.what_if.host_times import HostTimes
from quire.tools.what_if.size_table import Sample, Size, SizeTable
from quire.tools.what_if.step_mix import SeenSteps, StepMix
from quire.tools.what_if.step_parts import TimedStep, is_split, timed_steps

_FEWEST = 30
"""Steps, below which there is nothing to make a table of."""
_UNKNOWN = RowCosts()
_HELD_OUT = 0.2
_FAR_ERROR = 0.3
"""What steps of twice the size are taken to be off by where the log can't say."""


@dataclass(frozen=True, slots=True)
class FitQuality:
    """How far predictions are off, relative to what was measured, for steps the table has not seen."""

    num_steps: int
    median_error: float
    p95_error: float
    total_error: float
    """Of the total time; negative if predicted too short."""
    beyond_error: float | None = None
    """In the median, of steps about twice as large as any in a table: what larger steps than the
    log's are off by, as far as that can be known. None where the log has too few.
    """


class HostAndDevice(NamedTuple):
    """What a step takes."""

    host: float
    device: float


class StepTimes:
    """Seconds of a step, and of the pause before the next."""

    def __init__(
        self,
        table: SizeTable,
        seen: SeenSteps,
        costs: RowCosts,
        pause: float = 0.0,
        quality: FitQuality | None = None,
        host: HostTimes | None = None,
        graph_tokens: int | None = None,
    ) -> None:
        """`seen`: the sizes of the steps that were measured. With `host`, the table has the
        device's times.
        """
        self._inner: tuple[StepTimes, float] | None = None
        self._table = table
        self._costs = costs
        self._graph_tokens = graph_tokens
        self.seen = seen
        self.pause = pause
        self.host = host
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

    def expected(self, step: Step) -> HostAndDevice:
        """What such steps took in the median."""
        inner = self._inner
        if inner is not None and not inner[0].seen.distance(StepMix.of(step)):
            return inner[0].expected(step)
        device = self._table.seconds(size_of(step, self._costs, self._graph_tokens))
        return HostAndDevice(self.host.expected(step) if self.host is not None else 0.0, device)

    def draw(self, step: Step) -> HostAndDevice:
        """With the noise of one of the steps that are about as long."""
        shape = StepMix.of(step)
        fit = self
        error = 0.0
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
            size = size_of(step, self._costs, self._graph_tokens)
            device = (
                fit._table.seconds(size)
                * fit._table.draw(size, self._source)
                * self._scale
                * math.pow(1 + error, self._far)
            )
        if fit.host is not None:
            host = fit.host.draw(step) * self._scale * math.pow(1 + error, self._far)
        if distance:
            self.outside[shape] = self.outside.get(shape, 0.0) + host + device
            self.tokens_outside += shape.tokens
        self.seconds += host + device
        self.tokens += shape.tokens
        return HostAndDevice(host, device)

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
        self._source = random.Random(seed)
        self._scale = scale
        self._far = far
        for one in (self,) if self._inner is None else (self, self._inner[0]):
            if one.host is not None:
                one.host.restart(seed)
        self.seconds = 0.0
        self.tokens = 0
        """Of the steps drawn since."""
        self.outside: dict[StepMix, float] = {}
        """The seconds of those among them whose sizes are outside of what was measured."""
        self.tokens_outside = 0


def size_of(step: Step, costs: RowCosts, graph_tokens: int | None) -> Size:
    """The work of its rows: their products, those of the scores of rows that are sampled, and of
    pairs of queries and keys in prompts, in rows of the layers' matrices.
    """
    pairs = sum(
        one.num_tokens * (one.start + one.num_tokens / 2)
        for one in step.scheduled
        if one.num_tokens > 1
    )
    keys = float(sum(one.start + one.num_tokens for one in step.scheduled))
    rows = 1 + costs.work(*_counts(step)) + costs.pair_share * pairs
    return Size(StepMix.of(step).kind(graph_tokens), rows, keys)


def _counts(step: Step) -> tuple[int, int]:
    """Tokens, and those behind which one is sampled."""
    return step.num_tokens, sum(1 + len(one.draft_tokens) for one in step.scheduled if one.samples)


def fit_step_times(
    entries: Sequence[StepLogEntry],
    costs: RowCosts = _UNKNOWN,
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

    seen = SeenSteps((StepMix.of(one.step) for one in [*timeline.steps, *others]), limit)
    measured = list(timeline.steps)
    random.Random(0).shuffle(measured)
    cut = max(1, int(len(measured) * _HELD_OUT))
    held = [one for one in measured[:cut] if not one.is_bound] or measured[:cut]
    known = StepTimes(
        _table([*measured[cut:], *others], costs, limit), seen, costs, graph_tokens=limit
    )
    host = None
    if timeline.has_parts:
        known.host = HostTimes(timeline._replace(steps=measured[cut:]), graph_tokens)
        host = HostTimes(timeline, graph_tokens, others)
    predicted = np.array([sum(known.expected(one.step)) for one in held])
    took = np.array([one.host + one.seconds for one in held])
    errors = np.abs(predicted / took - 1)
    quality = FitQuality(
        len(held),
        float(np.median(errors)),
        float(np.quantile(errors, 0.95)),
        float(predicted.sum() / took.sum() - 1),
        _beyond_error(measured, costs, limit),
    )
    every = _table([*measured, *others], costs, limit)
    return StepTimes(every, seen, costs, timeline.pause, quality, host, limit)


def _table(steps: Sequence[TimedStep], costs: RowCosts, graph_tokens: int | None) -> SizeTable:
    """Of steps whose times are known. Those that took at most as long as they say count where the
    others have them longer; where the host hardly ever waits for the device, what a step takes at
    most is what it takes.
    """
    known = [_sample(one, costs, graph_tokens) for one in steps if not one.is_bound]
    bounds = [_sample(one, costs, graph_tokens) for one in steps if one.is_bound]
    if len(known) < _FEWEST:
        return SizeTable(known + bounds)
    table = SizeTable(known)
    return SizeTable(known + [one for one in bounds if table.seconds(one.size) > one.seconds])


def _sample(one: TimedStep, costs: RowCosts, graph_tokens: int | None) -> Sample:
    return Sample(size_of(one.step, costs, graph_tokens), one.seconds)


def _beyond_error(
    steps: Sequence[TimedStep], costs: RowCosts, graph_tokens: int | None
) -> float | None:
    """The larger half of the steps as a table of the smaller half has them: by tokens, and by those
    behind which one is sampled, whichever is worse.
    """
    counts = np.array([_counts(one.step) for one in steps])
    samples = [_sample(one, costs, graph_tokens) for one in steps]
    found = []
    for count in counts.T:
        is_small = count <= count.max() / 2
        small = [sample for sample, small in zip(samples, is_small, strict=True) if small]
        large = [sample for sample, small in zip(samples, is_small, strict=True) if not small]
        if len(small) >= _FEWEST and large:
            table = SizeTable(small)
            errors = [abs(table.seconds(one.size) / one.seconds - 1) for one in large]
            found.append(float(np.median(errors)))
    return max(found, default=None)
