"""Gives templates that call it `thinking` (gpt-oss') what the assistant thought before its earlier calls."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.frontend.messages import Message

_THINKING = re.compile(r"\bmessage(\.thinking\b|\[['\"]thinking['\"]\])")


def says_thinking(template_source: str) -> bool:
    """Whether a template looks for reasoning under this name."""
    return _THINKING.search(template_source) is not None


def named_thinking(messages: Sequence[Message]) -> list[Message]:
    """The same messages with `thinking` beside calls. Behind a whole answer its reasoning counts no more, and these
    templates do not want to see it. Beside calls they take reasoning or content, so both become one."""
    return [_named(message) for message in messages]


def _named(message: Message) -> Message:
    thought = message.get("reasoning_content")
    if not isinstance(thought, str) or not thought or not message.get("tool_calls") or message.get("thinking"):
        return message
    content = message.get("content")
    return {**message, "thinking": f"{thought}\n\n{content}" if content else thought, "content": None}
