"""OpenAI's responses: what goes out, as a whole and event by event."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from quire.outputs import Logprob, TokenLogprobs
from quire.server.generation import FinishReason, GenerationEvent, ToolCallDelta, Usage
from quire.server.protocol.responses import ResponsesRequest

Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


def response_body(
    request: ResponsesRequest,
    response_id: str,
    model: str,
    created: int,
    status: Status,
    output: Sequence[dict[str, Any]] = (),
    usage: Usage | None = None,
) -> dict[str, Any]:
    """A response as far as it has come."""
    reasoning = {"effort": request.reasoning.effort if request.reasoning is not None else None, "summary": None}
    choice: Any = request.tool_choice or "auto"
    text_format: dict[str, Any] = {"type": "text"}
    if request.text is not None and request.text.format is not None:
        text_format = request.text.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "model": model,
        "output": list(output),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": reasoning,
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": text_format},
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": choice.name},
        "tools": [tool.model_dump(include=_TOOL_FIELDS) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None if usage is None else usage_body(usage),
        "user": request.user,
        "metadata": request.metadata or {},
    }


_TOOL_FIELDS = {"type", "name", "description", "parameters", "strict"}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def item_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def status_of(reason: FinishReason) -> Status:
    return "incomplete" if reason == "length" else "completed"


class OutputItems:
    """The items an answer is made of (reasoning, message, function calls), of which the last is open.

    `take` and `finish` give the events that tell of it; without a stream only `items` counts.
    """

    def __init__(self, with_logprobs: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._with_logprobs = with_logprobs
        self._pieces: list[str] = []
        """Of the open item's text or arguments."""
        self._logprobs: list[TokenLogprobs] = []
        """Of tokens whose text has not come yet."""
        self._is_open = False

    def take(self, event: GenerationEvent) -> Iterator[Event]:
        self._logprobs += event.logprobs
        if event.reasoning:
            yield from self._add_text("reasoning", "reasoning_text", event.reasoning)
        if event.content:
            yield from self._add_text("message", "output_text", event.content)
        if event.reasoning or event.content or event.tool_calls:
            self._logprobs = []
        for call in event.tool_calls:
            yield from self._take_call(call)

    def finish(self, reason: FinishReason) -> Iterator[Event]:
        """An answer that says nothing is a message without text."""
        if not self.items:
            yield from self._add_text("message", "output_text", "")
        yield from self._close("incomplete" if reason == "length" else "completed")

    def _take_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.name is not None:
            yield from self._close("completed")
            item = {"type": "function_call", "id": item_id("fc"), "call_id": call.id, "name": call.name}
            yield from self._open({**item, "arguments": ""})
        if call.arguments:
            self._pieces.append(call.arguments)
            yield self._event("response.function_call_arguments.delta", delta=call.arguments)

    def _add_text(self, kind: str, part: str, text: str) -> Iterator[Event]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            prefix = "msg" if kind == "message" else "rs"
            item: dict[str, Any] = {"type": kind, "id": item_id(prefix)}
            item["role" if kind == "message" else "summary"] = "assistant" if kind == "message" else []
            yield from self._open({**item, "content": []})
            yield self._event("response.content_part.added", content_index=0, part=_part(part, ""))
            self.items[-1]["content"].append(_part(part, ""))
        self._pieces.append(text)
        more: dict[str, Any] = {}
        if part == "output_text":
            more["logprobs"] = [_logprob(one) for one in self._logprobs] if self._with_logprobs else []
            self.items[-1]["content"][0]["logprobs"] += more["logprobs"]
        yield self._event(f"response.{part}.delta", content_index=0, delta=text, **more)

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        self._is_open = True
        self._pieces = []
        self.items.append({**item, "status": "in_progress"})
        yield self._event("response.output_item.added", item=dict(self.items[-1]))

    def _close(self, status: Status) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        text = "".join(self._pieces)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._event("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = item["content"][0]
            part["text"] = text
            more = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
            yield self._event(f"response.{part['type']}.done", content_index=0, text=text, **more)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", item=item)

    def _event(self, kind: str, **fields: Any) -> Event:
        place: dict[str, Any] = {"output_index": len(self.items) - 1}
        if "item" not in fields:
            place["item_id"] = self.items[-1]["id"]
        return {"type": kind, **place, **fields}


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return {**part, "annotations": [], "logprobs": []} if kind == "output_text" else part


def _logprob(entry: TokenLogprobs) -> dict[str, Any]:
    return {**_token(entry), "top_logprobs": [_token(one) for one in entry.top]}


def _token(entry: Logprob) -> dict[str, Any]:
    return {"token": entry.text, "bytes": list(entry.token_bytes), "logprob": entry.logprob}
