"""Where a row of tokens repeats its last tokens: each position counts backwards by itself, all
positions at once.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import LAUNCH, USE_PDL, begin
from quire.backends.triton.shapes import cdiv

_BLOCK = 512


@jit(do_not_specialize=["size", "most"])
def _match_kernel(
    tokens,
    lengths,
    breaks,
    out,
    size,
    most,
    HAS_BREAKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * size
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(lengths + tl.program_id(0)).to(tl.int32) - 1
    matches = place < last
    found = tl.zeros([BLOCK], tl.int32)
    back = tl.zeros([], tl.int32)
    while (back < most) & (tl.max(matches.to(tl.int32)) > 0):
        # last - back is not negative: some position before the last one still matches.
        wanted = tl.load(tokens + row + last - back)
        matches &= place >= back
        matches &= tl.load(tokens + row + place - back, mask=matches, other=-1) == wanted
        if HAS_BREAKS:
            matches &= tl.load(breaks + row + last - back) == 0
        found += matches.to(tl.int32)
        back += 1
    tl.store(out + row + place, found, mask=place < size)


def match_lengths(tokens: Tensor, lengths: Tensor, breaks: Tensor | None, most: int) -> Tensor:
    """`Kernels.match_lengths`."""
    tokens = tokens.contiguous()
    rows, size = tokens.shape
    out = torch.empty(rows, size, dtype=torch.int32, device=tokens.device)
    if out.numel():
        flags = None if breaks is None else breaks.contiguous().view(torch.uint8)
        _match_kernel[(rows, cdiv(size, _BLOCK))](
            tokens=tokens,
            lengths=lengths.contiguous(),
            breaks=flags,
            out=out,
            size=size,
            most=most,
            HAS_BREAKS=breaks is not None,
            BLOCK=_BLOCK,
            PDL=USE_PDL,
            num_warps=4,
            **LAUNCH,
        )
    return out
