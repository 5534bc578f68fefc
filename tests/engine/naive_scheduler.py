"""What steps must look like, worked out from the steps alone, the slow and obvious way."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.config import SchedulerConfig
from quire.engine.request import Request
from quire.step import RequestUpdate, Step, StepResult


@dataclass
class NaiveRequest:
    """A live request, as far as steps and updates tell."""

    request: Request
    answer: list[int]
    reason: str
    order: tuple[int, float, int]
    expires: float
    tokens: list[int] = field(default_factory=list)
    in_flight: int = 0
    computed: int = 0
    table: list[int] | None = None
    """Its blocks while it runs."""
    was_admitted: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.tokens) + self.in_flight

    @property
    def limit(self) -> int:
        """Prompt and the whole answer, if nothing ends it early."""
        return self.request.max_total_tokens


class NaiveScheduler:
    """Keeps score of every request and judges each step."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.live: dict[str, NaiveRequest] = {}
        self.forced: set[str] = set()
        """Preempted from outside since the last step."""
        self.in_flight: list[tuple[Step, list[NaiveRequest]]] = []

    def judge(self, step: Step, now: float) -> None:
        """Checks a step against the rules, then takes it over."""
        expired = {name for name, known in self.live.items() if known.expires <= now}
        assert {
            f.request_id for f in step.finished if f.reason == "deadline" and f.time == now
        } >= expired
        for name in expired:
            self.live[name].table = None
        alive = {name: known for name, known in self.live.items() if name not in expired}
        given_way = [p.request_id for p in step.preempted if p.request_id not in self.forced]
        self._judge_running(step, alive, given_way)
        for name in given_way:
            self.preempt(name)
        self._judge_admissions(step, alive, given_way)
        self._apply(step, alive)
        self.forced.clear()
        held = {block for known in self.live.values() for block in known.table or ()}
        assert step.num_free_blocks == self.config.num_usable_blocks - len(held)
        assert step.num_running == sum(known.table is not None for known in alive.values())
        assert step.num_waiting == len(alive) - step.num_running

    def _judge_running(
        self, step: Step, alive: dict[str, NaiveRequest], given_way: list[str]
    ) -> None:
        scheduled = {entry.request_id: entry for entry in step.scheduled}
        running = {name: known for name, known in alive.items() if known.table is not None}
        staying = [known.order for name, known in running.items() if name not in given_way]
        for name in given_way:
            assert all(order < running[name].order for order in staying), (
                "someone more important gave way"
            )
        for name, known in running.items():
            left = known.num_tokens - known.computed
            if known.num_tokens >= known.limit:
                assert name not in scheduled, "its last token is in flight"
            elif left == 1 and name not in given_way:
                assert scheduled[name].num_tokens - len(scheduled[name].draft_tokens) == 1, (
                    "a decode starves"
                )
        chunked = [
            k for n, k in running.items() if k.num_tokens - k.computed > 1 and n not in given_way
        ]
        if chunked:
            assert min(chunked, key=lambda known: known.order).request.request_id in scheduled, (
                "a prompt starves"
            )

    def _judge_admissions(
        self, step: Step, alive: dict[str, NaiveRequest], given_way: list[str]
    ) -> None:
        admitted = [admission.request_id for admission in step.admitted]
        if given_way:
            assert not admitted
            return
        assert admitted == sorted(admitted, key=lambda name: alive[name].order)
        waiting = sorted(
            (known for known in alive.values() if known.table is None),
            key=lambda known: known.order,
        )
        passed = [known for known in waiting if known.request.request_id not in admitted]
        if admitted:
            last = alive[admitted[-1]].order
            for known in passed:
                assert known.order > last or not self._is_ready(known, alive, admitted), (
                    "someone was overtaken"
                )
        num_running = sum(known.table is not None for known in alive.values()) + len(admitted)
        num_real = step.num_tokens - sum(len(entry.draft_tokens) for entry in step.scheduled)
        if num_running < self.config.max_num_seqs and num_real < self.config.max_batched_tokens:
            for known in passed:
                if known.in_flight:
                    continue
                if self._is_ready(known, alive, admitted):
                    need = min(known.num_tokens + 1, known.limit - 1)
                    assert self.config.blocks_for(need) > step.num_free_blocks, "there was room"
                    break

    def _is_ready(
        self, known: NaiveRequest, alive: dict[str, NaiveRequest], admitted: list[str]
    ) -> bool:
        if known.in_flight:
            return False
        group = known.request.group_id
        if group is None or known.was_admitted or not self.config.prefix_caching:
            return True
        runs = [
            other.request
            for name, other in alive.items()
            if other.table is not None or name in admitted
        ]
        return not any(
            r.group_id == group and r.num_committed_tokens < len(r.prompt_token_ids) for r in runs
        )

    def _apply(self, step: Step, alive: dict[str, NaiveRequest]) -> None:
        for admission in step.admitted:
            known = alive[admission.request_id]
            assert list(admission.token_ids) == [*known.request.prompt_token_ids, *known.tokens]
            known.table = list(admission.block_ids)
            known.computed = admission.num_cached_tokens + admission.num_host_tokens
            known.was_admitted = True
        for entry in step.scheduled:
            known = alive[entry.request_id]
            assert known.table is not None
            assert entry.start == known.computed
            known.table.extend(entry.new_block_ids)
            known.computed += entry.num_tokens
            assert entry.samples == (known.computed - len(entry.draft_tokens) == known.num_tokens)
            assert entry.samples or not entry.draft_tokens
            known.in_flight += entry.samples + len(entry.draft_tokens)
            assert known.num_tokens <= known.limit
        if not step.is_empty:
            self.in_flight.append((step, [alive[entry.request_id] for entry in step.scheduled]))

    def preempt(self, name: str) -> None:
        known = self.live[name]
        known.table = None
        known.computed = 0

    def land(self, result: StepResult) -> None:
        """The oldest step's samples are no longer in flight; a dead request's don't matter. Who was
        preempted meanwhile can't be running again: it would have had samples in flight.
        """
        step, requests = self.in_flight.pop(0)
        for known, entry in zip(requests, step.scheduled, strict=True):
            known.in_flight -= entry.samples + len(entry.draft_tokens)
            if entry.draft_tokens and known.table is not None:
                known.computed -= 1 + len(entry.draft_tokens) - len(result.tokens[entry.request_id])

    def receive(self, update: RequestUpdate) -> None:
        known = self.live[update.request_id]
        known.tokens.extend(update.new_token_ids)
        assert known.tokens == known.answer[: len(known.tokens)]
        if update.finish_reason in ("stop", "length"):
            assert (known.tokens, update.finish_reason) == (known.answer, known.reason)
        elif update.finish_reason is None:
            assert len(known.tokens) < len(known.answer), "it should have ended"
        if update.finish_reason is not None:
            del self.live[update.request_id]
