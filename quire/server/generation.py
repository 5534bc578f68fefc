"""Generation: the one API behind every endpoint that makes text. An endpoint only translates.

    service = get_service(request)                      # from quire.server.service
    generation = await service.start(GenerationRequest(...))
    async for event in generation:                      # deltas of all choices as they come …
        ...
    choices = await generation.collect()                # … or, instead, everything at once
    generation.usage                                    # complete when either has ended

`start` checks, renders, tokenizes, admits and hands over to the engine. Whatever is wrong with the request is
raised by it (ApiError or a quire.errors type; both become the right response by themselves), so a streaming
endpoint may send its first byte when it returns. After that only an ApiError can come out of the iteration, for
what goes wrong later (engine lost, deadline): `sse.EventStream` turns it into an error event.

A generation must be ended: iterate it to its end, or call `abort()` (cheap, also when it is over). `collect` does
by itself, cancelled or not; `sse.EventStream` does for streams. Wrap endpoints in `connection.cancel_on_disconnect`
and a client that leaves cancels them.

Choices: with P prompts and params.n = N there are P*N choices, choice `p * N + i` being answer i to prompt p.

Chat: with `split=True` the text of an answer is taken apart: `event.reasoning` (what a model thinks between its
tags), `event.tool_calls` and `event.content` (everything else); `event.text` is the raw text all the same.
Otherwise `content` equals `text`. Tools: give them in `ChatPrompt.tools` (OpenAI's form: {"type": "function",
"function": {"name", "description", "parameters"}}) and say with `tool_choice` whether they must be used; a
generation with tool calls has finish_reason "tool_calls".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.outputs import TokenLogprobs
from quire.sampling_params import SamplingParams

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

    response_id: str
    """`chatcmpl-…` and the like: unique, the id of the response body and of GET /v1/requests/{id}."""
    request_id: str
    """x-request-id of the HTTP request (`request.state.request_id`), for logs."""
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    """`max_tokens=None` goes on to the end of the context; `seed=None` draws one."""
    endpoint: str = ""
    """Its path, for logs and records."""
    stream: bool = False
    split: bool = False
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    truncate_prompt_tokens: int | None = None
    """Keep this many of the prompt's last tokens; -1: as many as fit."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Names of parameters as this endpoint's clients write them, where they differ: an error about
    `max_tokens` names `fields["max_tokens"]`."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the client said about the request (user, metadata): kept with its record."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first piece of each call has its id and name."""

    index: int
    """Which of the choice's calls."""
    id: str | None
    name: str | None
    arguments: str
    """The next piece of the arguments' JSON text."""


@dataclass(frozen=True, slots=True)
class GenerationEvent:
    """What one choice gained. The last event of each choice, and only that, has a finish reason."""

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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole tool call."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A whole answer."""

    index: int
    text: str
    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(slots=True)
class Usage:
    """Tokens of the whole request; counts grow while it runs."""

    prompt_tokens: int = 0
    """Each prompt once, however many answers it gets."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Of the completion tokens, those between the reasoning tags; 0 without `split`."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
