"""Ollama's API: POST /api/chat, /api/generate and /api/embed, and what its clients ask about the
server: GET /api/tags, /api/ps, /api/version and POST /api/show. A stream is a row of lines, each an
object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire import __version__
from quire.server.api.http_responses import JsonResponse, one_line
from quire.server.api.protocol.common import Body
from quire.server.api.protocol.ollama import (
    LATEST,
    AnswerRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    OllamaRequest,
)
from quire.server.api.routes.anthropic import tool_input
from quire.server.api.routes.choices import logprob_body
from quire.server.calls import vectors
from quire.server.calls.generation import GenerationEvent, ToolCallDelta, whole_choices
from quire.server.errors import ApiError, error_body
from quire.server.guard.connection import (
    body_schema,
    cancel_on_disconnect,
    ignored_header,
    read_body,
)
from quire.server.lifecycle import Writer, answer
from quire.server.service import GenerationService, get_service

router = APIRouter(tags=["Ollama"])
_RequestT = TypeVar("_RequestT", bound=OllamaRequest)
_AnswerT = TypeVar("_AnswerT", bound=AnswerRequest)
NDJSON = "application/x-ndjson"
NEVER = "9999-12-31T23:59:59Z"
"""When the model will be unloaded."""


class OllamaWriter(Writer[_RequestT]):
    """The durations, which are nanoseconds, come from the call's own record."""

    def nanoseconds(self, name: str) -> int:
        return round((self.call.record.timings.get(name) or 0.0) * 1e9)

    def durations(self) -> dict[str, int]:
        """The model was loaded when the server started."""
        return {"total_duration": self.nanoseconds("total"), "load_duration": 0}


class AnswerWriter(OllamaWriter[_AnswerT]):
    """There is one answer."""

    MEDIA_TYPE: ClassVar[str] = NDJSON

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._calls: dict[int, list[ToolCallDelta]] = {}
        self._done_reason = "stop"

    def said(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """How this API says it."""
        raise NotImplementedError

    def chunks(self, event: GenerationEvent) -> Iterator[bytes]:
        for call in event.tool_calls:
            self._calls.setdefault(call.index, []).append(call)
        calls: list[dict[str, Any]] = []
        if event.finish_reason is not None:
            self._done_reason = "length" if event.finish_reason == "length" else "stop"
            calls = [_call(pieces) for pieces in self._calls.values()]  # a call is told as a whole
        if event.content or event.reasoning or calls or event.logprobs:
            told = self.said(event.content, event.reasoning, calls) | self._logprobs(event)
            yield one_line({**self._outline(), **told, "done": False}) + b"\n"

    def finish(self) -> Iterator[bytes]:
        yield one_line({**self._outline(), **self.said("", "", []), **self._ending()}) + b"\n"

    def error_event(self, path: str, error: ApiError, request_id: str) -> bytes:
        return one_line(error_body(path, error, request_id)) + b"\n"

    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        (event,) = whole_choices(events)
        self._done_reason = "length" if event.finish_reason == "length" else "stop"
        told = self.said(event.content, event.reasoning, [_call([one]) for one in event.tool_calls])
        return {**self._outline(), **told, **self._logprobs(event), **self._ending()}

    def _logprobs(self, event: GenerationEvent) -> dict[str, Any]:
        return (
            {"logprobs": [logprob_body(entry) for entry in event.logprobs]}
            if self.body.logprobs
            else {}
        )

    def _outline(self) -> dict[str, Any]:
        return {"model": self.body.model or self.model, "created_at": _now()}

    def _ending(self) -> dict[str, Any]:
        usage = self.call.usage
        until_first = self.nanoseconds("first_token")
        return {
            "done": True,
            "done_reason": self._done_reason,
            **self.durations(),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": until_first,
            "eval_count": usage.completion_tokens,
            "eval_duration": self.nanoseconds("total") - until_first,
        }


class OllamaChatWriter(AnswerWriter[OllamaChatRequest]):
    def said(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateWriter(AnswerWriter[GenerateRequest]):
    def said(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


class EmbedWriter(OllamaWriter[EmbedRequest]):
    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        found = [
            vectors.unit(np.frombuffer(event.vector, "<f4")[: self.body.dimensions])
            for event in sorted(events, key=lambda event: event.index)
        ]
        return {
            "model": self.body.model or self.model,
            "embeddings": [[float(str(number)) for number in vector] for vector in found],
            **self.durations(),
            "prompt_eval_count": self.call.usage.prompt_tokens,
        }


def _call(pieces: list[ToolCallDelta]) -> dict[str, Any]:
    arguments = tool_input("".join(piece.arguments for piece in pieces))
    return {"function": {"name": pieces[0].name, "arguments": arguments}}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _endpoint(
    kind: type[_AnswerT], writer: type[AnswerWriter[_AnswerT]], empty: Callable[[], dict[str, Any]]
) -> None:
    @cancel_on_disconnect
    async def create(request: Request) -> Response:
        body = await read_body(request, kind)
        if not body.is_empty:
            return await answer(request, kind, writer)
        model = get_service(request).check_model(body.served_name)
        if body.keep_alive in (0, "0"):
            raise ApiError(
                400,
                "keep_alive: 0 asks for the model to be unloaded; it stays as long as the server runs",
            )
        loaded = {
            "model": body.model or model,
            "created_at": _now(),
            **empty(),
            "done": True,
            "done_reason": "load",
        }
        headers = ignored_header([*request.state.ignored, *body.left_out()])
        return JsonResponse(loaded, headers=headers)

    lines = {NDJSON: {"schema": {"type": "string"}}}
    router.add_api_route(
        kind.ENDPOINT,
        create,
        methods=["POST"],
        name=kind.ENDPOINT.strip("/").replace("/", "_"),
        description="An answer, line by line unless `stream` is false.",
        openapi_extra=body_schema(kind),
        responses={200: {"description": "The answer, or its lines.", "content": lines}},
    )


_endpoint(
    OllamaChatRequest, OllamaChatWriter, lambda: {"message": {"role": "assistant", "content": ""}}
)
_endpoint(GenerateRequest, GenerateWriter, lambda: {"response": ""})


@router.post("/api/embed", openapi_extra=body_schema(EmbedRequest))
@cancel_on_disconnect
async def embed(request: Request) -> Response:
    """Vectors of length 1 for texts."""
    return await answer(request, EmbedRequest, EmbedWriter)


class ShowRequest(Body):
    """POST /api/show"""

    model: str
    verbose: bool | None = None


@router.get("/api/version")
async def version() -> Response:
    """Quire's."""
    return JsonResponse({"version": __version__})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """The models served here."""
    service = get_service(request)
    return JsonResponse({"models": [_model(service, name) for name in service.config.model_names]})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """The models in memory: those served here, for as long as the server runs."""
    service = get_service(request)
    memory = service.ready.memory
    about = {
        "expires_at": NEVER,
        "size": memory.get("engine_resident_memory", 0) + memory.get("gpu_memory_allocated", 0),
        "size_vram": memory.get("gpu_memory_allocated", 0),
        "context_length": service.ready.max_model_len,
    }
    return JsonResponse(
        {"models": [_model(service, name) | about for name in service.config.model_names]}
    )


@router.post("/api/show", openapi_extra=body_schema(ShowRequest))
async def show(request: Request) -> Response:
    """What there is to know about a model."""
    body = await read_body(request, ShowRequest)
    service = get_service(request)
    model = _model(service, service.check_model(body.model.removesuffix(LATEST)))
    template = service.tokenizer.chat_templates.get("default")
    capabilities = ["completion", "embedding"]
    capabilities += ["tools"] if template is not None else []
    capabilities += ["thinking"] if service.encoder.tools.thinks else []
    shown = {
        "modelfile": "",
        "parameters": "",
        "template": template or "",
        "modified_at": model["modified_at"],
        "details": model["details"],
        # Clients look for the context under the architecture's name, whichever that is.
        "model_info": {
            "general.architecture": "quire",
            "quire.context_length": service.ready.max_model_len,
            "quire.embedding_length": service.ready.hidden_size,
            "quire.vocab_size": service.ready.vocab_size,
        },
        "capabilities": capabilities,
    }
    return JsonResponse(shown, headers=ignored_header(request.state.ignored))


def _model(service: GenerationService, name: str) -> dict[str, Any]:
    started = datetime.fromtimestamp(service.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    details = {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": ""}
    return {
        "name": name,
        "model": name,
        "modified_at": started,
        "size": service.ready.memory.get("engine_resident_memory", 0),
        "digest": service.ready.fingerprint,
        "details": {**details, "quantization_level": ""},
    }
