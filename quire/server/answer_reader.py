"""Takes one answer's text apart as it comes: reasoning, tool calls, content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.frontend.reasoning import ReasoningSplitter
from quire.frontend.tool_calls import CallStart, ContentDelta, ToolCallParser
from quire.server.generation import ToolCallDelta


@dataclass(slots=True)
class AnswerReader:
    """Reads one answer. Without splitter and parser its text is all content."""

    splitter: ReasoningSplitter | None
    parser: ToolCallParser | None
    new_call_id: Callable[[], str]
    parallel: bool = True
    """Without, the first call is the only one that is returned."""
    num_calls: int = 0

    @property
    def is_reasoning(self) -> bool:
        """The text so far ends inside the reasoning."""
        return self.splitter is not None and self.splitter.is_reasoning

    def feed(self, text: str, is_last: bool) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
        """The content, reasoning and tool calls in a piece of text. `is_last`: no more follows, so what was held back
        comes too."""
        reasoning, content = "", text
        if self.splitter is not None:
            reasoning, content = self.splitter.feed(text)
            if is_last:
                rest = self.splitter.finish()
                reasoning, content = reasoning + rest.reasoning, content + rest.content
        if self.parser is None:
            return content, reasoning, ()
        deltas = self.parser.feed(content) if content else []
        if is_last:
            deltas += self.parser.finish()
        content = ""
        calls: list[ToolCallDelta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                content += delta.text
            elif delta.index > 0 and not self.parallel:
                continue
            elif isinstance(delta, CallStart):
                self.num_calls += 1
                calls.append(ToolCallDelta(delta.index, self.new_call_id(), delta.name, ""))
            elif calls and calls[-1].index == delta.index:
                last = calls.pop()
                calls.append(ToolCallDelta(last.index, last.id, last.name, last.arguments + delta.text))
            else:
                calls.append(ToolCallDelta(delta.index, None, None, delta.text))
        return content, reasoning, tuple(calls)
