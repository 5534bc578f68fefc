"""The items that conversations of OpenAI's responses are made of, and conversations put together
from those that were stored and those that are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import Discriminator, Field, TypeAdapter, ValidationError

from quire.errors import InvalidRequestError
from quire.server.api.protocol import common
from quire.server.api.protocol.unions import LIST, TEXT, TEXT_OR_LIST, by_type, kind
from quire.server.calls.response_store import OwnResponses
from quire.server.errors import ApiError
from quire.server.guard.connection import new_id

MAX_RECALLED = 32 * 2**20
"""Bytes of stored responses that one call may go on with."""
_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}


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
    namespace: str | None = None


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


class ItemReference(common.Body):
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
        if len(earlier) + len(added) > common.MAX_MESSAGES:
            message = f"there are {len(earlier) + len(added)} items; at most {common.MAX_MESSAGES} are accepted"
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
                common.function_call(item.call_id, name, item.arguments)
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
