"""InputBatch: the tensors of one step, gathered from the request rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.ops import Batches, Int32Array
from quire.models.decoder import Decoder
from quire.runner.request_rows import RequestRows
from quire.step import ScheduledColumns, ScheduledRequest, Step

T = TypeVar("T")


@dataclass(frozen=True)
class StepShape:
    """What the host knows of a step's scheduled requests, one entry each, in their order. A "draw"
    is a token that will be sampled: one after a request's last known token, and one after each of
    its guesses.
    """

    request_rows: Int32Array
    starts: Int32Array
    """The first position that is computed; for a request that runs ahead, if all its guesses in
    flight are right.
    """
    counts: Int32Array
    samples: npt.NDArray[np.bool_]
    guesses: tuple[tuple[int, ...], ...]
    runs_ahead: tuple[bool, ...]
    is_decode: bool
    """Whether every request computes one token and samples the next."""

    @classmethod
    def of(cls, step: Step) -> StepShape:
        columns = ScheduledColumns.of(step.scheduled)
        return cls(
            request_rows=np.array(columns.row, np.int32),
            starts=np.array(columns.start, np.int32),
            counts=np.array(columns.num_tokens, np.int32),
            samples=np.array(columns.samples, np.bool_),
            guesses=columns.guesses,
            runs_ahead=columns.runs_ahead,
            is_decode=step.num_decodes == len(step.scheduled),
        )

    @cached_property
    def has_guesses(self) -> bool:
        return any(self.guesses)

    @cached_property
    def is_ahead(self) -> bool:
        """Whether some request's position depends on guesses whose check the host has not seen yet."""
        return any(self.runs_ahead)

    @property
    def is_drawn_everywhere(self) -> bool:
        """Whether a token is sampled after every computed one: each request decodes or checks
        guesses, no prompts.
        """
        return self.is_decode or bool(
            self.samples.all() and (self.counts == 1 + self.num_guesses).all()
        )

    def drawn_for(self, scheduled: Sequence[ScheduledRequest]) -> Sequence[ScheduledRequest]:
        """The scheduled request of each draw."""
        return (
            scheduled
            if self.is_decode
            else [scheduled[owner] for owner in self.draw_owners.tolist()]
        )

    def by_token(self) -> StepShape:
        """The same step with every token as a decode of its own, as graphs want it. A layer writes
        the keys of all tokens before any of them attends, so each still sees the ones before it.
        """
        owners, samples = self.token_owners, np.zeros(len(self.token_owners), np.bool_)
        samples[self.draw_indices] = True
        ones, none = np.ones(len(owners), np.int32), ((),) * len(owners)
        return StepShape(
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
        """[tokens]: each token's position in its sequence, if all guesses in flight are right."""
        first = (self.starts - self.query_start[:-1])[self.token_owners]
        return first + np.arange(self.query_start[-1], dtype=np.int32)

    @cached_property
    def num_guesses(self) -> Int32Array:
        if not self.has_guesses:
            return np.zeros_like(self.counts)
        return np.array([len(guesses) for guesses in self.guesses], np.int32)

    @cached_property
    def draw_owners(self) -> npt.NDArray[np.int64]:
        """[draws]: the index of the scheduled request that each draw is for."""
        owners = np.flatnonzero(self.samples)
        return owners.repeat(1 + self.num_guesses[owners]) if self.has_guesses else owners

    @cached_property
    def draw_offsets(self) -> Int32Array:
        """[draws]: 0 for the draw after a request's last known token, then 1, 2 ... after its
        guesses.
        """
        if not self.has_guesses:
            return np.zeros(len(self.draw_owners), np.int32)
        return np.concatenate(
            [np.arange(1 + n, dtype=np.int32) for n in self.num_guesses[self.samples]]
        )

    @property
    def draw_indices(self) -> npt.NDArray[np.int64]:
        """[draws]: the index, among the step's tokens, of the token that each draw follows."""
        return (self.query_start[1:] - 1 - self.num_guesses)[
            self.draw_owners
        ] + self.draw_offsets.astype(np.int64)

    @property
    def draw_follows(self) -> npt.NDArray[np.int64]:
        """[draws]: the guess that each draw follows; -1 where it follows a known token."""
        # each request's last entry is -1, which becomes the next one's first
        return np.roll(self.draw_guesses, 1)

    @property
    def draw_guesses(self) -> npt.NDArray[np.int64]:
        """[draws]: the guess that the drawn token is compared with; -1 for a request's last draw,
        which has none.
        """
        owners = np.flatnonzero(self.samples).tolist()
        return np.array(
            [token for owner in owners for token in (*self.guesses[owner], -1)], np.int64
        )

    @property
    def draw_request_rows(self) -> npt.NDArray[np.int64]:
        """[draws]: the request row of each draw."""
        return self.request_rows[self.draw_owners].astype(np.int64)

    @property
    def draw_positions(self) -> npt.NDArray[np.int64]:
        """[draws]: the position that the drawn token will have, if all guesses in flight are right."""
        ends = self.starts + self.counts - self.num_guesses
        return (ends[self.draw_owners] + self.draw_offsets).astype(np.int64)


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What the decoder takes for one step."""

    token_ids: Tensor
    positions: Tensor
    paged: Batches
    draw_indices: Tensor
    """int64 [draws]: the step's tokens after which a token is sampled."""
    draw_request_rows: Tensor
    """int32 [draws]: the request row of each draw."""
    draw_positions: Tensor
    """int32 [draws]: the position that the sampled token will have."""


class _SentTogether(NamedTuple, Generic[T]):
    """What `build_batch` sends to the device in one copy: arrays, and then tensors, by the same
    names.
    """

    token_rows: T
    token_positions: T
    query_start: T
    context_lens: T
    table_rows: T
    draw_indices: T
    draw_request_rows: T
    draw_positions: T


def lag_of(shape: StepShape, request_rows: RequestRows) -> Tensor | None:
    """int32 [requests], on the device: how much earlier than `shape.starts` each request begins,
    because guesses in flight were wrong. None where no request runs ahead.
    """
    if not shape.is_ahead:
        return None
    rows, starts, ahead = request_rows.uploader.upload(
        shape.request_rows, shape.starts, np.array(shape.runs_ahead)
    )
    return torch.where(ahead, starts - request_rows.num_computed_tokens[rows.long()], 0)


def build_batch(
    shape: StepShape, request_rows: RequestRows, decoder: Decoder, lag: Tensor | None
) -> InputBatch:
    """The tensors of a step: the scheduled requests' tokens one after the other."""
    kernels, upload = decoder.kernels, request_rows.uploader.upload
    ends, draw_owners = shape.starts + shape.counts, shape.draw_owners
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
        draw_indices=shape.draw_indices,
        draw_request_rows=shape.request_rows[draw_owners],
        draw_positions=shape.draw_positions.astype(np.int32),
    )
    tensors = upload(*arrays, *(values for made in work.values() for values in made.values()))
    sent: _SentTogether[Tensor] = _SentTogether._make(tensors[: len(arrays)])
    received = iter(tensors[len(arrays) :])
    lists = {heads: dict(zip(made, received, strict=False)) for heads, made in work.items()}
    if lag is not None:
        owners, drawn_by = upload(shape.token_owners, draw_owners)
        sent = sent._replace(
            token_positions=sent.token_positions - lag[owners],
            context_lens=sent.context_lens - lag,
            draw_positions=sent.draw_positions - lag[drawn_by],
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
    return InputBatch(
        token_ids=token_ids,
        positions=positions,
        paged=paged,
        draw_indices=sent.draw_indices,
        draw_request_rows=sent.draw_request_rows,
        draw_positions=sent.draw_positions,
    )


def write_guesses(shape: StepShape, request_rows: RequestRows, lag: Tensor | None) -> None:
    """Writes the guesses into the request rows, after the known tokens, where decoder and penalties
    read them.
    """
    owners = np.arange(len(shape.counts)).repeat(shape.num_guesses)
    first = (shape.starts + shape.counts - shape.num_guesses).astype(np.int64)
    offsets = np.concatenate([np.arange(count) for count in shape.num_guesses])
    rows, places, values, owner = request_rows.uploader.upload(
        shape.request_rows[owners].astype(np.int64),
        first[owners] + offsets,
        np.array([token for tokens in shape.guesses for token in tokens], np.int64),
        owners,
    )
    request_rows.token_ids[rows, places if lag is None else places - lag[owner]] = values


def note_accepted(
    shape: StepShape, request_rows: RequestRows, drawn: Tensor, lag: Tensor | None
) -> None:
    """Sets `num_computed_tokens` of request rows that sample to their known tokens plus the guesses
    that were right. A guess is right if it equals the token drawn in its place, all guesses before
    it are right, and a token could be drawn after it. `drawn` int64 [2, draws]: tokens and flags.
    """
    owners = np.flatnonzero(shape.samples)
    counts = 1 + shape.num_guesses[owners]
    first = np.cumsum(counts) - counts
    # [requests, draws]: the guess that the drawn token must equal; -1 after a request's last guess.
    guesses = np.full((len(counts), int(counts.max())), -1, np.int64)
    for row, owner in enumerate(owners.tolist()):
        guesses[row, : counts[row] - 1] = shape.guesses[owner]
    draws = np.minimum(first[:, None] + np.arange(1 + guesses.shape[1]), drawn.shape[1] - 1)
    ends = (shape.starts + shape.counts - shape.num_guesses)[owners]
    sent: Sequence[Any] = guesses, draws, shape.request_rows[owners].astype(np.int64), ends, owners
    state: Sequence[Any] = request_rows.num_computed_tokens, drawn, lag
    if drawn.device.type == "cpu":  # there it takes half the time without torch
        state = [None if one is None else one.numpy() for one in state]
    else:
        sent = request_rows.uploader.upload(*sent)
    (expected, which, rows, known, index), (computed, found, behind) = sent, state
    is_right = (found[0][which[:, :-1]] == expected) & (found[1][which[:, 1:]] == 0)
    num_right = (1 * is_right).cumprod(1).sum(1, dtype=computed.dtype)
    computed[rows] = known + num_right if behind is None else known - behind[index] + num_right
