"""JSON read piece by piece, no deeper than a tool call needs: every character is looked at once.

Nothing is recursive and nothing is evaluated: brackets are counted, strings are skipped. So text
that is not quite JSON has a well-defined end too, and megabytes of brackets cost megabytes of
looking.
"""

from __future__ import annotations

import json
import re
from typing import Literal

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING_PART = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_CONTAINER_PART = re.compile(r'[^"{}\[\]]*')
_SCALAR_PART = re.compile(r"[^,}\]\s]*")


def skip_space(text: str, position: int) -> int:
    """Where JSON's white space ends."""
    return _skip(_SPACE, text, position)


def _skip(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Where a match ends that begins at `position`; the patterns here match everywhere, if only
    nothing.
    """
    match = pattern.match(text, position)
    assert match is not None
    return match.end()


class StringScanner:
    """Finds the end of a JSON string, reading from behind its opening quote."""

    def __init__(self) -> None:
        self.done = False
        self._escaped = False

    def read(self, text: str, position: int) -> int:
        """Where the string ends (behind its quote), or the end of the text."""
        if self._escaped and position < len(text):
            self._escaped = False
            position += 1
        position = _skip(_STRING_PART, text, position)
        if position == len(text):
            return position
        self.done = text[position] == '"'
        self._escaped = not self.done  # a backslash is the last character yet
        return position + 1


class ContainerScanner:
    """Finds the end of a JSON object or array, reading from its opening bracket."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._string: StringScanner | None = None

    def read(self, text: str, position: int) -> int:
        """Where the container ends (behind its bracket), or the end of the text."""
        while position < len(text):
            if self._string is not None:
                position = self._string.read(text, position)
                if self._string.done:
                    self._string = None
                continue
            position = _skip(_CONTAINER_PART, text, position)
            if position == len(text):
                break
            character = text[position]
            position += 1
            if character == '"':
                self._string = StringScanner()
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    self.done = True
                    return position
        return position


_State = Literal[
    "open",
    "key_or_end",
    "key",
    "colon",
    "value",
    "string",
    "container",
    "scalar",
    "comma",
    "done",
    "bad",
]
_Meaning = Literal["name", "arguments", "other"]


class CallObject:
    """Reads `{"name": …, "arguments": {…}}`, the keys in any order, others beside them skipped.

    Arguments may also be `null`, left out (both mean none), or an object written as a string.
    """

    def __init__(self, argument_keys: tuple[str, ...], may_lack_arguments: bool = True) -> None:
        self._argument_keys = argument_keys
        self._may_lack_arguments = may_lack_arguments
        self._state: _State = "open"
        self._meaning: _Meaning = "other"
        """Of the value being read."""
        self._key = ""
        self._pieces: list[str] = []
        """Of the key, string or scalar being read."""
        self._string = StringScanner()
        self._container = ContainerScanner()
        self._arguments: list[str] = []
        """Not taken yet."""
        self._has_arguments = False
        self.name: str | None = None

    @property
    def is_call(self) -> bool:
        """It has a name and arguments, the latter perhaps not to their end."""
        return self.name is not None and self._has_arguments

    @property
    def is_over(self) -> bool:
        """The object has ended, or it is not one."""
        return self._state in ("done", "bad")

    def take_arguments(self) -> str:
        """The arguments read since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def read(self, text: str, position: int) -> int:
        """Reads on; returns where the object ended, where it went wrong, or the end of the text."""
        while position < len(text) and not self.is_over:
            if self._state in ("key", "string"):
                position = self._read_string(text, position)
            elif self._state == "container":
                position = self._read_container(text, position)
            elif self._state == "scalar":
                position = self._read_scalar(text, position)
            else:
                position = skip_space(text, position)
                if position < len(text):
                    position += self._take_mark(text[position])
        return position

    def _take_mark(self, character: str) -> int:
        """A character between keys and values: changes the state; 1 if it was used up."""
        if self._state == "value":
            return self._begin_value(character)
        if self._state == "open" and character == "{":
            self._state = "key_or_end"
        elif self._state == "key_or_end" and character == '"':
            self._begin_string("key")
        elif self._state == "colon" and character == ":":
            self._state = "value"
        elif self._state == "comma" and character == ",":
            self._state = "key_or_end"
        elif self._state in ("key_or_end", "comma") and character == "}":
            self._end()
        else:
            self._state = "bad"
            return 0
        return 1

    def _end(self) -> None:
        if self.name is not None and not self._has_arguments and self._may_lack_arguments:
            self._set_arguments("{}")
        self._state = "done" if self.is_call else "bad"

    def _begin_value(self, character: str) -> int:
        if self._key == "name" and self.name is None:
            self._meaning = "name"
        elif self._key in self._argument_keys and not self._has_arguments:
            self._meaning = "arguments"
        else:
            self._meaning = "other"  # of keys that come twice the first counts
        if character == '"':
            self._begin_string("string")
            return 1
        fits = {"name": False, "arguments": character in "{n", "other": character not in ",:]}"}
        if not fits[self._meaning]:
            self._state = "bad"
        elif character in "{[":
            self._state = "container"
            self._container = ContainerScanner()
            self._has_arguments |= self._meaning == "arguments"
        else:
            self._state = "scalar"
            self._pieces = []
        return 0

    def _begin_string(self, state: Literal["key", "string"]) -> None:
        self._state = state
        self._string = StringScanner()
        self._pieces = []

    def _read_string(self, text: str, position: int) -> int:
        end = self._string.read(text, position)
        self._pieces.append(text[position:end])
        if not self._string.done:
            return end
        if self._state == "key":
            self._key = _decode(self._pieces) or ""
            self._state = "colon"
            return end
        self._state = "comma"
        value = None if self._meaning == "other" else _decode(self._pieces)
        if self._meaning == "name":
            self.name = value or None
            if not value:
                self._state = "bad"
        elif self._meaning == "arguments":
            if value is not None and value.lstrip().startswith("{"):
                self._set_arguments(value)
            else:
                self._state = "bad"
        return end

    def _read_container(self, text: str, position: int) -> int:
        end = self._container.read(text, position)
        if self._meaning == "arguments":
            self._arguments.append(text[position:end])
        if self._container.done:
            self._state = "comma"
        return end

    def _read_scalar(self, text: str, position: int) -> int:
        end = _skip(_SCALAR_PART, text, position)
        self._pieces.append(text[position:end])
        if end == len(text):
            return end
        self._state = "comma"
        if self._meaning == "arguments":
            if "".join(self._pieces) == "null":
                self._set_arguments("{}")
            else:
                self._state = "bad"
        return end

    def _set_arguments(self, text: str) -> None:
        self._has_arguments = True
        self._arguments.append(text)


def _decode(pieces: list[str]) -> str | None:
    """The string that was read up to its closing quote; None if it is none, or can't be sent as
    UTF-8.
    """
    try:
        value: str = json.loads('"' + "".join(pieces), strict=False)
        value.encode()
    except ValueError:  # UnicodeEncodeError, for half a surrogate pair, is one too
        return None
    return value
