"""Rows of a table by token id."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import LAUNCH, USE_PDL, begin
from quire.kernels.triton.shapes import next_power_of_2, num_warps

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["token_ids"])
def _embedding_kernel(
    token_ids, weight, out, vocab_size, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token_id = tl.load(token_ids + row).to(tl.int64)
    known = (token_id >= 0) & (token_id < vocab_size)
    found = tl.load(weight + token_id * SIZE + column, mask=known & (column < SIZE), other=float("nan"))
    tl.store(out + row * SIZE + column, found, mask=column < SIZE)


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight [vocab, hidden] in one piece, by int64 or int32 [rows].

    An id that is not in the table gives a row of NaN: the request it belongs to fails where its token is
    drawn (`HAS_NAN`), and nobody else does.
    """
    rows, size = token_ids.shape[0], weight.shape[1]
    out = torch.empty(rows, size, dtype=weight.dtype, device=weight.device)
    if rows:
        block = min(_BLOCK, next_power_of_2(size))
        _embedding_kernel[(rows, triton.cdiv(size, block))](
            token_ids, weight, out, weight.shape[0], size, block, USE_PDL, num_warps=num_warps(block), **LAUNCH
        )
    return out
