"""Tools for models whose chat template does not know them: described, called and answered in plain messages.

The words are the ones Hermes models were trained on in spirit, not to the letter: any chat model can follow them,
more or less well, and a grammar makes sure of the form where a call is required.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequestError
from quire.frontend.tool_calls import hermes

_KNOWS_TOOLS = re.compile(r"\btools\b")
_KNOWS_CALLS = re.compile(r"\btool_calls\b")

Message = Mapping[str, Any]


def knows_tools(template_source: str) -> bool:
    """Whether a template shows the model its tools."""
    return _KNOWS_TOOLS.search(template_source) is not None


def knows_calls(template_source: str) -> bool:
    """Whether a template shows earlier calls and their results."""
    return _KNOWS_CALLS.search(template_source) is not None


def describe_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with the tools explained in the system message."""
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = (
        "You can call these functions. Each line is one of them, with the JSON schema of its arguments:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and arguments as JSON between tags, like this:\n"
        f'{hermes.BEGIN}\n{{"name": "…", "arguments": {{…}}}}\n{hermes.END}'
    )
    if messages and isinstance(messages[0], Mapping) and messages[0].get("role") in ("system", "developer"):
        first = messages[0]
        return [{**first, "content": f"{_text_of(first, 0)}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def write_out_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with earlier calls written as the assistant's text and their results as the user's."""
    written: list[Message] = []
    joins = False
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "tool":
            result = f"<tool_response>\n{_text_of(message, index)}\n</tool_response>"
            if joins:
                written[-1] = {"role": "user", "content": f"{written[-1]['content']}\n{result}"}
            else:
                written.append({"role": "user", "content": result})
            joins = True
            continue
        joins = False
        if role == "assistant" and message.get("tool_calls"):
            content = _text_of(message, index) if message.get("content") else ""
            calls = [_call_text(call, index) for call in message["tool_calls"]]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**rest, "content": "\n".join([content, *calls] if content else calls)}
        written.append(message)
    return written


def _call_text(call: object, index: int) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    field = f"messages[{index}].tool_calls"
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{field}.function.name", "is missing")
    arguments = function.get("arguments") or "{}"
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        written = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    except (ValueError, RecursionError, TypeError):
        raise InvalidRequestError(f"{field}.function.arguments", "must be a JSON object") from None
    return f"{hermes.BEGIN}\n{written}\n{hermes.END}"


def _text_of(message: Message, index: int) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise InvalidRequestError(f"messages[{index}].content", "must be text or a list of text parts")
