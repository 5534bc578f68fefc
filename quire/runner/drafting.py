"""A draft model: a second decoder whose tokens are draft tokens for the main one.

It runs after a step, one token at a time for all requests that want drafts. It samples as the main
decoder does, with the same parameters and the same noise (seed and position), so both choose the
same token where their logits are close.

It uses the request rows and block tables of the main decoder. A draft model proper has a KV cache
of its own, with the same block ids, and every block copy is made in both. The same model in fewer
bits (`speculation="self"`) has none: it reads the main decoder's keys and values, and what it
writes there is overwritten when its drafts are checked.

Nothing here can change an answer: a draft computed from missing or wrong keys is only a bad draft
token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.models.decoder import Decoder
from quire.runner.batch import BatchShape, InputBatch, build_batch
from quire.runner.graphs import DecodeGraphs
from quire.runner.kv_cache import KVCache
from quire.runner.recorded import RecordedSteps
from quire.runner.request_rows import RequestRows
from quire.sampling.metadata import Indices
from quire.sampling.sampler import Sampler
from quire.step import ScheduledRequest, Step

Graphs = DecodeGraphs | RecordedSteps


class WantedDrafts(NamedTuple):
    """The requests of a step that want drafts after the tokens it sampled."""

    entries: Sequence[ScheduledRequest]
    rows: Indices
    counts: Indices
    """How many drafts each wants."""
    positions: Indices
    """Of each request's last sampled token, which the model has not computed yet."""

    @classmethod
    def of(
        cls, scheduled: Sequence[ScheduledRequest], tokens: Mapping[str, Sequence[int]]
    ) -> WantedDrafts | None:
        """Those of a step that sampled `tokens`; None if there are none."""
        wanted = [entry for entry in scheduled if entry.num_drafts and entry.request_id in tokens]
        if not wanted:
            return None
        ends = [
            e.start + e.num_tokens - len(e.draft_tokens) + len(tokens[e.request_id]) - 1
            for e in wanted
        ]
        rows, counts = ([getattr(one, name) for one in wanted] for name in ("row", "num_drafts"))
        return cls(wanted, *(np.array(one, np.int64) for one in (rows, counts, ends)))

    def active(self, number: int) -> Indices:
        """The indices of those that want more drafts than this."""
        return np.flatnonzero(self.counts > number)

    def choose(
        self, number: int, logits: Tensor, sampler: Sampler, request_rows: RequestRows
    ) -> None:
        """Samples draft `number` of those who want it, as the model's tokens are sampled, and writes
        it into the request rows.
        """
        active = self.active(number)
        metadata = sampler.metadata(
            self.rows[active], self.positions[active] + number + 1, request_rows.token_ids
        )
        sampled = sampler.sample(logits.float(), metadata).token_ids
        request_rows.write_tokens(metadata.request_rows, metadata.positions, sampled)

    def read(self, request_rows: RequestRows) -> dict[str, tuple[int, ...]]:
        """All drafts, from the request rows, so that the device is waited for once."""
        offsets = np.minimum(np.arange(self.counts.max()), self.counts[:, None] - 1)
        row, place = request_rows.uploader.upload(
            self.rows[:, None], self.positions[:, None] + 1 + offsets
        )
        drafts = zip(self.entries, request_rows.token_ids[row, place].tolist(), strict=True)
        return {entry.request_id: tuple(own[: entry.num_drafts]) for entry, own in drafts}


class ModelDrafter:
    """Drafts for the requests of a runner."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        has_own_cache: bool,
        request_rows: RequestRows,
        graphs: Graphs | None,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._request_rows = request_rows
        self._graphs = graphs
        self._num_computed: Indices | None = None
        """By request row, how many tokens have keys and values in the drafter's own cache; None if
        it has no cache.
        """
        if has_own_cache:
            self._num_computed = np.zeros(len(request_rows.token_ids), np.int64)

    def apply(self, step: Step) -> None:
        """Takes over a step's block copies and admissions."""
        if self._num_computed is not None:
            self._cache.copy_blocks(step.copies)
            for admission in step.admitted:
                self._num_computed[admission.row] = (
                    admission.num_cached_tokens + admission.num_host_tokens
                )

    takes_hidden = False

    def follow(
        self, shape: BatchShape, batch: InputBatch | None, hidden: Tensor | None, lag: Tensor | None
    ) -> None:
        """Fills the drafter's own cache from a step's batch, if that has prompt chunks. Single
        tokens are computed by `_catch_up` when drafts are wanted after them.
        """
        if batch is None:  # all are single tokens: no graph computes prompts beside a drafter
            return
        if self._num_computed is not None and (shape.counts > 1 + shape.num_draft_tokens).any():
            self._decoder(batch.token_ids, batch.positions, batch.paged, self._cache.layers)
            known = shape.starts + shape.counts - shape.num_draft_tokens
            before = self._num_computed[shape.request_rows]
            self._num_computed[shape.request_rows] = np.where(shape.starts <= before, known, before)

    def draft(
        self,
        scheduled: Sequence[ScheduledRequest],
        tokens: Mapping[str, Sequence[int]],
        sampler: Sampler,
    ) -> dict[str, tuple[int, ...]]:
        """Drafts tokens after the `tokens` that a step sampled: `num_drafts` for each scheduled
        request.
        """
        wanted = WantedDrafts.of(scheduled, tokens)
        if wanted is None:
            return {}
        rows, counts, positions = wanted.rows, wanted.counts, wanted.positions
        self._catch_up(rows, positions)
        is_plain = sampler.asks_nothing(rows.tolist())
        for number in range(int(counts.max())):
            active = wanted.active(number)
            logits, is_sampled = self._decode(
                single_tokens(rows[active], positions[active] + number)
            )
            if is_sampled and is_plain:
                continue
            wanted.choose(number, logits, sampler, self._request_rows)
        if self._num_computed is not None:
            self._num_computed[rows] = positions + counts
        if self._graphs is not None:
            self._graphs.capture_next()
        return wanted.read(self._request_rows)

    def sleep(self) -> None:
        """Gives memory back. The weights are kept in host memory at any level: nobody loads these
        again.
        """
        self._decoder.sleep(1)
        self._cache.sleep()
        if self._graphs is not None:
            self._graphs.sleep()

    def wake(self) -> None:
        """Takes it again."""
        self._decoder.wake()
        self._cache.wake()
        if self._graphs is not None:
            self._graphs.wake()

    def release(self) -> None:
        """Sleeps for good."""
        self.sleep()
        self._graphs = None
        self._decoder.release()
        self._cache.release()

    def _catch_up(self, rows: Indices, positions: Indices) -> None:
        """Computes the tokens before these positions that the drafter's own cache lacks."""
        if self._num_computed is None:
            return
        # Drafts that were not accepted left keys behind these positions: they don't count.
        begins = np.minimum(self._num_computed[rows], positions)
        missing = positions - begins
        if not missing.any():
            return
        owners = np.arange(len(rows)).repeat(missing)
        offsets = np.concatenate([np.arange(count) for count in missing])
        row, place = rows[owners], begins[owners] + offsets
        at, following = self._request_rows.uploader.upload(row, place + 1)
        known = self._request_rows.token_ids[at, following]
        self._decode(single_tokens(row, place))
        # a graph samples, and has overwritten these tokens
        self._request_rows.token_ids[at, following] = known

    def _decode(self, shape: BatchShape) -> tuple[Tensor, bool]:
        """Logits, and whether tokens were already sampled from them, by temperature and seed, into
        the request rows.
        """
        decoded = self._graphs.run(shape) if self._graphs is not None else None
        if decoded is not None:
            return decoded.logits, True
        decoder = self._decoder
        batch = build_batch(shape, self._request_rows, decoder, None)
        return decoder.logits(
            decoder(batch.token_ids, batch.positions, batch.paged, self._cache.layers)
        ), False


def single_tokens(rows: Indices, positions: Indices) -> BatchShape:
    """A step in which each row computes one token."""
    every = np.ones(len(rows), np.bool_)
    numbers = [values.astype(np.int32) for values in (rows, positions, every)]
    return BatchShape(
        numbers[0], numbers[1], numbers[2], every, ((),) * len(rows), (), is_decode=True
    )
