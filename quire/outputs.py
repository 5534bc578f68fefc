"""What comes back to the caller."""

from __future__ import annotations

from dataclasses import dataclass

from quire.step import FinishReason, RequestMetrics


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model held a token, by its own logits: before masks, penalties and
    temperature.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token; among equals the lower id comes first."""
    token_bytes: bytes
    """What the token stands for; may be part of a character."""

    @property
    def text(self) -> str:
        return self.token_bytes.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class TokenLogprobs(Logprob):
    """A token of a sequence, and what else the model held likely there."""

    top: tuple[Logprob, ...]
    """The most likely tokens, as many as were asked for (or as there are), the likeliest first."""
    named: tuple[Logprob, ...] = ()
    """Those that `logprob_token_ids` asks for, in that order."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    """stop (the model, a stop string or the grammar ended it), length, abort, deadline or error."""
    stop_reason: str | int | None
    """The stop string or the token id that ended it. None if the grammar did, or `finish_reason` is
    not "stop".
    """
    seed: int
    """What to pass as `seed`, with n=1, to get this answer again."""
    error: str | None
    metrics: RequestMetrics
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of `token_ids`, if they were asked for."""
    cumulative_logprob: float | None = None
    """The sum of the tokens' logprobs, if they were asked for or `best_of` needed them."""

    @property
    def stop_token_id(self) -> int | None:
        """The token that ended it, if one did; it is the last of `token_ids` and not part of
        `text`, unless `include_stop_str_in_output` asks for it.
        """
        return self.stop_reason if isinstance(self.stop_reason, int) else None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request: one answer, or `n` of them. The short names give the first."""

    request_id: str
    prompt: str | None
    """As text, if it came as text."""
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    """By index; with `best_of`, the best first."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each of `prompt_token_ids`, if they were asked for. The first is None: nothing
    precedes it. So are those that a request which was aborted or failed has not computed.
    """

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.completions[0].error

    @property
    def metrics(self) -> RequestMetrics:
        return self.completions[0].metrics

    @property
    def weights_version(self) -> int | None:
        """Of the weights that computed it: 0 as loaded, higher with every update. Where an update
        kept the request, the last; `metrics.weights_versions` has all.
        """
        return self.metrics.weights_version


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What one step of the engine added to one answer."""

    request_id: str
    index: int
    """Which answer; with `best_of`, which candidate, before they are ranked."""
    text: str
    """New text. The beginning of a possible stop string is held back: it comes with a later delta,
    or never.
    """
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One for each of `token_ids`, if they were asked for."""
    finish_reason: FinishReason | None
    output: RequestOutput | None
    """The whole request, once its last answer has finished."""
