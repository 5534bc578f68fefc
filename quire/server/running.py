"""A generation while it runs: updates of the engine become events, which wait here for their reader."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from quire.engine import make_requests
from quire.errors import NO_TOKEN_LEFT
from quire.frontend.live_request import LiveRequest
from quire.frontend.reasoning import ReasoningSplitter
from quire.frontend.tokenizer import Tokenizer
from quire.observe.request_records import RequestRecord
from quire.observe.tracing import Trace
from quire.outputs import Completion, RequestDelta, TokenLogprobs
from quire.server.admission import Ticket
from quire.server.answer_reader import AnswerReader
from quire.server.collector import Collector
from quire.server.connection import new_id
from quire.server.engine_client import EngineClient
from quire.server.errors import ApiError
from quire.server.generation import (
    Choice,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Usage,
)
from quire.server.messages import Refused
from quire.server.metrics import RequestTimes, ServerMetrics
from quire.server.prompts import EncodedPrompt
from quire.step import RequestMetrics, RequestUpdate


@dataclass(slots=True)
class _Answer:
    """One choice, as far as it has come."""

    index: int
    prompt: int
    live: LiveRequest
    position: int
    """Which answer of its prompt."""
    reader: AnswerReader
    started: bool = False
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    is_over: bool = False


class Generation:
    """One request of a client: all answers to all its prompts. See `quire.server.generation` for its use.

    It is the listener of its engine requests. Everything happens on the event loop.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prompts: Sequence[EncodedPrompt],
        seeds: Sequence[int],
        *,
        tokenizer: Tokenizer,
        client: EngineClient,
        ticket: Ticket,
        record: RequestRecord,
        metrics: ServerMetrics,
        trace: Trace,
        max_buffered_tokens: int,
    ) -> None:
        self.request = request
        self.prompts = prompts
        self.usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts))
        self.record = record
        self.tokenizer = tokenizer
        self.ignored = tuple(dict.fromkeys(name for prompt in prompts for name in prompt.ignored))
        """Fields that turned out to mean nothing to this model."""
        self._client = client
        self._ticket = ticket
        self._metrics = metrics
        self._trace = trace
        self._max_buffered = max_buffered_tokens if request.stream else None
        self._arrival = time.monotonic()
        self._answers: dict[str, _Answer] = {}
        self.request_ids: list[str] = []
        """Names of the engine's requests, one for each prompt."""
        self.lives: list[LiveRequest] = []
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            self._prepare(number, prompt, seed, tokenizer)
        self._cached: list[int | None] = [None] * len(prompts)
        self._undecided = set(self.request_ids)
        self._unfinished = len(prompts) * request.params.n if request.params.best_of is None else len(prompts)
        self._events: deque[GenerationEvent] = deque()
        self._num_buffered = 0
        self._error: ApiError | None = None
        self._is_over = False
        self._wake: asyncio.Future[None] | None = None

    # For its reader

    def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        return self

    async def __anext__(self) -> GenerationEvent:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            await self._wait()
        event = self._events.popleft()
        self._num_buffered -= len(event.token_ids)
        return event

    async def accepted_by_engine(self) -> None:
        """Waits for the engine's verdict; raises if it refuses."""
        while self._undecided and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def collect(self) -> list[Choice]:
        """All choices, whole."""
        collector = Collector(with_logprobs=self.request.params.logprobs is not None)
        try:
            async for event in self:
                collector.take(event)
        finally:
            self.abort()
        return collector.choices()

    def abort(self) -> None:
        """Ends it; does nothing when it is over."""
        if not self._is_over:
            self._end("aborted")

    def prompt_logprobs(self, number: int) -> tuple[TokenLogprobs | None, ...] | None:
        """Of a prompt's tokens, once an event of an answer to it has come; None if they were not asked for."""
        return self.lives[number].prompt_logprobs()

    # For the engine client

    def accepted(self, request_id: str) -> None:
        self._undecided.discard(request_id)
        self._notify()

    def refused(self, refusal: Refused) -> None:
        if refusal.kind == "internal":
            self._fail(ApiError(500, refusal.message))
            return
        message, wanted = refusal.message, refusal.field
        plan = self.prompts[0].plan
        if wanted == "structured.grammar" and plan is not None and plan.tools:
            wanted, message = "tools", f"tools: {plan.explain(message)}"
        if wanted is not None and wanted in self.request.fields:
            message = self.request.fields[wanted] + message.removeprefix(wanted)
            wanted = self.request.fields[wanted]
        self._fail(ApiError(400, message, field=wanted, code="invalid_value"))

    def started(self, name: str, cached_tokens: int) -> None:
        answer = self._answers[name]
        if answer.started:
            return
        answer.started = True
        self._trace.started(name, time.monotonic())
        self.record.state = "running"
        if self._cached[answer.prompt] is None:
            num_tokens = len(self.prompts[answer.prompt].token_ids)
            self._cached[answer.prompt] = cached_tokens
            self.usage.cached_tokens += min(cached_tokens, num_tokens)
            self._ticket.begun(num_tokens)
            self._metrics.prompt_started(num_tokens, min(cached_tokens, num_tokens))

    def update(self, update: RequestUpdate) -> None:
        answer = self._answers[update.request_id]
        if update.prompt_scores is not None:
            answer.live.take_prompt_scores(update.prompt_scores)
        if answer.is_over:
            # A stop string ended it before; these are the engine's own counts.
            if update.metrics is not None:
                self._metrics.answer_finished(update.metrics, "stop")
            return
        if update.finish_reason in ("error", "deadline", "abort"):
            self._fail(_failure(update))
            return
        if not update.new_token_ids and update.finish_reason is None:
            return
        ended_by_engine = update.finish_reason is not None
        began = time.monotonic()
        delta = answer.live.advance(answer.position, update, partial(self._end_answer, update.request_id, answer))
        self._count(answer, delta)
        if delta.finish_reason is not None:
            answer.is_over = True
            if ended_by_engine and update.metrics is not None:
                self._metrics.answer_finished(update.metrics, delta.finish_reason)
                self._trace.answered(update.request_id, update.metrics)
        if self.request.params.best_of is None:
            self._emit_delta(answer, delta)
        elif delta.output is not None:
            for place, completion in enumerate(delta.output.completions):
                self._emit_whole(answer, answer.prompt * self.request.params.n + place, completion)
            self._unfinished -= 1
        if delta.token_ids:
            self._trace.text(update.request_id, began, time.monotonic())
        if not self._unfinished:
            self._end("finished")
        elif self._max_buffered is not None and self._num_buffered > self._max_buffered:
            self._fail(ApiError(408, "the stream was not read for too long", code="slow_reader"))

    def lost(self, error: ApiError) -> None:
        self._fail(error)

    # Inside

    def _prepare(self, number: int, prompt: EncodedPrompt, seed: int, tokenizer: Tokenizer) -> None:
        request = self.request
        name = request.response_id if len(self.prompts) == 1 else f"{request.response_id}.{number}"
        requests = make_requests(name, prompt.token_ids, prompt.params, seed)
        live = LiveRequest(
            name,
            prompt.text,
            prompt.token_ids,
            requests,
            prompt.params,
            tokenizer,
            prompt.continues,
            deltas_only=True,
        )
        self.request_ids.append(name)
        self.lives.append(live)
        for position, one in enumerate(requests):
            index = number * request.params.n + position  # with best_of, known at the end
            self._answers[one.request_id] = _Answer(index, number, live, position, new_reader(prompt, request.split))

    def _end_answer(self, name: str, answer: _Answer) -> RequestMetrics:
        """A stop string is complete. The engine is told; its own counts follow."""
        self._client.end(name)
        now = time.monotonic()
        return RequestMetrics(
            request_id=name,
            arrival=self._arrival,
            first_scheduled=None,
            first_token=answer.first_token,
            finished=now,
            num_prompt_tokens=len(self.prompts[answer.prompt].token_ids),
            num_output_tokens=answer.num_tokens,
            cached_tokens=self._cached[answer.prompt] or 0,
            host_tokens=0,
            recomputed_tokens=0,
            preemptions=0,
        )

    def _count(self, answer: _Answer, delta: RequestDelta) -> None:
        count = len(delta.token_ids)
        if not count:
            return
        now = time.monotonic()
        if answer.first_token is None:
            answer.first_token = now
            self._metrics.first_token(now - self._arrival)
            self.record.timings.setdefault("first_token", round(now - self._arrival, 6))
        elif answer.last_token is not None:
            self._metrics.next_tokens((now - answer.last_token) / count, count)
        answer.last_token = now
        answer.num_tokens += count
        self.usage.completion_tokens += count
        if answer.reader.is_reasoning:
            self.usage.reasoning_tokens += count
        self._metrics.tokens(count)

    def _emit_delta(self, answer: _Answer, delta: RequestDelta) -> None:
        is_last = delta.finish_reason is not None
        pieces = answer.reader.feed(delta.text, is_last)
        reason: FinishReason | None = None
        if is_last:
            reason = _told(delta.finish_reason, answer.reader)
            self._unfinished -= 1
            self.record.finish_reasons.append(reason)
        self._emit(
            GenerationEvent(
                index=answer.index,
                text=delta.text,
                content=pieces.content,
                reasoning=pieces.reasoning,
                tool_calls=pieces.tool_calls,
                token_ids=delta.token_ids,
                logprobs=delta.logprobs,
                finish_reason=reason,
                stop_reason=answer.live.stop_reason(answer.position) if is_last else None,
            )
        )

    def _emit_whole(self, answer: _Answer, index: int, completion: Completion) -> None:
        reader = new_reader(self.prompts[answer.prompt], self.request.split)
        pieces = reader.feed(completion.text, True)
        reason = _told(completion.finish_reason, reader)
        self.record.finish_reasons.append(reason)
        self._emit(
            GenerationEvent(
                index=index,
                text=completion.text,
                content=pieces.content,
                reasoning=pieces.reasoning,
                tool_calls=pieces.tool_calls,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs or (),
                finish_reason=reason,
                stop_reason=completion.stop_reason,
            )
        )

    def _emit(self, event: GenerationEvent) -> None:
        self._events.append(event)
        self._num_buffered += len(event.token_ids)
        self._notify()

    def _fail(self, error: ApiError) -> None:
        if self._is_over:
            return
        self._error = error
        self.record.error = error.message
        self._events.clear()
        self._end("failed")

    def _end(self, state: str) -> None:
        self._is_over = True
        if state != "finished":
            self._client.abort(self.request_ids)
            self._metrics.requests_failed(state, sum(not answer.is_over for answer in self._answers.values()))
        self._ticket.release()
        record, usage = self.record, self.usage
        record.state = state
        record.cached_tokens = usage.cached_tokens
        record.completion_tokens = usage.completion_tokens
        record.timings["total"] = round(time.monotonic() - self._arrival, 6)
        self._trace.ended(state, record.attributes(), record.error)
        if state == "finished":
            self._metrics.request_finished(
                RequestTimes(
                    total=time.monotonic() - self._arrival,
                    num_prompt_tokens=usage.prompt_tokens,
                    num_completion_tokens=usage.completion_tokens,
                    num_longest_tokens=max(answer.num_tokens for answer in self._answers.values()),
                    n=self.request.params.n,
                    max_tokens=self.request.params.max_tokens,
                )
            )
        self._notify()

    async def _wait(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def new_reader(prompt: EncodedPrompt, split: bool) -> AnswerReader:
    """For one answer to a prompt."""
    plan = prompt.plan
    if plan is None or not split:
        return AnswerReader(None, None, partial(new_id, "call"))
    splitter = ReasoningSplitter(prompt.inside_reasoning) if plan.support.thinks else None
    return AnswerReader(splitter, plan.new_parser(), plan.new_call_id, plan.parallel)


def _told(reason: str | None, reader: AnswerReader) -> FinishReason:
    """Why an answer ended. One that was cut off says so, calls or not: the last of them may be half of one."""
    return "tool_calls" if reader.num_calls and reason == "stop" else cast(FinishReason, reason)


def _failure(update: RequestUpdate) -> ApiError:
    if update.finish_reason == "deadline":
        if update.error is not None:
            return ApiError(503, f"the request {update.error}; try again later", code="queue_timeout", retry_after=5.0)
        return ApiError(504, "the request took longer than it was allowed to", code="deadline_exceeded")
    message = update.error or "the request was ended by the server"
    if message.startswith("structured:") or message == NO_TOKEN_LEFT:  # what was asked for can't be
        return ApiError(400, message, code="invalid_value")
    return ApiError(500, message, code="engine_error")
