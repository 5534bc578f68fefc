"""Puts events together to whole choices."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.outputs import TokenLogprobs
from quire.server.generation import Choice, FinishReason, GenerationEvent, ToolCall


class Collector:
    """Feed it the events of a generation, in order."""

    def __init__(self, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs
        self._parts: dict[int, _Collected] = {}

    def take(self, event: GenerationEvent) -> None:
        self._parts.setdefault(event.index, _Collected()).take(event)

    def choices(self) -> list[Choice]:
        """When all events have come."""
        return [part.choice(index, self._with_logprobs) for index, part in sorted(self._parts.items())]


@dataclass(slots=True)
class _Collected:
    """A choice being put together."""

    texts: list[str] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def take(self, event: GenerationEvent) -> None:
        self.texts.append(event.text)
        self.contents.append(event.content)
        self.reasonings.append(event.reasoning)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        for call in event.tool_calls:
            if call.name is not None:
                self.calls.append((call.id or "", call.name, []))
            self.calls[-1][2].append(call.arguments)
        self.finish_reason = event.finish_reason
        self.stop_reason = event.stop_reason

    def choice(self, index: int, with_logprobs: bool) -> Choice:
        assert self.finish_reason is not None
        return Choice(
            index=index,
            text="".join(self.texts),
            content="".join(self.contents),
            reasoning="".join(self.reasonings),
            tool_calls=tuple(ToolCall(id, name, "".join(pieces)) for id, name, pieces in self.calls),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs) if with_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
