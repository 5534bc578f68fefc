"""Rewrites conversations with tools for chat templates that want more, or know less, than what
OpenAI's clients send.

Templates refuse what their models never saw: Mistral's take only ids of nine letters and digits,
Llama's one call per message, Hermes' only tools that are described, and results that name their
function. Clients know nothing of that, so it is found out once per template, by trying it. For
templates that know nothing of tools, they are described, called and answered in plain messages. The
words are the ones Hermes models were trained on in spirit, not to the letter: any chat model can
follow them, more or less well, and a grammar makes sure of the form where a call is required.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from quire.errors import QuireError
from quire.frontend.chat_template import ChatTemplate
from quire.frontend.messages import check_messages
from quire.frontend.tool_calls import hermes

ID_LENGTH = 9
ALPHANUMERIC = string.ascii_letters + string.digits
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """Nothing, for most templates."""

    short_ids: bool = False
    """Ids of calls must be nine letters and digits."""
    one_call: bool = False
    """A message may hold one call only."""
    full_tools: bool = False
    """Every tool must have a description and parameters."""

    def suit_messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The same conversation in a form that the template takes."""
        if not any(
            isinstance(one, Mapping) and one.get("role") == "tool" for one in messages
        ) and not (self.short_ids or self.one_call):
            return messages
        # What is wrong has to be told before messages change their places.
        checked: Sequence[Message] = _name_results(check_messages(messages, knows_developer=True))
        if self.one_call:
            checked = _one_call_each(checked)
        return [_shorten_ids(message) for message in checked] if self.short_ids else checked

    def suit_tools(self, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The same tools, with whatever the template insists on."""
        return [_fill(tool) for tool in tools] if self.full_tools else tools


def find_needs(source: str, named_tokens: Mapping[str, str]) -> TemplateNeeds:
    """The fewest under which the template shows both calls of a conversation; if it never does, the
    fewest under which it takes that.
    """
    names = ("short_ids", "one_call", "full_tools")
    try:
        template = ChatTemplate(source, named_tokens)
    except QuireError:  # who uses it will be told
        return TemplateNeeds()
    takes: TemplateNeeds | None = None
    for chosen in (one for count in range(len(names) + 1) for one in combinations(names, count)):
        needs = TemplateNeeds(**dict.fromkeys(chosen, True))
        try:
            shown = template.render(
                needs.suit_messages(_TRIAL), tools=needs.suit_tools(_TRIAL_TOOLS)
            )
        except QuireError:
            continue
        if all(name in shown for name in _TRIAL_NAMES):
            return needs
        takes = takes or needs
    return takes or TemplateNeeds()


_TRIAL_NAMES = ("trial-first", "trial-second")
_TRIAL_TOOLS = ({"type": "function", "function": {"name": "f"}},)
_TRIAL: tuple[Message, ...] = (
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": "{}"},
            }
            for number, name in enumerate(_TRIAL_NAMES)
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "b"},
    {"role": "tool", "tool_call_id": "call_1", "content": "c"},
)


def _name_results(messages: Sequence[Message]) -> list[Message]:
    """Results with the name of the function they come from, which only the call's id tells."""
    names: dict[Any, str] = {}
    named: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[_id_of(call)] = call.get("function", call)["name"]
        if message["role"] == "tool" and not message.get("name"):
            name = names.get(_id_of(message, "tool_call_id"))
            message = message if name is None else {**message, "name": name}
        named.append(message)
    return named


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Calls that were made at once as if made one after the other, each followed by its results."""
    written: list[Message] = []
    pending: list[Message] = []
    """Messages of one call each that are to be written when their results come, or when none do."""
    for message in messages:
        calls: Sequence[Any] = message.get("tool_calls") or ()
        if message["role"] == "tool":
            for index, waiting in enumerate(pending):
                if _id_of(waiting["tool_calls"][0]) == message.get("tool_call_id"):
                    written.append(pending.pop(index))
                    break
            written.append(message)
            continue
        written += pending
        pending = []
        if len(calls) < 2:
            written.append(message)
            continue
        first, *others = calls
        pending = [{**message, "tool_calls": [first]}]
        pending += [{"role": "assistant", "content": "", "tool_calls": [call]} for call in others]
    return written + pending


def _shorten_ids(message: Message) -> Message:
    if message.get("tool_calls"):
        calls = [
            {**call, "id": _short_id(call["id"])} if "id" in call else call
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    return message


def _short_id(call_id: object) -> object:
    """The same for the same id, so that results still belong to their calls."""
    if not isinstance(call_id, str) or _SHORT_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:8], "big")
    return "".join(
        ALPHANUMERIC[number // len(ALPHANUMERIC) ** place % len(ALPHANUMERIC)]
        for place in range(ID_LENGTH)
    )


def _fill(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    described = {
        **function,
        "description": function.get("description") or "",
        "parameters": parameters,
    }
    return {**tool, "function": described}


def _id_of(holder: Mapping[str, Any], key: str = "id") -> str | None:
    value = holder.get(key)
    return value if isinstance(value, str) else None


def mentions(template_source: str, variable: Literal["tools", "tool_calls"]) -> bool:
    """Whether a template shows the model its tools, or earlier calls and their results."""
    return re.search(rf"\b{variable}\b", template_source) is not None


EXAMPLE = f'{hermes.BEGIN}\n{{"name": "…", "arguments": {{…}}}}\n{hermes.END}'
"""A call as models are taught that know no form of their own."""


def describe_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], example: str = EXAMPLE
) -> list[Message]:
    """The messages with the tools explained in the system message, and how they are called."""
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = (
        "You can call these functions. Each line is one of them, with the JSON schema of its arguments:\n"
        f"<tools>\n{listed}\n</tools>\n"
        f"To call one, write its name and arguments as JSON between tags, like this:\n{example}"
    )
    first, *others = checked = check_messages(messages, knows_developer=True)
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
    return [{"role": "system", "content": text}, *checked]


def write_out_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with earlier calls written as the assistant's text and their results as the
    user's.
    """
    written: list[Message] = []
    joins = False
    for message in check_messages(messages, knows_developer=True):
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if joins:
                written[-1] = {"role": "user", "content": f"{written[-1]['content']}\n{result}"}
            else:
                written.append({"role": "user", "content": result})
            joins = True
            continue
        joins = False
        calls = message.pop("tool_calls", ()) if message["role"] == "assistant" else ()
        if calls:
            texts = [message["content"]] if message.get("content") else []
            message["content"] = "\n".join([*texts, *map(_call_text, calls)])
        written.append(message)
    return written


def _call_text(call: Message) -> str:
    function = call.get("function", call)
    written = json.dumps(
        {"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False
    )
    return f"{hermes.BEGIN}\n{written}\n{hermes.END}"
