"""The definition's matrix product: in tiles of a fixed number of rows, so that a row's bits don't
depend on how many others there are.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 32


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, in tiles of a fixed number of rows."""
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -rows % ROW_TILE))
    output = x.new_empty(padded.shape[0], weight.shape[0])
    for row in range(0, rows, ROW_TILE):
        output[row : row + ROW_TILE] = F.linear(padded[row : row + ROW_TILE], weight, bias)
    return output[:rows]
