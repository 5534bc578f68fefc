"""Takes in a step's results: appends tokens to requests, publishes full blocks in the prefix cache,
finds ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

from quire.engine.block_manager import BlockManager
from quire.engine.config import SchedulerConfig
from quire.engine.request import Request
from quire.engine.request_table import RequestTable
from quire.step import PromptLogprobs, RequestUpdate, Step, StepResult, new_tuple


class ResultTaker:
    """Updates requests with what a step has computed for them."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, table: RequestTable) -> None:
        self._config = config
        self._blocks = blocks
        self._table = table

    def take(self, step: Step, requests: Sequence[Request], result: StepResult, now: float) -> None:
        """`requests` has the request of each of the step's entries; what they gain goes to the
        table's updates.
        """
        tokens_of, errors, logprobs_of, ended = (
            result.tokens,
            result.errors,
            result.logprobs,
            result.ended,
        )
        prompt_logprobs, drafts = result.prompt_logprobs, result.drafts
        step_id = step.step_id
        block_size = self._config.block_size
        append, update_type = self._table.updates.append, RequestUpdate
        # Most entries are decodes, for which `request` is enough: reading a named tuple's fields
        # would cost more time than the rest of the loop. Their entry is None here.
        others = step.scheduled[step.num_decodes :]
        entries = (
            chain(repeat(None, step.num_decodes), others)
            if others
            else repeat(None, step.num_decodes)
        )
        draft_tokens: tuple[int, ...] = ()
        for request, entry in zip(requests, entries, strict=True):
            request_id = request.request_id
            if errors and request_id in errors:
                self._fail(request, errors[request_id], now)
                continue
            if prompt_logprobs and request_id in prompt_logprobs:
                self._note_prompt_logprobs(request, prompt_logprobs[request_id])
            if request.finish_reason is not None:
                continue  # It ended while this was computed: the result is dropped.
            # False if it was preempted since: then the keys and values of this step are in blocks
            # it no longer has.
            owns_row = request.row is not None and request.admitted_step <= step_id
            if entry is not None:
                draft_tokens = entry.draft_tokens
                if not entry.samples:
                    if owns_row:
                        self._note_computed(request, entry.start + entry.num_tokens)
                    continue
            request.num_placeholders -= 1
            if request.pooling is not None:
                if owns_row:
                    self._note_computed(request, len(request.token_ids))
                # the whole prompt is computed, which is all that was wanted
                if request_id in result.pooled:
                    self._table.finish(request, "stop", now, pooled=result.pooled[request_id])
                else:
                    self._fail(request, "the runner returned no pooled hidden state", now)
                continue
            tokens = tokens_of.get(request_id, ())
            if len(tokens) != 1 and not 1 <= len(tokens) <= 1 + len(draft_tokens):
                expected = f"1 to {1 + len(draft_tokens)}" if draft_tokens else "one"
                self._fail(
                    request, f"the runner returned {len(tokens)} tokens instead of {expected}", now
                )
                continue
            token = tokens[0]
            if draft_tokens:
                tokens = self._take_accepted(request, len(draft_tokens), tokens, owns_row)
                token = tokens[-1]
            token_ids = request.token_ids
            if owns_row:
                # All tokens but the new one have keys and values now: full blocks of them may be
                # published.
                request.num_committed_tokens = computed = len(token_ids)
                if computed // block_size > request.num_published_blocks:
                    self._blocks.publish(request)
            token_ids.append(token)
            if drafts or request.drafts:
                request.drafts = drafts.get(request_id, ())
            if request.first_token is None:
                request.first_token = now
                request.prompt_progress.has_tokens = True
                if owns_row and request.group_id is not None:
                    self._blocks.publish_partial(request)  # for the other answers to its prompt
            logprobs = logprobs_of.get(request_id, ())[: len(tokens)] if logprobs_of else ()
            if token in request.stop_ids and request.num_output_tokens > request.params.min_tokens:
                request.stop_token_id = token
                self._table.finish(request, "stop", now, tokens, logprobs=logprobs)
            elif ended and request_id in ended:
                self._table.finish(request, "stop", now, tokens, logprobs=logprobs)
            elif len(token_ids) >= request.max_total_tokens:
                self._table.finish(request, "length", now, tokens, logprobs=logprobs)
            else:
                # As `tokens_update` makes it, without a call for every row.
                append(
                    new_tuple(
                        update_type,
                        (request_id, tokens, None, None, None, None, logprobs, None, None),
                    )
                )

    def _take_accepted(
        self, request: Request, num_draft_tokens: int, tokens: tuple[int, ...], owns_row: bool
    ) -> tuple[int, ...]:
        """Appends the draft tokens that were right, up to a stop token; returns them and the token
        after them, to append.
        """
        request.num_placeholders -= num_draft_tokens
        request.num_draft_tokens -= num_draft_tokens
        request.drafted_tokens += num_draft_tokens
        request.accepted_tokens += len(tokens) - 1
        request.num_rejections += len(tokens) <= num_draft_tokens
        if owns_row:
            request.num_computed_tokens -= 1 + num_draft_tokens - len(tokens)
        right = tokens[:-1]
        if not request.stop_ids.isdisjoint(right):
            for index, token in enumerate(right):
                if (
                    token in request.stop_ids
                    and request.num_output_tokens + index >= request.params.min_tokens
                ):
                    request.token_ids.extend(right[:index])
                    return tokens[: index + 1]
        request.token_ids.extend(right)
        return tokens

    def _note_computed(self, request: Request, num_tokens: int) -> None:
        """The result says that a request's first `num_tokens` tokens have keys and values:
        publishes full blocks.
        """
        request.num_committed_tokens = num_tokens
        if num_tokens // self._config.block_size > request.num_published_blocks:
            self._blocks.publish(request)

    def _note_prompt_logprobs(self, request: Request, found: PromptLogprobs) -> None:
        """Reports logprobs of a prompt to its request; if that has ended, to another of the n
        answers to that prompt.
        """
        progress = request.prompt_progress
        if request.has_failed or found.start > progress.next_position:
            # An earlier chunk of the prompt failed, so these logprobs were computed from wrong keys
            # and values.
            return
        progress.next_position = max(progress.next_position, found.start + len(found.logprobs))
        takers = (
            [request]
            if request.finish_reason is None
            else self._table.members(request.group_id)[:1]
        )
        for taker in takers:
            # the group's name may belong to other requests by now
            if taker.prompt_progress is progress:
                self._table.updates.append(
                    RequestUpdate(taker.request_id, (), prompt_logprobs=found)
                )

    def _fail(self, request: Request, message: str, now: float) -> None:
        """Ends a request that failed by itself."""
        request.has_failed = True  # also after its end: steps in flight may still score its prompt
        if request.finish_reason is None:
            self._table.finish(request, "error", now, error=message)
