"""What comes back to the caller."""

from __future__ import annotations

from dataclasses import dataclass

from quire.step import FinishReason, RequestMetrics


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    """stop (the model ended it), length, abort, deadline or error."""
    stop_token_id: int | None
    """The token that ended it, if one did; it is the last of `token_ids` and not part of `text`."""
    seed: int
    """What to pass as `seed`, with n=1, to get this answer again."""
    error: str | None
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request: one answer, or `n` of them. The short names give the first."""

    request_id: str
    prompt: str | None
    """As text, if it came as text."""
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.completions[0].error

    @property
    def metrics(self) -> RequestMetrics:
        return self.completions[0].metrics


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What one step of the engine added to one answer."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    output: RequestOutput | None
    """The whole request, once its last answer has finished."""
