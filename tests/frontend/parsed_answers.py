"""A tool-call parser's deltas put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.frontend.tool_calls import CallStart, ContentDelta, Delta, ToolCallParser


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
    calls = (
        ParsedCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True)
    )
    return ParsedAnswer("".join(content), tuple(calls))


def parse(parser: ToolCallParser, text: str) -> ParsedAnswer:
    """A text that is complete."""
    return collect([*parser.feed(text), *parser.finish()])
