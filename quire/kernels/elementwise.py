"""Functions of single numbers, in float32, by exp: torch's own compute the last few elements of a
tensor in another way than the rest, so their bits would depend on the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x.float()).exp())


def silu(x: Tensor) -> Tensor:
    return x.float() * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), also where e^x is too large."""
    x32 = x.float()
    return x32.clamp_min(0) + torch.log1p((-x32.abs()).exp())
