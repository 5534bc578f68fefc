"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.errors import InvalidRequestError
from quire.frontend.tool_calls.tools import MAX_TOOLS
from quire.outputs import TokenLogprobs
from quire.server.generation import (
    ChatPrompt,
    Choice,
    GenerationEvent,
    GenerationRequest,
    NamedTool,
    ToolCallDelta,
    ToolChoice,
)
from quire.server.protocol.common import (
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    UNSUPPORTED_EVERYWHERE,
    Body,
    ResponseFormat,
    SamplingFields,
    StreamOptions,
    structured_names,
    token_name,
)


class FunctionName(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions"""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        **UNSUPPORTED_EVERYWHERE,
        "audio": "the model writes text only",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "prediction": "there is no predicted output",
        "web_search_options": "there is no web search",
        "verbosity": "say in a message how long the answer should be",
        "store": "nothing is stored",
        "echo": "use the completions API",
        "best_of": "use the completions API",
        "suffix": "the model continues texts, it does not fill gaps",
    }

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    modalities: list[Literal["text"]] | None = Field(None, min_length=1, max_length=1)
    """Text is all the model writes."""
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(None, max_length=1024)
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)

    request_id: str | None = Field(None, min_length=1, max_length=128)
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool = True
    """False leaves the reasoning out of the response."""

    def to_generation(self, response_id: str, request_id: str) -> GenerationRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "needs stream to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs", "can't be streamed")
        structured, structured_field = self.structured(self.response_format)
        params = self.sampling_params(
            max_tokens=self._max_tokens(),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            structured=structured,
        )
        fields = structured_names(structured_field)
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = "max_completion_tokens"
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
            fields["chat_template_kwargs.reasoning_effort"] = "reasoning_effort"
        notes = {"user": self.user, "safety_identifier": self.safety_identifier, "metadata": self.metadata}
        return GenerationRequest(
            response_id=response_id,
            request_id=request_id,
            prompts=(
                ChatPrompt(
                    self.messages,
                    self.tools,
                    self.documents,
                    kwargs or None,
                    self.add_generation_prompt,
                    self.continue_final_message,
                ),
            ),
            params=params,
            endpoint="/v1/chat/completions",
            stream=bool(self.stream),
            split=True,
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            fields=fields,
            notes={name: value for name, value in notes.items() if value is not None},
        )

    def _max_tokens(self) -> int | None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError("max_completion_tokens", "and max_tokens mean the same and differ: send one")
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def _tool_choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, NamedToolChoice):
            return NamedTool(self.tool_choice.function.name)
        if self.tool_choice is not None and not self.tools and self.tool_choice != "none":
            raise InvalidRequestError("tool_choice", "needs tools")
        return self.tool_choice or "auto"


def choice_body(choice: Choice, request: ChatCompletionRequest) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.content if choice.content or not choice.tool_calls else None,
        "refusal": None,
    }
    if choice.reasoning and request.include_reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    body: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs_body(choice.logprobs, request) if choice.logprobs is not None else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if request.return_token_ids:
        body["token_ids"] = choice.token_ids
    return body


def delta_body(event: GenerationEvent, request: ChatCompletionRequest) -> dict[str, Any] | None:
    """One choice of a chunk; None if the event holds nothing that shows."""
    delta: dict[str, Any] = {}
    if event.content:
        delta["content"] = event.content
    if event.reasoning and request.include_reasoning:
        delta["reasoning_content"] = event.reasoning
    if event.tool_calls:
        delta["tool_calls"] = [_call_delta(call) for call in event.tool_calls]
    shows_tokens = bool(request.return_token_ids and event.token_ids) or bool(event.logprobs)
    if not delta and event.finish_reason is None and not shows_tokens:
        return None
    body: dict[str, Any] = {
        "index": event.index,
        "delta": delta,
        "logprobs": logprobs_body(event.logprobs, request) if event.logprobs else None,
        "finish_reason": event.finish_reason,
    }
    if event.finish_reason is not None:
        body["stop_reason"] = event.stop_reason
    if request.return_token_ids:
        body["token_ids"] = event.token_ids
    return body


def logprobs_body(entries: Sequence[TokenLogprobs], request: ChatCompletionRequest) -> dict[str, Any]:
    as_ids = bool(request.return_tokens_as_token_ids)
    return {
        "content": [
            {
                "token": token_name(entry, as_ids),
                "logprob": entry.logprob,
                "bytes": list(entry.token_bytes),
                "top_logprobs": [
                    {"token": token_name(one, as_ids), "logprob": one.logprob, "bytes": list(one.token_bytes)}
                    for one in entry.top
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
