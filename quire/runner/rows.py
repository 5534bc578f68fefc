"""Permanent rows: what the device knows of each running request between steps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runner.sampling_batch import PARAMETERS, RowLists, SamplingBatch, read_lists, read_parameters
from quire.step import Admission, ScheduledRequest


class Rows:
    """One row per running request, from its admission until it finishes or is preempted.

    Token values live on the device: a step gathers its inputs from here, and the tokens it samples are
    written back here, so the next step does not need to know them on the CPU.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = torch.zeros(max_num_seqs, max_model_len + 1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self._num_blocks = [0] * max_num_seqs
        self._parameters = np.zeros(max_num_seqs, dtype=PARAMETERS)
        self._lists = [RowLists()] * max_num_seqs

    def admit(self, admission: Admission) -> None:
        row = admission.row
        tokens = torch.tensor(admission.token_ids, dtype=torch.int64)
        self.token_ids[row, : len(tokens)] = tokens.to(self.token_ids.device)
        self._num_blocks[row] = 0
        self._append_blocks(row, admission.block_ids)
        self._parameters[row] = read_parameters(admission)
        self._lists[row] = read_lists(admission, self.token_ids.device)

    def extend(self, scheduled: ScheduledRequest) -> None:
        """Takes up the blocks a request gained for this step."""
        if scheduled.new_block_ids:
            self._append_blocks(scheduled.row, scheduled.new_block_ids)

    def sampling_batch(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], masks: Tensor | None = None
    ) -> SamplingBatch:
        """The parameters of `rows`, whose next tokens will stand at `positions`.

        `masks` [len(rows), words] int32 say which tokens a row's grammar allows, bit by bit; they count for
        the rows that asked for structured output.
        """
        lists = tuple(self._lists[row] for row in rows.tolist())
        return SamplingBatch(self._parameters[rows], lists, rows, positions, self.token_ids, masks)

    def _append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        start = self._num_blocks[row]
        stop = start + len(block_ids)
        self.block_tables[row, start:stop] = torch.tensor(block_ids, dtype=torch.int32)
        self._num_blocks[row] = stop
