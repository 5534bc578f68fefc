"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.server.generation import ChatPrompt, GenerationRequest, NamedTool, ToolChoice
from quire.server.protocol import common
from quire.server.protocol.unions import LIST, TEXT, TEXT_OR_LIST, by_type, kind


class TextBlock(common.Body):
    type: Literal["text"]
    text: str


TextContent = Annotated[Annotated[str, TEXT] | Annotated[list[TextBlock], LIST], TEXT_OR_LIST]


class ToolUseBlock(common.Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(common.Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextContent = ""
    is_error: bool = False


class ThinkingBlock(common.Body):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(common.Body):
    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    Annotated[TextBlock, kind("text")]
    | Annotated[ToolUseBlock, kind("tool_use")]
    | Annotated[ToolResultBlock, kind("tool_result")]
    | Annotated[ThinkingBlock, kind("thinking")]
    | Annotated[RedactedThinkingBlock, kind("redacted_thinking")],
    by_type("text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
]


class Message(common.Body):
    role: Literal["user", "assistant"]
    content: Annotated[Annotated[str, TEXT] | Annotated[list[Block], LIST], TEXT_OR_LIST]


class Tool(common.Body):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None


class OpenChoice(common.Body):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool = False


class NamedChoice(common.Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class NoChoice(common.Body):
    type: Literal["none"]


Choosing = Annotated[
    Annotated[OpenChoice, kind("auto")]
    | Annotated[OpenChoice, kind("any")]
    | Annotated[NamedChoice, kind("tool")]
    | Annotated[NoChoice, kind("none")],
    by_type("auto", "any", "tool", "none"),
]


class Thinking(common.Body):
    """How long it thinks is the model's affair: a budget is among the fields that are ignored."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(common.Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(common.Body):
    format: OutputFormat | None = None


class Metadata(common.Body):
    user_id: str | None = Field(None, max_length=1024)


class CountTokensRequest(common.Body):
    """POST /v1/messages/count_tokens"""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "container": "there are no containers",
        "mcp_servers": "the server calls no other servers",
        "context_management": "the conversation is used as it is sent",
        "chat_template": common.NO_TEMPLATES,
    }

    model: str
    messages: list[Message] = Field(min_length=1, max_length=common.MAX_MESSAGES)
    system: TextContent | None = None
    tools: list[Tool] | None = None
    tool_choice: Choosing | None = None
    thinking: Thinking | None = None

    def prompt(self) -> ChatPrompt:
        """The conversation as the chat template takes it."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system)})
        for message in self.messages:
            content = message.content
            blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
            messages += _assistant(blocks) if message.role == "assistant" else _user(blocks)
        if len(messages) == bool(self.system):
            raise InvalidRequestError("messages", "say nothing")
        kwargs = None if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        prefilled = self.messages[-1].role == "assistant"
        tools = []
        for one in () if isinstance(self.tool_choice, NoChoice) else self.tools or ():
            about = {"name": one.name, "description": one.description, "parameters": one.input_schema}
            tools.append(common.function_tool(**about, strict=one.strict))
        return ChatPrompt(messages, tools or None, None, kwargs, not prefilled, continue_final_message=prefilled)


class MessagesRequest(CountTokensRequest, common.ApiRequest):  # type: ignore[misc]  # here a model must be named
    """POST /v1/messages"""

    ENDPOINT: ClassVar[str] = "/v1/messages"
    ID_PREFIX: ClassVar[str] = "msg_"
    FIELDS: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "chat_template_kwargs.enable_thinking": "thinking",
        "structured": "output_config.format",
        "structured.json_schema": "output_config.format.schema",
        "structured.grammar": "output_config.format.schema",
    }

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def to_generation(self, response_id: str, request_id: str) -> GenerationRequest:
        if any(not one.strip() for one in self.stop_sequences or ()):
            raise InvalidRequestError("stop_sequences", "each must hold something that is not white space")
        structured = None
        if self.output_config is not None and self.output_config.format is not None:
            schema = self.output_config.format.schema_
            structured = common.structured_output("output_config.format.schema", json_schema=schema)
        params = SamplingParams(
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            structured=structured,
        )
        choice, parallel = self._tool_choice()
        return GenerationRequest(
            response_id=response_id,
            request_id=request_id,
            prompts=(self.prompt(),),
            params=params,
            endpoint=self.ENDPOINT,
            stream=bool(self.stream),
            split=True,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            fields=self.FIELDS,
            notes=common.present(user=self.metadata.user_id if self.metadata is not None else None),
        )

    def _tool_choice(self) -> tuple[ToolChoice, bool]:
        choice = self.tool_choice
        if choice is None or isinstance(choice, NoChoice):
            return ("auto" if choice is None else "none"), True
        if not self.tools:
            raise InvalidRequestError("tool_choice", "needs tools")
        parallel = not choice.disable_parallel_tool_use
        if isinstance(choice, NamedChoice):
            return NamedTool(choice.name), parallel
        return ("required" if choice.type == "any" else "auto"), parallel


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _user(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """A user's turn: the results of calls, each a message of its own, and what the user says, in their order."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            text = _text(block.content)
            result = f"Error: {text}" if block.is_error else text
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
        elif isinstance(block, TextBlock):
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += block.text
            else:
                messages.append({"role": "user", "content": block.text})
        else:
            raise InvalidRequestError("messages.content.type", f"{block.type!r} is for the assistant's messages")
    return messages


def _assistant(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        if isinstance(block, TextBlock):
            message["content"] += block.text
        elif isinstance(block, ThinkingBlock):
            message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            call = common.function_call(block.id, block.name, json.dumps(block.input))
            message.setdefault("tool_calls", []).append(call)
        elif isinstance(block, ToolResultBlock):
            raise InvalidRequestError("messages.content.type", "'tool_result' is for the user's messages")
        # Redacted thinking holds nothing that a model here could read.
    return [message]
