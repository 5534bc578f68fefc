"""DeepSeek's format: `<｜tool▁calls▁begin｜>`, then for each call its kind, its name and its
arguments between marks of their own; in code fences (V3, R1), or bare and without a kind (V3.1).
"""

from __future__ import annotations

from quire.frontend.tool_calls.json_reader import skip_space
from quire.frontend.tool_calls.marked_words import MarkedWordsParser
from quire.frontend.tool_calls.parser import Delta, State

MARK = "<｜tool▁calls▁begin｜>"
_END = "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_TAIL = (_FENCE, _CALL_END, _END, _CALL)
"""What may follow a call's arguments."""

FENCED = (f"{_CALL}function{_SEPARATOR}NAME\n{_FENCE}json\n", f"\n{_FENCE}{_CALL_END}", "\n", _END)
BARE = (f"{_CALL}NAME{_SEPARATOR}", _CALL_END, "", _END)
"""Before a call's arguments, behind them, between two calls, and behind the last."""


def is_fenced(template_source: str) -> bool:
    """Whether a template writes arguments in code fences."""
    return f"{_FENCE}json" in template_source


def example(template_source: str) -> str:
    """A call, for models whose templates say nothing about tools."""
    begin, end, _, after = FENCED if is_fenced(template_source) else BARE
    return f"{MARK}{begin.replace('NAME', '…')}{{…}}{end}{after}"


class DeepSeekParser(MarkedWordsParser):
    """Reads both; what follows the separator tells which one it is."""

    def __init__(self, after_mark: bool = False) -> None:
        super().__init__(MARK, after_mark)

    def finish(self, is_cut: bool = False) -> list[Delta]:
        if self._state == self._in_tail:
            self._held = ""  # half of a closing mark
        return super().finish(is_cut)

    def _after_arguments(self) -> State:
        return self._in_tail

    def _after_mark(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        self._undecided.append(text[position:end])
        return end if end == len(text) else self._expect({_CALL: self._in_kind}, text, end)

    def _in_kind(self, text: str, position: int) -> int:
        end = self._read_word(text, position)
        if end < len(text):
            self._name = self._word
        return self._expect({_SEPARATOR: self._after_separator} if self._word else {}, text, end)

    def _after_separator(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        self._undecided.append(text[position:end])
        if end < len(text):
            self._state = self._before_arguments if text[end] == "{" else self._in_name
        return end

    def _in_name(self, text: str, position: int) -> int:
        end = self._read_word(text, position)
        if end < len(text):
            self._name = self._word
        return self._expect({"\n": self._in_fence} if self._word else {}, text, end)

    def _in_fence(self, text: str, position: int) -> int:
        return self._expect(
            {f"{_FENCE}json": self._before_arguments, "{": self._before_arguments}, text, position
        )

    def _in_tail(self, text: str, position: int) -> int:
        """Behind a call's arguments."""
        end = skip_space(text, position)
        for mark in _TAIL:
            if not text.startswith(mark, end):
                continue
            self._space = []
            if mark == _CALL:
                self._begin_undecided(mark)
                self._word = ""
                self._state = self._in_kind
            elif mark == _END:
                self._state = self._in_text
            return end + len(mark)
        rest = text[end : end + max(map(len, _TAIL))]
        if not any(mark.startswith(rest) for mark in _TAIL):
            self._state = self._in_text  # the model forgot a mark, or wrote more than calls
        return position
