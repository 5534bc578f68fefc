"""Takes what a model thinks (between `<think>` and `</think>`) apart from what it answers, as the
text comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from quire.frontend.tokenizer import Tokenizer

BEGIN = "<think>"
END = "</think>"
WHITE = " \t\r\n"
_TAIL = 8
"""Tokens at a prompt's end that are looked at for an opening tag."""


class SplitText(NamedTuple):
    """What a piece of text makes certain."""

    reasoning: str
    content: str


class ReasoningSplitter:
    """Reads one answer. Thinking comes first or not at all: a tag anywhere else is text like any
    other.

    White space around the tags belongs to neither part. An answer that ends before the closing tag
    was all reasoning. The outcome depends on the text alone, not on how it was cut into pieces.
    """

    def __init__(self, inside: bool = False) -> None:
        """`inside`: the prompt has opened the tag already."""
        self._state: Literal["start", "opened", "reasoning", "closed", "content"] = (
            "opened" if inside else "start"
        )
        self._space: list[str] = []
        """White space that counts if more of the same part follows."""
        self._held = ""
        """What could be the beginning of a tag."""

    @property
    def is_reasoning(self) -> bool:
        """The text so far ends inside the reasoning."""
        return self._state in ("opened", "reasoning")

    @property
    def is_over(self) -> bool:
        """All that follows is content."""
        return self._state == "content"

    def feed(self, text: str) -> SplitText:
        if (
            self._state == "reasoning"
            and text
            and not self._held
            and END[0] not in text
            and text[-1] not in WHITE
        ):
            # Most pieces: nothing in it ends the reasoning, or may begin to.
            reasoned = "".join([*self._space, text])
            self._space.clear()
            return SplitText(reasoned, "")
        text = self._held + text
        self._held = ""
        reasoning: list[str] = []
        content: list[str] = []
        position = 0
        while position < len(text):
            if self._state == "content":
                content.append(text[position:])
                break
            if self._state == "reasoning":
                position = self._read_reasoning(text, position, reasoning)
            else:
                position = self._read_tag(text, position, content)
            if self._held:
                break
        return SplitText("".join(reasoning), "".join(content))

    def finish(self) -> SplitText:
        """What was held back, when no more text follows."""
        rest = "".join([*self._space, self._held])
        self._space, self._held = [], ""
        if self._state == "start":
            return SplitText("", rest)
        return SplitText(rest if self._state == "reasoning" else rest.strip(WHITE), "")

    def _read_tag(self, text: str, position: int, content: list[str]) -> int:
        """Before the opening tag, behind it, or behind the closing one: white space is not part of
        anything yet.
        """
        stripped = len(text) - len(text[position:].lstrip(WHITE))
        if self._state == "start":
            self._space.append(text[position:stripped])
        if stripped == len(text):
            return stripped
        if self._state != "closed":
            if text.startswith(BEGIN, stripped):
                self._state = "opened"
                self._space = []
                return stripped + len(BEGIN)
            if BEGIN.startswith(text[stripped:]):
                self._held = text[stripped:]
                return stripped
        if self._state == "opened":
            self._state = "reasoning"
        else:
            content += self._space
            self._space = []
            self._state = "content"
        return stripped

    def _read_reasoning(self, text: str, position: int, reasoning: list[str]) -> int:
        found = text.find(END, position)
        end = found if found >= 0 else open_end(text, position, END)
        kept = text[position:end].rstrip(WHITE)
        if kept:
            reasoning += [*self._space, kept]
            self._space = []
        self._space.append(text[position + len(kept) : end])
        if found < 0:
            self._held = text[end:]
            return end
        self._space = []
        self._state = "closed"
        return found + len(END)


def open_end(text: str, start: int, mark: str) -> int:
    """Where in `text[start:]` an end begins that `mark` may begin with; the text's length if
    nowhere.
    """
    position = text.find(mark[0], max(start, len(text) - len(mark) + 1))
    while position >= 0 and not mark.startswith(text[position:]):
        position = text.find(mark[0], position + 1)
    return position if position >= 0 else len(text)


def thinks(template_source: str) -> bool:
    """Whether a model of this chat template writes its reasoning between these tags."""
    return END in template_source


def opens_reasoning(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> bool:
    """Whether a prompt ends with an opening tag, so that the answer begins inside the reasoning."""
    tail = tokenizer.decode(prompt_token_ids[-_TAIL:], skip_special_tokens=False)
    return tail.rstrip(WHITE).endswith(BEGIN)
