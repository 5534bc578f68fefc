"""Tools for models whose chat template does not know them: described, called and answered in plain messages.

The words are the ones Hermes models were trained on in spirit, not to the letter: any chat model can follow them,
more or less well, and a grammar makes sure of the form where a call is required.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.frontend.messages import check_messages
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
    first, *others = checked = check_messages(messages, knows_developer=True)
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
    return [{"role": "system", "content": text}, *checked]


def write_out_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with earlier calls written as the assistant's text and their results as the user's."""
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
    written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"{hermes.BEGIN}\n{written}\n{hermes.END}"
