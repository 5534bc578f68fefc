"""The form in which a chat template takes an assistant's earlier calls, found out by trying.

Clients send `content: null` beside calls, and arguments as JSON text. Most templates want the
arguments as an object; DeepSeek's add them to text as they are. Qwen3's look for a tag in the
content, and fail where it is null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from quire.errors import QuireError
from quire.frontend.messages import Message


class CallForm(NamedTuple):
    """As most templates want it."""

    text_arguments: bool = False
    """Arguments as JSON text."""
    empty_content: bool = False
    """Content that is null as empty text."""

    def suit(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages in this form."""
        return [
            self._suit(message) if message.get("tool_calls") else message for message in messages
        ]

    def _suit(self, message: Message) -> Message:
        suited = dict(message)
        if self.empty_content and suited.get("content") is None:
            suited["content"] = ""
        if self.text_arguments:
            suited["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return suited


def find_call_form(render: Callable[[list[Message]], str]) -> CallForm:
    """The first form in which the template shows a call, without words of Python's own (None, or an
    object as Python writes it); the usual one if none does: who uses it will be told why.
    """
    for text_arguments in (False, True):
        for empty_content in (False, True):
            form = CallForm(text_arguments, empty_content)
            try:
                shown = render(form.suit(_TRIAL))
            except QuireError:
                continue
            if _VALUE in shown and "None" not in shown and "'query'" not in shown:
                return form
    return CallForm()


_VALUE = "trial-value"
_CALL = {
    "id": "aaaaaaaa1",
    "type": "function",
    "function": {"name": "f", "arguments": {"query": _VALUE}},
}
_TRIAL: list[Message] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "aaaaaaaa1", "name": "f", "content": "b"},
]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    written = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "function": written} if "function" in call else written
