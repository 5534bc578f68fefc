"""Takes one answer's text apart as it comes: reasoning, tool calls, content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from quire.frontend.reasoning import ReasoningSplitter
from quire.frontend.tool_calls import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    ReasoningDelta,
    ToolCallParser,
)
from quire.server.calls.generation import ToolCallDelta
from quire.server.calls.prompts import EncodedPrompt
from quire.server.guard.request_ids import new_id


class Pieces(NamedTuple):
    """What a piece of text holds: reasoning, then content, then calls. Another order means further
    pieces.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(slots=True)
class _Call:
    """A call as far as it was written."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class AnswerReader:
    """Reads one answer. Without splitter and parser its text is all content."""

    splitter: ReasoningSplitter | None
    parser: ToolCallParser | None
    new_call_id: Callable[[], str]
    parallel: bool = True
    """Without, the first call is the only one that is returned."""
    ends_at_repeat: bool = False
    """A call that repeats an earlier one word for word ends the answer and is left out. For answers
    under a grammar, which lets a model that has nothing more to say do nothing but call again.
    Until a call differs from the earlier ones it is held back.
    """
    special_mark: str = ""
    """What stands before special tokens in the text it reads."""
    num_calls: int = 0
    is_plain: bool = field(init=False)
    """All of the text is content, from now on."""
    only_splits: bool = field(init=False)
    """There is nothing in the text but reasoning and content."""
    is_over: bool = False
    """A call was repeated: whatever else is written counts for nothing."""
    _calls: list[_Call] = field(default_factory=list)
    _holds_back: bool = False
    """The last of them, which so far repeats an earlier one."""

    def __post_init__(self) -> None:
        self.is_plain = self.splitter is None and self.parser is None
        self.only_splits = self.parser is None and not self.special_mark

    def unmarked(self, text: str) -> str:
        """A text as it is shown, special tokens without their marks."""
        return text.replace(self.special_mark, "") if self.special_mark else text

    @property
    def is_reasoning(self) -> bool:
        """The text so far ends inside the reasoning."""
        splitter = self.splitter
        parser = self.parser
        return (splitter is not None and splitter.is_reasoning) or (
            parser is not None and parser.is_reasoning
        )

    def feed(self, text: str, is_last: bool, is_cut: bool = False) -> list[Pieces]:
        """What is in a piece of text, in the order in which it was written. `is_last`: no more
        follows, so what was held back comes too, but if the answer was cut off (`is_cut`) not the
        beginning of a call.
        """
        content, reasoning = self.split(text, is_last)
        if self.parser is None:
            return [Pieces(content, reasoning)]
        deltas = self.parser.feed(content) if content else []
        if is_last:
            deltas += self.parser.finish(is_cut)
        found = [Pieces(reasoning=reasoning)]
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._add_content(found, delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._add_reasoning(found, delta.text)
            elif delta.index == 0 or self.parallel:
                self._add_call(found, delta)
        if is_last and self._holds_back and not is_cut and not self.is_over:
            self._release(found)
        return found

    def split(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Content and reasoning in a piece of text."""
        splitter = self.splitter
        if splitter is None:
            return text, ""
        reasoning, content = splitter.feed(text)
        if is_last:
            rest = splitter.finish()
            reasoning += rest.reasoning
            content += rest.content
        if self.only_splits:
            self.is_plain = splitter.is_over
        return content, reasoning

    def _add_content(self, found: list[Pieces], text: str) -> None:
        if self.is_over:
            return
        last = found[-1]
        if last.tool_calls:
            found.append(Pieces(text))
        else:
            found[-1] = last._replace(content=last.content + text)

    def _add_reasoning(self, found: list[Pieces], text: str) -> None:
        last = found[-1]
        if last.content or last.tool_calls:
            found.append(Pieces(reasoning=text))
        else:
            found[-1] = last._replace(reasoning=last.reasoning + text)

    def _add_call(self, found: list[Pieces], delta: CallStart | ArgumentsDelta) -> None:
        if self.is_over:
            return
        if isinstance(delta, CallStart):
            self._calls.append(_Call(delta.name))
            self._holds_back = self.ends_at_repeat and bool(self._earlier())
            if not self._holds_back:
                self._release(found)
            return
        call = self._calls[-1]
        if self.ends_at_repeat:
            call.arguments += delta.text
        if not self._holds_back:
            self._extend(found, ToolCallDelta(len(self._calls) - 1, None, None, delta.text))
            return
        earlier = self._earlier()
        self.is_over = any(one.arguments == call.arguments for one in earlier)
        if not any(one.arguments.startswith(call.arguments) for one in earlier):
            self._release(found)

    def _earlier(self) -> list[_Call]:
        """Calls of the same function before the last one."""
        return [one for one in self._calls[:-1] if one.name == self._calls[-1].name]

    def _release(self, found: list[Pieces]) -> None:
        """Tells of the last call, with what was held back of it."""
        self._holds_back = False
        self.num_calls += 1
        call = self._calls[-1]
        self._extend(
            found,
            ToolCallDelta(len(self._calls) - 1, self.new_call_id(), call.name, call.arguments),
        )

    def _extend(self, found: list[Pieces], delta: ToolCallDelta) -> None:
        calls = found[-1].tool_calls
        if calls and calls[-1].index == delta.index:
            last = calls[-1]
            joined = ToolCallDelta(last.index, last.id, last.name, last.arguments + delta.arguments)
            found[-1] = found[-1]._replace(tool_calls=(*calls[:-1], joined))
        else:
            found[-1] = found[-1]._replace(tool_calls=(*calls, delta))


def new_reader(prompt: EncodedPrompt, split: bool) -> AnswerReader:
    """For one answer to a prompt."""
    plan = prompt.plan
    if plan is None or not split:
        return AnswerReader(None, None, partial(new_id, "call-"))
    splitter = ReasoningSplitter(prompt.inside_reasoning) if plan.support.thinks else None
    is_shaped = bool(plan.tools) and prompt.params.structured is not None
    parser = plan.new_parser(prompt.is_begun)
    return AnswerReader(
        splitter, parser, plan.new_call_id, plan.parallel, is_shaped, plan.special_mark
    )
