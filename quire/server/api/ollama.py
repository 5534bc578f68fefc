"""Ollama's API: POST /api/chat, /api/generate and /api/embed, and what its clients ask about the
server: GET /api/tags, /api/ps, /api/version and POST /api/show. A stream is a row of lines, each an
object.

What its `options` call differently is translated; those about how a model is loaded (`num_gpu`,
`num_thread`, …) have nothing to change in a server that has loaded it, and are named in
x-quire-ignored.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, PrivateAttr

from quire import __version__
from quire.errors import InvalidRequestError
from quire.frontend.tool_calls.tools import MAX_TOOLS
from quire.sampling_params import SamplingParams
from quire.server.api import structure, vectors
from quire.server.api.anthropic import tool_input
from quire.server.api.body import (
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    NO_TEMPLATES,
    ApiRequest,
    Body,
    body_schema,
    foreign_function,
    function_call,
    offered,
    present,
)
from quire.server.api.embeddings import MAX_INPUTS, check_dimensions
from quire.server.api.endpoint import answer, cancel_on_disconnect, ignored_header, read_body
from quire.server.api.sampling import FromTable, TokenChoice
from quire.server.api.writer import Writer, logprob_body
from quire.server.calls.generation import (
    ChatPrompt,
    GenerationEvent,
    GenerationRequest,
    Prompt,
    TextPrompt,
    ToolCallDelta,
    whole_choices,
)
from quire.server.errors import ApiError, error_body
from quire.server.http_responses import JsonResponse, one_line
from quire.server.service import GenerationService, get_service

LATEST = ":latest"
"""What Ollama's clients put behind a model's name."""
NO_IMAGES = "the model reads text only"
_WHOLE_CONTEXT = -1
"""As `repeat_last_n`."""


class Options(TokenChoice):
    """How tokens are chosen, in Ollama's words; Quire's own are taken as well."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **structure.UNSUPPORTED,
        "mirostat": "use temperature, top_p or min_p",
        "tfs_z": "use typical_p",
        "penalize_newline": "penalties are for all tokens",
    }

    temperature: Annotated[float | None, FromTable("temperature")] = None
    top_p: Annotated[float | None, FromTable("top_p")] = None
    num_predict: Annotated[int | None, FromTable("max_tokens", low=-2)] = None
    """Tokens of the answer; -1 and -2: as many as there is room for."""
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float | None, FromTable("repetition_penalty")] = None
    repeat_last_n: int | None = Field(None, ge=-1)
    num_ctx: int | None = Field(None, ge=2)
    """Tokens of prompt and answer together: at most as many as the server's context has."""

    def to_params(
        self, native: Mapping[str, Any], **more: Any
    ) -> tuple[SamplingParams, dict[str, str]]:
        """And for `GenerationRequest.fields`: names as the client wrote them. `native`: what
        `format` asks for.
        """
        structured, fields = self.structured(native)
        penalty = self.repeat_penalty
        if self.repeat_last_n == 0:
            penalty = None
        elif penalty not in (None, 1) and self.repeat_last_n not in (None, _WHOLE_CONTEXT):
            message = (
                "must be -1 with a repeat_penalty: repetitions are looked for in the whole context"
            )
            raise InvalidRequestError("options.repeat_last_n", message)
        limit = (
            self.num_ctx
            if self.num_predict is None or self.num_predict < 0
            else max(1, self.num_predict)
        )
        given = present(repetition_penalty=penalty)
        params = self.sampling_params(
            self.stop, max_tokens=limit, structured=structured, **given, **more
        )
        own = {"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty"}
        names = {name: f"options.{name}" for name in type(self).model_fields}
        return params, {**names, **own, **fields}


class OllamaRequest(ApiRequest):
    """What they share."""

    keep_alive: float | str | None = None
    """The model stays where it is as long as the server runs, whatever is asked for: `done_reason`
    never says "unload".
    """
    options: Options | None = None

    @property
    def served_name(self) -> str | None:
        return None if self.model is None else self.model.removesuffix(LATEST)

    _defaults: Mapping[str, float] = PrivateAttr(default_factory=dict)

    def use_defaults(self, defaults: Mapping[str, float]) -> None:
        self._defaults = defaults

    @property
    def chosen(self) -> Options:
        options = self.options if self.options is not None else Options.model_validate({})
        options.use_defaults(self._defaults)
        return options

    def left_out(self) -> tuple[str, ...]:
        return () if self.keep_alive is None else ("keep_alive",)


class AnswerRequest(OllamaRequest):
    """A call for text."""

    ID_PREFIX: ClassVar[str] = "ollama-"

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    """Whether the model thinks first, or how much ("low", "medium", "high")."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, FromTable("logprobs", high=MAX_TOP_LOGPROBS)] = None
    truncate: bool | None = None
    """Cut off the beginning of a prompt that is too long; otherwise it is refused."""

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """There is nothing to answer: it only asks for the model to be loaded."""

    @abstractmethod
    def to_prompt(self) -> tuple[Prompt, tuple[str, ...]]:
        """And what was left out of it."""

    def to_generation(self) -> GenerationRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
        form = structure.format_output(self.format)
        native = {} if form is None else {"format": (form, "format")}
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        params, fields = self.chosen.to_params(native, logprobs=logprobs)
        prompt, left_out = self.to_prompt()
        thinking = dict.fromkeys(("enable_thinking", "reasoning_effort"), "think")
        return GenerationRequest(
            prompts=(prompt,),
            params=params,
            endpoint=self.ENDPOINT,
            stream=self.streams,
            split=isinstance(prompt, ChatPrompt),
            truncate_prompt_tokens=-1 if self.truncate else None,
            max_context=self.chosen.num_ctx,
            clamp_max_tokens=self.chosen.num_ctx is not None,
            fields={
                **fields,
                **{f"chat_template_kwargs.{name}": field for name, field in thinking.items()},
            },
            ignored=left_out + self.left_out(),
        )

    def template_kwargs(self) -> dict[str, Any] | None:
        if self.think is None:
            return None
        if isinstance(self.think, bool):
            return {"enable_thinking": self.think}
        return {"enable_thinking": True, "reasoning_effort": self.think}


class CalledFunction(Body):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolCall(Body):
    function: CalledFunction


class OllamaMessage(Body):
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {"images": NO_IMAGES}

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    """Of a result: whose it is."""


class OllamaChatRequest(AnswerRequest):
    """POST /api/chat"""

    ENDPOINT: ClassVar[str] = "/api/chat"
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "shift": "a conversation that fills the context ends"
    }

    messages: list[OllamaMessage] = Field(default_factory=list, max_length=MAX_MESSAGES)
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def to_prompt(self) -> tuple[Prompt, tuple[str, ...]]:
        for place, message in enumerate(self.messages):
            if (message.model_extra or {}).get("images"):
                raise InvalidRequestError(
                    f"messages[{place}].images", f"is not supported: {NO_IMAGES}"
                )
        tools, left_out = offered(self.tools, foreign_function, is_optional=True)
        return ChatPrompt(
            _as_openai(self.messages), tools or None, None, self.template_kwargs()
        ), left_out


class GenerateRequest(AnswerRequest):
    """POST /api/generate"""

    ENDPOINT: ClassVar[str] = "/api/generate"
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "images": NO_IMAGES,
        "suffix": "the model continues texts, it does not fill gaps",
        "template": NO_TEMPLATES,
        "context": "send the conversation to /api/chat",
        "shift": "an answer that fills the context ends",
        "width": "the model writes text only",
        "height": "the model writes text only",
        "steps": "the model writes text only",
    }

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    """The prompt as it is, without the model's chat template."""

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    def to_prompt(self) -> tuple[Prompt, tuple[str, ...]]:
        assert self.prompt is not None
        if self.raw:
            if self.system:
                raise InvalidRequestError(
                    "system", "has no place in a raw prompt: write it into the prompt"
                )
            return TextPrompt(self.prompt), ()
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.prompt})
        return ChatPrompt(messages, None, None, self.template_kwargs()), ()


class EmbedRequest(OllamaRequest):
    """POST /api/embed"""

    ENDPOINT: ClassVar[str] = "/api/embed"
    ID_PREFIX: ClassVar[str] = "ollama-"
    FIELDS: ClassVar[Mapping[str, str]] = {"prompt": "input", "text": "input"}

    input: str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
    truncate: bool | None = None
    """Cut off the end of texts that are too long; false: refuse them."""
    dimensions: int | None = Field(None, ge=1)

    def to_generation(self) -> GenerationRequest:
        texts = [self.input] if isinstance(self.input, str) else self.input
        return GenerationRequest(
            prompts=tuple(map(TextPrompt, texts)),
            params=SamplingParams(max_tokens=1, temperature=0, seed=0),
            endpoint=self.ENDPOINT,
            pooling="mean",
            truncate_prompt_tokens=None if self.truncate is False else -1,
            truncation_side="right",
            max_context=self.chosen.num_ctx,
            fields=self.FIELDS,
            ignored=self.left_out(),
        )

    def check_model_limits(self, hidden_size: int) -> None:
        check_dimensions(self.dimensions, hidden_size)


def _as_openai(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Calls have no ids in Ollama: a result belongs to the first call of its name that has none
    yet, or to the next.
    """
    written: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    for place, message in enumerate(messages):
        plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.tool_calls:
            open_calls = [
                (f"call_{place}_{i}", call.function.name)
                for i, call in enumerate(message.tool_calls)
            ]
            plain["tool_calls"] = [
                function_call(
                    call_id, name, json.dumps(call.function.arguments, ensure_ascii=False)
                )
                for (call_id, name), call in zip(open_calls, message.tool_calls, strict=True)
            ]
        if message.role == "tool":
            named = [call for call in open_calls if call[1] == message.tool_name]
            answered = next(iter(named or open_calls), None)
            if answered is not None:
                open_calls.remove(answered)
                plain |= {"tool_call_id": answered[0], "name": answered[1]}
            elif message.tool_name:
                plain["name"] = message.tool_name
        written.append(plain)
    return written


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
            fields = self.said(event.content, event.reasoning, calls) | self._logprobs(event)
            yield one_line({**self._outline(), **fields, "done": False}) + b"\n"

    def finish(self) -> Iterator[bytes]:
        yield one_line({**self._outline(), **self.said("", "", []), **self._ending()}) + b"\n"

    def error_event(self, path: str, error: ApiError, http_request_id: str) -> bytes:
        return one_line(error_body(path, error, http_request_id)) + b"\n"

    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        (event,) = whole_choices(events)
        self._done_reason = "length" if event.finish_reason == "length" else "stop"
        fields = self.said(
            event.content, event.reasoning, [_call([one]) for one in event.tool_calls]
        )
        return {**self._outline(), **fields, **self._logprobs(event), **self._ending()}

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
