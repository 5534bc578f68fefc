"""InputBatch: the tensors of one step, gathered from the request rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.kernels.ops import HeadShape, Kernels, PagedBatch
from quire.runner.request_rows import RequestRows
from quire.sampling.upload import Uploader
from quire.step import ScheduledRequest


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the host knows of a step's scheduled requests, one entry each, in their order."""

    request_rows: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    samples: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledRequest]) -> StepShape:
        _, rows, starts, counts, samples, _, _ = zip(*scheduled, strict=True)
        numbers = [np.array(values, np.int32) for values in (rows, starts, counts)]
        return cls(numbers[0], numbers[1], numbers[2], np.array(samples, np.bool_))

    @property
    def is_decode(self) -> bool:
        """Whether every request computes one token and samples the next."""
        return bool((self.counts == 1).all() and self.samples.all())

    @property
    def draw_request_rows(self) -> npt.NDArray[np.int64]:
        """The request row of each token that is drawn."""
        return self.request_rows[self.samples].astype(np.int64)

    @property
    def draw_positions(self) -> npt.NDArray[np.int64]:
        """Where in its sequence each drawn token will stand."""
        return (self.starts + self.counts)[self.samples].astype(np.int64)


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What the decoder takes for one step."""

    token_ids: Tensor
    positions: Tensor
    paged: PagedBatch
    draw_indices: Tensor
    """Which of the step's token rows tokens are drawn from."""
    draw_request_rows: Tensor
    """int32: the request row of each of them."""
    draw_positions: Tensor
    """int32: where in its sequence the drawn token will stand."""


def build_batch(
    shape: StepShape,
    request_rows: RequestRows,
    kernels: Kernels,
    uploader: Uploader,
    block_size: int,
    heads: HeadShape,
) -> InputBatch:
    """Lays the scheduled requests' tokens one after the other."""
    ends = shape.starts + shape.counts
    query_start = np.concatenate((np.zeros(1, np.int32), shape.counts.cumsum(dtype=np.int32)))
    # For every token row of the step: its request row and its position in the sequence.
    owners = shape.request_rows.repeat(shape.counts)
    first = (shape.starts - query_start[:-1]).repeat(shape.counts)
    positions = first + np.arange(query_start[-1], dtype=np.int32)
    draw_indices = (query_start[1:] - 1)[shape.samples]
    work = kernels.attention_work(shape.counts, ends, shape.request_rows, heads)
    sent = uploader.upload(
        owners,
        positions,
        query_start,
        ends,
        shape.request_rows,
        draw_indices,
        shape.request_rows[shape.samples],
        ends[shape.samples],
        *work.values(),
    )
    token_ids, places, slots = kernels.gather_inputs(
        sent[0], sent[1], request_rows.token_ids, request_rows.block_tables, block_size
    )
    paged = PagedBatch(
        query_start=sent[2],
        context_lens=sent[3],
        block_tables=request_rows.block_tables,
        table_rows=sent[4],
        slot_mapping=slots,
        max_query_len=int(shape.counts.max()),
        max_context_len=int(ends.max()),
        work=dict(zip(work, sent[8:], strict=True)),
    )
    return InputBatch(token_ids, places, paged, sent[5].long(), sent[6], sent[7])
