"""The tools of a request, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequestError

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments."""
    strict: bool


def check_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """What tools in OpenAI's form say; raises InvalidRequestError naming the field that is wrong."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            "tools", f"has {len(tools)} entries; at most {MAX_TOOLS} are allowed"
        )
    checked = [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    seen: set[str] = set()
    for index, tool in enumerate(checked):
        if tool.name in seen:
            raise InvalidRequestError(
                f"tools[{index}].function.name", f"{tool.name!r} is there twice"
            )
        seen.add(tool.name)
    return checked


def _check_tool(tool: object, field: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidRequestError(
            f"{field}.type", "must be 'function': other kinds of tools are not supported"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{field}.function", "must be an object with name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{field}.function.name",
            "must be 1 to 128 letters, digits, underscores, dots, colons or dashes",
        )
    parameters = function.get("parameters")
    if parameters is None:  # as OpenAI has it: a function without any
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidRequestError(
            f"{field}.function.parameters", "must be the JSON schema of an object"
        )
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise InvalidRequestError(f"{field}.function.strict", "must be true or false")
    return Tool(name, parameters, bool(strict))
