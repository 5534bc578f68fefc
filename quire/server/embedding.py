"""Embeddings by the engine: a prompt goes in, its pooled hidden states come out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from quire.errors import InvalidRequestError
from quire.observe.request_records import RequestRecord
from quire.observe.step_log import encode_params
from quire.observe.tracing import Trace
from quire.server.admission import Ticket
from quire.server.errors import ApiError
from quire.server.generation import GenerationRequest
from quire.server.messages import AddRequest, Refused
from quire.server.prompts import EncodedPrompt
from quire.server.service import GenerationService, renamed
from quire.step import Pooling, RequestUpdate

AT_ONCE = 32
"""Texts of one call that the engine is given at a time: a long list must not fill the queue."""


class EmbeddingRun:
    """One call: all its texts. It is the listener of their engine requests."""

    def __init__(
        self,
        service: GenerationService,
        request: GenerationRequest,
        prompts: Sequence[EncodedPrompt],
        pooling: Pooling,
        ticket: Ticket,
        record: RequestRecord,
        trace: Trace,
    ) -> None:
        self.record = record
        self._service = service
        self._request = request
        self._prompts = prompts
        self._pooling = pooling
        self._ticket = ticket
        self._trace = trace
        self._vectors: dict[str, bytes] = {}
        self._running: dict[str, int] = {}
        """Names of what the engine has, with their prompts' lengths."""
        self._has_begun: set[str] = set()
        self._error: ApiError | None = None
        self._changed = asyncio.Event()

    async def run(self) -> list[bytes]:
        """The vectors, in the order of the texts."""
        arrival = time.monotonic()
        state = "aborted"
        names = [f"{self._request.response_id}.{index}" for index in range(len(self._prompts))]
        waiting = list(zip(names, self._prompts, strict=True))[::-1]
        try:
            while waiting or self._running:
                while waiting and len(self._running) < AT_ONCE:
                    self._hand_over(*waiting.pop())
                await self._changed.wait()
                self._changed.clear()
                if self._error is not None:
                    state = "failed"
                    raise self._error
            state = "finished"
            return [self._vectors[name] for name in names]
        finally:
            self._service.client.abort(list(self._running))
            self._ticket.release()
            self.record.state = state
            self.record.error = None if self._error is None else self._error.message
            self.record.timings["total"] = round(time.monotonic() - arrival, 6)
            self._trace.ended(state, self.record.attributes(), self.record.error)
            if state != "finished":
                self._service.metrics.requests_failed(state, len(waiting) + len(self._running))

    # For the engine client

    def accepted(self, request_id: str) -> None:
        """The vector is what is waited for."""

    def refused(self, refusal: Refused) -> None:
        self._running.pop(refusal.request_id, None)
        if refusal.kind == "internal":
            self._fail(ApiError(500, refusal.message))
            return
        field = None if refusal.field is None else self._request.fields.get(refusal.field, refusal.field)
        self._fail(ApiError(400, refusal.message, field=field, code="invalid_value"))

    def started(self, name: str, cached_tokens: int) -> None:
        if name not in self._has_begun:
            self._has_begun.add(name)
            self.record.state = "running"
            self._trace.started(name, time.monotonic())
            self.record.cached_tokens += cached_tokens
            self._ticket.begun(self._running[name])
            self._service.metrics.prompt_started(self._running[name], cached_tokens)

    def update(self, update: RequestUpdate) -> None:
        if update.finish_reason is None:
            return
        self._running.pop(update.request_id, None)
        if update.metrics is not None:
            self._trace.answered(update.request_id, update.metrics)
        if update.pooled is not None:
            self._vectors[update.request_id] = update.pooled
            self._changed.set()
        elif update.finish_reason == "deadline":
            self._fail(ApiError(504, "the request took longer than it was allowed to", code="deadline_exceeded"))
        else:
            message = update.error or "the request was ended by the server"
            self._fail(ApiError(500, message, code="engine_error"))

    def lost(self, error: ApiError) -> None:
        self._running.clear()
        self._fail(error)

    # Inside

    def _hand_over(self, name: str, prompt: EncodedPrompt) -> None:
        message = AddRequest(
            name,
            prompt.token_ids,
            encode_params(prompt.params),
            seed=0,
            queue_timeout=self._service.config.queue_seconds,
            pooling=self._pooling,
        )
        self._service.client.add(message, [name], self)
        self._running[name] = len(prompt.token_ids)

    def _fail(self, error: ApiError) -> None:
        self._error = self._error or error
        self._changed.set()


async def start_embedding(service: GenerationService, request: GenerationRequest, pooling: Pooling) -> EmbeddingRun:
    """Checks, tokenizes and admits; `run` computes."""
    service.check_open()
    if request.params.priority and service.ready.policy != "priority":
        raise InvalidRequestError("priority", "counts only on a server started with --policy priority")
    ticket = service.admission.enter(min(len(request.prompts), AT_ONCE))
    try:
        deadline = service.config.request_seconds
        request = replace(request, params=replace(request.params, deadline=deadline))
        prompts = await service.in_thread(_encode, service, request)
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        ticket.add_tokens(num_tokens)
        notes = dict(request.notes)
        record = RequestRecord(request.response_id, request.request_id, request.endpoint, time.time(), notes=notes)
        record.prompt_tokens = num_tokens
        service.records.add(record)
        trace = service.begin_trace(request, samples=False)
        return EmbeddingRun(service, request, prompts, pooling, ticket, record, trace)
    except BaseException:
        ticket.release()
        raise


def _encode(service: GenerationService, request: GenerationRequest) -> list[EncodedPrompt]:
    encoded = []
    for index, prompt in enumerate(request.prompts):
        try:
            encoded.append(service.encoder.encode(request, prompt, service.limits))
        except InvalidRequestError as error:
            fields = dict(request.fields)
            if len(request.prompts) > 1:
                fields = {name: f"{shown}[{index}]" for name, shown in fields.items()}
            raise renamed(error, fields) from None
    return encoded
