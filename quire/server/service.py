"""Starts calls: the way from a client's request to the engine, and whether it is open."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from fastapi import Request

from quire.errors import InvalidRequestError
from quire.frontend.tokenizer import Tokenizer
from quire.observe.prometheus import ServerMetrics
from quire.observe.request_records import RecordBook, RequestRecord
from quire.observe.tracing import Trace, Tracing
from quire.server.adapters import ServedAdapters
from quire.server.calls.call import Call, EmbeddingCall
from quire.server.calls.generation import GenerationRequest
from quire.server.calls.prompts import EncodedPrompt, PromptEncoder
from quire.server.calls.text_call import TextCall
from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.guard.admission import Admission
from quire.server.guard.auth import owner_of
from quire.server.guard.counts import Counts
from quire.server.guard.quotas import Quotas, limits_by_owner
from quire.server.link.engine_client import Engines, unavailable
from quire.server.link.listeners import BatchedCallbacks
from quire.server.link.messages import AdapterFolder, Ready
from quire.server.stored.store import OwnResponses, ResponseStore, open_store

_T = TypeVar("_T")
_DESCRIBE_PAUSE = 0.05
_THREADS = 4
"""For tokenizing: more would only wait for each other."""
_ENCODED_AT_ONCE = 32
"""Prompts of a call that a thread encodes before others have their turn."""
_TIMEOUT_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")
"""Seconds."""
_PROMPT_FIELDS = ("prompt", "text", "token_ids")
"""Fields of errors about a prompt itself."""


class OtherProcesses(Protocol):
    """What the HTTP workers know about requests, and are told of adapters."""

    async def find_record(self, an_id: str, owner: str | None) -> RequestRecord | None: ...

    async def newest_records(self, count: int, owner: str | None) -> list[RequestRecord]: ...

    async def share_adapters(self, adapters: tuple[AdapterFolder, ...]) -> None: ...


class GenerationService:
    """One model, served. `quire.server.calls.call` explains its use."""

    def __init__(
        self,
        config: ServerConfig,
        tokenizer: Tokenizer,
        client: Engines,
        ready: Ready,
        metrics: ServerMetrics,
        tracing: Tracing | None = None,
        responses: ResponseStore | None = None,
        counts: Counts | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        """`counts`, `quotas`: what limits count, if other processes share them (`quire.server.link.workers`)."""
        self.config = config
        self.tokenizer = tokenizer
        self.client = client
        self.metrics = metrics
        self.tracing = tracing
        self.encoder = PromptEncoder(tokenizer)
        self.records = RecordBook()
        self.adapters = ServedAdapters(config.adapters, config.adapter_folder)
        self.responses = responses if responses is not None else open_store(config)
        self.counts = counts or Counts()
        limits = (ready.max_num_seqs, config.max_queued_requests, config.max_queued_tokens)
        self.admission = Admission(*limits, counts=self.counts, is_fair=ready.policy == "fair")
        self.quotas = quotas or Quotas(limits_by_owner(config))
        self.other_processes: OtherProcesses | None = None
        """Where else a request may be known: in the processes that serve the same engine."""
        self.calls: WeakValueDictionary[tuple[str, str], Call] = WeakValueDictionary()
        """By the owner and id of a response, as long as it is being written or read."""
        self.started = int(time.time())
        self.is_draining = False
        self._describing = asyncio.Lock()
        self._callbacks = BatchedCallbacks()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    @property
    def ready(self) -> Ready:
        """What the engine said about itself."""
        assert self.client.ready is not None
        return self.client.ready

    def responses_of(self, request: Request) -> OwnResponses:
        """The stored responses that a client may see: those asked for with its key."""
        return self.responses.of(owner_of(request.scope))

    def check_model(self, name: str | None) -> str:
        """The model's name as the client wrote it; raises for one that is not served here."""
        if name is None:
            return self.config.model_names[0]
        if name not in self.config.model_names and self.adapters.find(name) is None:
            names = ", ".join(self.config.model_names)
            shown = name if len(name) <= 100 else name[:100] + "…"
            message = f"model: {shown!r} is not served here; there is: {names}"
            raise ApiError(404, message, field="model", code="model_not_found")
        return name

    def for_model(self, request: GenerationRequest, name: str) -> GenerationRequest:
        """The request with the adapter that answers under this name, if it is an adapter's."""
        if name in self.config.model_names:
            return request
        return replace(request, adapter=self.adapters.find(name))

    async def start(
        self,
        request: GenerationRequest,
        request_id: str,
        http_request_id: str,
        owner: str,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Call:
        """Checks, tokenizes, admits and hands over; returns when the engine has taken it.

        `request_id` (`chatcmpl-…` and the like, unique) is the engine's name for it, the id of the
        response body and of GET /v1/requests/{id}; `http_request_id` is x-request-id of the HTTP
        request, for logs; `owner` may look at its record; `headers` are the HTTP request's, which
        may name the trace that this is part of.
        """
        if self.is_draining:
            raise ApiError(503, "the server is going down", code="shutting_down", retry_after=10.0)
        if self.client.state != "ready":
            raise unavailable()
        num_answers = request.num_answers
        if request.pooling is None and num_answers > self.config.max_answers:
            each = num_answers // len(request.prompts)
            asked = (
                f"{len(request.prompts)} prompts with {each} answers each are {num_answers} answers"
            )
            raise InvalidRequestError(
                "n", f"{asked}; one call may ask for {self.config.max_answers}"
            )
        if request.params.priority and self.ready.policy == "fcfs":
            raise InvalidRequestError(
                request.fields.get("priority", "priority"),
                "counts only on a server started with --policy priority or fair",
            )
        if self.ready.policy == "fair":
            request = replace(request, params=replace(request.params, tenant=owner))
        kind: type[Call] = TextCall if request.pooling is None else EmbeddingCall
        quota = self.quotas.enter(owner)
        try:
            ticket = self.admission.enter(min(num_answers, kind.AT_ONCE), owner, quota)
        except BaseException:
            if quota is not None:
                quota.release()
            raise
        try:
            prompts = await self._encode(request)
            num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
            ticket.add_tokens(num_tokens, self._first_token_seconds(headers))
            trace = self._begin_trace(request, request_id, http_request_id, headers)
            parts = (self.client, self.config, self.metrics, ticket, trace, self._callbacks)
            call = kind(request_id, http_request_id, request, prompts, self.tokenizer, *parts)
            call.record.owner = owner
            self.records.add(call.record)
        except BaseException:
            ticket.release()
            raise
        await call.start()
        return call

    def _first_token_seconds(self, headers: Mapping[str, str]) -> float | None:
        """How long a client waits for its first token: as the server allows it, or until its own
        patience ends, which OpenAI's and Anthropic's clients tell.
        """
        found = [] if self.config.first_token_seconds is None else [self.config.first_token_seconds]
        if self.ready.policy != "priority":  # there nobody knows who will come before
            for name in _TIMEOUT_HEADERS:
                with contextlib.suppress(ValueError):
                    seconds = float(headers.get(name, ""))
                    if seconds > 0:
                        found.append(seconds)
        return min(found, default=None)

    async def in_thread(self, function: Callable[..., _T], *args: object) -> _T:
        """Runs what may take long beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def find_record(self, name: str, owner: str | None) -> RequestRecord | None:
        """By the id of the response or by x-request-id, of this owner's or, with None, of
        anybody's.
        """
        found = self.records.find(name, owner)
        if found is None and self.other_processes is not None:
            return await self.other_processes.find_record(name, owner)
        return found

    async def newest_records(self, count: int, owner: str | None) -> list[RequestRecord]:
        """The last requests of this owner or, with None, of anybody, newest first."""
        found = self.records.newest(count, owner)
        if self.other_processes is not None:
            found += await self.other_processes.newest_records(count, owner)
            found.sort(key=lambda record: record.created, reverse=True)
        return found[:count]

    async def describe(self, record: RequestRecord) -> dict[str, Any] | None:
        """What the engine's log says about a request. It has to leave its steps for that, so not
        too often.
        """
        while True:
            state = record.state
            async with self._describing:
                try:
                    described = await self.client.describe(record.response_id)
                except TimeoutError as error:
                    why = "the engine is too busy to say; try again later"
                    raise ApiError(503, why, code="engine_busy", retry_after=1.0) from error
                finally:
                    await asyncio.sleep(_DESCRIBE_PAUSE)
            if record.state == state:
                return described
            # It ended meanwhile, say: the record knows that already, and the engine is to tell how.

    def _begin_trace(
        self,
        request: GenerationRequest,
        request_id: str,
        http_request_id: str,
        headers: Mapping[str, str],
    ) -> Trace:
        if self.tracing is None:
            return Trace()
        params = request.params
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": request_id,
            "http.request.id": http_request_id,
            "http.route": request.endpoint,
            "gen_ai.response.model": self.config.model_names[0],
        }
        if request.pooling is None:  # it is answered with tokens, so how they are chosen matters
            attributes["gen_ai.request.n"] = params.n
            attributes["gen_ai.request.temperature"] = params.temperature
            attributes["gen_ai.request.top_p"] = params.top_p
            if params.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = params.max_tokens
        return self.tracing.begin(time.monotonic(), attributes, headers)

    async def _encode(self, request: GenerationRequest) -> list[EncodedPrompt]:
        deadline = min(
            request.params.deadline or self.config.request_seconds, self.config.request_seconds
        )
        request = replace(request, params=replace(request.params, deadline=deadline))
        several = len(request.prompts) > 1

        def encode(numbers: range) -> list[EncodedPrompt]:
            encoded = []
            for number in numbers:
                try:
                    encoded.append(
                        self.encoder.encode(request, request.prompts[number], self.ready)
                    )
                except InvalidRequestError as error:
                    raise renamed(error, request.fields, number if several else None) from None
            return encoded

        prompts: list[EncodedPrompt] = []
        for first in range(0, len(request.prompts), _ENCODED_AT_ONCE):
            numbers = range(first, min(first + _ENCODED_AT_ONCE, len(request.prompts)))
            prompts += await self.in_thread(encode, numbers)
        return prompts


def renamed(
    error: InvalidRequestError, fields: Mapping[str, str], number: int | None = None
) -> InvalidRequestError:
    """The error with its field named as the client wrote it; `number` says which of several prompts
    it is about.
    """
    field = fields.get(error.field, error.field)
    if number is not None and error.field in _PROMPT_FIELDS:
        field = f"{field}[{number}]"
    elif (
        number is not None and error.field.partition("[")[0] == "messages"
    ):  # of one of several conversations
        field = f"messages[{number}]" + error.field.removeprefix("messages")
    return (
        error
        if field == error.field
        else type(error)(field, str(error).removeprefix(f"{error.field}: "))
    )


def get_service(request: Request) -> GenerationService:
    """The service behind an HTTP request."""
    service: GenerationService = request.app.state.service
    return service
