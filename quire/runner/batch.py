"""InputBatch: the tensors of one step, gathered from the request rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.ops import Batches, Int32Array
from quire.models.decoder import Decoder
from quire.models.linear import NOT_LISTED, RowsBySlot
from quire.runner.request_rows import RequestRows
from quire.step import ScheduledColumns, ScheduledRequest, Step

T = TypeVar("T")


@dataclass(frozen=True)
class BatchShape:
    """What the host knows of a step's scheduled requests, one entry each, in their order. A
    "sample" is a token that will be sampled: one after a request's last known token, and one after
    each of its draft tokens.
    """

    request_rows: Int32Array
    starts: Int32Array
    """The first position that is computed; for a request that runs ahead, if all its draft tokens
    in flight are right.
    """
    counts: Int32Array
    samples: npt.NDArray[np.bool_]
    draft_tokens: tuple[tuple[int, ...], ...]
    runs_ahead: tuple[bool, ...]
    is_decode: bool
    """Whether every request computes one token and samples the next."""

    @classmethod
    def of(cls, step: Step) -> BatchShape:
        """The columns of a step, as arrays for the device."""
        columns = ScheduledColumns.of(step.scheduled)
        return cls(
            request_rows=np.array(columns.row, np.int32),
            starts=np.array(columns.start, np.int32),
            counts=np.array(columns.num_tokens, np.int32),
            samples=np.array(columns.samples, np.bool_),
            draft_tokens=columns.draft_tokens,
            runs_ahead=columns.runs_ahead,
            is_decode=step.num_decodes == len(step.scheduled),
        )

    @cached_property
    def has_draft_tokens(self) -> bool:
        return any(self.draft_tokens)

    @cached_property
    def is_ahead(self) -> bool:
        """Whether some request's position depends on draft tokens whose check the host has not
        seen yet.
        """
        return any(self.runs_ahead)

    @property
    def is_sampled_everywhere(self) -> bool:
        """Whether a token is sampled after every computed one: each request decodes or checks
        draft tokens, no prompts.
        """
        return self.is_decode or bool(
            self.samples.all() and (self.counts == 1 + self.num_draft_tokens).all()
        )

    def sampled_for(self, scheduled: Sequence[ScheduledRequest]) -> Sequence[ScheduledRequest]:
        """The scheduled request of each sample."""
        return (
            scheduled
            if self.is_decode
            else [scheduled[owner] for owner in self.sample_owners.tolist()]
        )

    def by_token(self) -> BatchShape:
        """The same step with every token as a decode of its own, as graphs want it. A layer writes
        the keys of all tokens before any of them attends, so each still sees the ones before it.
        """
        owners, samples = self.token_owners, np.zeros(len(self.token_owners), np.bool_)
        samples[self.logits_indices] = True
        ones, none = np.ones(len(owners), np.int32), ((),) * len(owners)
        return BatchShape(
            self.request_rows[owners], self.token_positions, ones, samples, none, (), is_decode=True
        )

    @cached_property
    def query_start(self) -> Int32Array:
        """[requests + 1]: the index of each request's first token among the step's tokens, and the
        end of the last.
        """
        return np.concatenate((np.zeros(1, np.int32), self.counts.cumsum(dtype=np.int32)))

    @cached_property
    def token_owners(self) -> npt.NDArray[np.int64]:
        """[tokens]: the index of the scheduled request that each token belongs to."""
        return np.arange(len(self.counts)).repeat(self.counts)

    @property
    def token_positions(self) -> Int32Array:
        """[tokens]: each token's position in its sequence, if all draft tokens in flight are
        right.
        """
        first = (self.starts - self.query_start[:-1])[self.token_owners]
        return first + np.arange(self.query_start[-1], dtype=np.int32)

    @cached_property
    def num_draft_tokens(self) -> Int32Array:
        if not self.has_draft_tokens:
            return np.zeros_like(self.counts)
        return np.array([len(draft_tokens) for draft_tokens in self.draft_tokens], np.int32)

    @cached_property
    def sample_owners(self) -> npt.NDArray[np.int64]:
        """[samples]: the index of the scheduled request that each sample is for."""
        owners = np.flatnonzero(self.samples)
        return owners.repeat(1 + self.num_draft_tokens[owners]) if self.has_draft_tokens else owners

    @cached_property
    def sample_offsets(self) -> Int32Array:
        """[samples]: 0 for the sample after a request's last known token, then 1, 2 ... after its
        draft tokens.
        """
        if not self.has_draft_tokens:
            return np.zeros(len(self.sample_owners), np.int32)
        return np.concatenate(
            [np.arange(1 + n, dtype=np.int32) for n in self.num_draft_tokens[self.samples]]
        )

    @property
    def logits_indices(self) -> npt.NDArray[np.int64]:
        """[samples]: the index, among the step's tokens, of the token that each sample follows."""
        return (self.query_start[1:] - 1 - self.num_draft_tokens)[
            self.sample_owners
        ] + self.sample_offsets.astype(np.int64)

    @property
    def sample_follows(self) -> npt.NDArray[np.int64]:
        """[samples]: the draft token that each sample follows; -1 where it follows a known
        token.
        """
        # each request's last entry is -1, which becomes the next one's first
        return np.roll(self.compared_draft_tokens, 1)

    @property
    def compared_draft_tokens(self) -> npt.NDArray[np.int64]:
        """[samples]: the draft token that the sampled token is compared with; -1 for a request's
        last sample, which has none.
        """
        owners = np.flatnonzero(self.samples).tolist()
        return np.array(
            [token for owner in owners for token in (*self.draft_tokens[owner], -1)], np.int64
        )

    @property
    def sample_request_rows(self) -> npt.NDArray[np.int64]:
        """[samples]: the request row of each sample."""
        return self.request_rows[self.sample_owners].astype(np.int64)

    @property
    def sample_positions(self) -> npt.NDArray[np.int64]:
        """[samples]: the position that the sampled token will have, if all draft tokens in flight
        are right.
        """
        ends = self.starts + self.counts - self.num_draft_tokens
        return (ends[self.sample_owners] + self.sample_offsets).astype(np.int64)


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What the decoder takes for one step."""

    token_ids: Tensor
    positions: Tensor
    paged: Batches
    logits_indices: Tensor
    """int64 [samples]: the step's tokens after which a token is sampled."""
    sample_request_rows: Tensor
    """int32 [samples]: the request row of each sample."""
    sample_positions: Tensor
    """int32 [samples]: the position that the sampled token will have."""
    adapters: Tensor | None = None
    """int32 [tokens]: the slot of each token's adapter, -1 where it has none; None: none has one."""
    by_slot: RowsBySlot = field(default_factory=dict)
    """The tokens of some slots."""
    sample_by_slot: RowsBySlot = field(default_factory=dict)
    """The samples of these slots."""

    @property
    def sample_adapters(self) -> Tensor | None:
        """[samples]: those of the tokens after which a token is sampled."""
        return None if self.adapters is None else self.adapters[self.logits_indices]


class _SentTogether(NamedTuple, Generic[T]):
    """What `build_batch` sends to the device in one copy: arrays, and then tensors, by the same
    names.
    """

    token_rows: T
    token_positions: T
    query_start: T
    context_lens: T
    table_rows: T
    logits_indices: T
    sample_request_rows: T
    sample_positions: T


def lag_of(shape: BatchShape, request_rows: RequestRows) -> Tensor | None:
    """int32 [requests], on the device: how much earlier than `shape.starts` each request begins,
    because draft tokens in flight were wrong. None where no request runs ahead.
    """
    if not shape.is_ahead:
        return None
    rows, starts, ahead = request_rows.uploader.upload(
        shape.request_rows, shape.starts, np.array(shape.runs_ahead)
    )
    return torch.where(ahead, starts - request_rows.num_computed_tokens[rows.long()], 0)


def build_batch(
    shape: BatchShape,
    request_rows: RequestRows,
    decoder: Decoder,
    lag: Tensor | None,
    adapters: Int32Array | None = None,
    listed_slots: Collection[int] = (),
) -> InputBatch:
    """The tensors of a step: the scheduled requests' tokens one after the other. `adapters`: the
    slots of the requests' adapters, if some have one; rows of the `listed_slots` are listed.
    """
    kernels, upload = decoder.kernels, request_rows.uploader.upload
    ends, sample_owners = shape.starts + shape.counts, shape.sample_owners
    work = {
        heads: kernels.attention_work(shape.counts, ends, shape.request_rows, heads)
        for heads in decoder.spec.head_shapes
    }
    arrays = _SentTogether(
        token_rows=shape.request_rows[shape.token_owners],
        token_positions=shape.token_positions,
        query_start=shape.query_start,
        context_lens=ends,
        table_rows=shape.request_rows,
        logits_indices=shape.logits_indices,
        sample_request_rows=shape.request_rows[sample_owners],
        sample_positions=shape.sample_positions.astype(np.int32),
    )
    tensors = upload(*arrays, *(values for made in work.values() for values in made.values()))
    sent: _SentTogether[Tensor] = _SentTogether._make(tensors[: len(arrays)])
    received = iter(tensors[len(arrays) :])
    lists = {heads: dict(zip(made, received, strict=False)) for heads, made in work.items()}
    if lag is not None:
        owners, sampled_by = upload(shape.token_owners, sample_owners)
        sent = sent._replace(
            token_positions=sent.token_positions - lag[owners],
            context_lens=sent.context_lens - lag,
            sample_positions=sent.sample_positions - lag[sampled_by],
        )
        by_row = torch.zeros_like(request_rows.num_computed_tokens)
        by_row[sent.table_rows.long()] = lag
        for made in lists.values():
            kernels.shorten_attention_work_(made, by_row)
    token_ids, positions, paged = request_rows.inputs(
        kernels,
        sent.token_rows,
        sent.token_positions,
        query_start=sent.query_start,
        context_lens=sent.context_lens,
        table_rows=sent.table_rows,
        max_context_len=int(ends.max()),
        work=lists,
    )
    slots: Tensor | None = None
    by_slot, sample_by_slot = NOT_LISTED, NOT_LISTED
    if adapters is not None:
        token_slots = adapters[shape.token_owners]
        (slots,) = upload(token_slots)
        by_slot = _listed(token_slots, listed_slots, upload)
        sample_by_slot = _listed(token_slots[shape.logits_indices], listed_slots, upload)
    return InputBatch(
        token_ids=token_ids,
        positions=positions,
        paged=paged,
        logits_indices=sent.logits_indices,
        sample_request_rows=sent.sample_request_rows,
        sample_positions=sent.sample_positions,
        adapters=slots,
        by_slot=by_slot,
        sample_by_slot=sample_by_slot,
    )


def _listed(
    slots: Int32Array, listed: Collection[int], upload: Callable[..., Sequence[Tensor]]
) -> RowsBySlot:
    """By slot, which rows have it; of the listed ones that some have."""
    present = sorted(set(slots.tolist()).intersection(listed)) if listed else []
    if not present:
        return NOT_LISTED
    rows = upload(*(np.flatnonzero(slots == slot).astype(np.int64) for slot in present))
    return dict(zip(present, rows, strict=True))


def write_draft_tokens(shape: BatchShape, request_rows: RequestRows, lag: Tensor | None) -> None:
    """Writes the draft tokens into the request rows, after the known tokens, where decoder and
    penalties read them.
    """
    owners = np.arange(len(shape.counts)).repeat(shape.num_draft_tokens)
    first = (shape.starts + shape.counts - shape.num_draft_tokens).astype(np.int64)
    offsets = np.concatenate([np.arange(count) for count in shape.num_draft_tokens])
    rows, places, values, owner = request_rows.uploader.upload(
        shape.request_rows[owners].astype(np.int64),
        first[owners] + offsets,
        np.array([token for tokens in shape.draft_tokens for token in tokens], np.int64),
        owners,
    )
    request_rows.token_ids[rows, places if lag is None else places - lag[owner]] = values


def note_accepted(
    shape: BatchShape, request_rows: RequestRows, sampled: Tensor, lag: Tensor | None
) -> None:
    """Sets `num_computed_tokens` of request rows that sample to their known tokens plus the draft
    tokens that were right. A draft token is right if it equals the token sampled in its place, all
    draft tokens before it are right, and a token could be sampled after it. `sampled` int64 [2,
    samples]: tokens and flags.
    """
    owners = np.flatnonzero(shape.samples)
    counts = 1 + shape.num_draft_tokens[owners]
    first = np.cumsum(counts) - counts
    # [requests, samples]: the draft token that the sampled token must equal; -1 after a request's
    # last draft token.
    draft_tokens = np.full((len(counts), int(counts.max())), -1, np.int64)
    for row, owner in enumerate(owners.tolist()):
        draft_tokens[row, : counts[row] - 1] = shape.draft_tokens[owner]
    sample_places = np.minimum(
        first[:, None] + np.arange(1 + draft_tokens.shape[1]), sampled.shape[1] - 1
    )
    ends = (shape.starts + shape.counts - shape.num_draft_tokens)[owners]
    sent: Sequence[Any] = (
        draft_tokens,
        sample_places,
        shape.request_rows[owners].astype(np.int64),
        ends,
        owners,
    )
    state: Sequence[Any] = request_rows.num_computed_tokens, sampled, lag
    if sampled.device.type == "cpu":  # there it takes half the time without torch
        state = [None if one is None else one.numpy() for one in state]
    else:
        sent = request_rows.uploader.upload(*sent)
    (expected, which, rows, known, index), (computed, found, behind) = sent, state
    is_right = (found[0][which[:, :-1]] == expected) & (found[1][which[:, 1:]] == 0)
    num_right = (1 * is_right).cumprod(1).sum(1, dtype=computed.dtype)
    computed[rows] = known + num_right if behind is None else known - behind[index] + num_right
