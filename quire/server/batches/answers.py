"""Answers one request of a batch, by the code that answers the same body over HTTP.

An answer is the same bytes whenever and beside whatever else it is computed: ids, seeds and tool
calls' ids are derived from the request, `created` is 0, and counts that tell how it was computed
(cached tokens, draft tokens) are left out.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.errors import InvalidRequestError
from quire.server.api.body import ApiRequest, refuse_unsupported
from quire.server.api.chat import ChatCompletionRequest, ChatWriter
from quire.server.api.completions import CompletionRequest, CompletionWriter
from quire.server.api.embeddings import EmbeddingsRequest, EmbeddingWriter
from quire.server.api.endpoint import parse_body
from quire.server.api.writer import Writer
from quire.server.batches.requests import BAD_JSON, BatchRequest
from quire.server.calls.generation import GenerationRequest
from quire.server.errors import ApiError, error_body, to_api_error
from quire.server.http_responses import one_line
from quire.server.service import GenerationService, renamed

_KINDS: dict[str, tuple[type[ApiRequest], type[Writer[Any]]]] = {
    ChatCompletionRequest.ENDPOINT: (ChatCompletionRequest, ChatWriter),
    CompletionRequest.ENDPOINT: (CompletionRequest, CompletionWriter),
    EmbeddingsRequest.ENDPOINT: (EmbeddingsRequest, EmbeddingWriter),
}
ENDPOINTS = tuple(_KINDS)
_TRIES = 3
"""For a request in whose steps the engine fails: it may be the one that makes it fail."""
_RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """A line of the output."""

    line: bytes
    is_error: bool
    num_tokens: int = 0
    """Of the answer."""


class EngineGoneError(Exception):
    """There will be no engine again."""


@dataclass(slots=True)
class _Attempt:
    has_begun: bool = False
    """Whether the engine has taken it."""


class BatchAnswers:
    """Answers requests with a service, as many at a time as they come."""

    def __init__(self, service: GenerationService, priority: int = 0) -> None:
        """`priority`: of all of them, where they don't say themselves."""
        self._service = service
        self._priority = priority
        self._one_at_a_time = asyncio.Lock()
        """For requests that were there when the engine failed: one of them may be the reason."""

    async def answer(self, request: BatchRequest, owner: str = "") -> BatchAnswer:
        """Whatever is wrong with it becomes its answer; an engine that is restarted is waited for.
        `owner`: whose batch it is of.
        """
        if request.problem is not None:
            error = {"code": "invalid_line", "message": request.problem}
            return BatchAnswer(_line(request, None, error), is_error=True)
        found = await self._try(request, 1, owner)
        if isinstance(found, BatchAnswer):
            return found
        async with self._one_at_a_time:
            for left in range(_TRIES - 2, -1, -1):
                found = await self._try(request, left, owner)
                if isinstance(found, BatchAnswer):
                    return found
        raise AssertionError("the last try has an answer")

    async def _try(self, request: BatchRequest, left: int, owner: str) -> BatchAnswer | None:
        """Its answer; None if the engine failed, and there are tries left."""
        while True:
            attempt = _Attempt()
            try:
                body, num_tokens = await _answer(
                    self._service, request, attempt, self._priority, owner
                )
                return BatchAnswer(_line(request, _response(request, 200, body)), False, num_tokens)
            except Exception as error:
                found = to_api_error(error)
            if found.status == 503:
                await _wait_for_engine(self._service)
                if not attempt.has_begun:
                    continue
            if found.status >= 500 and left:
                return None
            shown = error_body(request.url, found, f"req_{request.id}")
            return BatchAnswer(
                _line(request, _response(request, found.status, shown)), is_error=True
            )


async def _answer(
    service: GenerationService, request: BatchRequest, attempt: _Attempt, priority: int, owner: str
) -> tuple[dict[str, Any], int]:
    if request.url not in _KINDS:
        raise ApiError(
            404, f"url: must be one of {', '.join(_KINDS)}", field="url", code="invalid_url"
        )
    kind, writer_kind = _KINDS[request.url]
    body = parse_body(request.body, kind)
    refuse_unsupported(body)
    model = service.check_model(body.model)
    body.check_model_limits(service.ready.hidden_size)
    body.use_defaults(service.tokenizer.sampling_defaults)
    wanted = service.for_model(_wanted(request, body, kind), model)
    if priority and not wanted.params.priority:
        wanted = replace(wanted, params=replace(wanted.params, priority=priority))
    attempt.has_begun = _is_open(service)
    call = await service.start(wanted, f"{kind.ID_PREFIX}{request.id}", f"req_{request.id}", owner)
    try:
        events = await call.all()
        writer = writer_kind(body, call, model, service.ready.fingerprint, service.responses.of(""))
        writer.created = 0
        whole = (
            await service.in_thread(writer.whole, events)
            if writer.is_long
            else writer.whole(events)
        )
    except BaseException:
        call.abort()
        raise
    return _reproducible(whole, request.id), call.usage.completion_tokens


def _wanted(request: BatchRequest, body: ApiRequest, kind: type[ApiRequest]) -> GenerationRequest:
    try:
        wanted = body.to_generation()
    except InvalidRequestError as error:
        raise renamed(error, kind.FIELDS) from None
    if wanted.stream:
        raise InvalidRequestError(
            "stream", "must be false in a batch: its answers are written as a whole"
        )
    if wanted.params.seed is None:
        wanted = replace(wanted, params=replace(wanted.params, seed=int(request.id[:16], 16) >> 1))
    return wanted


def _reproducible(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Without what depends on when and how it was computed."""
    usage = body.get("usage", {})
    usage.pop("prompt_tokens_details", None)
    details = usage.get("completion_tokens_details", {})
    for count in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        details.pop(count, None)
    for choice in body.get("choices", ()):
        for number, call in enumerate(choice.get("message", {}).get("tool_calls") or ()):
            # As long as it was: some models' templates want ids of a certain form.
            prefix = "call-" if call["id"].startswith("call-") else ""
            digest = hashlib.sha256(f"{name} {choice['index']} {number}".encode()).hexdigest()
            call["id"] = prefix + digest[: len(call["id"]) - len(prefix)]
    return body


def _response(request: BatchRequest, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{request.id}", "body": body}


def _line(
    request: BatchRequest, response: dict[str, Any] | None, error: dict[str, Any] | None = None
) -> bytes:
    name = request.answer_id
    line = {"id": name, "custom_id": request.custom_id, "response": response, "error": error}
    return one_line(line) + b"\n"


class WrittenAnswer(msgspec.Struct):
    """What `_line` wrote, as far as somebody who goes on with a batch has to know it."""

    id: str
    error: msgspec.Raw = msgspec.Raw(b"null")
    response: msgspec.Raw = msgspec.Raw(b"null")


def read_answer_line(line: bytes) -> WrittenAnswer | None:
    """None for what is no whole line of a batch's answers."""
    if not line.endswith(b"\n"):
        return None
    try:
        return msgspec.json.decode(line, type=WrittenAnswer)
    except BAD_JSON:
        return None


def _is_open(service: GenerationService) -> bool:
    return service.client.state == "ready" and not service.is_draining


async def _wait_for_engine(service: GenerationService) -> None:
    while not _is_open(service):
        if service.client.state in ("failed", "stopped"):
            raise EngineGoneError
        await asyncio.sleep(_RETRY_SECONDS)
