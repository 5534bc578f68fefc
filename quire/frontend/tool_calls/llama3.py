"""Llama 3's format: the answer is `{"name": …, "parameters": {…}}`, perhaps several with `;`
between them, perhaps behind `<|python_tag|>`.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.frontend.tool_calls.json_reader import CallObject, skip_space
from quire.frontend.tool_calls.parser import ToolCallParser

MARK = "<|python_tag|>"


class Llama3Parser(ToolCallParser):
    """Nothing tells a call from an answer in JSON but what it says, so only calls of the tools
    there are count, and only at the beginning of the answer or behind the mark.
    """

    separator = ";"

    def __init__(self, tool_names: Iterable[str], forced: bool = False) -> None:
        """`forced`: nothing but calls can come."""
        super().__init__(MARK)
        self._tool_names = frozenset(tool_names)
        self._forced = forced
        self._state = self._at_start

    def _accepts(self, call: CallObject) -> bool:
        return call.name in self._tool_names

    def _was_becoming_a_call(self) -> bool:
        if self._forced or MARK in "".join(self._undecided):
            return True
        # it may be an answer in JSON, as long as it names no tool
        if self._state == self._in_object:
            return self._object.name in self._tool_names
        return self._state == self._in_text and super()._was_becoming_a_call()

    def _at_start(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        if end < len(text):
            if text[end] == "{":
                self._begin_undecided(text[position:end])
                self._begin_object()
                return end
            self._state = self._in_text
        self._text(text[position:end])
        return end

    def _new_object(self) -> CallObject:
        return CallObject(("parameters", "arguments"), may_lack_arguments=False)
