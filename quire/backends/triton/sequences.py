"""What kernels of layers with a state read of a batch: which rows follow each other in a sequence,
where their records lie, and where their states do. All of it is read on the device, so that steps
can be captured in graphs.

Each row of a step has a request row and a position. A run is a stretch of rows of one request at
consecutive positions: a decoded token, drafts, a part of a prompt. A graph treats each row as a
sequence of its own, so runs are found here, by comparing a row with those before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.ops import PagedBatch
from quire.kernels.recurrent import CHUNK as TOKENS_OF_A_CHUNK

CHUNK = tl.constexpr(TOKENS_OF_A_CHUNK)
TILE = tl.constexpr(16)
"""Tokens of a tile of a chunk, the fewest that a tensor core multiplies at once. A token has its
place in its tile, whoever computes it.
"""


class Rows(NamedTuple):
    """int32 [rows] both, on the device."""

    tables: Tensor
    """The row of the block tables that each belongs to; negative: it is padding."""
    positions: Tensor


def rows_of(batch: PagedBatch) -> Rows:
    """Those of an engine are in the batch; else they are made of the lists of sequences."""
    if batch.token_rows is not None and batch.positions is not None:
        return Rows(batch.token_rows, batch.positions)
    counts = batch.query_start.diff().long()
    owner = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    behind = torch.arange(len(owner), device=counts.device) - batch.query_start[1:].long()[owner]
    return Rows(batch.table_rows[owner].int(), (batch.context_lens[owner] + behind).int())


@triton.jit
def in_step(tables, positions, rows, row, table, position):
    """Whether row `row` of the step is the token of this request at this position."""
    exists = (row >= 0) & (row < rows)
    same = tl.load(tables + row, mask=exists, other=-1) == table
    return exists & same & (tl.load(positions + row, mask=exists, other=-1) == position)


@triton.jit
def records_at(
    block_tables, table_stride, table, position, exists, block_stride, SIZE: tl.constexpr
):
    """Where the first head's record of a token lies, and how far apart the tokens' places are that
    it has within its block: (start of the block, offset in it).
    """
    place = block_tables + table.to(tl.int64) * table_stride + position // SIZE
    block = tl.load(place, mask=exists, other=0).to(tl.int64)
    return block * block_stride, position % SIZE


@triton.jit
def head_of_state(
    places,
    head,
    state_tables,
    state_stride,
    state_width,
    table,
    begin,
    NUMBER: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """A pointer to one head of the state at a chunk's begin. `places` has for each head which of
    the blocks of a state it is in, its address in block 0, and the bytes from block to block;
    ALIGNMENT divides all of these.
    """
    which = tl.load(places + 3 * head)
    row = state_tables + (begin // CHUNK % 2) * state_stride + table.to(tl.int64) * state_width
    block = tl.load(row + which).to(tl.int64)
    address = tl.load(places + 3 * head + 1) + block * tl.load(places + 3 * head + 2)
    return tl.multiple_of(address.to(tl.pointer_type(NUMBER)), ALIGNMENT)
