"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from quire.errors import InvalidRequestError
from quire.sampling_params import StructuredOutput
from quire.server.api import sampling, structure
from quire.server.api.body import (
    LIST,
    MAX_MESSAGES,
    TEXT,
    TEXT_OR_LIST,
    ApiRequest,
    Body,
    by_type,
    function_call,
    function_tool,
    kind,
    offered,
    present,
)
from quire.server.calls.generation import ChatPrompt, GenerationRequest, NamedTool, ToolChoice


class TextBlock(Body):
    type: Literal["text"]
    text: str


TextContent = Annotated[Annotated[str, TEXT] | Annotated[list[TextBlock], LIST], TEXT_OR_LIST]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextContent = ""
    is_error: bool = False


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Body):
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


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, TEXT] | Annotated[list[Block], LIST], TEXT_OR_LIST]


class Tool(Body):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None


class OtherTool(Body):
    """One that Anthropic's servers run, or whose form only its models know (`web_search_20250305`,
    `bash_20250124`).
    """

    type: str
    name: str | None = None


def _kind_of_tool(value: Any) -> str | None:
    if not isinstance(value, dict):
        return (
            None if not isinstance(value, Tool | OtherTool) else f"<{type(value).__name__.lower()}>"
        )
    return (
        "<othertool>"
        if isinstance(value.get("type"), str) and value["type"] != "custom"
        else "<tool>"
    )


AnyTool = Annotated[
    Annotated[Tool, Tag("<tool>")] | Annotated[OtherTool, Tag("<othertool>")],
    Discriminator(
        _kind_of_tool, custom_error_type="tool", custom_error_message="Input should be an object"
    ),
]


class OpenChoice(Body):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool = False


class NamedChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class NoChoice(Body):
    type: Literal["none"]


Choosing = Annotated[
    Annotated[OpenChoice, kind("auto")]
    | Annotated[OpenChoice, kind("any")]
    | Annotated[NamedChoice, kind("tool")]
    | Annotated[NoChoice, kind("none")],
    by_type("auto", "any", "tool", "none"),
]


class Thinking(Body):
    """How long it thinks is the model's affair: a budget is among the fields that are ignored."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: str | None = Field(None, max_length=32)


class Edit(Body):
    """Of the conversation, before the model reads it. Here it is used as it was sent, so an edit
    may stand here only if it would change nothing.
    """

    type: str
    keep: Any = None

    def changes(self, messages: Sequence[Message]) -> bool:
        blocks = [
            block
            for message in messages
            if isinstance(message.content, list)
            for block in message.content
        ]
        if self.type == "clear_thinking_20251015":
            thoughtful = [message for message in messages if _thinks(message)]
            return self.keep != "all" and len(thoughtful) > _kept(self.keep, "thinking_turns", 1)
        if self.type == "clear_tool_uses_20250919":
            results = sum(isinstance(block, ToolResultBlock) for block in blocks)
            return results > _kept(self.keep, "tool_uses", 3)
        return True


def _thinks(message: Message) -> bool:
    thoughts = ThinkingBlock | RedactedThinkingBlock
    return isinstance(message.content, list) and any(
        isinstance(block, thoughts) for block in message.content
    )


def _kept(keep: Any, kind: str, default: int) -> int:
    """How many of the last ones an edit leaves alone."""
    if keep is None:
        return default
    value = keep.get("value") if isinstance(keep, Mapping) and keep.get("type") == kind else None
    return value if isinstance(value, int) else 0


class ContextManagement(Body):
    edits: list[Edit] | None = Field(None, max_length=16)


class Metadata(Body):
    user_id: str | None = Field(None, max_length=1024)


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens"""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "container": "there are no containers",
        "mcp_servers": "the server calls no other servers",
        "stop": "use stop_sequences",
        **sampling.UNSUPPORTED,
    }

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: TextContent | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Choosing | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def read_prompt(self) -> tuple[ChatPrompt, tuple[str, ...]]:
        """The conversation as the chat template takes it, and what was left out of it."""
        for place, edit in enumerate(
            (self.context_management and self.context_management.edits) or ()
        ):
            if edit.changes(self.messages):
                field = f"context_management.edits[{place}]"
                why = (
                    f"{edit.type[:100]!r} can't be applied: the conversation is used as it is sent"
                )
                raise InvalidRequestError(field, why)
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system)})
        for message in self.messages:
            content = message.content
            blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
            messages += _TURNS[message.role](blocks)
        if len(messages) == bool(self.system):
            raise InvalidRequestError("messages", "say nothing")
        kwargs: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            kwargs["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            kwargs["reasoning_effort"] = self.output_config.effort
        prefilled = self.messages[-1].role == "assistant"
        choice = self.tool_choice
        is_optional = isinstance(choice, OpenChoice | NoChoice) and choice.type != "any"
        kept, ignored = offered(self.tools, _foreign, is_optional)
        tools = []
        for one in () if isinstance(choice, NoChoice) else kept:
            assert isinstance(one, Tool)
            about = {
                "name": one.name,
                "description": one.description,
                "parameters": one.input_schema,
            }
            tools.append(function_tool(**about, strict=one.strict))
        prompt = ChatPrompt(messages, tools or None, None, kwargs or None, not prefilled, prefilled)
        return prompt, ignored


class MessagesRequest(CountTokensRequest, sampling.TokenChoice, ApiRequest):  # type: ignore[misc]  # named model
    """POST /v1/messages"""

    ENDPOINT: ClassVar[str] = "/v1/messages"
    ID_PREFIX: ClassVar[str] = "msg_"
    FIELDS: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "chat_template_kwargs.enable_thinking": "thinking",
        "chat_template_kwargs.reasoning_effort": "output_config.effort",
    }

    max_tokens: Annotated[int, sampling.FromTable("max_tokens")]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float | None, sampling.FromTable("temperature", high=1)] = None
    n: Literal[1] | None = None
    top_k: Annotated[int | None, sampling.FromTable("top_k")] = None
    top_p: Annotated[float | None, sampling.FromTable("top_p")] = None
    output_format: OutputFormat | None = None
    """The former name of `output_config.format`."""
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def to_generation(self) -> GenerationRequest:
        if any(not one.strip() for one in self.stop_sequences or ()):
            raise InvalidRequestError(
                "stop_sequences", "each must hold something that is not white space"
            )
        structured, names = self.structured(self._native_format())
        params = self.sampling_params(
            self.stop_sequences, max_tokens=self.max_tokens, structured=structured
        )
        prompt, ignored = self.read_prompt()
        choice, parallel = self._tool_choice()
        return GenerationRequest(
            prompts=(prompt,),
            params=params,
            endpoint=self.ENDPOINT,
            stream=bool(self.stream),
            split=True,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            fields={**self.FIELDS, **names},
            clamp_max_tokens=True,
            ignored=ignored,
            notes=present(user=self.metadata.user_id if self.metadata is not None else None),
        )

    def _native_format(self) -> dict[str, tuple[StructuredOutput, str]]:
        config = self.output_config
        own = None if config is None else config.format
        given = {"output_config.format": own, "output_format": self.output_format}
        return {
            name: (
                structure.structured_output(f"{name}.schema", json_schema=one.schema_),
                f"{name}.schema",
            )
            for name, one in given.items()
            if one is not None
        }

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


def _foreign(tool: Tool | OtherTool) -> tuple[str, str | None] | None:
    return (tool.type, tool.name) if isinstance(tool, OtherTool) else None


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _user(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """A user's turn: the results of calls, each a message of its own, and what the user says, in
    their order.
    """
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
            raise InvalidRequestError(
                "messages.content.type", f"{block.type!r} is for the assistant's messages"
            )
    return messages


def _assistant(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        if isinstance(block, TextBlock):
            message["content"] += block.text
        elif isinstance(block, ThinkingBlock):
            message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            call = function_call(block.id, block.name, json.dumps(block.input))
            message.setdefault("tool_calls", []).append(call)
        elif isinstance(block, ToolResultBlock):
            raise InvalidRequestError(
                "messages.content.type", "'tool_result' is for the user's messages"
            )
        # Redacted thinking holds nothing that a model here could read.
    return [message]


def _system(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Instructions in the middle of a conversation."""
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    if len(texts) < len(blocks):
        raise InvalidRequestError("messages.content.type", "messages of the system hold text")
    return [{"role": "system", "content": "".join(texts)}]


_TURNS = {"user": _user, "assistant": _assistant, "system": _system}
