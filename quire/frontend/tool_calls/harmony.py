"""gpt-oss' format, harmony: an answer is a row of messages, each with a header that says on which channel it is and to
whom it goes: `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.name
<|constrain|>json<|message|>{…}<|call|>`. The prompt ends with the first message's `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from quire.frontend.tool_calls.parser import ContentDelta, Delta, ReasoningDelta, ToolCallParser

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
CONTROL_TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, END)
"""Those that stand inside an answer; the other two end it."""
FINAL = f"{CHANNEL}final{MESSAGE}"
"""What a prompt ends with if the answer is to begin without reasoning."""
SPECIAL_MARK = "\udcff"
"""Stands before each control token in the text that is read here, so that the same characters as
text (a page that the model repeats, say) are text. No token's bytes decode to it: half of a
surrogate pair is not UTF-8.
"""
_FUNCTIONS = "functions."
_BEGIN = SPECIAL_MARK + MESSAGE
_CHANNEL = re.compile(rf"{SPECIAL_MARK}{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(rf"(?<!\w)to=([^\s{SPECIAL_MARK}]+)")
_MAX_HEADER = 1024
_MAX_TOKEN = 64
"""Characters of a control token."""


def is_harmony(template_source: str) -> bool:
    """Whether a chat template writes in this format."""
    return CHANNEL in template_source and MESSAGE in template_source


class HarmonyParser(ToolCallParser):
    """Reads one answer. What is on the channel `analysis` is reasoning, what goes to a function is
    a call, on whichever channel and in whichever part of the header it says so; the rest is
    content. Two messages of one kind have an empty line between them. Of a header that never ends
    nothing is shown.
    """

    def __init__(self, tool_names: Iterable[str] = (), in_final: bool = False) -> None:
        """Without tools nothing is a call. `in_final`: the prompt has begun a message of the
        channel `final`.
        """
        super().__init__(_BEGIN)
        self._tool_names = frozenset(tool_names)
        self._kind: type[ContentDelta] | type[ReasoningDelta] | None = ContentDelta
        """Of the message that is being read; None for a call."""
        self._last_kind: type[ContentDelta] | type[ReasoningDelta] | None = None
        """Of the last text that was reported."""
        self._is_first = True
        """Nothing was reported of this message."""
        self._state = self._in_body if in_final else self._in_header

    @property
    def is_reasoning(self) -> bool:
        return self._state == self._in_body and self._kind is ReasoningDelta

    def finish(self, is_cut: bool = False) -> list[Delta]:
        if self._state == self._in_body:
            self._end_body(is_cut)  # what is held is part of a control token
        elif (
            not self._num_calls
            and self._last_kind is None
            and not re.search(rf"{SPECIAL_MARK}|^ ?to=", self._held)
        ):
            # the model knows nothing of the format: what it wrote is its answer
            self._say(self._held)
        self._held = ""
        return self._take_deltas()

    def _in_header(self, text: str, position: int) -> int:
        found = text.find(_BEGIN, position, position + _MAX_HEADER)
        if found < 0:
            # It waits for its end; one that is too long is a message without a header.
            return (
                self._begin_body("", position) if len(text) - position >= _MAX_HEADER else position
            )
        return self._begin_body(text[position:found], found + len(_BEGIN))

    def _begin_body(self, header: str, position: int) -> int:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        to = recipient[1] if recipient is not None else ""
        name = to.removeprefix(_FUNCTIONS)
        self._is_first = True
        self._state = self._in_body
        self._kind = (
            ReasoningDelta if channel is not None and channel[1] == "analysis" else ContentDelta
        )
        if self._tool_names and name and (name != to or name in self._tool_names):
            self._kind = None
            self._start_call(name)
        return position

    def _in_body(self, text: str, position: int) -> int:
        mark = text.find(SPECIAL_MARK, position)
        self._say(text[position : mark if mark >= 0 else len(text)])
        if mark < 0:
            return len(text)
        end = text.find("|>", mark, mark + _MAX_TOKEN)
        if end < 0:
            return mark if len(text) - mark < _MAX_TOKEN else mark + 1
        token = text[mark + 1 : end + 2]
        if token in (END, RETURN, CALL, START, CHANNEL):
            self._end_body()
            self._state = self._in_header
        # which belongs to the header; others are not shown
        return mark if token == CHANNEL else end + 2

    def _end_body(self, is_cut: bool = False) -> None:
        if self._kind is None and self._is_first and not is_cut:
            self._arguments("{}")

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._kind is None:
            self._arguments(text)
        else:
            between = "\n\n" if self._is_first and self._last_kind is self._kind else ""
            self._deltas.append(self._kind(between + text))
        self._is_first = False
        self._last_kind = self._kind
