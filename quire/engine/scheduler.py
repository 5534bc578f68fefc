"""Who computes what in the next step, and what becomes of the results.

Every request has tokens and a count of computed ones; each step it computes some of the difference. The
scheduler may run ahead of the results: a token sampled by a step in flight is a placeholder, its value
follows at commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.engine.block_manager import BlockManager, Placement
from quire.engine.config import SchedulerConfig
from quire.engine.ledger import Ledger
from quire.engine.request import Request
from quire.errors import EngineError, InvalidRequestError, QuireError
from quire.step import (
    Admission,
    FinishReason,
    PromptScores,
    RequestMetrics,
    RequestUpdate,
    ScheduledRequest,
    Step,
    StepResult,
)

_make = tuple.__new__
"""Makes a named tuple in half the time its own constructor takes: two are made per row and step."""


@dataclass(slots=True)
class _Draft:
    """The step being put together."""

    step_id: int
    now: float
    budget: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    chunk_starts: dict[Request, int] = field(default_factory=dict)
    """Where requests that may compute several tokens begin in this step."""
    fork_sources: dict[str, Request | None] = field(default_factory=dict)
    """Per group: whose prompt can be shared, or None while one of its members is computing it."""
    preempting: bool = False


class Scheduler:
    """Turns requests into steps, and results of steps into updates of requests."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager | None = None) -> None:
        self.config = config
        self.blocks = blocks or BlockManager(config)
        self.ledger = Ledger(config, self.blocks)
        self.in_flight: deque[tuple[Step, list[Request]]] = deque()
        """Steps not committed yet, oldest first, with the requests behind their entries: results are matched
        by object, since by then a name may belong to another request."""
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether there is anything to schedule, to commit or to report."""
        ledger = self.ledger
        return bool(ledger.requests or self.in_flight or ledger.finished or ledger.updates)

    def add(self, request: Request, now: float) -> None:
        """Takes a request in, or says why it never could be computed."""
        self.ledger.add(request, now)

    def fork(self, request: Request, source: Request, now: float) -> None:
        """Takes a request in that goes on from tokens of another one; see `Ledger.fork`."""
        oldest = self.in_flight[0][0].step_id if self.in_flight else self._num_steps
        self.ledger.fork(request, source, oldest, now)

    def let_go(self, request: Request) -> None:
        """Gives up the blocks a request holds without running: after its end, or forked and waiting."""
        self.ledger.let_go(request)

    def abort(self, request_ids: Iterable[str], now: float) -> None:
        """Ends these requests (or all answers of a group) at once; unknown names have just finished."""
        for request_id in request_ids:
            request = self.ledger.requests.get(request_id)
            for target in list(self.ledger.members(request_id)) if request is None else [request]:
                self.ledger.finish(target, "abort", now)

    def end(self, request_id: str, reason: FinishReason, now: float) -> RequestMetrics:
        """Ends a live request for a reason its owner found (a stop string in its text), who is told its metrics
        here and gets no further update about it."""
        self.ledger.finish(self.ledger.get(request_id), reason, now)
        metrics = self.ledger.updates.pop().metrics
        assert metrics is not None
        return metrics

    def set_priority(self, request_id: str, priority: int) -> None:
        """Moves a request to another place in the order."""
        if self.config.policy != "priority":
            raise InvalidRequestError("priority", "counts under policy 'priority' only; this engine runs 'fcfs'")
        self.ledger.set_priority(self.ledger.get(request_id), priority)

    def preempt(self, request_id: str, why: str = "asked for") -> None:
        """Takes row and blocks from a request; it comes back when there is room."""
        request = self.ledger.get(request_id)
        if request.row is not None:
            self.ledger.preempt(request, why)
        else:
            self.ledger.let_go(request)

    def schedule(self, now: float) -> Step:
        """Decides the next step. Unless it is empty it must be submitted, then committed or failed."""
        ledger = self.ledger
        ledger.expire(now)
        draft = _Draft(self._num_steps, now, self.config.max_batched_tokens)
        self._schedule_running(draft)
        # Whoever has just given way must not push itself back in.
        if not draft.preempting:
            self._schedule_waiting(draft)
        step = Step(
            step_id=draft.step_id,
            now=now,
            scheduled=tuple(draft.scheduled),
            admitted=tuple(draft.admitted),
            preempted=tuple(ledger.preempted),
            finished=tuple(ledger.finished),
            copies=self.blocks.take_copies(),
            num_free_blocks=self.blocks.pool.num_free,
            num_waiting=len(ledger.waiting),
            num_running=len(ledger.running),
        )
        if not step.is_empty:
            self._num_steps += 1
            ledger.preempted.clear()
            ledger.finished.clear()
            self.in_flight.append((step, draft.requests))
        return step

    def commit(self, step: Step, result: StepResult, now: float) -> list[RequestUpdate]:
        """Takes the oldest step's result: tokens are appended, full blocks published, ends found.

        Returns everything that happened since the last call, ends found outside of commits included.
        """
        requests = self._take_oldest(step, result)
        tokens_of = result.tokens
        errors = result.errors
        scores_of = result.scores
        ended = result.ended
        step_id = step.step_id
        block_size = self.config.block_size
        ledger = self.ledger
        updates = ledger.updates
        for request, (request_id, _, start, num_tokens, samples, _) in zip(requests, step.scheduled, strict=True):
            if errors and request_id in errors:
                self._fail_request(request, step_id, errors[request_id], now)
                continue
            if result.prompt_scores and request_id in result.prompt_scores:
                self._note_prompt_scores(request, result.prompt_scores[request_id])
            if request.finish_reason is not None:
                continue  # It ended while this was computed: the result is dropped.
            if request.row is not None and request.admitted_step <= step_id:
                request.num_committed_tokens = computed = start + num_tokens
                if computed // block_size > request.num_published_blocks:
                    self.blocks.publish(request)
            if not samples:
                continue
            request.num_placeholders -= 1
            if request.pooling is not None:
                self._finish_pooled(request, step_id, result.pooled.get(request_id), now)
                continue
            tokens = tokens_of.get(request_id, ())
            if len(tokens) != 1:
                message = f"the runner returned {len(tokens)} tokens instead of one"
                self._fail_request(request, step_id, message, now)
                continue
            token_ids = request.token_ids
            token_ids.append(tokens[0])
            if request.first_token is None:
                request.first_token = now
                request.unproven_source = None
            scores = scores_of.get(request_id, ()) if scores_of else ()
            if tokens[0] in request.stop_ids and request.num_output_tokens > request.params.min_tokens:
                request.stop_token_id = tokens[0]
                ledger.finish(request, "stop", now, tokens, scores=scores)
            elif ended and request_id in ended:
                ledger.finish(request, "stop", now, tokens, scores=scores)
            elif len(token_ids) >= request.max_total_tokens:
                ledger.finish(request, "length", now, tokens, scores=scores)
            else:
                updates.append(_make(RequestUpdate, (request_id, tokens, None, None, None, None, scores, None, None)))
        return self.take_updates()

    def fail(self, step: Step, message: str, now: float) -> list[Step]:
        """Ends every request of `step` and of all steps submitted after it; returns those steps.

        Nothing these steps did is relied on: what their copies brought is forgotten, the rows and blocks of
        their requests are given up. Their notices (finished, preempted) count as delivered.
        """
        failed = [entry for entry in self.in_flight if entry[0].step_id >= step.step_id]
        for failed_step, requests in failed:
            self.in_flight.pop()
            self.blocks.void(failed_step.copies)
            for request in requests:
                if request.finish_reason is None:
                    self.ledger.finish(request, "error", now, error=message)
        # Copies still to be submitted may have had the lost ones' targets as their sources.
        self.blocks.void(self.blocks.take_copies())
        return [failed_step for failed_step, _ in failed]

    def take_updates(self) -> list[RequestUpdate]:
        """What has happened since the last call."""
        updates = self.ledger.updates
        self.ledger.updates = []
        return updates

    def _schedule_running(self, draft: _Draft) -> None:
        """First everyone with one token to compute, then longer stretches out of what is left."""
        chunks: list[Request] = []
        block_size = self.config.block_size
        scheduled, requests = draft.scheduled, draft.requests
        for request in self.ledger.running.snapshot():
            row = request.row
            if row is None:
                continue  # It gave way to one before it in this very loop.
            start = request.num_computed_tokens
            num_tokens = len(request.token_ids) + request.num_placeholders
            if num_tokens >= request.max_total_tokens:
                continue  # Its last token is in flight.
            if num_tokens - start != 1:
                chunks.append(request)
                continue
            new_block_ids: tuple[int, ...] = ()
            if start == len(request.block_table) * block_size:
                block_id = self._grow(request, draft)
                if block_id is None:
                    continue
                new_block_ids = (block_id,)
            if start < request.computed_before:
                request.recomputed_tokens += 1
            scheduled.append(_make(ScheduledRequest, (request.request_id, row, start, 1, True, new_block_ids)))
            requests.append(request)
            request.num_computed_tokens = num_tokens
            request.num_placeholders += 1
        draft.budget -= len(scheduled)
        for request in chunks:
            if draft.budget and request.row is not None:
                self._schedule_chunk(request, draft, ())

    def _schedule_chunk(self, request: Request, draft: _Draft, new_block_ids: tuple[int, ...]) -> None:
        """As many of a request's tokens as the budget allows; their blocks were taken at admission."""
        assert request.row is not None
        start = request.num_computed_tokens
        end = min(request.num_tokens, start + draft.budget)
        samples = end == request.num_tokens
        request.recomputed_tokens += max(0, min(end, request.computed_before) - start)
        draft.chunk_starts[request] = start
        draft.scheduled.append(
            ScheduledRequest(request.request_id, request.row, start, end - start, samples, new_block_ids)
        )
        draft.requests.append(request)
        draft.budget -= end - start
        request.num_computed_tokens = end
        request.num_placeholders += samples

    def _grow(self, request: Request, draft: _Draft) -> int | None:
        """A block for the next token: a free one, else a held one, else one of the least important running request.

        The running queue is walked in its order, so whoever gives way has not been scheduled in this step.
        """
        while request.row is not None:
            try:
                block = self.blocks.grow(request)
            except QuireError as error:
                self.ledger.finish(request, "error", draft.now, error=str(error))
                return None
            if block is not None:
                return block.block_id
            if not self.ledger.reclaim(None):
                draft.preempting = True
                why = f"request {request.request_id} needed a block and none was free"
                self.ledger.preempt(self.ledger.running[-1], why)
        return None

    def _schedule_waiting(self, draft: _Draft) -> None:
        """Admits in order. Nobody overtakes a request that has no room yet, only one that isn't ready."""
        waiting = self.ledger.waiting
        index = 0
        while draft.budget and self.ledger.free_rows and index < len(waiting):
            request = waiting[index]
            ready, source = self._readiness(request, draft)
            if not ready:
                index += 1
                continue
            try:
                placement = self._place(request, source)
            except QuireError as error:
                self.ledger.finish(request, "error", draft.now, error=str(error))
                continue
            if placement is not None:
                self._admit(request, placement, source, draft)
            elif not self.ledger.reclaim(request):
                return

    def _place(self, request: Request, source: Request | None) -> Placement | None:
        if source is not None:
            self.blocks.fork(request, source, request.num_prompt_tokens - 1)
        placement = self.blocks.place(request, min(len(request.token_ids) + 1, request.max_total_tokens - 1))
        if placement is None and source is not None:
            self.ledger.let_go(request)  # what the source is computing is not certain, so it can't be held
        return placement

    def _readiness(self, request: Request, draft: _Draft) -> tuple[bool, Request | None]:
        """Whether a waiting request could be admitted now, and whose prompt it then shares."""
        if request.num_placeholders:
            return False, None
        group_id = request.group_id
        if group_id is None or request.first_scheduled is not None:
            return True, None
        if group_id not in draft.fork_sources:
            computing = False
            for member in self.ledger.members(group_id):
                if member.row is None:
                    continue
                # Only what earlier steps computed can be shared: copies come before this step's compute.
                submitted = draft.chunk_starts.get(member, member.num_computed_tokens - 1)
                if submitted >= request.num_prompt_tokens - 1:
                    draft.fork_sources[group_id] = member
                    break
                computing = True
            else:
                if not computing:
                    return True, None
                draft.fork_sources[group_id] = None
        source = draft.fork_sources[group_id]
        return source is not None, source

    def _admit(self, request: Request, placement: Placement, source: Request | None, draft: _Draft) -> None:
        row = self.ledger.start(request, draft.now)
        request.admitted_step = draft.step_id
        request.num_computed_tokens = placement.num_device_tokens + placement.num_host_tokens
        request.host_tokens += placement.num_host_tokens
        if request.forked_from is None:
            request.cached_tokens += placement.num_device_tokens
        else:
            request.forked_tokens += placement.num_device_tokens
        if source is None:
            request.num_committed_tokens = request.num_computed_tokens
        elif source.num_committed_tokens < request.num_computed_tokens:
            # The prompt is still being computed, by the source or by the one it was forked from itself.
            request.unproven_source = source.unproven_source or source
        block_ids = tuple(block.block_id for block in request.block_table)
        draft.admitted.append(
            Admission(
                request_id=request.request_id,
                row=row,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=block_ids[: placement.num_ready_blocks],
                num_cached_tokens=placement.num_device_tokens,
                num_host_tokens=placement.num_host_tokens,
                params=request.params,
                seed=request.seed,
                eos_token_ids=request.eos_token_ids,
                arrival=request.arrival,
                forked_from=request.forked_from,
                resolved=request.resolved,
                # Whoever it was forked from scores the prompt, in steps already submitted.
                score_prompt_from=request.score_prompt_from if source is None else None,
                pooling=request.pooling,
            )
        )
        self._schedule_chunk(request, draft, block_ids[placement.num_ready_blocks :])

    def _note_prompt_scores(self, request: Request, found: PromptScores) -> None:
        """Passes scores of a prompt on, to another answer to it if the one that computed them has ended."""
        progress = request.prompt_progress
        if request.has_failed or found.start > progress.next_position:
            return  # What comes before it failed, so this was computed from rubbish.
        progress.next_position = max(progress.next_position, found.start + len(found.scores))
        takers = [request] if request.finish_reason is None else self.ledger.members(request.group_id)[:1]
        for taker in takers:
            if taker.prompt_progress is progress:  # the group's name may belong to other requests by now
                self.ledger.updates.append(RequestUpdate(taker.request_id, (), prompt_scores=found))

    def _finish_pooled(self, request: Request, step_id: int, vector: bytes | None, now: float) -> None:
        """The whole prompt is computed, which is all that was wanted."""
        if vector is None:
            self._fail_request(request, step_id, "the runner returned no pooled hidden state", now)
        else:
            self.ledger.finish(request, "stop", now, pooled=vector)

    def _fail_request(self, request: Request, step_id: int, message: str, now: float) -> None:
        """Ends a request that failed by itself, and those who took over its prompt before this was known."""
        # Also after its own end: its blocks live on in other answers, and steps in flight may still score its prompt.
        request.has_failed = True
        for member in list(self.ledger.members(request.group_id)):
            if member.unproven_source is request and member.admitted_step > step_id:
                text = f"shares the prompt of request {request.request_id}, which failed: {message}"
                self.ledger.finish(member, "error", now, error=text)
        if request.finish_reason is None:
            self.ledger.finish(request, "error", now, error=message)

    def _take_oldest(self, step: Step, result: StepResult) -> list[Request]:
        if not self.in_flight or self.in_flight[0][0] is not step or result.step_id != step.step_id:
            oldest = self.in_flight[0][0].step_id if self.in_flight else None
            raise EngineError(
                f"results must be committed in order: expected step {oldest}, got step {step.step_id} "
                f"with the result of step {result.step_id}"
            )
        return self.in_flight.popleft()[1]
