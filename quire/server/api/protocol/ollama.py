"""Ollama's API: chat, generate and embed. What its `options` call differently is translated; those
about how a model is loaded (`num_gpu`, `num_thread`, …) have nothing to change in a server that has
loaded it, and are named in x-quire-ignored.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from quire.errors import InvalidRequestError
from quire.frontend.tool_calls.tools import MAX_TOOLS
from quire.sampling_params import SamplingParams
from quire.server.api.protocol import common, structure
from quire.server.api.protocol.embeddings import MAX_INPUTS
from quire.server.api.protocol.sampling import FromTable, TokenChoice
from quire.server.api.protocol.tools import foreign_function, offered
from quire.server.calls.generation import ChatPrompt, GenerationRequest, Prompt, TextPrompt

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
        given = common.present(repetition_penalty=penalty)
        params = self.sampling_params(
            self.stop, max_tokens=limit, structured=structured, **given, **more
        )
        own = {"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty"}
        names = {name: f"options.{name}" for name in type(self).model_fields}
        return params, {**names, **own, **fields}


class OllamaRequest(common.ApiRequest):
    """What they share."""

    keep_alive: float | str | None = None
    """The model stays where it is as long as the server runs, whatever is asked for: `done_reason`
    never says "unload".
    """
    options: Options | None = None

    @property
    def served_name(self) -> str | None:
        return None if self.model is None else self.model.removesuffix(LATEST)

    @property
    def chosen(self) -> Options:
        return self.options if self.options is not None else Options.model_validate({})

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
    top_logprobs: Annotated[int | None, FromTable("logprobs", high=common.MAX_TOP_LOGPROBS)] = None
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

    def to_generation(self, response_id: str, request_id: str) -> GenerationRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
        form = structure.format_output(self.format)
        native = {} if form is None else {"format": (form, "format")}
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        params, fields = self.chosen.to_params(native, logprobs=logprobs)
        prompt, left_out = self.to_prompt()
        thinking = dict.fromkeys(("enable_thinking", "reasoning_effort"), "think")
        return GenerationRequest(
            response_id=response_id,
            request_id=request_id,
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


class CalledFunction(common.Body):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolCall(common.Body):
    function: CalledFunction


class OllamaMessage(common.Body):
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

    messages: list[OllamaMessage] = Field(default_factory=list, max_length=common.MAX_MESSAGES)
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
        "template": common.NO_TEMPLATES,
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

    def to_generation(self, response_id: str, request_id: str) -> GenerationRequest:
        texts = [self.input] if isinstance(self.input, str) else self.input
        return GenerationRequest(
            response_id=response_id,
            request_id=request_id,
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
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise InvalidRequestError(
                "dimensions", f"is {self.dimensions}; this model's vectors have {hidden_size}"
            )


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
                common.function_call(
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
