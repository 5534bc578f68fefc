"""Answers of models that write in channels (gpt-oss), for people: reasoning, an empty line, the
answer.
"""

from __future__ import annotations

from dataclasses import replace

from quire.frontend.detokenizer import IncrementalDetokenizer
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tool_calls import ContentDelta, ReasoningDelta, ToolSupport
from quire.outputs import RequestDelta

_ASK = {"role": "user", "content": "a"}


class ChannelReader:
    """Reads one chat answer's deltas: their text becomes what a person is shown, the whole answer's
    text its content alone. For models that write no channels nothing changes.
    """

    def __init__(self, tokenizer: Tokenizer, support: ToolSupport | None) -> None:
        """`support` is the model's, None for prompts that are no chat."""
        plan = support.plan([_ASK]) if support is not None and support.has_channels else None
        self._parser = plan.new_parser() if plan is not None else None
        mark = plan.special_mark if plan is not None else ""
        self._detokenizer = IncrementalDetokenizer(tokenizer, False, special_mark=mark)
        self._content: list[str] = []
        self._last: type[ContentDelta] | type[ReasoningDelta] | None = None

    def read(self, delta: RequestDelta) -> RequestDelta:
        if self._parser is None:
            self._content.append(delta.text)
            return delta
        is_last = delta.finish_reason is not None
        found = self._parser.feed("".join(map(self._detokenizer.push, delta.token_ids)))
        found += self._parser.finish() if is_last else []
        shown: list[str] = []
        for one in found:
            if isinstance(one, ContentDelta | ReasoningDelta):
                shown += ["\n\n"] if self._last not in (None, type(one)) else []
                shown.append(one.text)
                self._last = type(one)
                self._content += [one.text] if isinstance(one, ContentDelta) else []
        output = delta.output
        if output is not None:
            whole = replace(output.completions[0], text=self.content)
            output = replace(output, completions=(whole, *output.completions[1:]))
        return replace(delta, text="".join(shown), output=output)

    @property
    def content(self) -> str:
        """What belongs into the conversation."""
        return "".join(self._content)
