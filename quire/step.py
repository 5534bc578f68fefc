"""A step as a value: what the scheduler decided, what the runner must do, and what came of it.

A runner takes a step apart in this order: rows of `preempted` and `finished` are given up, rows of
`admitted` are set up, `copies` are executed one after the other, then `scheduled` is computed. All
device work of all steps happens in the order of submission (one stream), and the scheduler counts
on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.sampling_params import ResolvedTokens, SamplingParams

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
CopyKind = Literal["device_to_host", "host_to_device", "device_to_device"]
PreemptionKind = Literal["recompute", "swap"]
Pooling = Literal["mean", "last"]
PauseMode = Literal["wait", "abort", "keep"]
"""What becomes of requests when an engine is paused. wait: those that have begun are computed to
their end; abort: all end at once; keep: all stay where they are and go on after the pause.
"""


StateIds = tuple[tuple[int, ...], ...]
"""Blocks of two states of recurrent layers, at the begin of an even chunk and of an odd one; () if
there are none.
"""


class ScheduledRequest(NamedTuple):
    """Compute tokens `start` to `start + num_tokens` of a request row; the last
    `len(draft_tokens)` of them are draft tokens. If `samples`, draw the token after the last token
    that is no draft token and write it to the row. If that token equals the first draft token,
    draw the token after that draft token too, and so on up to the first draft token that is wrong.

    A request may be scheduled again before its draft tokens are checked (`runs_ahead`): then
    `start` assumes that all of them are right. The row on the device knows how many really were,
    and the runner begins there instead.

    A named tuple rather than a dataclass, which takes longer to make: one is made for every row of
    every step.
    """

    request_id: str
    row: int
    start: int
    num_tokens: int
    samples: bool
    new_block_ids: tuple[int, ...]
    """Appended to the row's block table before computing."""
    draft_tokens: tuple[int, ...] = ()
    """Draft tokens that may follow the known ones; only where `samples`."""
    runs_ahead: bool = False
    num_drafts: int = 0
    """How many tokens after the sampled one the runner should draft, as draft tokens for a later
    step. The row has blocks for the keys and values of all of these but the last.
    """


new_tuple = tuple.__new__
"""Makes a named tuple in half the time that its own constructor takes, and checks nothing. So it is
used here, next to the types, by functions that take names, and in two loops over all rows of a
step, which write out what these functions do. `tests/engine/test_step_values.py` compares all of
them with constructors, and the fields are checked below.
"""


def decode_entry(
    request_id: str, row: int, start: int, new_block_ids: tuple[int, ...], runs_ahead: bool
) -> ScheduledRequest:
    """An entry that computes one token and samples the next."""
    return new_tuple(
        ScheduledRequest, (request_id, row, start, 1, True, new_block_ids, (), runs_ahead, 0)
    )


def with_draft_tokens(
    entry: ScheduledRequest,
    new_block_ids: tuple[int, ...],
    draft_tokens: tuple[int, ...],
    num_drafts: int,
) -> ScheduledRequest:
    """An entry without draft tokens, which computes and checks these too and has the runner draft
    tokens after them.
    """
    request_id, row, start, num_tokens, samples, _, _, runs_ahead, _ = entry
    num_tokens += len(draft_tokens)
    return new_tuple(
        ScheduledRequest,
        (
            request_id,
            row,
            start,
            num_tokens,
            samples,
            new_block_ids,
            draft_tokens,
            runs_ahead,
            num_drafts,
        ),
    )


class ScheduledColumns(NamedTuple):
    """Scheduled requests by field: the same names, a tuple with the values of all requests each."""

    request_id: tuple[str, ...]
    row: tuple[int, ...]
    start: tuple[int, ...]
    num_tokens: tuple[int, ...]
    samples: tuple[bool, ...]
    new_block_ids: tuple[tuple[int, ...], ...]
    draft_tokens: tuple[tuple[int, ...], ...]
    runs_ahead: tuple[bool, ...]
    num_drafts: tuple[int, ...]

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledRequest]) -> ScheduledColumns:
        """Of at least one request."""
        return cls._make(zip(*scheduled, strict=True))


assert ScheduledColumns._fields == ScheduledRequest._fields
assert " ".join(ScheduledRequest._fields) == (
    "request_id row start num_tokens samples new_block_ids draft_tokens runs_ahead num_drafts"
), "the scheduler lists a decode's values in this order"


class BlockCopy(NamedTuple):
    """Copy what one block holds; `source` and `target` are block ids or host slots, as `kind` says."""

    kind: CopyKind
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """Everything a runner needs to set up a row."""

    request_id: str
    row: int
    token_ids: tuple[int, ...]
    """All tokens known now: the prompt, and after a preemption the answer so far."""
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    """The blocks it starts with: cached, or filled by this step's copies."""
    num_cached_tokens: int
    """Tokens whose keys and values lie in the device cache already."""
    num_host_tokens: int
    """Tokens this step's copies bring back from the host tier; computing begins after both."""
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    arrival: float
    resolved: ResolvedTokens = field(default_factory=ResolvedTokens)
    score_prompt_from: int | None = None
    """The first prompt position whose logprobs are still wanted; None: no position's. Position p is
    scored by computing token p - 1, so the cached tokens end before that one.
    """
    pooling: Pooling | None = None
    """The request wants its prompt's hidden states, pooled this way (an embedding), and no answer:
    the token that is sampled is ignored. For "mean" no token of the prompt is taken from the cache.
    """
    state_ids: StateIds = ()
    """The blocks of its states. That of the chunk in which computing begins is filled by this
    step's copies, unless it is the first chunk, before which there is nothing to know.
    """
    weights_version: int = 0
    """That of the weights which compute it in this row: 0 are those that were loaded."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running request lost its row and blocks; it keeps its tokens and its place in the queue."""

    request_id: str
    row: int
    kind: PreemptionKind
    why: str
    num_computed_tokens: int
    """How many tokens' keys and values it had."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended since the last step; `row` is None if it was not running."""

    request_id: str
    row: int | None
    reason: FinishReason
    arrival: float
    time: float
    num_prompt_tokens: int
    num_output_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class StepPromise(NamedTuple):
    """How much of prompts a step may compute where token times are promised, and why."""

    prompt_tokens: int
    """At most so many beside the decodes, or alone."""
    seconds: float
    """What the whole step is expected to take then."""
    gave_way: str | None = None
    """Which target can't be held: "first_token" or "token_time"; None: both are."""


class StepAdapters(NamedTuple):
    """Whose adapters a step has, by the names that callers gave them."""

    running: tuple[str, ...]
    """Those of running requests, in order."""
    waiting: tuple[str, ...] = ()
    """Those for which requests were passed over, since running requests have all the room."""
    num_waiting: int = 0
    """How many requests that were."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, complete: nothing else passes from scheduler to runner."""

    step_id: int
    now: float
    scheduled: tuple[ScheduledRequest, ...] = ()
    admitted: tuple[AdmittedRequest, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    finished: tuple[Finished, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    num_free_blocks: int = 0
    """Blocks in no block table after this step was scheduled; some of them hold cached prefixes."""
    num_waiting: int = 0
    num_running: int = 0
    num_decodes: int = 0
    """The first `num_decodes` entries of `scheduled` compute one token, sample the next one and
    have no draft tokens.
    """
    promise: StepPromise | None = None
    """Where there is a target for token times and a prompt could be computed; None elsewhere."""
    adapters: StepAdapters | None = None
    """None where nobody has or waits for one."""

    @property
    def is_empty(self) -> bool:
        """Nothing to do and nothing to tell: such a step is neither submitted nor committed."""
        return not (
            self.scheduled or self.admitted or self.preempted or self.finished or self.copies
        )

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.scheduled)


class TokenLogprob(NamedTuple):
    """How likely the model held a token, and which ones it held most likely: from the logits as the
    model gave them, before masks, penalties and temperature.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token; among equals the lower id comes first."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely tokens, as many as were asked for, the first ranks
    first.
    """
    named: tuple[tuple[int, float, int], ...] = ()
    """(token id, logprob, rank) of the tokens that were asked for by id, in that order."""


class PromptLogprobs(NamedTuple):
    """Logprobs of consecutive prompt positions."""

    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a runner found: for each request that samples, one token and one more for every draft
    token that was right; or an error that concerns this request only.
    """

    step_id: int
    tokens: Mapping[str, tuple[int, ...]]
    errors: Mapping[str, str] = field(default_factory=dict)
    logprobs: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    """One for each of `tokens`, for the requests that ask for logprobs."""
    prompt_logprobs: Mapping[str, PromptLogprobs] = field(default_factory=dict)
    """For the prompt positions this step could score, where they were asked for."""
    ended: frozenset[str] = frozenset()
    """Requests that end with these tokens because their grammar allows no further one."""
    pooled: Mapping[str, bytes] = field(default_factory=dict)
    """For requests with pooling that sample: the pooled vector, not normalised, as little-endian
    float32.
    """
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Draft tokens for a later step: a draft model's tokens, or the only text that a grammar allows
    there.
    """


@dataclass(frozen=True, slots=True)
class StepLogEntry:
    """A step that is over: `result` if it succeeded, `error` if it failed."""

    step: Step
    result: StepResult | None
    error: str | None
    committed: float
    """When its result arrived; `step.now` says when it was scheduled."""
    submitted: float | None = None
    """When `Runner.submit` returned; None without a clock, and for a step that failed."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """One request's counts and times, in the units of the `now` the engine was given (seconds)."""

    request_id: str
    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float
    num_prompt_tokens: int
    num_output_tokens: int
    cached_tokens: int
    """Found in the device cache, over all admissions."""
    host_tokens: int
    """Brought back from the host tier, over all admissions."""
    recomputed_tokens: int
    """Computed again after a preemption."""
    preemptions: int
    drafted_tokens: int = 0
    """Draft tokens that were checked."""
    accepted_tokens: int = 0
    """Draft tokens that were right: tokens of the answer that needed no step of their own."""
    weights_versions: tuple[tuple[int, int], ...] = ()
    """The versions of the weights that computed it, each with the number of its first token in the
    answer. More than one only where weights were replaced while the request was kept.
    """

    @property
    def weights_version(self) -> int | None:
        """The one that it ended with; None if it was never computed."""
        return self.weights_versions[-1][1] if self.weights_versions else None

    @property
    def queue_time(self) -> float | None:
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def time_per_output_token(self) -> float | None:
        """Mean time between tokens after the first; None for fewer than two."""
        if self.first_token is None or self.num_output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.num_output_tokens - 1)


def add_version(
    versions: tuple[tuple[int, int], ...], num_output_tokens: int, version: int
) -> tuple[tuple[int, int], ...]:
    """`RequestMetrics.weights_versions` of a request that gets a row with so many tokens of its
    answer, and weights of that version.
    """
    if versions and versions[-1][1] == version:
        return versions
    first = num_output_tokens if versions else 0
    return (*(one for one in versions if one[0] < first), (first, version))


class RequestUpdate(NamedTuple):
    """What a request gained: tokens, logprobs, its end. Each request gets exactly one with a finish
    reason.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The end-of-sequence or stop token that ended it; it is the last of the new tokens too."""
    error: str | None = None
    metrics: RequestMetrics | None = None
    """With the finish reason."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each new token, if logprobs were asked for."""
    prompt_logprobs: PromptLogprobs | None = None
    """Logprobs of prompt positions. The same positions may come twice, for example from two answers
    to one prompt.
    """
    pooled: bytes | None = None
    """With the finish reason "stop", if pooling was asked for: the vector, as little-endian
    float32.
    """

    @property
    def only_appends_tokens(self) -> bool:
        """Whether it tells of new tokens and nothing else, as most do in most steps."""
        return bool(self.new_token_ids) and self[2:] == _NOTHING_ELSE


_NOTHING_ELSE = RequestUpdate(request_id="", new_token_ids=())[2:]


def tokens_update(
    request_id: str, new_token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
) -> RequestUpdate:
    """The update of a request that gained tokens and goes on."""
    return new_tuple(
        RequestUpdate, (request_id, new_token_ids, None, None, None, None, logprobs, None, None)
    )


assert " ".join(RequestUpdate._fields) == (
    "request_id new_token_ids finish_reason stop_token_id error metrics logprobs prompt_logprobs pooled"
), "whoever takes results lists an update's values in this order"
