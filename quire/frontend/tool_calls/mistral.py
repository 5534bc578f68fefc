"""Mistral's formats: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, and since the Tekken tokenizers
`[TOOL_CALLS]name[ARGS]{…}` for each call, perhaps with `[CALL_ID]…` before `[ARGS]`."""

from __future__ import annotations

import re

from quire.frontend.tool_calls.json_reader import ContainerScanner, skip_space
from quire.frontend.tool_calls.parser import State, ToolCallParser

MARK = "[TOOL_CALLS]"
ARGUMENTS_MARK = "[ARGS]"
ID_MARK = "[CALL_ID]"
_WORD = re.compile(r"[A-Za-z0-9_.\-]*")
_MAX_WORD = 256


class MistralParser(ToolCallParser):
    """Reads both formats; the first character behind the mark tells which one it is."""

    separator = ","

    def __init__(self, after_mark: bool = False) -> None:
        super().__init__(MARK, after_mark)
        self._container = ContainerScanner()
        self._word = ""
        self._name = ""

    def _after_mark(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        self._undecided.append(text[position:end])
        if end == len(text):
            return end
        if text[end] == "[":
            self._undecided.append("[")
            self._begin_object()
            return end + 1
        if text[end] == "{":
            self._begin_object()
        else:
            self._word = ""
            self._state = self._in_name
        return end

    def _after_call(self, text: str, position: int) -> int:
        end = super()._after_call(text, position)
        return end + text.startswith("]", end) if end == position else end

    def _in_name(self, text: str, position: int) -> int:
        end = self._read_word(text, position)
        if end < len(text):
            self._name = self._word
        marks: dict[str, State] = {}
        if self._word:
            marks = {ID_MARK: self._in_call_id, ARGUMENTS_MARK: self._before_arguments, "{": self._before_arguments}
        return self._expect(marks, text, end)

    def _in_call_id(self, text: str, position: int) -> int:
        return self._expect({ARGUMENTS_MARK: self._before_arguments}, text, self._read_word(text, position))

    def _before_arguments(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        self._undecided.append(text[position:end])
        if end < len(text):
            if text[end] != "{":
                return self._refuse(end)
            self._start_call(self._name)
            self._container = ContainerScanner()
            self._state = self._in_arguments
        return end

    def _in_arguments(self, text: str, position: int) -> int:
        end = self._container.read(text, position)
        self._arguments(text[position:end])
        if self._container.done:
            self._in_call = False
            self._state = self._in_text
        return end

    def _read_word(self, text: str, position: int) -> int:
        match = _WORD.match(text, position, position + _MAX_WORD + 1 - len(self._word))
        assert match is not None
        self._word += match[0]
        self._undecided.append(match[0])
        return match.end()

    def _expect(self, marks: dict[str, State], text: str, position: int) -> int:
        """Behind a word: one of these marks, or it is no call."""
        if len(self._word) > _MAX_WORD:
            return self._refuse(position)
        for mark, state in marks.items():
            if text.startswith(mark, position):
                self._state = state
                self._word = ""
                if mark == "{":
                    return position
                self._undecided.append(mark)
                return position + len(mark)
        rest = text[position : position + len(ID_MARK)]
        if not rest or any(mark.startswith(rest) for mark in marks):
            return position  # a mark may follow yet
        return self._refuse(position)

    def _refuse(self, position: int) -> int:
        self._give_back()
        self._state = self._in_text
        return position
