"""Hermes' format, which Qwen and many others use: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from quire.frontend.tool_calls.deltas import Delta
from quire.frontend.tool_calls.json_reader import CallObject, skip_space
from quire.frontend.tool_calls.parser import MarkedCallParser

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesParser(MarkedCallParser):
    """Each call stands between tags of its own; text may come before, between and after them."""

    def __init__(self, after_mark: bool = False) -> None:
        super().__init__(BEGIN, after_mark)

    def finish(self) -> list[Delta]:
        if self._state == self._after_object:
            self._held = ""  # half of the closing tag
        return super().finish()

    def _after_mark(self, text: str, position: int) -> int:
        self._begin_object(CallObject(("arguments", "parameters")))
        return position

    def _after_object(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        self._space.append(text[position:end])
        if end == len(text):
            return end
        if text.startswith(END, end):
            self._space = []
            self._state = self._in_text
            return end + len(END)
        if END.startswith(text[end:]):
            return end  # the tag may follow yet
        # The model forgot the tag, or wrote more than the call: it is text.
        self._state = self._in_text
        return end
