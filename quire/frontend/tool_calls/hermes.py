"""Hermes' format, which Qwen and many others use: `<tool_call>{"name": …, "arguments":
{…}}</tool_call>`.
"""

from __future__ import annotations

from quire.frontend.tool_calls.parser import Delta, ToolCallParser

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesParser(ToolCallParser):
    """Each call stands between tags of its own; text may come before, between and after them."""

    def __init__(self, after_mark: bool = False) -> None:
        super().__init__(BEGIN, after_mark)

    def finish(self, is_cut: bool = False) -> list[Delta]:
        if self._state == self._after_object:
            self._held = ""  # half of the closing tag
        return super().finish(is_cut)

    def _after_call(self, text: str, position: int) -> int:
        if text.startswith(END, position):
            self._space = []
            self._state = self._in_text
            return position + len(END)
        if not END.startswith(text[position:]):  # else the tag may follow yet
            # The model forgot the tag, or wrote more than the call: it is text.
            self._state = self._in_text
        return position
