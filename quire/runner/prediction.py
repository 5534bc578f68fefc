"""Drafts by a layer for multi-token prediction (`quire.models.prediction`).

The layer follows every step: from the step's final hidden states and the tokens behind them it makes
keys and values of its own, which lie in the blocks of the model's, one layer more, so prefix cache,
host tier and copies have them. The last of a request's rows gives the first draft; for the next one
the layer computes that draft, with what it made itself in place of the model's hidden state, and so
on. Those keys are overwritten when the model has computed the tokens.

The last key of a block depends on the token behind it. A request that finds the block in the prefix
cache, and goes on otherwise, reads a key made with another's token: a slightly worse draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from quire.kernels.ops import MixerCache
from quire.models.decoder import Decoder
from quire.models.prediction import Predictor
from quire.runner.batch import BatchShape, InputBatch, build_batch
from quire.runner.drafting import WantedDrafts, single_tokens
from quire.runner.request_rows import RequestRows
from quire.sampling.metadata import Indices
from quire.sampling.sampler import Sampler
from quire.step import ScheduledRequest, Step


class PredictingDrafter:
    """Drafts for the requests of a runner."""

    takes_hidden = True

    def __init__(
        self,
        predictor: Predictor,
        decoder: Decoder,
        caches: Sequence[MixerCache],
        request_rows: RequestRows,
    ) -> None:
        """`caches` are the layer's; the `decoder` is the model's."""
        self._predictor = predictor
        self._decoder = decoder
        self._caches = caches
        self._request_rows = request_rows
        self._last: tuple[BatchShape, Tensor, Tensor] | None = None
        """The last step, and what the layer made of its rows."""

    def apply(self, step: Step) -> None:
        """Its keys are copied with the model's."""

    def follow(
        self, shape: BatchShape, batch: InputBatch | None, hidden: Tensor | None, lag: Tensor | None
    ) -> None:
        """Computes the rows of a step that has sampled; `hidden` are its final hidden states."""
        assert hidden is not None
        if batch is None:
            batch = build_batch(shape, self._request_rows, self._decoder, lag)
        owners = shape.request_rows[shape.token_owners].astype(np.int64)
        self._last = shape, *self._compute(owners, batch, hidden)

    def draft(
        self,
        scheduled: Sequence[ScheduledRequest],
        tokens: Mapping[str, Sequence[int]],
        sampler: Sampler,
    ) -> dict[str, tuple[int, ...]]:
        """Drafts tokens after the `tokens` that the last step sampled: `num_drafts` for each
        scheduled request.
        """
        wanted = WantedDrafts.of(scheduled, tokens)
        if wanted is None or self._last is None:
            return {}
        shape, final, passed = self._last
        number_of = {row: number for number, row in enumerate(shape.request_rows.tolist())}
        owners = [number_of[row] for row in wanted.rows.tolist()]
        (last,) = self._request_rows.uploader.upload(
            wanted.positions - 1 - shape.starts[owners] + shape.query_start[owners]
        )
        wanted.choose(0, self._predictor.logits(final[last]), sampler, self._request_rows)
        passed = passed[last]
        before = wanted.active(0)
        for number in range(1, int(wanted.counts.max())):
            active = wanted.active(number)
            (kept,) = self._request_rows.uploader.upload(np.searchsorted(before, active))
            places = single_tokens(wanted.rows[active], wanted.positions[active] + number - 1)
            batch = build_batch(places, self._request_rows, self._decoder, None)
            final, passed = self._compute(wanted.rows[active], batch, passed[kept])
            wanted.choose(number, self._predictor.logits(final), sampler, self._request_rows)
            before = active
        return wanted.read(self._request_rows)

    def _compute(self, rows: Indices, batch: InputBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer makes of hidden states and the tokens behind them."""
        (owners,) = self._request_rows.uploader.upload(rows)
        following = self._request_rows.token_ids[owners, batch.positions + 1]
        return self._predictor(following, hidden, batch.positions, batch.paged, self._caches)

    def sleep(self) -> None:
        """Gives memory back; the weights are kept in host memory at any level, as a draft model's."""
        self._last = None
        self._predictor.sleep(1)

    def wake(self) -> None:
        """Takes it again."""
        self._predictor.wake()

    def release(self) -> None:
        """Sleeps for good."""
        self._last = None
        self._caches = ()
        self._predictor.release()
