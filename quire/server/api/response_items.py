"""The items that OpenAI's responses are made of: as they are sent or were stored, put together to
conversations, and as an answer writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import Discriminator, Field, TypeAdapter, ValidationError

from quire.errors import InvalidRequestError
from quire.outputs import TokenLogprobs
from quire.server.api.body import (
    LIST,
    MAX_MESSAGES,
    TEXT,
    TEXT_OR_LIST,
    Body,
    by_type,
    function_call,
    kind,
)
from quire.server.api.writer import logprob_body
from quire.server.calls.generation import FinishReason, GenerationEvent
from quire.server.errors import ApiError
from quire.server.guard.request_ids import new_id
from quire.server.stored.store import OwnResponses

Event = dict[str, Any]
MAX_RECALLED = 32 * 2**20
"""Bytes of stored responses that one call may go on with."""
_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}


class TextPart(Body):
    type: Literal["input_text", "output_text"]
    text: str


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[
    Annotated[TextPart, kind("input_text")]
    | Annotated[TextPart, kind("output_text")]
    | Annotated[RefusalPart, kind("refusal")],
    by_type("input_text", "output_text", "refusal"),
]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Annotated[str, TEXT] | Annotated[list[Part], LIST], TEXT_OR_LIST]


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionCallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[Annotated[str, TEXT] | Annotated[list[TextPart], LIST], TEXT_OR_LIST]


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None


class ItemReference(Body):
    """An item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: str = Field(max_length=128)


_BY_TYPE = by_type(
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "item_reference",
    default="message",
)
_type_of = cast(Callable[[Any], str | None], _BY_TYPE.discriminator)


def _kind_of_item(value: Any) -> str | None:
    """OpenAI lets references do without their type."""
    if (
        isinstance(value, dict)
        and value.get("type") is None
        and "id" in value
        and "role" not in value
    ):
        return "<item_reference>"
    if isinstance(value, ItemReference):
        return "<item_reference>"
    return _type_of(value)


Item = Annotated[
    Annotated[MessageItem, kind("message")]
    | Annotated[FunctionCallItem, kind("function_call")]
    | Annotated[FunctionCallOutputItem, kind("function_call_output")]
    | Annotated[ReasoningItem, kind("reasoning")]
    | Annotated[ItemReference, kind("item_reference")],
    Discriminator(
        _kind_of_item,
        custom_error_type=_BY_TYPE.custom_error_type,
        custom_error_message=_BY_TYPE.custom_error_message,
    ),
]
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a call is about: the items of the responses it goes on with, and those it adds."""

    earlier: Sequence[Item]
    added: Sequence[Item]

    @classmethod
    def recall(
        cls, given: str | Sequence[Item], previous_id: str | None, stored: OwnResponses
    ) -> Conversation:
        """Looks up what `given` refers to; raises for what is not stored (any more)."""
        if isinstance(given, str):
            given = [MessageItem(role="user", content=given)]
        earlier = [] if previous_id is None else _recalled(previous_id, stored)
        added = _resolved(given, stored)
        if len(earlier) + len(added) > MAX_MESSAGES:
            message = (
                f"there are {len(earlier) + len(added)} items; at most {MAX_MESSAGES} are accepted"
            )
            raise InvalidRequestError("input", message)
        return cls(earlier, added)

    def messages(self, instructions: str | None) -> list[dict[str, Any]]:
        """As the chat template takes them. Instructions hold for one response: those of earlier
        ones are not here.
        """
        first = [{"role": "system", "content": instructions}] if instructions else []
        return first + _from_items([*self.earlier, *self.added])

    def describe_added(self) -> tuple[bytes, list[str]]:
        """What the call adds as JSON, each item with an id, as it is stored; and these ids."""
        described = []
        for item in self.added:
            shown = item.model_dump(exclude_none=True)
            if isinstance(item, MessageItem) and isinstance(item.content, str):
                part = "output_text" if item.role == "assistant" else "input_text"
                shown["content"] = [{"type": part, "text": item.content}]
            kept_id = shown.get("id")
            shown["id"] = (
                kept_id
                if isinstance(kept_id, str) and kept_id
                else new_id(_PREFIXES[shown["type"]])
            )
            described.append(shown)
        return msgspec.json.encode(described), [shown["id"] for shown in described]


def _recalled(response_id: str, stored: OwnResponses) -> list[Item]:
    """The conversation up to and with a stored response."""
    chain, missing = stored.chain(response_id)
    if missing is not None:
        what = "" if missing == response_id else f": {missing[:128]!r}, which it goes on with,"
        message = f"previous_response_id: {response_id!r}{what} is not stored; {_advice(stored)}"
        raise ApiError(
            400, message, field="previous_response_id", code="previous_response_not_found"
        )
    if sum(one.num_bytes for one in chain) > MAX_RECALLED:
        most = f"at most {MAX_RECALLED // 2**20} MiB of stored responses can be gone on with"
        raise InvalidRequestError("previous_response_id", f"{most}: send the conversation as input")
    for one in chain:
        status = one.status()
        if status not in ("completed", "incomplete"):
            message = f"{one.id!r} is {status}: send the conversation as input"
            raise InvalidRequestError("previous_response_id", message)
    return _checked([item for one in chain for item in (*one.input(), *one.output())])


def _resolved(given: Sequence[Item], stored: OwnResponses) -> list[Item]:
    """The items with what they refer to in its place."""
    wanted = [item.id for item in given if isinstance(item, ItemReference)]
    found = stored.items(wanted) if wanted else {}
    resolved: list[Item] = []
    for place, item in enumerate(given):
        if not isinstance(item, ItemReference):
            resolved.append(item)
            continue
        if item.id not in found:
            message = f"input[{place}]: the item {item.id!r} is not stored; {_advice(stored)}"
            raise ApiError(404, message, field="input", code="not_found")
        resolved += _checked([found[item.id]])
    return resolved


def _checked(items: list[dict[str, Any]]) -> list[Item]:
    try:
        return _ITEMS.validate_python(items)
    except ValidationError:  # written by another version of this server
        message = "what is stored can't be read by this version: send the conversation as input"
        raise InvalidRequestError("input", message) from None


def _advice(stored: OwnResponses) -> str:
    """What to send instead."""
    if not stored.store.is_on:
        return "this server stores no responses: send the items themselves, the whole conversation, as input"
    return (
        "responses are kept for a limited time and number, and not at all with store: false: send the items "
        "themselves, the whole conversation, as input"
    )


def _from_items(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items that an assistant's turn was made of (reasoning, text, calls) become one message again."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, FunctionCallOutputItem):
            messages.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            )
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
        elif isinstance(item, FunctionCallItem):
            name = item.name if item.namespace is None else f"{item.namespace}.{item.name}"
            turn.setdefault("tool_calls", []).append(
                function_call(item.call_id, name, item.arguments)
            )
    return messages


def _may_follow(item: Item, turn: Mapping[str, Any]) -> bool:
    """Whether it goes on with a turn: reasoning comes first, text next, calls last."""
    if isinstance(item, FunctionCallItem):
        return True
    begun = bool(turn["content"]) or "tool_calls" in turn
    return not begun and (isinstance(item, MessageItem) or "reasoning_content" not in turn)


def _text(content: str | Sequence[TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def status_of(reason: FinishReason) -> str:
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
        yield from self._close(status_of(reason))

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
