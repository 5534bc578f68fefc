"""Checks a chat request's messages and turns them into the plain data that templates are given."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequestError

ROLES = ("system", "user", "assistant", "tool", "developer")
_CUSTOM_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_ -]{0,63}")
"""Other roles, for templates that write down any role. Nothing in such a name can pass for a
control token.
"""
MAX_DEPTH = 64
"""How deep lists and objects in messages and tools may be nested."""

Message = dict[str, Any]


def check_messages(messages: object, knows_developer: bool) -> list[Message]:
    """Copies of the messages, made of JSON types only.

    Text parts are joined, tool-call arguments become objects, and the role `developer` becomes
    `system` for templates that never mention it (`knows_developer`), since for those it means the
    same.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages", "must be a list of messages")
    if not messages:
        raise InvalidRequestError("messages", "is empty; a chat needs at least one message")
    checked = [
        _check_message(message, f"messages[{index}]") for index, message in enumerate(messages)
    ]
    for message in checked:
        if message["role"] == "developer" and not knows_developer:
            message["role"] = "system"
    return checked


def plain_data(value: object, field: str, depth: int = 0) -> Any:
    """The same value in exact JSON types, so that a template meets no method but theirs."""
    if depth > MAX_DEPTH:
        raise InvalidRequestError(
            field.split(".")[0], f"is nested more than {MAX_DEPTH} levels deep"
        )
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequestError(field, f"must be a finite number, not {value}")
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidRequestError(field, f"has the key {key!r}; keys must be strings")
        items = {str.__str__(key): item for key, item in value.items()}
        return {key: plain_data(item, f"{field}.{key}", depth + 1) for key, item in items.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [
            plain_data(item, f"{field}[{index}]", depth + 1) for index, item in enumerate(value)
        ]
    kind = type(value).__name__
    raise InvalidRequestError(field, f"must be text, a number, a list or an object, not {kind}")


def check_list(values: object, field: str) -> list[Any] | None:
    """`tools` and `documents`: a list of objects, or nothing."""
    if values is None:
        return None
    plain = plain_data(values, field)
    if not isinstance(plain, list):
        raise InvalidRequestError(field, "must be a list of objects")
    for index, item in enumerate(plain):
        if not isinstance(item, dict):
            raise InvalidRequestError(f"{field}[{index}]", "must be an object")
    return plain


def _check_message(message: object, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(field, "must be an object with role and content")
    plain: Message = plain_data(message, field)
    role = plain.get("role")
    if role is None:
        raise InvalidRequestError(f"{field}.role", f"is missing; it is one of {', '.join(ROLES)}")
    if role not in ROLES and not (isinstance(role, str) and _CUSTOM_ROLE.fullmatch(role)):
        allowed = "a name of at most 64 letters, digits, spaces, - and _"
        raise InvalidRequestError(
            f"{field}.role", f"is neither one of {', '.join(ROLES)} nor {allowed}"
        )
    if plain.get("tool_calls"):
        _check_tool_calls(plain["tool_calls"], f"{field}.tool_calls")
    else:  # clients send null for none; to templates a key that is there means calls
        plain.pop("tool_calls", None)
    _check_content(plain, field)
    if plain.get("reasoning_content") is None and isinstance(plain.get("reasoning"), str):
        plain["reasoning_content"] = plain["reasoning"]  # vLLM's name; templates know the other
    return plain


def _check_content(message: Message, field: str) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None:
        if message["role"] == "assistant" and message.get("tool_calls"):
            return
        raise InvalidRequestError(f"{field}.content", "is missing")
    if not isinstance(content, list):
        raise InvalidRequestError(f"{field}.content", "must be text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        where = f"{field}.content[{index}]"
        if not isinstance(part, dict):
            raise InvalidRequestError(where, 'must be an object like {"type": "text", "text": "…"}')
        if part.get("type") != "text":
            raise InvalidRequestError(
                f"{where}.type", f"is {part.get('type')!r}; only 'text' is supported"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where}.text", "must be text")
        texts.append(part["text"])
    message["content"] = "".join(texts)


def _check_tool_calls(calls: object, field: str) -> None:
    """OpenAI clients send arguments as JSON text, templates want the object it stands for."""
    if not isinstance(calls, list):
        raise InvalidRequestError(field, "must be a list of tool calls")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{field}[{index}].function.name", "is missing")
        where = f"{field}[{index}].function.arguments"
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                raise InvalidRequestError(where, "must be a JSON object") from None
            function["arguments"] = plain_data(arguments, where)
        if arguments is None:
            function["arguments"] = {}
        elif not isinstance(arguments, dict):
            raise InvalidRequestError(where, "must be a JSON object")
