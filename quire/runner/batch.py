"""InputBatch: the tensors of one step, gathered from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.ops import PagedBatch
from quire.runner.rows import Rows
from quire.step import ScheduledRequest


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What the decoder and the sampler take for one step."""

    token_ids: Tensor
    positions: Tensor
    paged: PagedBatch
    sampling_indices: Tensor
    """Which of the step's token rows are scored, in the order of the requests that sample."""
    sampling_rows: npt.NDArray[np.int64]
    """The permanent row of each request that samples."""
    sampling_positions: npt.NDArray[np.int64]
    """Where in its sequence each sampled token will stand."""


def build_batch(scheduled: Sequence[ScheduledRequest], rows: Rows, block_size: int) -> InputBatch:
    """Lays the scheduled requests' tokens one after the other."""
    device = rows.token_ids.device
    row = np.fromiter((s.row for s in scheduled), np.int64, len(scheduled))
    start = np.fromiter((s.start for s in scheduled), np.int64, len(scheduled))
    count = np.fromiter((s.num_tokens for s in scheduled), np.int64, len(scheduled))
    samples = np.fromiter((s.samples for s in scheduled), np.bool_, len(scheduled))
    end = start + count
    query_start = np.concatenate((np.zeros(1, np.int64), count.cumsum()))
    # For every token row of the step: its request's permanent row and its position in the sequence.
    token_row = torch.from_numpy(row.repeat(count)).to(device)
    first = (start - query_start[:-1]).repeat(count)
    positions = torch.from_numpy(first + np.arange(query_start[-1])).to(device)
    max_context_len = int(end.max())
    tables = rows.block_tables[torch.from_numpy(row).to(device), : -(-max_context_len // block_size)]
    blocks = rows.block_tables[token_row, positions // block_size].long()
    paged = PagedBatch(
        query_start=torch.from_numpy(query_start.astype(np.int32)).to(device),
        context_lens=torch.from_numpy(end.astype(np.int32)).to(device),
        block_tables=tables,
        slot_mapping=blocks * block_size + positions % block_size,
        max_query_len=int(count.max()),
        max_context_len=max_context_len,
    )
    return InputBatch(
        token_ids=rows.token_ids[token_row, positions],
        positions=positions,
        paged=paged,
        sampling_indices=torch.from_numpy(query_start[1:][samples] - 1).to(device),
        sampling_rows=row[samples],
        sampling_positions=end[samples],
    )
