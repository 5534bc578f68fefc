"""The loop: steps in flight, runners that fail, and what is left afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.engine.block_manager import BlockManager
from quire.engine.config import SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.invariants import InvariantError, check_invariants
from quire.engine.request import make_requests
from quire.engine.scheduler import Scheduler
from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.step import Step, StepResult
from quire.tools.simulate.fake_runner import FakePending, FakeRunner, StepFault
from quire.tools.simulate.scenario import FaultyPool
from tests.engine.harness import Harness, config


def test_engine_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, quire.tools.simulate.simulation; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_pipe_is_filled_before_the_first_wait() -> None:
    engine = Harness(depth=3)
    engine.add("request", range(5), max_tokens=6)
    engine.turn(2)
    assert len(engine.scheduler.in_flight) == 2
    assert engine.tokens["request"] == []
    engine.turn()
    assert len(engine.tokens["request"]) == 1
    engine.run()
    engine.check_answers()


def test_depth_below_one_is_refused() -> None:
    settings = config()
    with pytest.raises(InvalidRequestError, match="depth"):
        EngineCore(Scheduler(settings), FakeRunner(settings, 50), depth=0)


def test_an_idle_engine_does_nothing() -> None:
    engine = Harness()
    assert engine.core.step(1.0) == []
    assert engine.steps == []


def test_clock_gives_the_times_results_arrive() -> None:
    settings = config()
    core = EngineCore(Scheduler(settings), FakeRunner(settings, 50), clock=lambda: 10.0)
    for request in make_requests("a", [1, 2], SamplingParams(max_tokens=1), 0):
        core.add_request(request, 1.0)
    (update,) = core.step(2.0)
    assert update.metrics is not None
    assert update.metrics.queue_time == 1.0
    assert update.metrics.time_to_first_token == 9.0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("fault", ["submit", "result"])
@pytest.mark.parametrize("failing_step", [0, 1, 2, 5])
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(
    failing_step: int, fault: StepFault, depth: int
) -> None:
    engine = Harness(config(num_host_blocks=4), depth=depth, step_faults={failing_step: fault})
    engine.add("a", range(9), max_tokens=12)
    engine.add("b", range(9), max_tokens=12, n=2)
    engine.turn(failing_step + depth)
    engine.add("c", range(9), max_tokens=12)
    engine.run()
    assert engine.reason("a") == "error"
    assert engine.ends["a"].error is not None
    assert f"injected: step {failing_step}" in engine.ends["a"].error
    assert engine.tokens["a"] == engine.solo("a")[0][: len(engine.tokens["a"])]
    engine.check_answers("c")
    assert engine.scheduler.blocks.pool.num_free == 32
    failed = [entry.step.step_id for entry in engine.log if entry.error is not None]
    assert failed[0] == failing_step
    assert len(failed) <= depth


def test_requests_outside_the_failed_steps_survive() -> None:
    # Two rows, budget for one of two prompts per step: "b" is not in step 1.
    engine = Harness(config(max_num_seqs=2, max_batched_tokens=6), step_faults={1: "result"})
    engine.add("a", range(12), max_tokens=3)
    engine.add("b", range(20, 32), max_tokens=3)
    engine.run()
    assert engine.reason("a") == "error"
    engine.check_answers("b")


class Interrupted:
    """A runner whose first submission is interrupted by Ctrl-C, or whose first result is."""

    def __init__(self, runner: FakeRunner, where: str) -> None:
        self.runner = runner
        self.where = where
        self.pending: FakePending | None = None

    def _interrupt(self, where: str) -> None:
        if self.where == where:
            self.where = ""
            raise KeyboardInterrupt

    def submit(self, step: Step) -> Interrupted:
        self._interrupt("submit")
        self.pending = self.runner.submit(step)
        return self

    def result(self) -> StepResult:
        self._interrupt("result")
        assert self.pending is not None
        return self.pending.result()


@pytest.mark.parametrize(("where", "reason"), [("submit", "error"), ("result", "length")])
def test_an_interrupt_leaves_an_engine_that_can_go_on(where: str, reason: str) -> None:
    settings = config()
    core = EngineCore(Scheduler(settings), Interrupted(FakeRunner(settings, 50), where))
    for request in make_requests("a", [1, 2], SamplingParams(max_tokens=3), 0):
        core.add_request(request, 0.0)
    with pytest.raises(KeyboardInterrupt):
        core.step(0.0)
    updates = []
    while core.has_work:
        updates += core.step(1.0)
    assert updates[-1].finish_reason == reason
    check_invariants(core.scheduler)


@pytest.mark.parametrize("refuse", [True, False])
def test_the_nth_allocation_failing_never_breaks_the_bookkeeping(refuse: bool) -> None:
    settings = config(num_blocks=12, num_host_blocks=3)
    for number in range(1, 40):
        some, none = frozenset([number]), frozenset[int]()
        pool = FaultyPool(settings.num_blocks, some if refuse else none, none if refuse else some)
        engine = Harness(settings, depth=2, blocks=BlockManager(settings, pool=pool))
        engine.add("a", range(13), max_tokens=8)
        engine.add("b", range(6), max_tokens=8, n=2)
        engine.run()
        engine.add("c", range(13), max_tokens=8)
        engine.run()
        failed = [name for name in engine.requests if engine.reason(name) == "error"]
        assert len(failed) <= (0 if refuse else 1)
        engine.check_answers(*(name for name in engine.requests if name not in failed))
        assert pool.num_free == 11


@pytest.mark.parametrize("faulty_step", [0, 1, 2])
def test_an_answer_that_fails_leaves_the_others_to_its_prompt_alone(faulty_step: int) -> None:
    engine = Harness(depth=2, request_faults={faulty_step: 0})
    engine.add("group", range(6), n=3)
    engine.add("other", range(6))
    engine.run()
    failed = [name for name in engine.requests if engine.reason(name) == "error"]
    assert len(failed) == 1
    engine.check_answers(*(name for name in engine.requests if name not in failed))


def test_copies_not_yet_submitted_are_forgotten_with_the_failed_ones_they_depend_on() -> None:
    # Host tier of one slot. "b" is restored from it in a step that will fail; meanwhile "x" pushes
    # it out of the slot, and "b" is preempted: the block saved now never held what it should.
    settings = SchedulerConfig(
        num_blocks=9,
        max_num_seqs=4,
        max_batched_tokens=64,
        max_model_len=32,
        block_size=4,
        num_host_blocks=1,
    )
    engine = Harness(settings, depth=1)
    prompt = [1, 2, 3, 4, 5]
    engine.add("a", prompt, max_tokens=1)
    engine.run()
    blocks = engine.scheduler.blocks
    engine.add("flood", range(10, 40), max_tokens=1)  # Evicts a's block to the host.
    engine.run()
    assert len(blocks.host) == 1
    engine.add("b", prompt, max_tokens=4)
    failing = engine.scheduler.schedule(engine.now)
    assert [copy.kind for copy in failing.copies if copy.kind == "host_to_device"] == [
        "host_to_device"
    ]
    (key,) = [key for key, _ in blocks.host._slots.values()]
    blocks.host.drop(0)
    engine.scheduler.preempt("b")
    assert blocks.host.find(key) is not None
    engine.scheduler.fail(failing, "lost", engine.now)
    assert blocks.host.find(key) is None
    check_invariants(engine.scheduler)


def test_invariants_notice_a_leaked_reference_a_lost_row_and_a_wrong_name() -> None:
    def fresh() -> Harness:
        engine = Harness()
        engine.add("a", range(9), max_tokens=8)
        engine.turn(2)
        return engine

    engine = fresh()
    engine.scheduler.blocks.pool.share(engine.requests["a"].block_table[0])
    with pytest.raises(InvariantError, match="is in 1 block tables"):
        check_invariants(engine.scheduler)
    engine = fresh()
    engine.scheduler.table.free_rows.pop()
    with pytest.raises(InvariantError, match="rows are lost"):
        check_invariants(engine.scheduler)
    engine = fresh()
    engine.requests["a"].block_keys[0].digest = b"another"
    with pytest.raises(InvariantError, match="another name"):
        check_invariants(engine.scheduler)
    engine = fresh()
    engine.requests["a"].num_placeholders += 1
    with pytest.raises(InvariantError, match="placeholders"):
        check_invariants(engine.scheduler)
