"""Permanent rows: what the device knows of each running request between steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runner.sampling_batch import PARAMETERS, RowLists, SamplingBatch, read_lists, read_parameters
from quire.runner.staging import StagingRing
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.step import Admission, Step


class Rows:
    """One row per running request, from its admission until it finishes or is preempted.

    Token values live on the device: a step gathers its inputs from here, and the tokens it samples are
    written back here, so the next step does not need to know them on the CPU. A step changes the rows by what
    is new in it only.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = torch.zeros(max_num_seqs, max_model_len + 1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self._staging = StagingRing(device)
        self._num_blocks = [0] * max_num_seqs
        self._parameters = np.zeros(max_num_seqs, dtype=PARAMETERS)
        self._lists = [RowLists()] * max_num_seqs
        self._is_plain = np.ones(max_num_seqs, dtype=np.bool_)

    def apply(self, step: Step) -> None:
        """Takes up who was admitted and which blocks were gained."""
        table_index: list[int] = []
        table_values: list[int] = []
        width = self.block_tables.shape[1]

        def append_blocks(row: int, block_ids: tuple[int, ...]) -> None:
            first = row * width + self._num_blocks[row]
            table_index.extend(range(first, first + len(block_ids)))
            table_values.extend(block_ids)
            self._num_blocks[row] += len(block_ids)

        for admission in step.admitted:
            self._num_blocks[admission.row] = 0
            append_blocks(admission.row, admission.block_ids)
            self._parameters[admission.row] = read_parameters(admission)
            self._lists[admission.row] = read_lists(admission, self.token_ids.device)
            self._is_plain[admission.row] = _is_plain(admission)
        for scheduled in step.scheduled:
            if scheduled.new_block_ids:
                append_blocks(scheduled.row, scheduled.new_block_ids)
        if table_index:
            changes = np.array((table_index, table_values), dtype=np.int32)
            where, values = self._staging.upload(tuple(changes))
            self.block_tables.view(-1)[where.long()] = values
        if step.admitted:
            self._write_admitted(step.admitted)

    def sampling_batch(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], masks: Tensor | None = None
    ) -> SamplingBatch:
        """The parameters of `rows`, whose next tokens will stand at `positions`.

        `masks` [len(rows), words] int32 say which tokens a row's grammar allows, bit by bit; they count for
        the rows that asked for structured output.
        """
        lists = tuple(self._lists[row] for row in rows.tolist())
        return SamplingBatch(self._parameters[rows], lists, rows, positions, self.token_ids, masks)

    def are_plain(self, rows: npt.NDArray[np.int64]) -> bool:
        """Whether none of `rows` asks for more than a temperature."""
        return bool(self._is_plain[rows].all())

    def _write_admitted(self, admitted: tuple[Admission, ...]) -> None:
        lengths = [len(admission.token_ids) for admission in admitted]
        tokens = np.concatenate([np.array(admission.token_ids, dtype=np.int32) for admission in admitted])
        rows = np.array([admission.row for admission in admitted], dtype=np.int32)
        owner = rows.repeat(lengths)
        place = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        parameters = self._parameters[rows]
        sent = self._staging.upload(
            (
                owner,
                place,
                tokens,
                rows,
                parameters["temperature"].view(np.int32),
                np.ascontiguousarray(parameters["seed"]).view(np.int32),
            )
        )
        self.token_ids[sent[0].long(), sent[1].long()] = sent[2].long()
        index = sent[3].long()
        self.temperatures[index] = sent[4].view(torch.float32)
        # Two words each: a part of the upload need not begin where 8 bytes do.
        words = sent[5].view(-1, 2).long()
        self.seeds[index] = (words[:, 1] << 32) | (words[:, 0] & 0xFFFFFFFF)


def _is_plain(admission: Admission) -> bool:
    """Whether the request's tokens depend on nothing but the logits, its temperature and its seed."""
    plain = replace(
        admission, params=SamplingParams(temperature=admission.params.temperature), resolved=ResolvedTokens()
    )
    return read_parameters(admission) == read_parameters(plain)
