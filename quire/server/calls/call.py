"""The life of one client's call between its admission and its end, whatever API it came through and
whatever it asked for: its prompts go to the engine, what comes back waits here for its reader, and
its end is recorded once.

    call = await service.start(GenerationRequest(...), request_id, …)
    events = await call.all()                           # or, as they come: on_news and take
    call.usage                                          # complete when the call is over

Whatever is wrong with a request is raised by `start` (ApiError or a quire.errors type; both become
the right response by themselves), so a stream may send its first byte when it returns. After that
only an ApiError can come out of it, for what goes wrong later (engine lost, deadline). A call must
be ended: read it to its end, or call `abort()` (cheap, also when it is over).
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from quire.errors import NO_TOKEN_LEFT
from quire.frontend.tokenizer import Tokenizer
from quire.observe.prometheus import ServerMetrics
from quire.observe.request_records import RequestRecord
from quire.observe.step_lines import encode_params
from quire.observe.tracing import Trace
from quire.outputs import TokenLogprobs
from quire.server.calls.generation import GenerationEvent, GenerationRequest, Usage, join_events
from quire.server.calls.prompts import EncodedPrompt
from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.guard.admission import Ticket
from quire.server.link.engine_client import Engines
from quire.server.link.listeners import BatchedCallbacks, Grow
from quire.server.link.messages import AddRequest, Refused, pack_tokens
from quire.step import RequestUpdate

_FAILURES = ("error", "deadline", "abort")


class TextSink(Protocol):
    """Takes what most tokens bring, more text for a choice, without an event being made of it."""

    def push(self, text: str, token_ids: tuple[int, ...], is_reasoning: bool) -> bool:
        """Content or reasoning, and with which tokens it came; False if it can't take that now."""


@dataclass(slots=True)
class _Asked:
    """What the engine is asked for one prompt."""

    request_id: str
    seed: int
    answer_ids: Sequence[str]
    cached_tokens: int | None = None
    """None until one of its answers has started."""


class Call(ABC):
    """Hands prompts over and listens to the engine; subclasses say what an update means. All on the
    event loop.
    """

    AT_ONCE: ClassVar[int] = sys.maxsize
    """Prompts that the engine is given at a time."""

    def __init__(
        self,
        request_id: str,
        http_request_id: str,
        request: GenerationRequest,
        prompts: Sequence[EncodedPrompt],
        tokenizer: Tokenizer,
        client: Engines,
        config: ServerConfig,
        metrics: ServerMetrics,
        ticket: Ticket,
        trace: Trace,
        callbacks: BatchedCallbacks,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts))
        self.weights_version = 0
        """Of the weights that computed the last answer that has ended."""
        self.record = RequestRecord(
            response_id=request_id,
            request_id=http_request_id,
            endpoint=request.endpoint,
            created=time.time(),
            notes=dict(request.notes),
        )
        self.record.prompt_tokens = self.usage.prompt_tokens
        self._client = client
        self._metrics = metrics
        self._ticket = ticket
        self._trace = trace
        self.callbacks = callbacks
        self.on_news: Callable[[], None] | None = None
        """Called in the loop's next turn when events have come, or the end: once, until it says
        (`is_announced`) that it wants to hear of the next.
        """
        self.is_announced = False
        self._queue_seconds = config.queue_seconds
        self._max_buffered = config.max_buffered_tokens if request.stream else sys.maxsize
        self._arrival = time.monotonic()
        self._unsent = deque(range(len(prompts)))
        """Prompts the engine was not given yet."""
        self.events: list[GenerationEvent] = []
        """That have come and were not taken yet; the same list all the time."""
        self._undecided: set[str] = set()
        """Requests the engine has neither accepted nor refused."""
        self._asked = [self._ask(number) for number in range(len(prompts))]
        """For each prompt."""
        self._prompt_of = {
            answer_id: number
            for number, asked in enumerate(self._asked)
            for answer_id in asked.answer_ids
        }
        self._unfinished = set(self._prompt_of)
        self._started: set[str] = set()
        self._silent = set(range(len(prompts) * request.params.n))
        """Choices of which no event was taken yet."""
        self._num_buffered = 0
        self._error: ApiError | None = None
        self.is_over = False
        """Nothing more will come."""
        self._wake: asyncio.Future[None] | None = None

    def _ask(self, number: int) -> _Asked:
        request_id = self.request_id
        seed = self.request.params.seed
        if len(self.prompts) > 1:
            request_id += f".{number}"
        if seed is None:
            seed = secrets.randbits(64)
        return _Asked(request_id, seed, self._prepare(number, request_id, seed))

    # What a kind of call is

    @abstractmethod
    def _prepare(self, number: int, request_id: str, seed: int) -> Sequence[str]:
        """Makes ready for the answers to a prompt; returns their ids."""

    @abstractmethod
    def _take(self, update: RequestUpdate) -> None:
        """Makes events of an update. It may be about an answer that is finished already."""

    @abstractmethod
    def _count_finished(self) -> None:
        """Tells the metrics of a call that came to its end."""

    # For its reader

    @property
    def ignored(self) -> list[str]:
        """Fields that turned out to mean nothing to this model."""
        return list(dict.fromkeys(name for prompt in self.prompts for name in prompt.ignored))

    def prompt_logprobs(self, number: int) -> tuple[TokenLogprobs | None, ...] | None:
        """Of a prompt's tokens, once an event of an answer to it has come; None if they were not
        asked for.
        """
        return None

    def take(self) -> list[GenerationEvent]:
        """Those, in as few events as tell the same; the first of a choice is one of its own."""
        events = self.events.copy()
        self.events.clear()
        self._num_buffered = 0
        return (
            events if len(events) == 1 and not self._silent else join_events(events, self._silent)
        )

    def write_text_to(self, index: int, sink: TextSink) -> None:
        """Whether the text of a choice comes as events or, as long as none wait, by `sink` makes no
        difference.
        """
        return

    def raise_error(self) -> None:
        """Raises what ended it, if it did not end well."""
        if self._error is not None:
            raise self._error

    async def all(self) -> list[GenerationEvent]:
        """All events, when it is over."""
        while not self.is_over:
            await self._wait()
        self.raise_error()
        return self.events

    async def start(self) -> None:
        """Hands over to the engine and waits for its verdict; raises if the engine refuses or is
        gone.
        """
        try:
            self._hand_over()
            while self._undecided and self._error is None:
                await self._wait()
            self.raise_error()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Ends it; does nothing when it is over."""
        if not self.is_over:
            self._end("aborted")

    # For the engine client

    def accepted(self, request_id: str) -> None:
        self._undecided.discard(request_id)
        self._notify()

    def refused(self, refusal: Refused) -> None:
        if refusal.kind == "internal":
            self.fail(ApiError(500, refusal.message))
            return
        if refusal.kind == "unavailable":
            self.fail(ApiError(503, refusal.message, code="engine_unavailable", retry_after=5.0))
            return
        message = refusal.message
        field = refusal.field
        plan = self.prompts[0].plan
        if field == "structured.grammar" and plan is not None and plan.tools:
            field = "tools"
            message = f"tools: {plan.explain(message)}"
        if field is not None and field in self.request.fields:
            message = self.request.fields[field] + message.removeprefix(field)
            field = self.request.fields[field]
        self.fail(ApiError(400, message, field=field, code="invalid_value"))

    def started(self, answer_id: str, cached_tokens: int) -> None:
        if answer_id in self._started:
            return
        self._started.add(answer_id)
        self._trace.started(answer_id, time.monotonic())
        self.record.state = "running"
        number = self._prompt_of[answer_id]
        asked = self._asked[number]
        if asked.cached_tokens is None:
            num_tokens = len(self.prompts[number].token_ids)
            asked.cached_tokens = cached_tokens
            self.usage.cached_tokens += min(cached_tokens, num_tokens)
            self._ticket.begun(num_tokens)
            self._metrics.prompt_started(num_tokens, min(cached_tokens, num_tokens))

    def update(self, update: RequestUpdate) -> None:
        if update.finish_reason in _FAILURES and update.request_id in self._unfinished:
            self.fail(failure(update))
            return
        self._take(update)
        if self._unsent:
            self._hand_over()
        if not self._unfinished and not self.is_over:
            self._end("finished")

    def grower(self, answer_id: str) -> Grow:
        return lambda token_ids, now: self.update(RequestUpdate(answer_id, token_ids))

    def fail(self, error: ApiError) -> None:
        if self.is_over:
            return
        self._error = error
        self.record.error = error.message
        self.events.clear()
        self._end("failed")

    def _hand_over(self) -> None:
        """Gives the engine the next prompts, as many as it may have at a time."""
        try:
            while (
                self._unsent
                and not self.is_over
                and len(self._unfinished) - len(self._unsent) < self.AT_ONCE
            ):
                number = self._unsent[0]
                prompt = self.prompts[number]
                asked = self._asked[number]
                message = AddRequest(
                    asked.request_id,
                    pack_tokens(prompt.token_ids),
                    encode_params(prompt.params),
                    asked.seed,
                    prompt.resolved,
                    self._queue_seconds,
                    self.request.pooling,
                    adapter=self.request.adapter,
                )
                self._client.add(message, self)
                self._unsent.popleft()
                self._undecided.add(asked.request_id)
        except ApiError as error:  # the engine is gone, be it in the middle of the call
            self.fail(error)

    def _emit(self, event: GenerationEvent) -> None:
        if self.is_over:
            return
        self.events.append(event)
        self._num_buffered += len(event.token_ids)
        if self._num_buffered > self._max_buffered:
            self.fail(ApiError(408, "the stream was not read for too long", code="slow_reader"))
        elif not self.is_announced and self.on_news is not None:
            # as below: this is for every token
            self.is_announced = True
            self.callbacks.add(self.on_news)

    def _end(self, state: str) -> None:
        self.is_over = True
        if state == "finished":
            self._count_finished()
        else:
            self._client.abort([asked.request_id for asked in self._asked])
            self._metrics.requests_failed(state, len(self._unfinished))
        self._ticket.release(self.usage.completion_tokens)
        record = self.record
        record.state = state
        record.cached_tokens = self.usage.cached_tokens
        record.completion_tokens = self.usage.completion_tokens
        record.timings["total"] = round(time.monotonic() - self._arrival, 6)
        self._trace.ended(state, record.attributes(), record.error)
        self._notify()

    async def _wait(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _notify(self) -> None:
        """For those who wait for a verdict or the end."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        if not self.is_announced and self.on_news is not None:
            self.is_announced = True
            self.callbacks.add(self.on_news)


class EmbeddingCall(Call):
    """A call whose prompts are answered with one vector each: their pooled hidden states."""

    AT_ONCE: ClassVar[int] = 32  # a long list of texts must not fill the engine's queue

    def _prepare(self, number: int, request_id: str, seed: int) -> Sequence[str]:
        return (request_id,)

    def _take(self, update: RequestUpdate) -> None:
        if update.finish_reason is None:
            return
        if update.pooled is None:
            self.fail(failure(update))
            return
        self._unfinished.discard(update.request_id)
        if update.metrics is not None:
            self._trace.answered(update.request_id, update.metrics)
        self._emit(GenerationEvent(self._prompt_of[update.request_id], vector=update.pooled))

    def _count_finished(self) -> None:
        """The histograms are about answers, which this has none of."""


def failure(update: RequestUpdate) -> ApiError:
    """What a client is told about an answer that ended without its result."""
    if update.finish_reason == "deadline":
        if update.error is not None:
            return ApiError(
                503,
                f"the request {update.error}; try again later",
                code="queue_timeout",
                retry_after=5.0,
            )
        return ApiError(
            504, "the request took longer than it was allowed to", code="deadline_exceeded"
        )
    message = update.error or "the request was ended by the server"
    if message.startswith("weights_version:"):  # they were replaced while it was kept
        return ApiError(409, message, field="weights_version", code="weights_replaced")
    if update.finish_reason == "abort":
        return ApiError(503, message, code="aborted", retry_after=1.0)
    if message.startswith("structured:") or message == NO_TOKEN_LEFT:  # what was asked for can't be
        return ApiError(400, message, code="invalid_value")
    return ApiError(500, message, code="engine_error")
