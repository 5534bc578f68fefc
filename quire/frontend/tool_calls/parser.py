"""What a tool-call parser reports, piece by piece, and the part of reading that all formats share:
text outside of calls, what is held back, and giving back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.frontend.reasoning import WHITE, open_end
from quire.frontend.tool_calls.json_reader import CallObject, skip_space


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text that is part of no call."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """What the model thinks, where the format of calls says so too."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call has begun: its name is known; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments, as the model wrote them."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | CallStart | ArgumentsDelta
State = Callable[[str, int], int]
"""Reads `text` from a position on and returns where it stopped, perhaps having put another state in
its place. One that stays where it is, at the same position, waits for more text.
"""


class ToolCallParser:
    """Reads one answer, in which a mark announces calls. What it reports in all depends on the text
    alone, not on how it was cut into pieces.

    A call is reported as soon as it can't be anything else: its name is known and its arguments
    have begun. Text that looked like a call and was none comes back as content, every character of
    it; white space directly before a call, and after the last one, belongs to no content. Arguments
    are passed on as they were written; if the answer ends inside them, or they are no JSON, that is
    for the caller to see.
    """

    separator = ""
    """What may stand between two calls behind one mark."""

    def __init__(self, mark: str, after_mark: bool = False) -> None:
        """`after_mark`: the prompt ends with the mark, so the answer begins behind it."""
        self._mark = mark
        self._state: State = self._after_mark if after_mark else self._in_text
        self._held = ""
        """What could be the beginning of a mark; shorter than the mark."""
        self._space: list[str] = []
        """White space that becomes content if more content follows."""
        self._undecided: list[str] = []
        """What was read of something that may become a call: content, should it not."""
        self._object = self._new_object()
        self._in_call = False
        self._num_calls = 0
        self._deltas: list[Delta] = []

    @property
    def is_reasoning(self) -> bool:
        """The text so far ends inside the reasoning, for formats that say where it is."""
        return False

    def feed(self, text: str) -> list[Delta]:
        """What the next piece of the answer makes certain."""
        text = self._held + text
        position = 0
        while position < len(text):
            state = self._state
            reached = state(text, position)
            if reached == position and self._state == state:
                break
            position = reached
        self._held = text[position:]
        return self._take_deltas()

    def finish(self, is_cut: bool = False) -> list[Delta]:
        """What was held back, when no more text follows. In an answer that was cut off (`is_cut`)
        what began like a call was going to be one: it is no content.
        """
        if is_cut and self._was_becoming_a_call():
            self._undecided.clear()
            self._space.clear()
            self._held = ""
        self._undecided.append(self._held)
        self._held = ""
        self._give_back()
        if self._space and not self._num_calls:
            self._deltas.append(ContentDelta("".join(self._space)))
        return self._take_deltas()

    # What differs between formats

    def _new_object(self) -> CallObject:
        return CallObject(("arguments", "parameters"))

    def _accepts(self, call: CallObject) -> bool:
        """Whether an object that has the form of a call is one."""
        return True

    def _after_mark(self, text: str, position: int) -> int:
        self._begin_object()
        return position

    def _was_becoming_a_call(self) -> bool:
        """Whether the text so far ends inside of what is not yet certain to be a call. One
        character that a mark begins with (`<`, `[`) may be anything; more of it is hardly ever
        meant as text.
        """
        return self._state != self._in_text or len(self._held) > 1

    def _after_call(self, text: str, position: int) -> int:
        """At the first character behind a call that is not white space."""
        self._state = self._in_text
        if text[position] != self.separator:
            return position
        self._begin_undecided(self.separator)
        self._begin_object()
        return position + 1

    # States

    def _in_text(self, text: str, position: int) -> int:
        found = text.find(self._mark, position)
        end = found if found >= 0 else open_end(text, position, self._mark)
        self._text(text[position:end])
        if found < 0:
            return end
        self._begin_undecided(self._mark)
        self._state = self._after_mark
        return found + len(self._mark)

    def _in_object(self, text: str, position: int) -> int:
        end = self._object.read(text, position)
        if not self._in_call:
            self._undecided.append(text[position:end])
            if self._object.is_call and self._accepts(self._object):
                assert self._object.name is not None
                self._start_call(self._object.name)
        if self._in_call:
            self._arguments(self._object.take_arguments())
        if self._object.is_over:
            self._state = self._after_object if self._in_call else self._in_text
            self._give_back()
            self._in_call = False
        return end

    def _after_object(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        self._space.append(text[position:end])
        return end if end == len(text) else self._after_call(text, end)

    # Helpers

    def _begin_object(self) -> None:
        self._object = self._new_object()
        self._state = self._in_object

    def _begin_undecided(self, text: str) -> None:
        self._undecided += [*self._space, text]
        self._space = []

    def _start_call(self, name: str) -> None:
        self._in_call = True
        self._undecided.clear()
        self._deltas.append(CallStart(self._num_calls, name))
        self._num_calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._deltas.append(ArgumentsDelta(self._num_calls - 1, text))

    def _give_back(self) -> None:
        """What has not become a call is content."""
        self._text("".join(self._undecided))
        self._undecided.clear()

    def _text(self, text: str) -> None:
        """Text outside of calls; white space at its end waits."""
        kept = text.rstrip(WHITE)
        if kept:
            self._deltas.append(ContentDelta("".join([*self._space, kept])))
            self._space = []
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas
