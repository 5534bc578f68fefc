"""All live requests: which ones wait and which run, and what callers and runner have not been told
yet.

The table changes a request's queue, row and blocks together, when the scheduler adds, admits,
preempts or ends it.
"""

from __future__ import annotations

import heapq
from collections import Counter

from quire.engine.block_manager import BlockManager
from quire.engine.config import SchedulerConfig
from quire.engine.fair_shares import FairQueue, FairShares
from quire.engine.request import Request
from quire.engine.request_queue import RequestQueue
from quire.errors import CapacityError, InvalidRequestError
from quire.step import (
    Finished,
    FinishReason,
    Preemption,
    PreemptionKind,
    RequestUpdate,
    TokenLogprob,
    add_version,
)


class RequestTable:
    """All live requests: by name, by group, by queue, by row."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.config = config
        self.blocks = blocks
        self.shares = (
            FairShares(dict(config.tenant_weights), config.max_num_seqs)
            if config.policy == "fair"
            else None
        )
        """What tenants have had; None where it doesn't count."""
        self.waiting: RequestQueue | FairQueue = (
            RequestQueue() if self.shares is None else FairQueue(self.shares)
        )
        self.running = RequestQueue()
        self.requests: dict[str, Request] = {}
        self.groups: dict[str, list[Request]] = {}
        self.adapters: Counter[str] = Counter()
        """Of running requests: how many have each adapter."""
        self.adapter_names: dict[str, str] = {}
        """By digest, what one of them calls it."""
        self.free_rows = list(range(config.max_num_seqs))
        self.updates: list[RequestUpdate] = []
        """For the callers, who have not been told yet."""
        self.preempted: list[Preemption] = []
        self.finished: list[Finished] = []
        """These two: for the runner, which has not been told yet."""
        self._deadlines: dict[Request, float] = {}
        self._next_deadline = float("inf")
        self._num_added = 0
        self.weights_version = 0
        """Of the weights that compute now."""

    def add(self, request: Request, now: float) -> None:
        """Takes a request in, or says why it never could be computed."""
        request.weights_version = self.weights_version
        self._check(request)
        request.max_total_tokens = self._limit(request)
        request.arrival = now
        request.sequence = self._num_added
        self._num_added += 1
        since = now if request.queued_since is None else request.queued_since
        request.order = (self._rank(request), since, request.sequence)
        self.requests[request.request_id] = request
        if request.group_id is not None:
            self.groups.setdefault(request.group_id, []).append(request)
        if request.params.deadline is not None:
            self._deadlines[request] = now + request.params.deadline
            self._next_deadline = min(self._next_deadline, now + request.params.deadline)
        if self.shares is not None:
            self.shares.enter(request.tenant)
        self.waiting.add(request)

    def get(self, request_id: str) -> Request:
        """The live request of that name."""
        request = self.requests.get(request_id)
        if request is None:
            raise InvalidRequestError("request_id", f"{request_id} is unknown or has finished")
        return request

    def check_weights(self, request: Request) -> None:
        """Raises InvalidRequestError for one that wants another version of the weights."""
        wanted = request.params.weights_version
        if wanted is not None and wanted != self.weights_version:
            raise InvalidRequestError(
                "weights_version", f"is {wanted}; the engine has version {self.weights_version}"
            )

    def members(self, group_id: str | None) -> list[Request]:
        """The live answers of a group, oldest first; none for a request by itself."""
        return self.groups.get(group_id, []) if group_id is not None else []

    def set_priority(self, request: Request, priority: int) -> None:
        """Moves a request to another place in its queue."""
        queue = self.waiting if request.row is None else self.running
        queue.remove(request)
        request.priority = priority
        request.order = (self._rank(request), *request.order[1:])
        queue.add(request)

    def expire(self, now: float) -> None:
        """Ends the requests whose deadline has passed."""
        if now < self._next_deadline:
            return
        for request in [r for r, deadline in self._deadlines.items() if deadline <= now]:
            self.finish(request, "deadline", now)
        self._next_deadline = min(self._deadlines.values(), default=float("inf"))

    def start(self, request: Request, now: float) -> int:
        """Moves a waiting request, whose block table is filled, to a free row; returns the row."""
        self.waiting.remove(request)
        row = request.row = heapq.heappop(self.free_rows)
        if request.first_scheduled is None:
            request.first_scheduled = now
        request.prompt_progress.has_begun = True
        request.weights_versions = add_version(
            request.weights_versions, request.num_output_tokens, request.weights_version
        )
        self.running.add(request)
        if request.adapter:
            self.adapters[request.adapter] += 1
            self.adapter_names[request.adapter] = request.resolved.adapter_name
        if self.shares is not None:
            self.shares.start(request.tenant)
        return row

    def preempt(self, request: Request, why: str, saves: bool = True) -> None:
        """Takes row and blocks from a running request. It keeps its tokens and its place in the
        order; a token that a step in flight samples for it is still valid, and is appended when it
        comes. Unless it `saves` them, cached blocks are not copied to the host tier.
        """
        assert request.row is not None
        num_computed = request.num_computed_tokens
        is_saved = saves and self.blocks.demote(request)
        kind: PreemptionKind = "swap" if is_saved else "recompute"
        self.preempted.append(Preemption(request.request_id, request.row, kind, why, num_computed))
        self.blocks.release(request)
        self._give_up_row(request)
        request.preemptions += 1
        request.computed_before = max(request.computed_before, num_computed)
        request.num_computed_tokens = request.num_committed_tokens = 0
        self.waiting.add(request)

    def even_out(self, held_up: Request | None) -> None:
        """Has a tenant with more rows than its share give one up, if the next request waits for a
        row or, `held_up`, for blocks, and its tenant has less than its share.
        """
        shares, waiting = self.shares, self.waiting
        if shares is None or not waiting or (self.free_rows and held_up is None):
            return
        request = waiting.first()
        if request.num_placeholders or (self.free_rows and request is not held_up):
            return
        giver = shares.giver(request.tenant)
        if giver is not None:
            last = next(one for one in reversed(self.running) if one.tenant == giver)
            why = f"request {request.request_id} of a tenant with less than its share waited"
            self.preempt(last, why)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        new_token_ids: tuple[int, ...] = (),
        error: str | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
        pooled: bytes | None = None,
    ) -> None:
        """Ends a request, gives up its row and blocks, and notes its end for the callers and the
        runner.
        """
        row = request.row
        if row is None:
            self.waiting.remove(request)
        else:
            self._give_up_row(request)
        if row is not None and reason in ("stop", "length"):
            self.blocks.publish_end(request)
        self.blocks.release(request)
        request.block_keys = []
        request.drafts, request.draft_state = (), None
        self._forget(request)
        request.finish_reason = reason
        request.finished = now
        metrics = request.metrics()
        name, sizes = request.request_id, (metrics.num_prompt_tokens, metrics.num_output_tokens)
        draft_tokens = metrics.drafted_tokens, metrics.accepted_tokens
        self.finished.append(
            Finished(name, row, reason, request.arrival, now, *sizes, *draft_tokens)
        )
        update = RequestUpdate(
            name, new_token_ids, reason, request.stop_token_id, error, metrics, logprobs
        )
        self.updates.append(update._replace(pooled=pooled))

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        if self.shares is not None:
            self.shares.leave(request.tenant, len(request.token_ids))
        self._deadlines.pop(request, None)
        if request.group_id is not None:
            group = self.groups[request.group_id]
            group.remove(request)
            if not group:
                del self.groups[request.group_id]

    def _give_up_row(self, request: Request) -> None:
        assert request.row is not None
        heapq.heappush(self.free_rows, request.row)
        self.running.remove(request)
        request.row = None
        if request.adapter:
            self.adapters[request.adapter] -= 1
            if not self.adapters[request.adapter]:
                del self.adapters[request.adapter], self.adapter_names[request.adapter]
        if self.shares is not None:
            self.shares.stop(request.tenant)

    def _rank(self, request: Request) -> int:
        return request.priority if self.config.policy == "priority" else 0

    def _limit(self, request: Request) -> int:
        """How many tokens the sequence may have. They must fit the cache when no other request
        runs: so the most important request can always be computed to its end, if need be by
        preempting all others.
        """
        config = self.config
        num_prompt = request.num_prompt_tokens
        limit = config.max_model_len
        if request.params.max_tokens is not None:
            limit = min(limit, num_prompt + request.params.max_tokens)
        # The last token is sampled but never computed, so it needs no room.
        if limit - 1 > config.num_tokens:
            raise CapacityError(
                f"request {request.request_id}: prompt ({num_prompt} tokens) and answer (up to "
                f"{limit - num_prompt}) need room for {limit - 1} tokens, the cache holds "
                f"{config.num_tokens} ({config.num_tokens // config.block_size} blocks of {config.block_size}): lower "
                "max_tokens, shorten the prompt or give the cache more memory"
            )
        return limit

    def _check(self, request: Request) -> None:
        request_id = request.request_id
        prompt = request.prompt_token_ids
        if request.sequence >= 0:
            raise InvalidRequestError("request", f"{request_id} was added before: make a new one")
        if request_id in self.requests:
            raise InvalidRequestError(
                "request_id", f"{request_id} is in use: wait for its end or rename"
            )
        if not prompt:
            raise InvalidRequestError(
                "prompt", f"of {request_id} is empty: it needs at least one token"
            )
        if min(prompt) < 0 or max(prompt) >= 2**31:
            raise InvalidRequestError(
                "prompt", f"of {request_id} holds token ids outside 0 to 2**31-1"
            )
        if len(prompt) + 1 > self.config.max_model_len:
            raise InvalidRequestError(
                "prompt",
                f"of request {request_id} has {len(prompt)} tokens, and with one new token must fit "
                f"max_model_len ({self.config.max_model_len}): shorten it",
            )
        self.check_weights(request)
        for member in self.members(request.group_id)[:1]:
            same = (member.prompt_token_ids, member.extra_keys, member.key_parts)
            if same != (prompt, request.extra_keys, request.key_parts):
                raise InvalidRequestError(
                    "group_id",
                    f"{request.group_id} has another prompt, cache salt or key parts than {request_id}",
                )
