"""Gives templates that call it `thinking` (gpt-oss') what the assistant thought before its earlier
calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.frontend import reasoning
from quire.frontend.messages import Message

_THINKING = re.compile(r"\bmessage(\.thinking\b|\[['\"]thinking['\"]\])")


def says_thinking(template_source: str) -> bool:
    """Whether a template looks for reasoning under this name."""
    return _THINKING.search(template_source) is not None


def named_thinking(messages: Sequence[Message]) -> list[Message]:
    """The same messages with `thinking` beside calls. Behind a whole answer its reasoning counts no
    more, and these templates do not want to see it, be it between tags as `LLM.chat` tells it.
    Beside calls they take reasoning or content, so both become one.
    """
    return [_named(_without_tags(message)) for message in messages]


def _without_tags(message: Message) -> Message:
    content = message.get("content")
    if (
        message["role"] != "assistant"
        or not isinstance(content, str)
        or not content.startswith(reasoning.BEGIN)
    ):
        return message
    thought, end, rest = content.removeprefix(reasoning.BEGIN).partition(reasoning.END)
    if not end:
        return message
    thought = message.get("reasoning_content") or thought.strip(reasoning.WHITE)
    return {**message, "reasoning_content": thought, "content": rest.lstrip(reasoning.WHITE)}


def _named(message: Message) -> Message:
    thought = message.get("reasoning_content")
    if (
        not isinstance(thought, str)
        or not thought
        or not message.get("tool_calls")
        or message.get("thinking")
    ):
        return message
    content = message.get("content")
    return {
        **message,
        "thinking": f"{thought}\n\n{content}" if content else thought,
        "content": None,
    }
