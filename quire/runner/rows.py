"""Permanent rows: what the device knows of each running request between steps."""

from __future__ import annotations

import numpy as np
import torch

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
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.min_length = np.zeros(max_num_seqs, dtype=np.int64)
        """Tokens, prompt included, before which the end tokens can't be chosen."""
        self.end_token_ids: list[tuple[int, ...]] = [()] * max_num_seqs

    def admit(self, admission: Admission) -> None:
        row, params = admission.row, admission.params
        tokens = torch.tensor(admission.token_ids, dtype=torch.int64)
        self.token_ids[row, : len(tokens)] = tokens.to(self.token_ids.device)
        self._num_blocks[row] = 0
        self._append_blocks(row, admission.block_ids)
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.seed[row] = admission.seed
        self.min_length[row] = admission.num_prompt_tokens + params.min_tokens
        ends = () if params.ignore_eos else admission.eos_token_ids
        self.end_token_ids[row] = (*ends, *params.stop_token_ids)

    def extend(self, scheduled: ScheduledRequest) -> None:
        """Takes up the blocks a request gained for this step."""
        if scheduled.new_block_ids:
            self._append_blocks(scheduled.row, scheduled.new_block_ids)

    def _append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        start = self._num_blocks[row]
        stop = start + len(block_ids)
        self.block_tables[row, start:stop] = torch.tensor(block_ids, dtype=torch.int32)
        self._num_blocks[row] = stop
