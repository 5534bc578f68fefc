"""What the routes and the engine's side of the server say to each other: a call's prompts and
parameters go down as a `GenerationRequest`, what the engine makes of them comes back as
`GenerationEvent`s.

Choices: with P prompts and params.n = N there are P*N choices, choice `p * N + i` being answer i to
prompt p.

Chat: with `split=True` the text of an answer is taken apart: `event.reasoning` (what a model thinks
between its tags), `event.tool_calls` and `event.content` (everything else); `event.text` is the raw
text all the same. Otherwise `content` equals `text`. Tools: give them in `ChatPrompt.tools`
(OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}) and say
with `tool_choice` whether they must be used; a generation with tool calls has finish_reason
"tool_calls".

Embeddings: with `pooling` there are no answers but one vector for each prompt (`event.vector`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from quire.outputs import TokenLogprobs
from quire.sampling_params import SamplingParams
from quire.server.link.messages import AdapterFolder
from quire.step import Pooling

TruncationSide = Literal["left", "right"]
FinishReason = Literal["stop", "length", "tool_calls"]
"""What a client sees. Aborts, deadlines and failures are no answers: they come as an ApiError."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to be continued as it is."""

    text: str
    add_special_tokens: bool = True
    """Put the model's beginning-of-sequence token before it."""


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids to be continued as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages (OpenAI's form, as plain dicts) for the model's chat template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Go on with the last message instead of beginning a new one."""


Prompt = TextPrompt | TokensPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that must be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What an endpoint asks for."""

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    """`max_tokens=None` goes on to the end of the context; `seed=None` draws one."""
    endpoint: str = ""
    """Its path, for logs and records."""
    stream: bool = False
    split: bool = False
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    pooling: Pooling | None = None
    """For embeddings: how a prompt's hidden states become one vector."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of the prompt's tokens; -1: as many as fit."""
    truncation_side: TruncationSide = "left"
    """Where tokens are cut off: on the left (the last ones are kept) or on the right."""
    max_context: int | None = None
    """Tokens of prompt and answer together, if that is to be less than the model's context."""
    adapter: AdapterFolder | None = None
    """Which adapter answers; None: the model itself."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Names of parameters as this endpoint's clients write them, where they differ: an error about
    `max_tokens` names `fields["max_tokens"]`."""
    clamp_max_tokens: bool = False
    """More tokens than the context has room for mean as many as there is room for."""
    ignored: tuple[str, ...] = ()
    """What was sent and left out, for x-quire-ignored."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the client said about the request (user, metadata): kept with its record."""

    @property
    def num_answers(self) -> int:
        """Sequences the engine computes for it."""
        return len(self.prompts) * (self.params.best_of or self.params.n)


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first piece of each call has its id and name."""

    index: int
    """Which of the choice's calls."""
    id: str | None
    name: str | None
    arguments: str
    """The next piece of the arguments' JSON text."""


class GenerationEvent(msgspec.Struct, frozen=True, gc=False):
    """What one choice gained. The last event of each choice, and only that, has a finish reason; a
    text to embed has one event, its vector.
    """

    index: int
    text: str = ""
    """All that is new, reasoning and tool calls included."""
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of token_ids, if params.logprobs asked for them."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended it, with the finish reason."""
    vector: bytes = b""
    """Of a text to embed: float32, little-endian, not normalised."""


def whole_choices(events: Iterable[GenerationEvent]) -> list[GenerationEvent]:
    """All events of each choice joined to one, by index."""
    parts: dict[int, list[GenerationEvent]] = {}
    for event in events:
        parts.setdefault(event.index, []).append(event)
    return [_joined(parts[index]) for index in sorted(parts)]


def join_events(
    events: Sequence[GenerationEvent], silent: set[int] | None = None
) -> list[GenerationEvent]:
    """What waited for its reader, in as few events as tell the same: text that follows text is one.
    The first event of a choice in `silent`, which it is taken out of, stays one of its own.
    """
    groups: list[list[GenerationEvent]] = []
    last: dict[int, list[GenerationEvent]] = {}
    said: dict[int, GenerationEvent] = {}
    """By choice, the last event of its group that told anything."""
    for event in events:
        group = last.get(event.index)
        if group is not None and _continues(said.get(event.index), group[-1], event):
            group.append(event)
        else:
            groups.append([event])
            said.pop(event.index, None)
            if silent and event.index in silent:
                silent.remove(event.index)
                continue
            last[event.index] = groups[-1]
        if event.content or event.reasoning or event.tool_calls:
            said[event.index] = event
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _continues(
    said: GenerationEvent | None, before: GenerationEvent, event: GenerationEvent
) -> bool:
    """Whether the two can be told as one, with what was `said` before them: reasoning goes before
    content, and content before calls. Tokens with logprobs stay with what they say, and those that
    say nothing yet with what follows.
    """
    if event.logprobs:
        kinds = [
            (bool(one.reasoning), bool(one.content), bool(one.tool_calls))
            for one in (before, event)
        ]
        if any(kinds[0]) and kinds[0] != kinds[1]:
            return False
    if said is None:
        return True
    return not (said.tool_calls or event.tool_calls) and not (said.content and event.reasoning)


def _joined(events: Sequence[GenerationEvent]) -> GenerationEvent:
    calls: dict[int, list[ToolCallDelta]] = {}
    for event in events:
        for call in event.tool_calls:
            calls.setdefault(call.index, []).append(call)
    return msgspec.structs.replace(
        events[-1],
        text="".join(event.text for event in events),
        content="".join(event.content for event in events),
        reasoning="".join(event.reasoning for event in events),
        tool_calls=tuple(
            replace(pieces[0], arguments="".join(piece.arguments for piece in pieces))
            for pieces in calls.values()
        ),
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
        logprobs=tuple(entry for event in events for entry in event.logprobs),
    )


@dataclass(slots=True)
class Usage:
    """Tokens of the whole request; counts grow while it runs."""

    prompt_tokens: int = 0
    """Each prompt once, however many answers it gets."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Of the completion tokens, those between the reasoning tags; 0 without `split`."""
    accepted_tokens: int = 0
    """Draft tokens (the client's prediction, or others) that were right."""
    rejected_tokens: int = 0
    """Draft tokens that were checked and wrong, of answers that have ended by themselves."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
