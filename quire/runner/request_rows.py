"""Request rows: what the device knows of each running request between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.ops import Batches, HeadShape, Kernels, PagedBatch
from quire.sampling.metadata import Indices, effective_temperature
from quire.sampling.upload import Uploader
from quire.step import AdmittedRequest, Step


class RequestRows:
    """The permanent place of every running request on the device, from its admission until it
    finishes or is preempted.

    Token values live on the device: a step gathers its inputs from here and writes the tokens it
    samples back here, so the next step can be submitted before they reach the CPU. The host only
    sends admitted requests and new blocks.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        group_heads: Sequence[HeadShape | None] = (None,),
        num_state_blocks: int = 0,
    ) -> None:
        """`group_heads`: the heads of each group of layers; None if all of the model's are the
        same. `num_state_blocks`: of one state of its recurrent layers.
        """
        num_groups = len(group_heads)
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.token_ids = torch.zeros(
            max_num_seqs, max_model_len + 1, dtype=torch.int64, device=device
        )
        self.block_tables = torch.zeros(
            num_groups, max_num_seqs, max_blocks, dtype=torch.int32, device=device
        )
        """One table per group of layers; a `Step` lists the groups' blocks for the same tokens side
        by side.
        """
        self.state_tables = torch.zeros(
            2, max_num_seqs, num_state_blocks, dtype=torch.int32, device=device
        )
        """The blocks of the states at the begin of even chunks, and of odd ones."""
        self._group_heads = tuple(group_heads)
        self.seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self.num_computed_tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        """How many tokens a request has computed, wrong draft tokens not counted; set by steps that
        check draft tokens only.
        """
        self.uploader = Uploader(device)
        self._num_blocks = [0] * max_num_seqs

    def apply(self, step: Step) -> None:
        """Writes a step's newly admitted requests and new blocks into the rows."""
        table_index: list[int] = []
        table_values: list[int] = []
        groups, num_rows, width = self.block_tables.shape
        for admission in step.admitted:
            self._num_blocks[admission.row] = 0
        gained = [(one.row, one.block_ids) for one in step.admitted]
        for row, block_ids in gained + [
            (one.row, one.new_block_ids) for one in step.scheduled if one.new_block_ids
        ]:
            first, end = self._num_blocks[row], self._num_blocks[row] + len(block_ids)
            table_index.extend(
                (n % groups * num_rows + row) * width + n // groups for n in range(first, end)
            )
            table_values.extend(block_ids)
            self._num_blocks[row] = end
        if table_index:
            where, values = self.uploader.upload(
                np.array(table_index), np.array(table_values, np.int32)
            )
            self.block_tables.view(-1)[where] = values
        if step.admitted:
            self._write_admitted(step.admitted)

    def write_tokens(self, request_rows: Indices, positions: Indices, token_ids: Tensor) -> None:
        """Puts sampled tokens where the next step finds them."""
        where, at = self.uploader.upload(request_rows, positions)
        self.token_ids[where, at] = token_ids

    def inputs(
        self,
        kernels: Kernels,
        token_rows: Tensor,
        positions: Tensor,
        work: Mapping[HeadShape, Mapping[str, Tensor]] | None = None,
        **sequences: Any,
    ) -> tuple[Tensor, Tensor, Batches]:
        """The token ids at some positions of request rows, the positions, and a `PagedBatch` for
        each group of layers; `work` has the lists of attention's work for each shape of heads,
        `sequences` are the other fields besides block tables and slots.
        """
        found = [
            kernels.gather_inputs(token_rows, positions, self.token_ids, tables, self.block_size)
            for tables in self.block_tables
        ]
        batches = zip(self.block_tables, found, self._group_heads, strict=True)
        paged = (
            PagedBatch(
                block_tables=tables,
                slot_mapping=slots,
                state_tables=self.state_tables,
                token_rows=token_rows,
                positions=positions,
                work=_lists_for(work, heads),
                **sequences,
            )
            for tables, (_, _, slots), heads in batches
        )
        return *found[0][:2], tuple(paged)

    def sample(
        self,
        kernels: Kernels,
        logits: Tensor,
        request_rows: Tensor,
        positions: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Samples by temperature and seed only, and writes the tokens into the rows: see
        `Kernels.sample_rows`.
        """
        assert kernels.sample_rows is not None
        return kernels.sample_rows(
            logits, request_rows, self.seeds, self.temperatures, positions, self.token_ids, out
        )

    def _write_admitted(self, admitted: tuple[AdmittedRequest, ...]) -> None:
        lengths = [len(admission.token_ids) for admission in admitted]
        rows = np.array([admission.row for admission in admitted])
        owner, place, tokens, index, temperatures, seeds = self.uploader.upload(
            rows.repeat(lengths),
            np.concatenate([np.arange(length) for length in lengths]),
            np.concatenate([np.array(admission.token_ids, np.int64) for admission in admitted]),
            rows,
            np.array(
                [effective_temperature(admission.params) for admission in admitted], np.float32
            ),
            np.array([admission.seed for admission in admitted], np.uint64).view(np.int64),
        )
        self.token_ids[owner, place] = tokens
        self.temperatures[index] = temperatures
        self.seeds[index] = seeds
        if self.state_tables.shape[2]:
            # [requests, 2, blocks]
            blocks = np.array([admission.state_ids for admission in admitted], np.int32)
            (states,) = self.uploader.upload(blocks.reshape(-1))
            self.state_tables[:, index] = states.view(blocks.shape).transpose(0, 1)


def _lists_for(
    work: Mapping[HeadShape, Mapping[str, Tensor]] | None, heads: HeadShape | None
) -> Mapping[str, Tensor] | None:
    """Those of one group's heads."""
    if not work:
        return None
    if heads is not None and heads in work:
        return work[heads]
    (only,) = work.values()  # of a model whose layers all have the same heads
    return only
