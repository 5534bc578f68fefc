"""Where a row of tokens repeats its last tokens, as defined in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def match_lengths(tokens: Tensor, lengths: Tensor, breaks: Tensor | None, most: int) -> Tensor:
    """`Kernels.match_lengths`, one length after the other, for the positions that still match,
    which are soon few. Their number must be known on the host, so on a GPU this would wait for the
    device.
    """
    found = torch.zeros(tokens.shape, dtype=torch.int32, device=tokens.device)
    last = (lengths - 1).unsqueeze(1)
    same = (tokens == tokens.gather(1, last)) & (
        torch.arange(tokens.shape[1], device=tokens.device) < last
    )
    if breaks is not None:
        same &= ~breaks.gather(1, last)
    row, place = same.nonzero(as_tuple=True)
    for n in range(1, most + 1):
        if n > 1:
            mine, end = place - (n - 1), lengths[row] - n
            same = (mine >= 0) & (tokens[row, mine.clamp_min(0)] == tokens[row, end.clamp_min(0)])
            if breaks is not None:
                same &= ~breaks[row, end.clamp_min(0)]
            row, place = row[same], place[same]
        if len(row) == 0:
            break
        found[row, place] = n
    return found
