"""Mistral's formats: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, and since the Tekken
tokenizers `[TOOL_CALLS]name[ARGS]{…}` for each call, perhaps with `[CALL_ID]…` before `[ARGS]`.
"""

from __future__ import annotations

from quire.frontend.tool_calls.json_reader import skip_space
from quire.frontend.tool_calls.marked_words import MarkedWordsParser
from quire.frontend.tool_calls.parser import State

MARK = "[TOOL_CALLS]"
ARGUMENTS_MARK = "[ARGS]"
ID_MARK = "[CALL_ID]"


class MistralParser(MarkedWordsParser):
    """Reads both formats; the first character behind the mark tells which one it is."""

    separator = ","

    def __init__(self, after_mark: bool = False) -> None:
        super().__init__(MARK, after_mark)

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
            marks = {
                ID_MARK: self._in_call_id,
                ARGUMENTS_MARK: self._before_arguments,
                "{": self._before_arguments,
            }
        return self._expect(marks, text, end)

    def _in_call_id(self, text: str, position: int) -> int:
        return self._expect(
            {ARGUMENTS_MARK: self._before_arguments}, text, self._read_word(text, position)
        )
