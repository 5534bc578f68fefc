"""The scheduler against the naive model, with late results, failures and interference at any
moment.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quire.engine.config import SchedulerConfig
from quire.engine.invariants import check_invariants
from quire.engine.request import Request, make_requests
from quire.engine.scheduler import Scheduler
from quire.sampling_params import SamplingParams
from quire.step import RequestUpdate, Step
from quire.tools.simulate.fake_model import solo_run
from quire.tools.simulate.fake_runner import FakePending, FakeRunner
from tests.engine.naive_scheduler import NaiveRequest, NaiveScheduler
from tests.long_runs import short_or_long

VOCAB, EOS, MAX_LEN = 6, (5,), 20
MOST_IN_FLIGHT = 3


class SchedulerMachine(RuleBasedStateMachine):
    """Steps are computed when submitted and committed any time later, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.pending: list[tuple[Step, FakePending]] = []
        self.everyone: list[Request] = []

    @initialize(
        size=st.integers(1, 4),
        extra_blocks=st.integers(0, 8),
        rows=st.integers(1, 4),
        extra_budget=st.integers(0, 9),
        policy=st.sampled_from(["fcfs", "priority"]),
        num_host=st.sampled_from([0, 2, 8]),
        caching=st.booleans(),
        guessing=st.none() | st.integers(0, 2**16),
    )
    def start(
        self,
        size: int,
        extra_blocks: int,
        rows: int,
        extra_budget: int,
        policy: Literal["fcfs", "priority"],
        num_host: int,
        caching: bool,
        guessing: int | None,
    ) -> None:
        self.config = SchedulerConfig(
            num_blocks=1 + -(-MAX_LEN // size) + extra_blocks,
            max_num_seqs=rows,
            max_batched_tokens=rows + extra_budget,
            max_model_len=MAX_LEN,
            block_size=size,
            policy=policy,
            num_host_blocks=num_host if caching else 0,
            prefix_caching=caching,
        )
        self.chance = Random(guessing)
        self.scheduler = Scheduler(self.config, propose=None if guessing is None else self.propose)
        self.runner = FakeRunner(self.config, VOCAB)
        self.naive = NaiveScheduler(self.config)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 12) | st.none(),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, "salt"]),
        deadline=st.sampled_from([None, None, 4.0]),
        seed=st.integers(0, 3),
        caches_partial=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int | None,
        n: int,
        priority: int,
        salt: str | None,
        deadline: float | None,
        seed: int,
        caches_partial: bool,
    ) -> None:
        params = SamplingParams(
            max_tokens=max_tokens, n=n, priority=priority, cache_salt=salt, deadline=deadline
        )
        self.take_in(prompt, params, seed, caches_partial)

    @precondition(lambda self: self.everyone)
    @rule(
        data=st.data(), extra=st.lists(st.integers(0, 1), max_size=3), max_tokens=st.integers(1, 6)
    )
    def follow(self, data: st.DataObject, extra: list[int], max_tokens: int) -> None:
        """A request whose prompt begins with another's tokens, and which has that one's place in
        the queue.
        """
        leader = data.draw(st.sampled_from(self.everyone), label="leader")
        position = data.draw(st.integers(1, len(leader.token_ids)), label="position")
        prompt = [*leader.token_ids[:position], *extra][: MAX_LEN - 1]
        params = replace(leader.params, max_tokens=max_tokens, n=1, deadline=None)
        self.take_in(prompt, params, 1, True, leader.order[1])

    def take_in(
        self,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        caches_partial: bool,
        since: float | None = None,
    ) -> None:
        name = f"r{self.count % 5}"
        if any(live.split("/")[0] == name for live in self.naive.live):
            name = f"q{self.count}"
        for request in make_requests(name, prompt, params, seed, EOS):
            request.caches_partial_block, request.queued_since = caches_partial, since
            self.scheduler.add(request, self.now)
            self.everyone.append(request)
            answer, reason = solo_run(prompt, params, request.seed, EOS, VOCAB, self.config)
            rank = params.priority if self.config.policy == "priority" else 0
            order = (rank, self.now if since is None else since, self.count)
            expires = float("inf") if params.deadline is None else self.now + params.deadline
            self.naive.live[request.request_id] = NaiveRequest(
                request, answer, reason, order, expires
            )
            self.count += 1

    def propose(self, request: Request, most: int) -> list[int]:
        """Some right and some wrong, and now and then more than was asked for."""
        if self.chance.random() < 0.3:
            return []
        first = request.num_tokens - 1 - request.num_prompt_tokens
        right = self.naive.live[request.request_id].answer[
            first : first + self.chance.randint(1, 5)
        ]
        return [
            token if self.chance.random() < 0.7 else self.chance.randrange(VOCAB)
            for token in [*right, 0]
        ]

    @precondition(lambda self: len(self.pending) < MOST_IN_FLIGHT)
    @rule()
    def schedule(self) -> None:
        step = self.scheduler.schedule(self.now)
        self.naive.judge(step, self.now)
        if not step.is_empty:
            self.pending.append((step, self.runner.submit(step)))
        self.receive(self.scheduler.take_updates())

    @precondition(lambda self: self.pending)
    @rule()
    def late_result(self) -> None:
        step, pending = self.pending.pop(0)
        result = pending.result()
        self.naive.land(result)
        self.receive(self.scheduler.commit(step, result, self.now))

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def failure(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.pending) - 1), label="failing step")
        hit = {entry.request_id for step, _ in self.pending[index:] for entry in step.scheduled}
        hit &= set(self.naive.live)
        # Names may have been used again since: only requests that were really in those steps end.
        hit = {
            name
            for name in hit
            if any(self.naive.live[name] in known for _, known in self.naive.in_flight[index:])
        }
        failed = self.scheduler.fail(self.pending[index][0], "broken", self.now)
        assert failed == [step for step, _ in self.pending[index:]]
        del self.pending[index:], self.naive.in_flight[index:]
        updates = self.scheduler.take_updates()
        assert {update.request_id for update in updates if update.finish_reason == "error"} == hit
        self.receive(updates)

    @precondition(lambda self: self.naive.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.naive.live)), label="name")
        self.scheduler.abort([name], self.now)
        updates = self.scheduler.take_updates()
        assert [(update.request_id, update.finish_reason) for update in updates] == [
            (name, "abort")
        ]
        self.receive(updates)

    @precondition(lambda self: self.naive.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.naive.live)), label="name")
        self.scheduler.preempt(name)
        if self.naive.live[name].table is not None:
            self.naive.preempt(name)
            self.naive.forced.add(name)

    @precondition(lambda self: self.naive.live and self.config.policy == "priority")
    @rule(data=st.data(), priority=st.integers(-2, 2))
    def change_priority(self, data: st.DataObject, priority: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.naive.live)), label="name")
        self.scheduler.set_priority(name, priority)
        known = self.naive.live[name]
        known.order = (priority, *known.order[1:])

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        if hasattr(self, "scheduler"):
            check_invariants(self.scheduler)
            assert self.runner.violations == []
            assert set(self.scheduler.table.requests) == set(self.naive.live)

    def receive(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            self.naive.receive(update)

    def teardown(self) -> None:
        """Left alone, everyone comes to an end and everything is given back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            if len(self.pending) < MOST_IN_FLIGHT:
                self.schedule()
            if self.pending:
                self.late_result()
            self.bookkeeping_is_sound()
        assert not self.naive.live
        check_invariants(self.scheduler)
        assert self.scheduler.blocks.pool.num_free == self.config.num_usable_blocks


@pytest.mark.soak
def test_scheduler_keeps_the_rules_whatever_happens() -> None:
    examples = short_or_long(150, 600, quick=40)
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(deadline=None, max_examples=examples, stateful_step_count=40),
    )
