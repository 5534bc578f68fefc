"""A scheduler with 256 drafted requests and a model that costs nothing, for `speculation`."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from quire.engine import Scheduler, SchedulerConfig, make_requests
from quire.sampling_params import SamplingParams
from quire.speculate.speculator import Speculator
from quire.step import Step, StepLogEntry, StepResult


@dataclass
class DraftedScheduler:
    """A scheduler with 256 requests, and what its steps took."""

    name: str
    speculator: Speculator | None
    period: int
    """All text repeats itself after so many tokens; 0: never."""
    noise: float = 0.0
    """With this chance a token is another one."""

    def __post_init__(self) -> None:
        # 120 steps, of which each may bring 32 tokens.
        config = SchedulerConfig(
            num_blocks=72_000, max_num_seqs=256, max_batched_tokens=8192, max_model_len=4500
        )
        source = self.speculator
        self.scheduler = (
            Scheduler(config)
            if source is None
            else Scheduler(config, None, source.propose, source.num_drafts)
        )
        self.rng = random.Random(1)
        self.times: list[float] = []
        self.tokens: list[int] = []
        for i in range(256):
            prompt = [self.token(position) for position in range(500 + i % 16)]
            self.scheduler.add(
                make_requests(f"r{i}", prompt, SamplingParams(max_tokens=3900), i)[0], 0.0
            )

    def token(self, position: int) -> int:
        is_random = not self.period or (self.noise and self.rng.random() < self.noise)
        return self.rng.randrange(50_000) if is_random else position % self.period

    def step(self, number: int) -> None:
        # What it computed, however often others had the core meanwhile.
        began = time.thread_time()
        step = self.scheduler.schedule(float(number))
        scheduled = time.thread_time()
        result = self.fake(step)
        drawn = time.thread_time()
        self.scheduler.commit(step, result, number + 0.5)
        if self.speculator is not None:
            self.speculator.observe(
                StepLogEntry(step, result, None, number + 0.5 + 1e-4 * step.num_tokens)
            )
        if number > 20:  # from there on all of them decode
            self.times.append(time.thread_time() - drawn + scheduled - began)
            self.tokens.append(sum(map(len, result.tokens.values())))

    def fake(self, step: Step) -> StepResult:
        tokens = {}
        for one in step.scheduled:
            if one.samples:
                first = one.start + one.num_tokens - len(one.draft_tokens)
                drawn = [self.token(first + i) for i in range(1 + len(one.draft_tokens))]
                right = next(
                    (i for i, token in enumerate(one.draft_tokens) if token != drawn[i]),
                    len(one.draft_tokens),
                )
                tokens[one.request_id] = tuple(drawn[: right + 1])
        return StepResult(step.step_id, tokens)
