"""OpenAI's responses: what comes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.server.generation import ChatPrompt, GenerationRequest, NamedTool, ToolChoice
from quire.server.protocol import common
from quire.server.protocol.unions import LIST, TEXT, TEXT_OR_LIST, by_type, kind

LOGPROBS = "message.output_text.logprobs"
TOOL_FIELDS = {"name", "description", "parameters", "strict"}
"""Of a tool, those that the model is shown and the response repeats."""


class TextPart(common.Body):
    type: Literal["input_text", "output_text"]
    text: str


class RefusalPart(common.Body):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[
    Annotated[TextPart, kind("input_text")]
    | Annotated[TextPart, kind("output_text")]
    | Annotated[RefusalPart, kind("refusal")],
    by_type("input_text", "output_text", "refusal"),
]


class MessageItem(common.Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Annotated[str, TEXT] | Annotated[list[Part], LIST], TEXT_OR_LIST]


class FunctionCallItem(common.Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(common.Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[Annotated[str, TEXT] | Annotated[list[TextPart], LIST], TEXT_OR_LIST]


class ReasoningText(common.Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(common.Body):
    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None


Item = Annotated[
    Annotated[MessageItem, kind("message")]
    | Annotated[FunctionCallItem, kind("function_call")]
    | Annotated[FunctionCallOutputItem, kind("function_call_output")]
    | Annotated[ReasoningItem, kind("reasoning")],
    by_type("message", "function_call", "function_call_output", "reasoning", default="message"),
]


class FunctionTool(common.Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(common.Body):
    type: Literal["function"]
    name: str


class TextFormat(common.JsonSchemaFormat):
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextConfig(common.Body):
    format: TextFormat | None = None


class Reasoning(common.Body):
    """The reasoning itself is returned: a wish for a summary is among the fields that are ignored."""

    effort: str | None = Field(None, max_length=32)


class ResponsesStreamOptions(common.Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(common.ApiRequest):
    """POST /v1/responses"""

    ENDPOINT: ClassVar[str] = "/v1/responses"
    ID_PREFIX: ClassVar[str] = "resp_"
    FIELDS: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_output_tokens",
        "chat_template_kwargs.reasoning_effort": "reasoning.effort",
        "messages": "input",
        "prompt": "input",
        "structured": "text.format",
        "structured.json_schema": "text.format.schema",
        "structured.grammar": "text.format.schema",
    }
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "background": "the answer comes with the response",
        "conversation": "nothing is stored: send the whole conversation as input",
        "previous_response_id": "nothing is stored: send the whole conversation as input",
        "prompt": "nothing is stored: send the text as input",
        "max_tool_calls": "no tools run here: calls are returned to you",
        "chat_template": common.NO_TEMPLATES,
    }

    input: Annotated[
        Annotated[str, TEXT] | Annotated[list[Item], Field(max_length=common.MAX_MESSAGES), LIST], TEXT_OR_LIST
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=common.MAX_TOP_LOGPROBS)
    include: list[str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    """Nothing is stored, and the response says so."""
    truncation: Literal["disabled", "auto"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(None, max_length=1024)

    @property
    def wants_logprobs(self) -> bool:
        return self.include is not None and LOGPROBS in self.include

    def to_generation(self, response_id: str, request_id: str) -> GenerationRequest:
        for index, name in enumerate(self.include or ()):
            if name != LOGPROBS:
                raise InvalidRequestError(f"include[{index}]", f"only {LOGPROBS!r} can be included")
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequestError("top_logprobs", f"needs {LOGPROBS!r} in include")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "needs stream to be true")
        wanted = self.text.format if self.text is not None else None
        schema = wanted.schema_ if wanted is not None and wanted.type == "json_schema" else None
        params = SamplingParams(
            max_tokens=self.max_output_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            structured=None if wanted is None else common.json_output(wanted.type, schema, "text.format.schema"),
        )
        effort = self.reasoning.effort if self.reasoning is not None else None
        kwargs = None if effort is None else {"reasoning_effort": effort}
        tools = [common.function_tool(**tool.model_dump(include=TOOL_FIELDS)) for tool in self.tools or ()]
        return GenerationRequest(
            response_id=response_id,
            request_id=request_id,
            prompts=(ChatPrompt(self._messages(), tools or None, template_kwargs=kwargs),),
            params=params,
            endpoint=self.ENDPOINT,
            stream=bool(self.stream),
            split=True,
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            fields=self.FIELDS,
            notes=common.present(user=self.user, safety_identifier=self.safety_identifier, metadata=self.metadata),
        )

    def _tool_choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, FunctionChoice):
            return NamedTool(self.tool_choice.name)
        if self.tool_choice == "required" and not self.tools:
            raise InvalidRequestError("tool_choice", "needs tools")
        return self.tool_choice or "auto"

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if not (self.input.strip() if isinstance(self.input, str) else self.input):
            raise InvalidRequestError("input", "is empty")
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        return messages + _from_items(self.input)


def _from_items(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items that an assistant's turn was made of (reasoning, text, calls) become one message again."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, FunctionCallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            turn = None
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
            turn = None
            continue
        if turn is None or not _may_follow(item, turn):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        if isinstance(item, MessageItem):
            turn["content"] = _text(item.content)
        elif isinstance(item, ReasoningItem):
            turn["reasoning_content"] = "".join(part.text for part in item.content or item.summary)
        else:
            turn.setdefault("tool_calls", []).append(common.function_call(item.call_id, item.name, item.arguments))
    return messages


def _may_follow(item: MessageItem | FunctionCallItem | ReasoningItem, turn: Mapping[str, Any]) -> bool:
    """Whether it goes on with a turn: reasoning comes first, text next, calls last."""
    if isinstance(item, FunctionCallItem):
        return True
    begun = bool(turn["content"]) or "tool_calls" in turn
    return not begun and (isinstance(item, MessageItem) or "reasoning_content" not in turn)


def _text(content: str | Sequence[TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
