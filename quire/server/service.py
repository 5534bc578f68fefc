"""Starts generations: the way from a client's request to the engine, and whether it is open."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request

from quire.errors import InvalidRequestError
from quire.frontend.tokenizer import Tokenizer
from quire.observe.request_records import RecordBook, RequestRecord
from quire.observe.step_log import encode_params
from quire.observe.tracing import NoTrace, Trace, Tracing
from quire.server.admission import Admission
from quire.server.config import ServerConfig
from quire.server.engine_client import EngineClient, unavailable
from quire.server.errors import ApiError
from quire.server.generation import GenerationRequest
from quire.server.messages import AddRequest, Ready
from quire.server.metrics import ServerMetrics
from quire.server.prompts import EncodedPrompt, EngineLimits, PromptEncoder
from quire.server.running import Generation

_T = TypeVar("_T")
_DESCRIBE_PAUSE = 0.05
_THREADS = 4
"""For tokenizing: more would only wait for each other."""


class GenerationService:
    """One model, served. `quire.server.generation` explains its use."""

    def __init__(
        self,
        config: ServerConfig,
        tokenizer: Tokenizer,
        client: EngineClient,
        ready: Ready,
        metrics: ServerMetrics,
        tracing: Tracing | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.client = client
        self.metrics = metrics
        self.tracing = tracing
        self.encoder = PromptEncoder(tokenizer)
        self.records = RecordBook()
        self.admission = Admission(ready.max_num_seqs, config.max_queued_requests, config.max_queued_tokens)
        self.started = int(time.time())
        self.is_draining = False
        self._describing = asyncio.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    @property
    def ready(self) -> Ready:
        """What the engine said about itself."""
        assert self.client.ready is not None
        return self.client.ready

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(self.ready.max_model_len, self.ready.vocab_size)

    def check_model(self, name: str | None) -> str:
        """The model's name as the client wrote it; raises for one that is not served here."""
        if name is None:
            return self.config.model_names[0]
        if name not in self.config.model_names:
            names = ", ".join(self.config.model_names)
            shown = name if len(name) <= 100 else name[:100] + "…"
            raise ApiError(
                404, f"model: {shown!r} is not served here; there is: {names}", field="model", code="model_not_found"
            )
        return name

    async def start(self, request: GenerationRequest) -> Generation:
        """Checks, tokenizes, admits and hands over; returns when the engine has taken it."""
        self.check_open()
        count = request.params.best_of or request.params.n
        num_answers = count * len(request.prompts)
        if num_answers > self.config.max_answers:
            asked = f"{len(request.prompts)} prompts with {count} answers each are {num_answers} answers"
            raise InvalidRequestError("n", f"{asked}; one call may ask for {self.config.max_answers}")
        if request.params.priority and self.ready.policy != "priority":
            raise InvalidRequestError("priority", "counts only on a server started with --policy priority")
        ticket = self.admission.enter(num_answers)
        try:
            prompts = await self._encode(request)
            ticket.add_tokens(sum(len(prompt.token_ids) for prompt in prompts))
            record = RequestRecord(
                request.response_id, request.request_id, request.endpoint, time.time(), notes=dict(request.notes)
            )
            record.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
            seed = request.params.seed
            seeds = [secrets.randbits(64) if seed is None else seed for _ in prompts]
            generation = Generation(
                request,
                prompts,
                seeds,
                tokenizer=self.tokenizer,
                client=self.client,
                ticket=ticket,
                record=record,
                metrics=self.metrics,
                trace=self.begin_trace(request),
                max_buffered_tokens=self.config.max_buffered_tokens,
            )
            self.records.add(record)
        except BaseException:
            ticket.release()
            raise
        try:
            self._hand_over(generation, prompts, seeds)
            await generation.accepted_by_engine()
        except BaseException:
            generation.abort()
            raise
        return generation

    async def in_thread(self, function: Callable[..., _T], *args: object) -> _T:
        """Runs what may take long beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def write(self, respond: Callable[[], _T], generation: Generation) -> _T:
        """What `respond` makes of a generation that is over: beside the event loop if it may take long."""
        params = generation.request.params
        if params.logprobs is None and params.prompt_logprobs is None:
            return respond()
        return await self.in_thread(respond)

    async def describe(self, response_id: str) -> dict[str, Any] | None:
        """What the engine's log says about a request. It has to leave its steps for that, so not too often."""
        async with self._describing:
            try:
                return await self.client.describe(response_id)
            finally:
                await asyncio.sleep(_DESCRIBE_PAUSE)

    def begin_trace(self, request: GenerationRequest, samples: bool = True) -> Trace:
        """`samples`: the request is answered with tokens, so how they are chosen is told."""
        if self.tracing is None:
            return NoTrace()
        params = request.params
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": request.response_id,
            "http.request.id": request.request_id,
            "http.route": request.endpoint,
            "gen_ai.response.model": self.config.model_names[0],
        }
        if samples:
            attributes["gen_ai.request.n"] = params.n
            attributes["gen_ai.request.temperature"] = params.temperature
            attributes["gen_ai.request.top_p"] = params.top_p
            if params.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = params.max_tokens
        return self.tracing.begin(time.monotonic(), attributes)

    def check_open(self) -> None:
        """Raises ApiError 503 if nothing can be started now."""
        if self.is_draining:
            raise ApiError(503, "the server is going down", code="shutting_down", retry_after=10.0)
        if self.client.state != "ready":
            raise unavailable()

    async def _encode(self, request: GenerationRequest) -> list[EncodedPrompt]:
        deadline = min(request.params.deadline or self.config.request_seconds, self.config.request_seconds)
        request = replace(request, params=replace(request.params, deadline=deadline))
        try:
            return [
                await self.in_thread(self.encoder.encode, request, prompt, self.limits) for prompt in request.prompts
            ]
        except InvalidRequestError as error:
            raise renamed(error, request.fields) from None

    def _hand_over(self, generation: Generation, prompts: list[EncodedPrompt], seeds: list[int]) -> None:
        for request_id, live, prompt, seed in zip(
            generation.request_ids, generation.lives, prompts, seeds, strict=True
        ):
            message = AddRequest(
                request_id,
                prompt.token_ids,
                encode_params(prompt.params),
                seed,
                prompt.resolved,
                self.config.queue_seconds,
            )
            self.client.add(message, live.names, generation)


def renamed(error: InvalidRequestError, fields: Mapping[str, str]) -> InvalidRequestError:
    """The error with its field named as the client wrote it."""
    if error.field not in fields:
        return error
    return type(error)(fields[error.field], str(error).removeprefix(f"{error.field}: "))


def get_service(request: Request) -> GenerationService:
    """The service behind an HTTP request."""
    service: GenerationService = request.app.state.service
    return service
