"""What formats share in which marks stand between a call's name and its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.frontend.tool_calls.json_reader import ContainerScanner, skip_space
from quire.frontend.tool_calls.parser import State, ToolCallParser

_WORD = re.compile(r"[A-Za-z0-9_.\-]*")
_MAX_WORD = 256


class MarkedWordsParser(ToolCallParser):
    """Reads words and marks, and arguments that are a JSON object of their own."""

    def __init__(self, mark: str, after_mark: bool = False) -> None:
        super().__init__(mark, after_mark)
        self._container = ContainerScanner()
        self._word = ""
        self._name = ""

    def _after_arguments(self) -> State:
        """What is read behind a call's arguments."""
        return self._in_text

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
            self._state = self._after_arguments()
        return end

    def _read_word(self, text: str, position: int) -> int:
        match = _WORD.match(text, position, position + _MAX_WORD + 1 - len(self._word))
        assert match is not None
        self._word += match[0]
        self._undecided.append(match[0])
        return match.end()

    def _expect(self, marks: Mapping[str, State], text: str, position: int) -> int:
        """Behind a word: one of these marks, or it is no call. A bracket is left for whoever reads
        arguments.
        """
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
        rest = text[position : position + max(map(len, marks), default=0)]
        if position == len(text) or any(mark.startswith(rest) for mark in marks):
            return position  # a mark may follow yet
        return self._refuse(position)

    def _refuse(self, position: int) -> int:
        self._give_back()
        self._state = self._in_text
        return position
