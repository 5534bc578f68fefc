"""An engine with the fake model on a device that takes a known time for each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from quire.engine.config import SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.invariants import check_invariants
from quire.engine.request import Request, make_requests
from quire.engine.scheduler import Scheduler
from quire.engine.token_times import work_of
from quire.sampling_params import SamplingParams
from quire.step import Step, StepLogEntry, StepResult
from quire.tools.simulate.fake_model import solo_run
from quire.tools.simulate.fake_runner import FakeRunner

VOCAB = 50
StepTime = Callable[[Step], float]


def usual_time(step: Step) -> float:
    """10 ms and what tokens and the keys they read add."""
    return 0.01 + 0.0002 * step.num_tokens + 2e-8 * work_of(step)[1]


class TimedEngine:
    """Two steps in flight, a clock that goes on as the device computes, and arrivals by it."""

    def __init__(self, step_time: StepTime = usual_time, **settings: Any) -> None:
        values: dict[str, Any] = {
            "num_blocks": 2049,
            "max_num_seqs": 8,
            "max_batched_tokens": 512,
            "max_model_len": 1024,
            "block_size": 16,
        }
        self.config = SchedulerConfig(**values | settings)
        self.now = 0.0
        self.scheduler = Scheduler(self.config)
        self.entries: list[StepLogEntry] = []
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.token_times: dict[str, list[float]] = defaultdict(list)
        self._step_time = step_time
        self._runner = FakeRunner(self.config, VOCAB)
        self._arrivals: list[tuple[float, str, Sequence[int], SamplingParams]] = []
        self.core = EngineCore(self.scheduler, self, 2, self.entries.append, clock=lambda: self.now)

    def submit(self, step: Step) -> Computing:
        return Computing(self, step, self._runner.submit(step))

    def at(self, time: float, name: str, prompt: Sequence[int], **params: Any) -> None:
        """A request that comes at that time."""
        self._arrivals.append((time, name, prompt, SamplingParams(**params)))

    def run(self, until: float = float("inf")) -> None:
        self._arrivals.sort(key=lambda arrival: arrival[:2], reverse=True)
        while self.now < until and (self._arrivals or self.core.has_work):
            if not self.core.has_work:
                self.now = max(self.now, self._arrivals[-1][0])
            while self._arrivals and self._arrivals[-1][0] <= self.now:
                _, name, prompt, params = self._arrivals.pop()
                (request,) = make_requests(name, prompt, params, seed=0)
                self.core.add_request(request, self.now)
                self.requests[name] = request
            for update in self.core.step(self.now):
                self.tokens[update.request_id] += update.new_token_ids
                self.token_times[update.request_id] += [self.now] * len(update.new_token_ids)
            if len(self.entries) % 20 == 0:
                check_invariants(self.scheduler)
            assert self._runner.violations == []

    @property
    def steps(self) -> list[Step]:
        return [entry.step for entry in self.entries]

    def gaps(self, *names: str) -> list[float]:
        """Between the tokens of these requests, or of all."""
        return sorted(
            after - before
            for name in names or self.requests
            for before, after in zip(
                self.token_times[name], self.token_times[name][1:], strict=False
            )
        )

    def first_token_time(self, name: str) -> float:
        return self.token_times[name][0] - self.requests[name].arrival

    def check_answers(self) -> None:
        """Everybody has the answer that it would get alone."""
        for name, request in self.requests.items():
            alone = solo_run(
                request.prompt_token_ids, request.params, 0, (), VOCAB, self.config, ()
            )
            assert self.tokens[name] == alone[0]


class Computing:
    """A step on the device: steps are computed one after the other."""

    def __init__(self, engine: TimedEngine, step: Step, pending: Any) -> None:
        self._engine, self._step, self._pending = engine, step, pending

    def result(self) -> StepResult:
        engine = self._engine
        before = engine.entries[-1].committed if engine.entries else 0.0
        # it was begun when it came, or when the one before it was done
        engine.now = max(engine.now, max(self._step.now, before) + engine._step_time(self._step))
        return self._pending.result()  # type: ignore[no-any-return]
