"""POST /v1/responses: text and tools. What was answered is stored (`routes/stored.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from quire.outputs import TokenLogprobs
from quire.server.api.http_responses import TextEvent, named_event
from quire.server.api.protocol.responses import (
    TOOL_FIELDS,
    FunctionTool,
    NamespaceTool,
    OtherTool,
    ResponsesRequest,
)
from quire.server.api.routes.choices import logprob_body
from quire.server.calls.generation import FinishReason, GenerationEvent, Usage
from quire.server.errors import CANCELLED, ApiError, error_body
from quire.server.guard.connection import new_id
from quire.server.lifecycle import Writer, endpoint

Event = dict[str, Any]


class ResponseWriter(Writer[ResponsesRequest]):
    """There is one answer. Every event of a stream has its number."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._items = OutputItems(self.body.wants_logprobs, self.body.namespaces())
        self._num_events = 0
        self._text_item = 0
        self._text_event: TextEvent | None = None
        """How the message goes on that is the item of this number, counted from 1."""
        self._is_over = False
        self._stores_elsewhere = self.body.to_store is not None and self.stored.store.is_remote
        self.is_long = self.is_long or self._stores_elsewhere
        self.may_take_long = self._stores_elsewhere
        self._error: dict[str, Any] | None = None

    def begin(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self._response("in_progress")})

    def is_long_chunk(self, event: GenerationEvent) -> bool:
        """It has to wait until the response is stored, and its client must not hear of the end
        before.
        """
        return event.finish_reason is not None and self._stores_elsewhere

    def text_writer(self, index: int, is_reasoning: bool = False) -> Callable[[str], bytes | None]:
        return partial(self._extend, "reasoning" if is_reasoning else "message")

    def _extend(self, kind: str, text: str) -> bytes | None:
        if not self._items.takes_text(kind):
            return None
        if self._text_item != len(self._items.items):
            self._text_item = len(self._items.items)
            self._text_event = TextEvent(
                lambda text, number: self._encode(self._items.text_delta(text), number)
            )
        assert self._text_event is not None
        self._items.add_text(text)
        self._num_events += 1
        return self._text_event.write(text, self._num_events - 1)

    def chunks(self, event: GenerationEvent) -> Iterator[bytes]:
        for out in self._items.take(event):
            yield self._event(out)
        if event.finish_reason is not None:
            for out in self._items.finish(event.finish_reason):
                yield self._event(out)
            status = _status(event.finish_reason)
            yield self._event({"type": f"response.{status}", "response": self._finish(status)})

    def error_event(self, path: str, error: ApiError, request_id: str) -> bytes:
        shown = error_body(path, error, request_id)["error"]
        if not self._is_over:
            is_cancelled = error.code == CANCELLED
            if not is_cancelled:
                self._error = {"code": shown["code"] or "server_error", "message": shown["message"]}
            list(self._items.finish("length"))
            self._finish("cancelled" if is_cancelled else "failed")
        return self._event(
            {"type": "error", **{name: shown[name] for name in ("code", "message", "param")}}
        )

    def close(self) -> None:
        if not self._is_over:  # the client left
            list(self._items.finish("length"))
            self._finish("cancelled")

    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        reason: FinishReason = "stop"
        for event in events:
            list(self._items.take(event))
            reason = event.finish_reason or reason
        list(self._items.finish(reason))
        return self._finish(_status(reason))

    def _finish(self, status: str) -> dict[str, Any]:
        """The response, now that it is over; it is stored before its client hears of it, who may go
        on at once.
        """
        self._is_over = True
        response = self._response(status)
        if self.body.to_store is not None:
            items, ids = self.body.to_store
            output = [_without_logprobs(item) for item in self._items.items]
            ids = [*ids, *(item["id"] for item in output)]
            self.stored.put(
                {**response, "output": output}, items, ids, self.body.previous_response_id
            )
        return response

    def _event(self, fields: Event) -> bytes:
        number = self._num_events
        self._num_events += 1
        return self._encode(fields, number)

    @staticmethod
    def _encode(fields: Event, number: int) -> bytes:
        return named_event(fields["type"], {**fields, "sequence_number": number})

    def _response(self, status: str) -> dict[str, Any]:
        """The response as far as it has come."""
        reasoning = {
            "effort": self.body.reasoning.effort if self.body.reasoning is not None else None,
            "summary": None,
        }
        choice: Any = self.body.tool_choice or "auto"
        text_format: dict[str, Any] = {"type": "text"}
        if self.body.text is not None and self.body.text.format is not None:
            text_format = self.body.text.format.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": self.body.instructions,
            "max_output_tokens": self.body.max_output_tokens,
            "model": self.model,
            "output": self._items.items,
            "parallel_tool_calls": self.body.parallel_tool_calls is not False,
            "previous_response_id": self.body.previous_response_id,
            "reasoning": reasoning,
            "safety_identifier": self.body.safety_identifier,
            "service_tier": "default",
            "store": self.body.to_store is not None,
            "temperature": 1.0 if self.body.temperature is None else self.body.temperature,
            "text": {"format": text_format},
            "tool_choice": choice
            if isinstance(choice, str)
            else {"type": "function", "name": choice.name},
            "tools": [_describe(tool) for tool in self.body.tools or ()],
            "top_logprobs": self.body.top_logprobs or 0,
            "top_p": 1.0 if self.body.top_p is None else self.body.top_p,
            "truncation": self.body.truncation or "disabled",
            "usage": None if status == "in_progress" else _usage(self.call.usage),
            "user": self.body.user,
            "metadata": self.body.metadata or {},
        }


def _describe(tool: FunctionTool | NamespaceTool | OtherTool) -> dict[str, Any]:
    """A tool as the response repeats it."""
    if isinstance(tool, FunctionTool):
        return tool.model_dump(include={"type", *TOOL_FIELDS})
    return tool.model_dump(exclude_none=True)


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _status(reason: FinishReason) -> str:
    return "incomplete" if reason == "length" else "completed"


class OutputItems:
    """The items an answer is made of (reasoning, message, function calls), of which the last is
    open.

    `take` and `finish` give the events that tell of it; without a stream only `items` counts.
    """

    def __init__(self, with_logprobs: bool, namespaces: Mapping[str, tuple[str, str]]) -> None:
        """`namespaces`: by the names that the model calls them, the namespace and name of functions
        in one.
        """
        self._namespaces = namespaces
        self.items: list[dict[str, Any]] = []
        self._with_logprobs = with_logprobs
        self._pieces: list[str] = []
        """Of the open item's text or arguments."""
        self._logprobs: list[TokenLogprobs] = []
        """Of tokens whose text has not come yet."""
        self._is_open = False

    def takes_text(self, kind: str) -> bool:
        """Whether an item of this kind is open, so that more text is nothing but more of it."""
        return self._is_open and not self._with_logprobs and bool(self.items[-1]["type"] == kind)

    def add_text(self, text: str) -> None:
        self._pieces.append(text)

    def text_delta(self, text: str) -> Event:
        """The event that tells of it."""
        if self.items[-1]["type"] == "reasoning":
            return self._event("response.reasoning_text.delta", content_index=0, delta=text)
        return self._event("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def take(self, event: GenerationEvent) -> Iterator[Event]:
        self._logprobs += event.logprobs
        if event.reasoning:
            yield from self._add_text("reasoning", "reasoning_text", event.reasoning)
        if event.content:
            yield from self._add_text("message", "output_text", event.content)
        if event.reasoning or event.content or event.tool_calls:
            self._logprobs = []
        for call in event.tool_calls:
            if call.name is not None:
                yield from self._close("completed")
                item = {
                    "type": "function_call",
                    "id": new_id("fc_"),
                    "call_id": call.id,
                    "name": call.name,
                }
                if call.name in self._namespaces:
                    item["namespace"], item["name"] = self._namespaces[call.name]
                yield from self._open({**item, "arguments": ""})
            if call.arguments:
                self._pieces.append(call.arguments)
                yield self._event("response.function_call_arguments.delta", delta=call.arguments)

    def finish(self, reason: FinishReason) -> Iterator[Event]:
        """An answer that says nothing is a message without text."""
        if not self.items:
            yield from self._add_text("message", "output_text", "")
        yield from self._close(_status(reason))

    def _add_text(self, kind: str, part: str, text: str) -> Iterator[Event]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            prefix = "msg_" if kind == "message" else "rs_"
            item: dict[str, Any] = {"type": kind, "id": new_id(prefix)}
            item["role" if kind == "message" else "summary"] = (
                "assistant" if kind == "message" else []
            )
            yield from self._open({**item, "content": []})
            yield self._event("response.content_part.added", content_index=0, part=_part(part, ""))
            self.items[-1]["content"].append(_part(part, ""))
        self._pieces.append(text)
        more: dict[str, Any] = {}
        if part == "output_text":
            more["logprobs"] = (
                [logprob_body(one) for one in self._logprobs] if self._with_logprobs else []
            )
            self.items[-1]["content"][0]["logprobs"] += more["logprobs"]
        yield self._event(f"response.{part}.delta", content_index=0, delta=text, **more)

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        self._is_open = True
        self._pieces = []
        self.items.append({**item, "status": "in_progress"})
        yield self._event("response.output_item.added", item=dict(self.items[-1]))

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        text = "".join(self._pieces)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._event(
                "response.function_call_arguments.done", name=item["name"], arguments=text
            )
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


router = endpoint(
    ResponsesRequest,
    ResponseWriter,
    "create_response",
    "An answer to a text or a conversation.",
    "OpenAI",
)
