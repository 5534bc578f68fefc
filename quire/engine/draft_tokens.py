"""Draft tokens for the requests of a step: from whatever budget and blocks are left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.engine.block_manager import BlockManager
from quire.engine.config import SchedulerConfig
from quire.engine.request import Request
from quire.engine.step_plan import StepPlan
from quire.errors import QuireError
from quire.step import with_draft_tokens

Propose = Callable[[Request, int], Sequence[int]]
"""Called with a request that samples and a number n: returns at most n tokens that may follow the
request's own.
"""


class DraftTokens:
    """Has draft tokens proposed, and adds them to a step."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        propose: Propose,
        num_drafts: Callable[[Request], int] | None,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._propose = propose
        self._num_drafts = num_drafts

    def add(self, plan: StepPlan, num_running: int) -> None:
        """Appends draft tokens to the entries that sample, from the budget that is left and from
        free blocks, as long as one block is left for every running request. Each request may have
        the same number of draft tokens at most.
        """
        most = self._config.max_batched_tokens
        used = most - plan.left_out - plan.budget
        share = ((self._config.max_checked_tokens or most) - used) // max(len(plan.requests), 1)
        if share <= 0:
            return
        num_drafts, state = self._num_drafts, self._config.state
        for index, request in enumerate(plan.requests):
            if request.draft_pause:
                request.draft_pause -= request.draft_pause > 0
            elif plan.scheduled[index].samples and request.pooling is None:
                # - 1: the sampled token itself takes one place.
                room = min(
                    plan.budget, share, request.max_total_tokens - request.num_computed_tokens - 1
                )
                # draft tokens in flight pass one chunk's end at most: the state before it is kept
                if state is not None:
                    room = min(room, state.chunk - 1 - request.num_draft_tokens)
                draft_tokens = self._propose(request, room) if room > 0 else ()
                drafts = 0 if num_drafts is None else num_drafts(request)
                if draft_tokens or drafts:
                    self._extend_entry(plan, index, tuple(draft_tokens[:room]), drafts, num_running)

    def _extend_entry(
        self,
        plan: StepPlan,
        index: int,
        draft_tokens: tuple[int, ...],
        num_drafts: int,
        num_running: int,
    ) -> None:
        """Adds draft tokens, and the number of tokens to draft after them, to an entry, as far as
        there are blocks.
        """
        request, entry = plan.requests[index], plan.scheduled[index]
        computed = request.num_computed_tokens
        # drafting computes the sampled token and all drafts but the last, within max_total_tokens
        if num_drafts:
            num_drafts = max(
                0, min(num_drafts, request.max_total_tokens - computed - len(draft_tokens) - 2)
            )
        end, new_block_ids = computed + len(draft_tokens) + num_drafts, entry.new_block_ids
        if end > self._blocks.num_held(request):
            new_block_ids += self._grow(request, end, num_running)
            room = self._blocks.num_held(request) - computed
            draft_tokens = draft_tokens[:room]
            num_drafts = min(num_drafts, room - len(draft_tokens))
        count = len(draft_tokens)
        if count:
            request.num_computed_tokens = computed + count
            request.num_placeholders += count
            request.num_draft_tokens += count
            plan.budget -= count
            plan.num_decodes = min(plan.num_decodes, index)
        plan.scheduled[index] = with_draft_tokens(entry, new_block_ids, draft_tokens, num_drafts)

    def _grow(self, request: Request, end: int, num_running: int) -> tuple[int, ...]:
        """New blocks for tokens up to `end`, while one stays free for each running request."""
        blocks, needed = self._blocks, self._config.num_groups * num_running
        new_block_ids: tuple[int, ...] = ()
        try:
            while (
                end > blocks.num_held(request)
                and blocks.pool.num_free > needed
                and (more := blocks.grow(request))
            ):
                new_block_ids += more
        except QuireError:
            pass  # draft tokens need not be made
        return new_block_ids
