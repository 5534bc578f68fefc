"""Takes one answer's text apart as it comes: reasoning, tool calls, content."""

from __future__ import annotations

from collections.abc import Callable

from quire.frontend.reasoning import ReasoningSplitter
from quire.frontend.tool_calls import CallStart, ContentDelta, ToolCallParser
from quire.server.generation import ToolCallDelta


class AnswerReader:
    """Reads one answer. Without splitter and parser its text is all content."""

    def __init__(
        self,
        splitter: ReasoningSplitter | None,
        parser: ToolCallParser | None,
        new_call_id: Callable[[], str],
        parallel: bool = True,
    ) -> None:
        self._splitter = splitter
        self._parser = parser
        self._new_call_id = new_call_id
        self._parallel = parallel
        """Without, the first call is the only one that is returned."""
        self.num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """The text so far ends inside the reasoning."""
        return self._splitter is not None and self._splitter.is_reasoning

    def feed(self, text: str, is_last: bool) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
        """The content, reasoning and tool calls in a piece of text. `is_last`: no more follows, so what was held back
        comes too."""
        reasoning, content = "", text
        if self._splitter is not None:
            reasoning, content = self._splitter.feed(text)
            if is_last:
                rest = self._splitter.finish()
                reasoning, content = reasoning + rest.reasoning, content + rest.content
        if self._parser is None:
            return content, reasoning, ()
        deltas = self._parser.feed(content) if content else []
        if is_last:
            deltas += self._parser.finish()
        content = ""
        calls: list[ToolCallDelta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                content += delta.text
            elif delta.index > 0 and not self._parallel:
                continue
            elif isinstance(delta, CallStart):
                self.num_calls += 1
                calls.append(ToolCallDelta(delta.index, self._new_call_id(), delta.name, ""))
            elif calls and calls[-1].index == delta.index:
                last = calls.pop()
                calls.append(ToolCallDelta(last.index, last.id, last.name, last.arguments + delta.text))
            else:
                calls.append(ToolCallDelta(delta.index, None, None, delta.text))
        return content, reasoning, tuple(calls)
