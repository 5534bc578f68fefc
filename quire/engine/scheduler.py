"""Who computes what in the next step.

Every request has tokens and a count of computed ones; each step it computes some of the difference.
The scheduler may run ahead of the results: a token sampled by a step in flight is a placeholder,
its value follows at commit.

A step may compute draft tokens after a request's known ones and sample after each of them: the
request gains one token, and one more for every draft token that is right. The scheduler learns at
commit how many were. Until then it counts all of them as right, which is the most there can be: it
takes blocks for that many tokens and has later steps start behind them. The runner knows how many
were right when it computes such a step, and begins at the true position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from quire.engine.block_manager import BlockManager, Placement
from quire.engine.config import SchedulerConfig
from quire.engine.draft_tokens import DraftTokens, Propose
from quire.engine.fair_shares import FairShares
from quire.engine.pauses import Pauses
from quire.engine.request import Request
from quire.engine.request_table import RequestTable
from quire.engine.results import ResultTaker
from quire.engine.step_plan import StepPlan
from quire.engine.token_times import TokenTimes
from quire.errors import EngineError, InvalidRequestError, QuireError
from quire.step import (
    AdmittedRequest,
    FinishReason,
    RequestMetrics,
    RequestUpdate,
    ScheduledRequest,
    Step,
    StepResult,
    new_tuple,
)


class Scheduler:
    """Turns requests into steps, and has their results taken in order."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager | None = None,
        propose: Propose | None = None,
        num_drafts: Callable[[Request], int] | None = None,
    ) -> None:
        """`propose` returns draft tokens for a request, which one step then checks together;
        `num_drafts` says how many tokens the runner itself should draft after a step, for the next
        one.
        """
        self.config = config
        self.blocks = blocks or BlockManager(config)
        self.table = RequestTable(config, self.blocks)
        self._results = ResultTaker(config, self.blocks, self.table)
        self._drafts = (
            None if propose is None else DraftTokens(config, self.blocks, propose, num_drafts)
        )
        self.in_flight: deque[tuple[Step, list[Request]]] = deque()
        """Steps not committed yet, oldest first, each with the `Request` of every entry: results
        are matched by object and not by name, since by then a name may belong to another request.
        """
        self._num_steps = 0
        self.pauses = Pauses(self.table)
        self.step_times = None if config.target_token_time is None else TokenTimes(config)
        self._held_up: Request | None = None
        """The request that was next in the last step, and for which there were too few blocks."""

    @property
    def has_work(self) -> bool:
        """Whether there is anything to schedule, to commit or to report."""
        table = self.table
        if self.in_flight or table.finished or table.updates or table.preempted:
            return True
        return self.pauses.may_compute

    def add(self, request: Request, now: float) -> None:
        """Takes a request in, or says why it never could be computed."""
        self.table.add(request, now)

    def abort(self, request_ids: Iterable[str], now: float) -> None:
        """Ends these requests (or all answers of a group) at once; unknown names have just
        finished.
        """
        for request_id in request_ids:
            request = self.table.requests.get(request_id)
            for target in list(self.table.members(request_id)) if request is None else [request]:
                self.table.finish(target, "abort", now)

    def end(self, request_id: str, reason: FinishReason, now: float) -> RequestMetrics:
        """Ends a live request for a reason its owner found (a stop string in its text), who is told
        its metrics here and gets no further update about it.
        """
        self.table.finish(self.table.get(request_id), reason, now)
        metrics = self.table.updates.pop().metrics
        assert metrics is not None
        return metrics

    def set_priority(self, request_id: str, priority: int) -> None:
        """Moves a request to another place in the order."""
        if self.config.policy == "fcfs":
            raise InvalidRequestError(
                "priority", "counts under policy 'priority' or 'fair'; this engine runs 'fcfs'"
            )
        self.table.set_priority(self.table.get(request_id), priority)

    def preempt(self, request_id: str, why: str = "asked for") -> None:
        """Takes row and blocks from a request; it comes back when there is room."""
        request = self.table.get(request_id)
        if request.row is not None:
            self.table.preempt(request, why)

    def schedule(self, now: float, held: frozenset[int] = frozenset()) -> Step:
        """Decides the next step. Unless it is empty it must be submitted, then committed or failed.
        Running requests in the rows `held` have no part in it.
        """
        table = self.table
        table.expire(now)
        plan = StepPlan(self._num_steps, now, self.config.max_batched_tokens)
        if self.pauses.mode in (None, "wait"):
            self._fill(plan, held)
        step = Step(
            step_id=plan.step_id,
            now=now,
            scheduled=tuple(plan.scheduled),
            admitted=tuple(plan.admitted),
            preempted=tuple(table.preempted),
            finished=tuple(table.finished),
            copies=self.blocks.take_copies(),
            num_free_blocks=self.blocks.pool.num_free,
            num_waiting=len(table.waiting),
            num_running=len(table.running),
            num_decodes=plan.num_decodes,
            promise=plan.promise,
            adapters=plan.adapters(table.adapter_names),
        )
        if not step.is_empty:
            self._num_steps += 1
            table.preempted.clear()
            table.finished.clear()
            self.in_flight.append((step, plan.requests))
        return step

    def _fill(self, plan: StepPlan, held: frozenset[int]) -> None:
        """Puts into the step what is to be computed."""
        table, shares = self.table, self.table.shares
        if shares is not None and not shares.are_even and self.pauses.mode is None:
            table.even_out(self._held_up)
        self._held_up = None
        chunks = self._schedule_decodes(plan, held)
        may_admit = bool(table.free_rows and table.waiting)
        if chunks or may_admit:
            self._schedule_prompts(chunks, may_admit, plan)
        plan.cut_to_graph(self.config, shares)
        if self._drafts is not None and not plan.preempting:
            self._drafts.add(plan, len(table.running))
        if self.config.state is not None:
            self._advance_states(plan)

    def _schedule_prompts(self, chunks: list[Request], may_admit: bool, plan: StepPlan) -> None:
        """Computes parts of prompts: of running requests that have more than a token to compute,
        and of waiting ones.
        """
        table, step_times = self.table, self.step_times
        if not may_admit and len(chunks) == 1:
            # The usual case. Nobody preempted this one: it would wait now, and a row be free.
            if step_times is not None:
                step_times.limit(plan, chunks[0])
            if plan.budget:
                self._schedule_chunk(chunks[0], plan, ())
        elif step_times is not None:
            live = [request for request in chunks if request.row is not None]
            shares = table.shares
            first = next(iter(live), None) if shares is None else shares.least_served(live)
            prompt = table.waiting.first() if first is None and table.waiting else first
            step_times.limit(plan, prompt)
            self._schedule_in_time(first, chunks, plan)
        elif table.shares is not None and chunks:
            self._schedule_by_shares(chunks, plan, table.shares)
        else:
            self._schedule_chunks(chunks, plan)
            self._schedule_waiting(plan)

    def commit(self, step: Step, result: StepResult, now: float) -> list[RequestUpdate]:
        """Takes in the oldest step's result. Returns all updates since the last call, aborts and
        the like too.
        """
        if not self.in_flight or self.in_flight[0][0] is not step or result.step_id != step.step_id:
            oldest = self.in_flight[0][0].step_id if self.in_flight else None
            raise EngineError(
                f"results must be committed in order: expected step {oldest}, got step {step.step_id} "
                f"with the result of step {result.step_id}"
            )
        _, requests = self.in_flight.popleft()
        self._results.take(step, requests, result, now)
        if self.step_times is not None:
            self.step_times.observe(step, requests, now)
        return self.take_updates()

    def fail(self, step: Step, message: str, now: float) -> list[Step]:
        """Ends every request of `step` and of all steps submitted after it; returns those steps.

        Nothing is assumed to have been computed: cache entries that their copies filled are
        dropped, and their requests lose rows and blocks. The runner counts as told of their
        `finished` and `preempted` entries.
        """
        failed = [entry for entry in self.in_flight if entry[0].step_id >= step.step_id]
        for failed_step, requests in failed:
            self.in_flight.pop()
            self.blocks.void(failed_step.copies)
            for request in requests:
                if request.finish_reason is None:
                    self.table.finish(request, "error", now, error=message)
        # Copies waiting for the next step may read what the failed steps' copies should have
        # written.
        self.blocks.void(self.blocks.take_copies())
        return [failed_step for failed_step, _ in failed]

    def take_updates(self) -> list[RequestUpdate]:
        """What has happened since the last call."""
        updates, self.table.updates = self.table.updates, []
        return updates

    def _schedule_decodes(self, plan: StepPlan, held: frozenset[int]) -> list[Request]:
        """First come the requests with one token to compute; returns those that have more, in
        their order.
        """
        chunks: list[Request] = []
        block_size, groups = self.config.block_size, self.config.num_groups
        scheduled, requests, draft_tokens = plan.scheduled, plan.requests, self._drafts is not None
        append, append_request = scheduled.append, requests.append
        entry_type = ScheduledRequest
        for request in self.table.running.copy():  # which preemptions change
            row = request.row
            if row is None:
                continue  # It was preempted by this loop, for a more important request's block.
            if held and row in held:
                continue
            start = request.num_computed_tokens
            num_tokens = len(request.token_ids) + request.num_placeholders
            if num_tokens >= request.max_total_tokens:
                continue  # Its last token is in flight.
            if num_tokens - start != 1:
                chunks.append(request)
                continue
            new_block_ids: tuple[int, ...] = ()
            if start * groups == len(request.block_table) * block_size:
                allocated = self._grow(request, plan)
                if allocated is None:
                    continue
                new_block_ids = allocated
            if start < request.computed_before:
                request.recomputed_tokens += 1
                plan.recomputed_decodes.append(request.tenant)
            ahead = draft_tokens and request.num_draft_tokens > 0
            # As `decode_entry` makes it (their fields are checked when step.py is loaded, and
            # compared by a test): a call for every row would take a tenth of this loop's time.
            append(
                new_tuple(
                    entry_type,
                    (request.request_id, row, start, 1, True, new_block_ids, (), ahead, 0),
                )
            )
            append_request(request)
            request.num_computed_tokens = num_tokens
            request.num_placeholders += 1
        plan.budget -= len(scheduled)
        plan.num_decodes = len(scheduled)
        if self.table.shares is not None:
            self.table.shares.charge_decodes(requests, plan.recomputed_decodes)
        return chunks

    def _schedule_chunks(self, chunks: Iterable[Request], plan: StepPlan) -> None:
        """Parts of prompts, with the budget that is left."""
        for request in chunks:
            if plan.budget and request.row is not None:
                self._schedule_chunk(request, plan, ())

    def _schedule_in_time(
        self, first: Request | None, chunks: list[Request], plan: StepPlan
    ) -> None:
        """Where the budget is small to keep a promise of time: half of it is the first prompt's,
        so that it gets on; with the other half short prompts may pass it, the shortest first. With
        shares, those of tenants that have had more come last.
        """
        shares = self.table.shares
        rest = [request for request in chunks if request is not first]
        kept = 0 if first is None else (plan.budget + 1) // 2
        plan.budget -= kept
        if shares is None:
            rest.sort(key=_num_left)
            self._schedule_chunks(rest, plan)
            self._schedule_waiting(plan)
        else:
            most = None if first is None else shares.standing(first.tenant)
            rest = self._schedule_by_shares(rest, plan, shares, most)
        plan.budget += kept
        if first is not None:
            self._schedule_chunks((first,), plan)
            if shares is not None and plan.budget:
                self._schedule_by_shares(rest, plan, shares)

    def _schedule_by_shares(
        self,
        chunks: list[Request],
        plan: StepPlan,
        shares: FairShares,
        most: float | None = None,
    ) -> list[Request]:
        """Prompts of the tenant that has had least come first, running ones (the shortest first)
        before waiting ones; with `most`, none of tenants that have had more. Returns the running
        ones that were left out.
        """
        standing = shares.standing
        order = sorted((standing(one.tenant), _num_left(one), n) for n, one in enumerate(chunks))
        num_done, before = 0, -1.0
        for had, _, number in order:
            if most is not None and had > most:
                break
            if had != before:
                self._schedule_waiting(plan, had, False)
                before = had
            if not plan.budget:
                break
            self._schedule_chunks((chunks[number],), plan)
            num_done += 1
        self._schedule_waiting(plan, most)
        return [chunks[number] for _, _, number in order[num_done:]]

    def _schedule_chunk(
        self, request: Request, plan: StepPlan, new_block_ids: tuple[int, ...]
    ) -> None:
        """As many of a request's tokens as the budget allows; their blocks were taken at admission."""
        assert request.row is not None
        start = request.num_computed_tokens
        end = min(request.num_tokens, start + plan.budget)
        if self.blocks.states is not None:
            end = self.blocks.states.cut(request, start, end)
        samples = end == request.num_tokens
        recomputed = 0
        if start < request.computed_before:
            recomputed = min(end, request.computed_before) - start
            request.recomputed_tokens += recomputed
        plan.scheduled.append(
            ScheduledRequest(
                request.request_id, request.row, start, end - start, samples, new_block_ids
            )
        )
        plan.requests.append(request)
        num_tokens = end - start
        plan.budget -= num_tokens
        if self.table.shares is not None:
            self.table.shares.charge(request.params.tenant, num_tokens - recomputed)
        request.num_computed_tokens = end
        request.num_placeholders += samples

    def _grow(self, request: Request, plan: StepPlan) -> tuple[int, ...] | None:
        """A block for the next token: a free one, else the least important running requests are
        preempted until one is.

        The running queue is walked from the most important on, so the preempted ones are not in
        this step yet.
        """
        while request.row is not None:
            try:
                block_ids = self.blocks.grow(request)
            except QuireError as error:
                self.table.finish(request, "error", plan.now, error=str(error))
                return None
            if block_ids is not None:
                return block_ids
            plan.preempting = True
            why = f"request {request.request_id} needed a block and none was free"
            self.table.preempt(self.table.running[-1], why)
        return None

    def _schedule_waiting(
        self, plan: StepPlan, most: float | None = None, or_equal: bool = True
    ) -> None:
        """Admits waiting requests in order; with `most`, those of tenants that have had less (or as
        much). One for which there are too few blocks holds up all behind it; one that is not ready
        (its last token is in flight, or another answer computes its prompt, or there is no room for
        its adapter) is passed over.
        """
        # Whoever was just preempted for another's blocks must not be admitted again at once.
        if plan.preempting or not (plan.budget and self.table.free_rows and self.table.waiting):
            return
        shares = self.table.shares
        without_slot: Request | None = None
        """The first that waits for room for its adapter."""
        for request in self.table.waiting.candidates():
            if not plan.budget or not self.table.free_rows:
                return
            if most is not None and shares is not None:
                had = shares.standing(request.tenant)
                if had > most or (had == most and not or_equal):
                    return
            if request.num_placeholders:
                continue
            if self.config.prefix_caching and plan.waits_for_prompt(request, self.table.members):
                continue
            if not self.pauses.lets_in(request):
                continue
            if request.adapter and self._waits_for_slot(request, without_slot):
                without_slot = without_slot or request
                plan.waiting_adapters.append(request.resolved.adapter_name)
                continue
            try:
                placement = self.blocks.place(
                    request, min(len(request.token_ids) + 1, request.max_total_tokens - 1)
                )
            except QuireError as error:
                self.table.finish(request, "error", plan.now, error=str(error))
                continue
            if placement is None:
                self._held_up = request
                return
            self._admit(request, placement, plan)
            if request.adapter and without_slot is not None:
                without_slot.num_passed += 1

    def _waits_for_slot(self, request: Request, passed: Request | None) -> bool:
        """Whether running requests have all adapters that there is room for, and not this one's.
        Those behind a request that waits for that may pass it, but not for ever: then they wait,
        too, until adapters leave.
        """
        if passed is not None and passed.num_passed >= self.config.max_num_seqs:
            return True
        most, running = self.config.max_loras, self.table.adapters
        return bool(most) and request.adapter not in running and len(running) >= most

    def _admit(self, request: Request, placement: Placement, plan: StepPlan) -> None:
        row = self.table.start(request, plan.now)
        request.admitted_step = plan.step_id
        request.num_computed_tokens = placement.num_device_tokens + placement.num_host_tokens
        request.num_committed_tokens = request.num_computed_tokens
        request.host_tokens += placement.num_host_tokens
        request.cached_tokens += placement.num_device_tokens
        block_ids = tuple(block.block_id for block in request.block_table)
        plan.admitted.append(
            AdmittedRequest(
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
                resolved=request.resolved,
                score_prompt_from=request.score_prompt_from,
                pooling=request.pooling,
                state_ids=tuple(
                    tuple(block.block_id for block in state.blocks) for state in request.states
                ),
                weights_version=request.weights_version,
            )
        )
        self._schedule_chunk(request, plan, block_ids[placement.num_ready_blocks :])

    def _advance_states(self, plan: StepPlan) -> None:
        """Notes which states of recurrent layers the step makes, and has those copied that are
        kept.
        """
        reserve = self.config.num_groups * len(self.table.running)
        for request, entry in zip(plan.requests, plan.scheduled, strict=True):
            self.blocks.advance_states(
                request, entry.start, entry.start + entry.num_tokens, reserve
            )


def _num_left(request: Request) -> int:
    """Tokens of it that are not computed yet."""
    return request.num_tokens - request.num_computed_tokens
