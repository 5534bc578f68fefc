"""What a tool-call parser reports, piece by piece, and what the pieces come to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text that is part of no call."""

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


Delta = ContentDelta | CallStart | ArgumentsDelta


class ToolCallParser(Protocol):
    """Reads one answer. What it reports in all depends on the text alone, not on how it was cut into pieces.

    A call is reported as soon as it can't be anything else: its name is known and its arguments have begun. Text
    that looked like a call and was none comes back as content, every character of it. Arguments are passed on
    as they were written; if the answer ends inside them, or they are no JSON, that is for the caller to see.
    """

    def feed(self, text: str) -> list[Delta]:
        """What the next piece of the answer makes certain."""

    def finish(self) -> list[Delta]:
        """What was held back, when no more text follows."""


@dataclass(slots=True)
class ParsedCall:
    """A call as far as it has come."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A whole answer taken apart."""

    content: str
    calls: tuple[ParsedCall, ...]


def collect(deltas: Iterable[Delta]) -> ParsedAnswer:
    """Puts an answer's deltas together."""
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif isinstance(delta, CallStart):
            names.append(delta.name)
            arguments.append([])
        else:
            arguments[delta.index].append(delta.text)
    calls = (ParsedCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True))
    return ParsedAnswer("".join(content), tuple(calls))


def parse(parser: ToolCallParser, text: str) -> ParsedAnswer:
    """A text that is complete."""
    return collect([*parser.feed(text), *parser.finish()])
