"""Steps of sizes that a log does not have, measured on an engine whose steps take what is known."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from quire.engine import EngineCore, Scheduler, SchedulerConfig
from quire.errors import QuireError
from quire.observe.engine_metrics import derive_metrics
from quire.observe.step_log import LoggedEngine, StepLog
from quire.step import Step, StepLogEntry, StepResult
from quire.tools.what_if.calibration import Calibrator, config_for
from quire.tools.what_if.recorded import recorded_requests
from quire.tools.what_if.step_mix import SeenSteps, StepMix, add_seconds, mixes_to_measure
from quire.tools.what_if.step_times import fit_step_times
from quire.tools.what_if.what_if import Setting, Summary, parse_changes, predict
from tests.simulate.test_what_if import CONFIG, Machine, close, run

SMALL = replace(CONFIG, max_batched_tokens=24)


def gpu_seconds(step: Step) -> float:
    """Up to 64 tokens are multiplied while weights are read; then each takes its time."""
    return 0.010 + 0.0005 * max(0, step.num_tokens - 64)


def submit(machine: Machine, step: Step) -> Machine:
    machine.now += gpu_seconds(step) * machine._noise.uniform(0.98, 1.02)
    machine._result = StepResult(
        step.step_id, {one.request_id: (7,) for one in step.scheduled if one.samples}
    )
    return machine


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> list[StepLogEntry]:
    """A log of steps of at most 24 tokens."""
    monkeypatch.setattr(Machine, "submit", submit)
    return run(SMALL, StepLog(capacity=10**6))


class Engine:
    """Takes `slower` times as long as the log's; with up to `depth` steps in flight, as on a GPU."""

    def __init__(self, config: SchedulerConfig, slower: float = 1.0, depth: int = 1) -> None:
        self.now, self._free_at, self._slower = 0.0, 0.0, slower
        self.heard: list[StepLogEntry] = []
        self.core = EngineCore(Scheduler(config), self, depth, self.heard.append, lambda: self.now)

    def submit(self, step: Step) -> Submitted:
        self._free_at = max(self._free_at, self.now) + self._slower * gpu_seconds(step)
        tokens = {one.request_id: (7,) for one in step.scheduled if one.samples}
        return Submitted(self, self._free_at, StepResult(step.step_id, tokens))

    def calibrator(self, entries: list[StepLogEntry]) -> Calibrator:
        return Calibrator(self.core, self.heard, 50, "fake", LoggedEngine(1, SMALL), entries)


class Submitted(NamedTuple):
    engine: Engine
    ready: float
    value: StepResult

    def result(self) -> StepResult:
        self.engine.now = max(self.engine.now, self.ready)
        return self.value


@pytest.mark.slow
def test_from_small_steps_to_whole_prompts(small_steps: list[StepLogEntry]) -> None:
    """Nothing in the log says that a step of 200 tokens takes eight times as long as one of 24: a
    what-if without a measurement is far off, and says so; with one it is within 10%, on a machine
    that is slower now, too.
    """
    times = fit_step_times(small_steps)
    changes = "max_batched_tokens=256,max_num_seqs=6"
    setting = parse_changes(changes, Setting(SMALL))
    requests = recorded_requests(small_steps)
    measured = Summary.of(derive_metrics(run(setting.config, StepLog(capacity=10**6), noise=99)))
    blind = predict(requests, setting, times)
    assert blind.share_outside < 0.1 < blind.tokens_outside  # they seem to take no time
    assert blind.is_outside
    assert measured.per_token[1] > 1.2 * blind.run.per_token[1]
    engine = Engine(config_for([SMALL, setting.config]), slower=1.4, depth=2)
    calibrator = engine.calibrator(small_steps)
    done: list[float] = []
    found = calibrator.calibrate(blind.outside, 60.0, done.append)
    assert done == sorted(done)
    assert done[-1] == 1.0
    assert not engine.core.has_work
    made = {StepMix.of(entry.step) for entry in engine.heard}
    assert made >= set(mixes_to_measure(blind.outside, 6))  # each as it is in the what-if
    # They take longer than was thought, so more may come together while they do: larger ones again.
    better = predict(requests, setting, found.times)
    found = calibrator.calibrate(better.outside or blind.outside, 60.0)
    assert found.speed == pytest.approx(1.4, rel=0.03)
    assert found.error < 0.05
    known = predict(requests, setting, found.times)
    assert not known.is_outside
    close(known.run, measured, 0.10)
    # The log's own steps are told as well as before.
    assert found.times.quality.median_error < times.quality.median_error + 0.01


def test_another_kind_of_machine_says_nothing_about_the_log(
    small_steps: list[StepLogEntry],
) -> None:
    calibrator = Engine(replace(SMALL, max_num_seqs=8), 5.0).calibrator(small_steps)
    with pytest.raises(QuireError, match="take 5 times as long here"):
        calibrator.calibrate({StepMix(8, 0, 0): 1.0}, 60.0)


def test_sizes_that_take_too_long_are_left_out(small_steps: list[StepLogEntry]) -> None:
    shapes = {StepMix(3, 0, 0): 1.0, StepMix(1, 1, 100): 1.0, StepMix(0, 2, 100_000): 1.0}
    engine = Engine(
        replace(SMALL, max_batched_tokens=100_000, max_model_len=100_000, num_blocks=20_000)
    )
    engine.calibrator(small_steps).calibrate(shapes, 2.0)
    assert max(entry.step.num_tokens for entry in engine.heard) == 101
    assert engine.now < 2.5
    engine = Engine(SMALL)
    with pytest.raises(QuireError, match="take too long"):
        engine.calibrator(small_steps).calibrate(shapes, 0.0)


def test_what_is_outside_and_how_far() -> None:
    seen = SeenSteps([StepMix(2, 0, 0), StepMix(4, 0, 0), StepMix(1, 1, 15), StepMix(0, 2, 100)])
    assert (seen.most_tokens, seen.most_requests) == (100, 4)
    for within in (StepMix(3, 0, 0), StepMix(2, 1, 30), StepMix(0, 1, 105)):
        assert seen.distance(within) == 0.0, within
    assert seen.distance(StepMix(8, 0, 0)) == 1.0
    assert seen.distance(StepMix(1, 0, 0)) == 1.0  # smaller ones than any are unknown, too
    assert seen.distance(StepMix(0, 1, 400)) == 2.0
    assert seen.distance(StepMix(2, 6, 50)) == 1.0  # more requests
    assert SeenSteps([StepMix(4, 0, 0)]).distance(StepMix(0, 1, 4)) == 1.0  # none of its kind
    sums = add_seconds({StepMix(1, 0, 0): 1.0}, {StepMix(1, 0, 0): 2.0, StepMix(2, 0, 0): 1.0})
    assert sums == {StepMix(1, 0, 0): 3.0, StepMix(2, 0, 0): 1.0}


def test_a_few_sizes_stand_for_all() -> None:
    seconds = {StepMix(0, 1, size): 1.0 for size in range(30, 1000, 10)}
    seconds |= {StepMix(12, 0, 0): 2.0, StepMix(11, 0, 0): 90.0, StepMix(3, 0, 0): 0.001}
    chosen = mixes_to_measure(seconds, 4)
    assert chosen == sorted(chosen, key=lambda shape: shape.tokens)
    # the largest, although another of about its size takes more time
    assert StepMix(12, 0, 0) in chosen
    assert StepMix(3, 0, 0) not in chosen
    assert len([shape for shape in chosen if shape.prompts]) == 4
    assert chosen[-1] == StepMix(0, 1, 990)
    assert mixes_to_measure({}, 4) == []
