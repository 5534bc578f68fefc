"""Answers in channels (gpt-oss) as plain text, for callers who read what other models write:
reasoning between `<think>` and `</think>`, calls between `<tool_call>` and `</tool_call>`, and the
answer behind them.
"""

from __future__ import annotations

import json

from quire.frontend import reasoning
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tool_calls import hermes
from quire.frontend.tool_calls.harmony import HarmonyParser, is_harmony
from quire.frontend.tool_calls.parser import CallStart, ContentDelta, ReasoningDelta

_ANY_FUNCTION = ("functions",)
"""Whatever goes to a function is a call: whoever gave no tools is not going to see any."""


def writes_channels(tokenizer: Tokenizer) -> bool:
    """Whether a model's chat answers are in channels."""
    return is_harmony(tokenizer.chat_templates.get("default", ""))


class ChannelText:
    """Reads one answer, with marks before its control tokens, and gives the text to show. What that
    is in all depends on the answer alone, not on how it was cut into pieces.
    """

    __slots__ = ("_end", "_parser")

    def __init__(self) -> None:
        self._parser = HarmonyParser(_ANY_FUNCTION)
        self._end = ""
        """What ends the part that is being written, once another one begins or the answer is whole."""

    def read(self, text: str, is_last: bool, is_cut: bool) -> str:
        """What a piece of the answer makes certain; `is_cut`: it ended in the middle."""
        deltas = self._parser.feed(text) + (self._parser.finish(is_cut) if is_last else [])
        shown: list[str] = []
        for delta in deltas:
            if isinstance(delta, CallStart):
                name = json.dumps(delta.name, ensure_ascii=False)
                shown += [self._end, f'{hermes.BEGIN}\n{{"name": {name}, "arguments": ']
                self._end = f"}}\n{hermes.END}\n"
            elif isinstance(delta, ReasoningDelta) and not self._end.startswith(
                f"\n{reasoning.END}"
            ):
                shown += [self._end, f"{reasoning.BEGIN}\n"]
                self._end = f"\n{reasoning.END}\n\n"
            elif isinstance(delta, ContentDelta):
                shown.append(self._end)
                self._end = ""
            shown.append("" if isinstance(delta, CallStart) else delta.text)
        if is_last and not is_cut:
            shown.append(self._end.rstrip("\n"))
        return "".join(shown)
