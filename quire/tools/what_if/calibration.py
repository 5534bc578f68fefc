"""Steps that a log does not have, measured: a real engine computes some of each size, with made-up
prompts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from quire.engine import EngineCore, SchedulerConfig, make_requests
from quire.errors import QuireError
from quire.observe.step_log import LoggedEngine
from quire.sampling_params import SamplingParams
from quire.step import StepLogEntry
from quire.tools.what_if.step_mix import StepMix, mixes_to_measure
from quire.tools.what_if.step_parts import TimedStep, timed_as_a_whole, timed_steps
from quire.tools.what_if.step_times import StepTimes, fit_step_times

_SIZES = 6
"""Measured at a time of steps of answers alone, and as many of others, that the log does not have."""
_KNOWN_SIZES = 2
"""The same of steps that it has: by those, the machine of now can be compared with that of then."""
_ROUNDS = 4
"""Over all sizes, so that a slow moment is not one size's; fewer where time is over."""
_STEPS = 2
"""Of a size in each round."""
_SOME = 16
"""Tokens of a step, from which on twice as many take about twice as long, or less."""
_STARTING = 8
"""Steps in which all answers must have begun."""
_LASTING = 24
"""Tokens an answer may take: more than there are steps of one size."""
_SPEEDS = (0.5, 2.0)
"""How long steps may take that the log has, over what it says: beyond, this is another kind of
machine.
"""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Step times that know what was measured beside the log, and what that was."""

    times: StepTimes
    model: str
    steps: int
    sizes: int
    seconds: float
    """The measurement took."""
    speed: float
    """How long steps of the log's sizes took, over what the log says."""
    error: float
    """By how much the others may be off: what the fit differs from them by, in the median, and how
    far apart the log's sizes are in `speed`.
    """


def config_for(settings: Sequence[SchedulerConfig]) -> SchedulerConfig:
    """The settings of an engine that can compute any step of these, with little memory for keys and
    values.
    """
    rows, tokens, longest = (
        max(getattr(one, name) for one in settings)
        for name in ("max_num_seqs", "max_batched_tokens", "max_model_len")
    )
    base = settings[0]
    longest = min(longest, tokens + 2 * _LASTING)
    # All rows with short answers, and prompts of two steps: one may be in flight.
    blocks = (
        base.blocks_for(longest) + rows * base.blocks_for(_LASTING) + 2 * base.blocks_for(tokens)
    )
    config = replace(
        base, num_blocks=1 + blocks, policy="fcfs", num_host_blocks=0, prefix_caching=False
    )
    return replace(config, max_num_seqs=rows, max_batched_tokens=tokens, max_model_len=longest)


class Calibrator:
    """Measures steps on an engine made for it (`config_for`), and fits the log's step times to
    them, too.
    """

    def __init__(
        self,
        core: EngineCore,
        heard: list[StepLogEntry],
        vocab_size: int,
        model: str,
        logged: LoggedEngine,
        entries: Sequence[StepLogEntry],
    ) -> None:
        """`heard` gets the entries of the engine's steps; `entries` are the log's, and `logged` its
        engine.
        """
        self._maker = _StepMaker(core, heard, vocab_size)
        self._heard = heard
        self._model = model
        self._costs = logged.costs
        self._entries = entries
        self._graph_tokens = logged.config.max_checked_tokens
        self._times = fit_step_times(entries, logged.costs, graph_tokens=self._graph_tokens)
        self._known: dict[StepMix, float] = {}
        for one in timed_steps(entries, self._graph_tokens).steps:
            shape = StepMix.of(one.step)
            self._known[shape] = self._known.get(shape, 0.0) + one.host + one.seconds
        self._spent = 0.0

    def calibrate(
        self,
        outside: Mapping[StepMix, float],
        seconds: float,
        report: Callable[[float], None] = lambda done: None,
    ) -> Calibration:
        """Measures the sizes that what-ifs spend the seconds `outside` in, in at most so many
        `seconds` by the engine's clock. What was measured before counts, too. Raises QuireError
        where that can't be done, or says nothing of the log.
        """
        chosen = {
            *mixes_to_measure(outside, _SIZES),
            *mixes_to_measure(self._known, _KNOWN_SIZES),
        }
        began = self._maker.now()
        self._measure(
            sorted(chosen, key=lambda shape: (shape.tokens, shape)), began + seconds, report
        )
        self._spent += self._maker.now() - began
        return self._fit()

    def _measure(
        self, shapes: Sequence[StepMix], end: float, report: Callable[[float], None]
    ) -> None:
        """The smallest first; those that would take too long are left out."""
        took = dict.fromkeys(shapes, 0.0)
        for number in range(_ROUNDS):
            for place, shape in enumerate(shapes):
                before = shapes[place - 1] if place else shape
                # What a few tokens take says nothing of many.
                expected = (
                    took[shape]
                    or (before.tokens >= _SOME) * took[before] * shape.tokens / before.tokens
                )
                started = self._maker.now()
                if started + expected > end:
                    continue
                self._maker.make(shape)
                took[shape] = self._maker.now() - started
                report((number * len(shapes) + place + 1) / (_ROUNDS * len(shapes)))

    def _fit(self) -> Calibration:
        """Each size, divided by how long steps that the log has take now, over what they took then:
        the machine may be busier, or another one.
        """
        times = self._times
        measured = _counted(self._heard, self._graph_tokens, times.host is not None)
        by_shape: dict[StepMix, list[TimedStep]] = {}
        for one in measured:
            by_shape.setdefault(StepMix.of(one.step), []).append(one)
        typical = {
            shape: _typical(found, times.host is not None) for shape, found in by_shape.items()
        }
        outside = {shape: one for shape, one in typical.items() if times.seen.distance(shape)}
        inside = {shape: one for shape, one in typical.items() if shape not in outside}
        speeds = {shape: _over(one, times) for shape, one in inside.items()}
        if not speeds or not outside:
            raise QuireError("steps of such sizes take too long to measure them")
        speed = median(speeds.values())
        if not _SPEEDS[0] <= speed <= _SPEEDS[1]:
            raise QuireError(
                f"steps that the log has take {speed:.2g} times as long here: this is another kind of machine"
            )
        device, host = _part_speeds(inside, times) if times.host is not None else (speeds, {})
        others = [
            one._replace(
                seconds=one.seconds / device[_nearest(shape, device)],
                host=one.host / host[_nearest(shape, host)] if host else 0.0,
            )
            for shape, one in outside.items()
        ]
        fitted = fit_step_times(
            self._entries, self._costs, others=others, graph_tokens=self._graph_tokens
        )
        error = median(abs(1 / _over(one, fitted) - 1) for one in others)
        error += (max(speeds.values()) / min(speeds.values()) - 1) / 2
        fitted.outside_of(times, error)
        steps = sum(StepMix.of(one.step) in outside for one in measured)
        return Calibration(fitted, self._model, steps, len(outside), self._spent, speed, error)


class _StepMaker:
    """Gives an engine requests such that its next steps have a certain size."""

    def __init__(self, core: EngineCore, heard: list[StepLogEntry], vocab_size: int) -> None:
        assert core.clock is not None
        self.now = core.clock
        self._core = core
        self._heard = heard
        self._vocab_size = vocab_size
        self._chance = random.Random(0)
        self._count = 0

    def make(self, shape: StepMix) -> None:
        core = self._core
        heard = self._heard
        before = len(self._heard)
        names = [self._add(1, _LASTING) for _ in range(shape.answers)]
        for _ in range(_STARTING):
            if not names or (len(heard) > before and heard[-1].step.num_decodes == len(names)):
                break
            core.step(self.now())
        for _ in range(_STEPS):
            for number in range(shape.prompts):
                length = shape.prompt_tokens * (number + 1) // shape.prompts
                self._add(length - shape.prompt_tokens * number // shape.prompts, 1)
            core.step(self.now())
        core.abort(names, self.now())
        while core.has_work:
            core.step(self.now())

    def _add(self, prompt_tokens: int, max_tokens: int) -> str:
        self._count += 1
        prompt = [self._chance.randrange(self._vocab_size) for _ in range(max(1, prompt_tokens))]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        (request,) = make_requests(f"calibration-{self._count}", prompt, params, self._count)
        self._core.add_request(request, self.now())
        return request.request_id


def _counted(
    entries: Sequence[StepLogEntry], graph_tokens: int, has_parts: bool
) -> list[TimedStep]:
    """All but the first of each size, which may have been recorded or compiled; by the rule of the
    log's steps.
    """
    known: set[StepMix] = set()
    counted: list[TimedStep] = []
    for one in (
        timed_steps(entries, graph_tokens) if has_parts else timed_as_a_whole(entries)
    ).steps:
        shape = StepMix.of(one.step)
        if shape in known:
            counted.append(one)
        known.add(shape)
    return counted


def _typical(steps: Sequence[TimedStep], has_parts: bool) -> TimedStep:
    """Of steps of one size the fastest: what disturbs makes it longer, never shorter. With parts,
    whose noise is larger than that, the median of each; the device's where the host waited for it,
    else the shortest that it can be.
    """
    fastest = min(steps, key=lambda one: (one.is_bound, one.seconds))
    if not has_parts:
        return fastest
    # with its own step: some set up requests
    middle = sorted(steps, key=lambda one: one.host)[len(steps) // 2]
    known = [one.seconds for one in steps if not one.is_bound]
    return middle._replace(seconds=median(known) if known else fastest.seconds, is_bound=not known)


def _over(one: TimedStep, times: StepTimes) -> float:
    """How long a step took, over what is expected; the host's part of it where the device's is not
    known.
    """
    host, device = times.expected(one.step)
    return one.host / host if one.is_bound else (one.host + one.seconds) / (host + device)


def _part_speeds(
    inside: Mapping[StepMix, TimedStep], times: StepTimes
) -> tuple[dict[StepMix, float], dict[StepMix, float]]:
    """How long the device and the host take for steps that the log has, over what it says. Where
    the host never waits for the device, nobody knows how fast that is, and it does not matter.
    """
    expected = {shape: times.expected(one.step) for shape, one in inside.items()}
    known = {
        shape: one.seconds / expected[shape].device
        for shape, one in inside.items()
        if not one.is_bound
    }
    return known or dict.fromkeys(inside, 1.0), {
        shape: one.host / expected[shape].host for shape, one in inside.items()
    }


def _nearest(shape: StepMix, known: Iterable[StepMix]) -> StepMix:
    """The one of about the same size, and of the same kind if there is one: what slows a machine
    down may do so more where weights are read than where many rows are multiplied.
    """
    return min(
        known,
        key=lambda one: (
            (one.prompts > 0) is not (shape.prompts > 0),
            abs(math.log2(one.tokens / shape.tokens)),
        ),
    )
