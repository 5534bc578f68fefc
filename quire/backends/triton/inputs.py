"""Gathers a step's inputs (token ids, positions, cache slots) from the request rows on the device."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import LAUNCH, USE_PDL, begin
from quire.backends.triton.shapes import cdiv

_BLOCK = 256


@jit(do_not_specialize=["count"])
def _gather_inputs_kernel(
    token_rows,
    places,
    token_ids,
    block_tables,
    out_ids,
    out_positions,
    out_slots,
    count,
    id_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = index < count
    row = tl.load(token_rows + index, mask=within, other=-1).to(tl.int64)
    place = tl.load(places + index, mask=within, other=0)
    known = row >= 0
    token = tl.load(token_ids + row * id_stride + place, mask=known, other=0)
    block = tl.load(block_tables + row * table_stride + place // BLOCK_SIZE, mask=known, other=0)
    slot = tl.where(known, block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE, -1)
    tl.store(out_ids + index, token, mask=within)
    tl.store(out_positions + index, place.to(tl.int64), mask=within)
    tl.store(out_slots + index, slot, mask=within)


def gather_inputs(
    token_rows: Tensor, positions: Tensor, token_ids: Tensor, block_tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`Kernels.gather_inputs`."""
    count = len(token_rows)
    out = torch.empty(3, count, dtype=torch.int64, device=token_rows.device)
    ids, places, slots = out.unbind()
    if count:
        _gather_inputs_kernel[(cdiv(count, _BLOCK),)](
            token_rows=token_rows,
            places=positions,
            token_ids=token_ids,
            block_tables=block_tables,
            out_ids=ids,
            out_positions=places,
            out_slots=slots,
            count=count,
            id_stride=token_ids.stride(0),
            table_stride=block_tables.stride(0),
            BLOCK_SIZE=block_size,
            BLOCK=_BLOCK,
            PDL=USE_PDL,
            num_warps=4,
            **LAUNCH,
        )
    return ids, places, slots
