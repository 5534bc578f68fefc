"""The requests of a log again, on a virtual clock: the real scheduler with other settings, steps as
long as fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np

from quire.config import Duration
from quire.engine import EngineCore, Scheduler, SchedulerConfig
from quire.errors import CapacityError, InvalidRequestError
from quire.observe.engine_metrics import EngineMetrics
from quire.step import RequestMetrics, Step, StepResult
from quire.tools.what_if.recorded import RecordedRequest
from quire.tools.what_if.step_mix import StepMix
from quire.tools.what_if.step_times import StepTimes

_CHANGES = ("max_num_seqs", "max_batched_tokens", "max_model_len", "num_blocks", "num_host_blocks")
_MOST_STEPS = 5_000_000
_SCALES = (1.0, 1.02, 0.98, 1.01, 0.99)
"""Of step times, in turn: by so much a fit is off, and near an engine's limit it becomes much more
in the queue.
"""
_ENDS = ((1.03, 1.0), (0.97, -1.0))
"""Of two more plays for the range of each figure: what all are multiplied with, and by which part
of what they may be off those are longer whose sizes the log does not have.
"""
PLAYS = len(_SCALES) + len(_ENDS)
"""Of a setting, at most."""
_STEPS_PLAYED = 200_000
"""Fewer plays of a log that long: they take 0.1 s per thousand steps."""
_OUTSIDE = 0.01
"""Of a setting's time or tokens: less in steps of sizes that the log does not have is nothing to
measure or say.
"""
_UNCERTAIN = 0.15
"""Between the lowest and the highest of a figure: then they are said."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine's settings, and how quickly requests come."""

    config: SchedulerConfig
    depth: int = 1
    rate: float = 1.0
    """Of arrivals: 2 is twice as many a second as were recorded."""


def parse_changes(text: str, base: Setting) -> Setting:
    """`max_num_seqs=128,policy=priority,rate=2` and so on, on top of what was recorded."""
    config: dict[str, Any] = {}
    rate = base.rate
    depth = base.depth
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, is_given, value = part.partition("=")
        try:
            if name in _CHANGES:
                config[name] = int(value)
            elif name == "depth":
                depth = int(value)
            elif name == "rate":
                rate = float(value)
            elif name in ("policy", "gives_way") and is_given:
                config[name] = value
            elif name in ("target_token_time", "target_first_token"):
                config[name] = None if value == "none" else Duration().check(name, value)
            elif name == "prefix_caching" and value in ("true", "false"):
                config[name] = value == "true"
            else:
                raise ValueError
        except ValueError:
            known = ", ".join(
                (
                    *_CHANGES,
                    "policy",
                    "prefix_caching=true|false",
                    "target_token_time",
                    "target_first_token",
                    "gives_way",
                    "depth",
                    "rate",
                )
            )
            raise InvalidRequestError(
                "--what-if", f"{part!r}: give NAME=VALUE with one of {known}"
            ) from None
    if not 0 < rate < float("inf") or depth < 1:
        raise InvalidRequestError("--what-if", "rate must be above 0 and depth at least 1")
    old = base.config
    is_full = old.num_usable_blocks == old.max_num_seqs * old.blocks_for(old.max_model_len)
    if is_full and "num_blocks" not in config:
        # The cache had all that its rows could use, and would have more for more of them.
        rows = config.get("max_num_seqs", old.max_num_seqs)
        length = config.get("max_model_len", old.max_model_len)
        config["num_blocks"] = 1 + rows * old.blocks_for(length)
    return Setting(replace(old, **config), depth, rate)


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Pending:
    def __init__(self, clock: _Clock, ready: float, fetch: float, result: StepResult) -> None:
        self._clock = clock
        self._ready = ready
        self._fetch = fetch
        self._result = result

    def result(self) -> StepResult:
        self._clock.now = max(self._clock.now + self._fetch, self._ready)
        return self._result


class _TimedRunner:
    """Computes nothing: tokens are any tokens, and a step takes its time: the host's, then the
    device's, which computes one after the other.
    """

    def __init__(self, clock: _Clock, times: StepTimes) -> None:
        self._clock = clock
        self._times = times
        self._fetch = 0.0 if times.host is None else times.host.fetch
        self._free_at = 0.0

    def submit(self, step: Step) -> _Pending:
        decided = self._clock.now
        takes = self._times.draw(step)
        self._clock.now = launched = decided + takes.host
        begin = decided if self._times.is_split(step) else launched
        self._free_at = max(max(self._free_at, begin) + takes.device, launched)
        tokens = {one.request_id: (0,) for one in step.scheduled if one.samples}
        pooled = {one.request_id: b"" for one in step.scheduled if one.samples}
        return _Pending(
            self._clock, self._free_at, self._fetch, StepResult(step.step_id, tokens, pooled=pooled)
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """Several plays of the same requests, with other noise and steps that are a bit longer or
    shorter.
    """

    run: Summary
    """The median of each figure."""
    low: Summary
    high: Summary
    """Those of all plays, and of two more in which steps are as much longer and shorter as they may
    be off.
    """
    refused: int
    """Requests that could never have run with these settings."""
    outside: Mapping[StepMix, float]
    """Seconds of steps whose sizes are outside of what was measured."""
    share_outside: float
    """Of the time of all steps."""
    tokens_outside: float
    """Those steps' share of all tokens."""

    @property
    def is_outside(self) -> bool:
        """Whether such steps matter; judged by their tokens, too: nobody knows their times."""
        return max(self.share_outside, self.tokens_outside) > _OUTSIDE

    def uncertain(self) -> Iterator[tuple[str, int, float, float]]:
        """Figures that depend on a step's last percent: field, index, and between what they lie."""
        for name in ("ttft", "per_token", "latency"):
            for index in range(2):
                low = getattr(self.low, name)[index]
                high = getattr(self.high, name)[index]
                if high - low > _UNCERTAIN * getattr(self.run, name)[index]:
                    yield name, index, low, high


class Play(NamedTuple):
    """One of the plays of a setting."""

    setting: Setting
    seed: int
    scale: float
    """Of all step times."""
    far: float = 0.0
    """Of what those may be off whose sizes the log does not have."""


class PlayResult(NamedTuple):
    """What came of one."""

    run: Summary
    refused: int
    outside: Mapping[StepMix, float]
    share_outside: float
    tokens_outside: float


PlayAll = Callable[[Sequence[Play]], Sequence[PlayResult]]


def predict(requests: Sequence[RecordedRequest], setting: Setting, times: StepTimes) -> Prediction:
    """What would have been with a setting."""
    return predict_all([setting], lambda plays: [play_once(requests, times, one) for one in plays])[
        0
    ]


def predict_all(settings: Sequence[Setting], play_all: PlayAll) -> list[Prediction]:
    """The same with each of several, by whoever plays them: no play depends on another."""
    firsts = play_all([Play(one, 0, _SCALES[0]) for one in settings])
    plays: list[Play] = []
    counts = []
    for setting, first in zip(settings, firsts, strict=True):
        scales = _SCALES[1 : max(1, _STEPS_PLAYED // max(first.run.steps, 1))]
        plays += [Play(setting, seed, scale) for seed, scale in enumerate(scales, 1)]
        # And with all steps as far off as they may be, those that the log does not have, too.
        plays += [Play(setting, 1 + len(scales), *ends) for ends in _ENDS]
        counts.append(len(scales) + len(_ENDS))
    found = iter(play_all(plays))
    predictions = []
    for first, count in zip(firsts, counts, strict=True):
        every = [first.run, *(one.run for one in islice(found, count))]
        runs = every[: -len(_ENDS)]
        low = Summary.over(every, min)
        high = Summary.over(every, max)
        predictions.append(Prediction(Summary.over(runs, median_low), low, high, *first[1:]))
    return predictions


def play_once(requests: Sequence[RecordedRequest], times: StepTimes, one: Play) -> PlayResult:
    times.restart(one.seed, one.scale, one.far)
    played, refused = play(requests, one.setting, times)
    share = sum(times.outside.values()) / max(times.seconds, 1e-9)
    # Of those whose end the log has: the others are there, but were not counted in it either.
    ended = {
        _played_name(number, request)
        for number, request in enumerate(requests)
        if request.finish_reason
    }
    return PlayResult(
        Summary.of(played, ended or None),
        refused,
        times.outside,
        share,
        times.tokens_outside / max(times.tokens, 1),
    )


def play(
    requests: Sequence[RecordedRequest], setting: Setting, times: StepTimes
) -> tuple[EngineMetrics, int]:
    """What would have happened; and how many requests could never have run with these settings."""
    clock = _Clock()
    metrics = EngineMetrics(keep=10**9)
    scheduler = Scheduler(setting.config)
    core = EngineCore(scheduler, _TimedRunner(clock, times), setting.depth, metrics.observe, clock)
    start = requests[0].admission.arrival if requests else 0.0
    waiting = [
        ((one.admission.arrival if one.noticed is None else one.noticed) - start, number, one)
        for number, one in enumerate(requests)
    ]
    waiting.sort(key=lambda one: one[:2], reverse=True)
    refused = 0
    for _ in range(_MOST_STEPS):
        if not core.has_work:
            if not waiting:
                break
            clock.now = max(clock.now, waiting[-1][0] / setting.rate)
        while waiting and waiting[-1][0] / setting.rate <= clock.now:
            _, number, one = waiting.pop()
            arrival = (one.admission.arrival - start) / setting.rate
            # Names are used again, and may still be in use when things take longer.
            request = one.fixed(_played_name(number, one))
            request.group_id = (
                None if request.group_id is None else f"{request.group_id}@{one.admission.arrival}"
            )
            try:
                core.add_request(request, arrival)
            except (CapacityError, InvalidRequestError):
                refused += 1
        before = metrics.counters.steps
        core.step(clock.now)
        clock.now += times.draw_pause(clock.now, metrics.counters.steps > before)
    return metrics, refused


def _played_name(number: int, one: RecordedRequest) -> str:
    return f"{number}:{one.name}"


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in the figures people look at. Times are in seconds."""

    requests: int
    seconds: float
    """From the first arrival to the last end."""
    ttft: tuple[float, float]
    """Median and 95th percentile."""
    per_token: tuple[float, float]
    latency: tuple[float, float]
    tokens_per_second: float
    steps: int
    preemptions: int
    hit_rate: float
    """Of the prompt tokens of all admissions, those that were found in a cache."""

    @classmethod
    def of(cls, metrics: EngineMetrics, only: Collection[str] | None = None) -> Summary:
        """`only`: of requests of these names."""
        finished = [one for one in metrics.finished if only is None or one.request_id in only]
        counters = metrics.counters
        begin = min((one.arrival for one in finished), default=0.0)
        seconds = max((one.finished for one in finished), default=0.0) - begin
        found = counters.cached_tokens + counters.host_tokens
        return cls(
            len(finished),
            seconds,
            _two([one.time_to_first_token for one in finished]),
            _two([one.time_per_output_token for one in finished]),
            _two([_latency(one) for one in finished]),
            sum(one.num_output_tokens for one in finished) / seconds if seconds else 0.0,
            counters.steps,
            sum(counters.preemptions.values()),
            found / max(1, found + counters.computed_tokens - counters.sampled_tokens),
        )

    @classmethod
    def over(cls, runs: Sequence[Summary], choose: Callable[[list[Any]], Any]) -> Summary:
        """One figure of several, each by itself."""
        fields: dict[str, Any] = {}
        for name in cls.__slots__:
            values = [getattr(run, name) for run in runs]
            is_pair = isinstance(values[0], tuple)
            fields[name] = (
                tuple(choose(list(one)) for one in zip(*values, strict=True))
                if is_pair
                else choose(values)
            )
        return cls(**fields)

    def as_json(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def _latency(one: RequestMetrics) -> float:
    return one.finished - one.arrival


def _two(values: Sequence[float | None]) -> tuple[float, float]:
    known = [value for value in values if value is not None]
    if not known:
        return 0.0, 0.0
    return float(np.quantile(known, 0.5)), float(np.quantile(known, 0.95))
