"""A request as the scheduler sees it: its tokens, how many are computed, and what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from quire.engine.block_key import BlockKey, KeyPart
from quire.engine.block_pool import Block
from quire.errors import InvalidRequestError
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.step import FinishReason, Pooling, RequestMetrics


@dataclass(slots=True, eq=False)
class RequestState:
    """What recurrent layers know of a request's tokens before one of its chunks."""

    blocks: list[Block]
    chunk: int = 0
    """The index of that chunk, once the submitted steps are done; 0: of none yet."""
    is_published: bool = False
    """Whether it was offered to the prefix cache."""


@dataclass(slots=True, eq=False)
class PromptProgress:
    """How far a prompt has come; the n answers to it share one."""

    next_position: int = 1
    """The first prompt position whose logprobs have not come back. The first token has none:
    nothing precedes it.
    """
    has_begun: bool = False
    """Whether one of the answers has had a row: a pause that waits for those that have begun waits
    for all of them, so that they are of one version of the weights.
    """
    has_tokens: bool = False
    """Whether one of the answers has a token: then all of the prompt was scored."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to be continued. Made by the caller, changed by the scheduler alone after `add`.

    Two requests are the same only if they are the same object: a name may be used again as soon as
    the first request of that name has finished, while results of its last steps are still to come.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """Never None, unlike `params.seed`: answer i of n has the call's seed + i."""
    eos_token_ids: tuple[int, ...] = ()
    group_id: str | None = None
    """Shared by the n answers to one prompt."""
    resolved: ResolvedTokens = field(default_factory=ResolvedTokens)
    prompt_progress: PromptProgress = field(default_factory=PromptProgress)
    caches_partial_block: bool = False
    """When it ends by "stop" or "length", its last block is cached although it is not full, for
    requests whose prompt begins with all its tokens (the next step of a beam search).
    """
    queued_since: float | None = None
    """Counts as its time of arrival in the waiting queue; None: the time of `add`."""
    pooling: Pooling | None = None
    """The request wants its prompt's hidden states, pooled this way (an embedding), instead of an
    answer.
    """
    key_parts: tuple[KeyPart, ...] = ()
    """What its blocks depend on besides tokens and cache salt, such as an adapter: others must
    agree to share them.
    """

    priority: int = 0
    sequence: int = -1
    """Order of arrival among equals; -1 before `add`."""
    order: tuple[int, float, int] = (0, 0.0, -1)
    """(priority, or 0 under fcfs; arrival; sequence): the lower one is served first and preempted
    last.
    """
    token_ids: list[int] = field(default_factory=list)
    """Prompt and answer, without the tokens that steps in flight will sample."""
    num_placeholders: int = 0
    """How many tokens steps in flight will add, if all their draft tokens are right."""
    num_draft_tokens: int = 0
    """How many of the placeholders are draft tokens."""
    drafts: Sequence[int] = ()
    """Tokens that the runner has drafted after the known ones, to be checked as draft tokens."""
    draft_state: Any = None
    """What the `Speculator` remembers of this request."""
    draft_pause: int = 0
    """For how many steps the `Speculator` is not asked for draft tokens; -1: never again."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    num_rejections: int = 0
    """Steps in which one of its draft tokens was wrong."""
    num_computed_tokens: int = 0
    """Tokens that have keys and values once all submitted steps are done, if all their draft
    tokens are right.
    """
    num_committed_tokens: int = 0
    """Tokens that have keys and values by steps whose results have come back."""
    max_total_tokens: int = 0
    """The most tokens that prompt and answer may have together."""
    stop_ids: frozenset[int] = frozenset()
    row: int | None = None
    """Where it runs; None while it waits, and after its end."""
    block_table: list[Block] = field(default_factory=list)
    block_keys: list[BlockKey] = field(default_factory=list)
    """Hash keys of its full blocks, as far as they were needed so far; kept when it is preempted."""
    num_published_blocks: int = 0
    """Blocks of the table already offered to the prefix cache."""
    num_left_blocks: dict[int, int] = field(default_factory=dict)
    """For each group that gives blocks up: how many of its first ones it gave up; their entries are
    block 0.
    """
    states: list[RequestState] = field(default_factory=list)
    """Those of even and of odd chunks, if there are recurrent layers and it runs."""
    left_states: list[RequestState] = field(default_factory=list)
    """Copies of states that others may want, made before the steps that computed them came back."""
    state_ends: tuple[int, ...] = ()
    """Tokens at which a step should end because the state there is worth keeping: where a cached
    prefix parts.
    """
    admitted_step: int = -1
    """The step that gave it its present row: results of earlier steps say nothing about its present
    blocks.
    """
    num_passed: int = 0
    """How many requests with adapters went before it while it waited for room for its own."""
    has_failed: bool = False
    """A step reported an error for it: what later steps in flight computed for it is wrong."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    weights_version: int = 0
    """By which it is computed now, or will be."""
    weights_versions: tuple[tuple[int, int], ...] = ()
    """Those by which it was computed so far, each with the number of its first token in the answer."""
    cached_tokens: int = 0
    host_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    computed_before: int = 0
    """The most tokens it had computed when it was preempted: tokens below this are computed a
    second time.
    """

    def __post_init__(self) -> None:
        self.prompt_token_ids = tuple(self.prompt_token_ids)
        self.token_ids = list(self.prompt_token_ids)
        self.priority = self.params.priority
        self.stop_ids = frozenset(self.params.end_token_ids(self.eos_token_ids))
        if self.adapter:
            self.key_parts = (KeyPart(f"adapter {self.adapter}"), *self.key_parts)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """All its tokens, placeholders included."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def tenant(self) -> str:
        """Whose it is, for fair shares."""
        return self.params.tenant

    @property
    def adapter(self) -> str:
        """The digest of its adapter; nothing if it has none."""
        return self.resolved.adapter

    @property
    def extra_keys(self) -> tuple[str, ...]:
        """What a cached prefix must agree in besides the tokens. There is one salt at most, so that
        no salt can pass for a version of the weights.
        """
        salt = () if self.params.cache_salt is None else (self.params.cache_salt,)
        return ("weights", str(self.weights_version), *salt) if self.weights_version else salt

    @property
    def score_prompt_from(self) -> int | None:
        """The first prompt position whose logprobs are still wanted; None: no position's."""
        position = self.prompt_progress.next_position
        wanted = self.params.prompt_logprobs is not None and position < len(self.prompt_token_ids)
        return position if wanted else None

    def change_weights(self, version: int) -> None:
        """From here on it is computed by other weights; it has no row. What it knows of its prompt
        is forgotten; its answer so far stays.
        """
        self.weights_version = version
        self.block_keys = []
        self.drafts = ()
        if not self.prompt_progress.has_tokens:
            self.prompt_progress.next_position = 1

    def metrics(self) -> RequestMetrics:
        """Its counts and times; only a finished request has them all."""
        assert self.finished is not None
        return RequestMetrics(
            **{field.name: getattr(self, field.name) for field in fields(RequestMetrics)}
        )


def make_requests(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    eos_token_ids: Iterable[int] = (),
    resolved: ResolvedTokens | None = None,
    pooling: Pooling | None = None,
    key_parts: tuple[KeyPart, ...] = (),
) -> list[Request]:
    """One request per answer of a call (`best_of`, or else `n`): answer i is that of a call with n
    = 1 and seed + i.

    A single request is named `request_id`; several are named `request_id/0`, `request_id/1` and so
    on, in one group.
    """
    prompt = tuple(prompt_token_ids)
    eos = tuple(eos_token_ids)
    count = params.n if params.best_of is None else params.best_of
    single = params if count == 1 else replace(params, n=1, best_of=None)
    if params.best_of is not None and params.logprobs is None:
        single = replace(single, logprobs=0)  # the best are found by their logprobs
    progress = PromptProgress()
    if pooling is not None and count > 1:
        raise InvalidRequestError("n", "a prompt has one pooled vector: ask for one")
    return [
        Request(
            request_id=request_id if count == 1 else f"{request_id}/{i}",
            prompt_token_ids=prompt,
            params=single,
            seed=(seed + i) % 2**64,
            eos_token_ids=eos,
            group_id=None if count == 1 else request_id,
            resolved=resolved or ResolvedTokens(),
            prompt_progress=progress,
            pooling=pooling,
            key_parts=key_parts,
        )
        for i in range(count)
    ]
