"""Functions of single numbers, in float32, by exp: torch's own compute the last few elements of a
tensor in another way than the rest, so their bits would depend on the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Written out: torch's own has other bits for vectors of other lengths (rule R1)."""
    return 1 / (1 + (-x.float()).exp())


def silu(x: Tensor) -> Tensor:
    return x.float() * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), also where e^x is too large."""
    x32 = x.float()
    return x32.clamp_min(0) + torch.log1p((-x32.abs()).exp())


ERF_SLOPE = 0.3275911 / math.sqrt(2)
ERF_FACTORS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""Abramowitz and Stegun, 7.1.26: the error function to within 1.5e-7."""


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution's function, of float32 numbers: max(x, 0) minus half of |x|
    times what the error function lacks to 1. By products and an exponential, as in all kernels:
    torch's erf has other bits in the last elements of a tensor.
    """
    size = x.abs()
    part = 1 / (1 + ERF_SLOPE * size)
    lacking = torch.zeros_like(part)
    for factor in ERF_FACTORS:
        lacking = (lacking + factor) * part
    return x.clamp(min=0) - 0.5 * size * lacking * (-0.5 * x * x).exp()


def xielu(x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Of float32 numbers: see `quire.kernels.ops.Kernels`."""
    below = (x.clamp(max=0).exp() - 1 - x) * (softplus(negative) + 0.5)
    return torch.where(x > 0, softplus(positive) * x * x, below) + 0.5 * x


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), by exp as `sigmoid` is."""
    decayed = (x.abs() * (-2 / cap)).exp()
    return (cap * (1 - decayed) / (1 + decayed)).copysign(x)


# twice that of tanh: (1 + tanh(y)) / 2 is the sigmoid of 2y
GELU_FACTOR = 2 * math.sqrt(2 / math.pi)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu_tanh": lambda x: x * sigmoid(GELU_FACTOR * (x + 0.044715 * x * x * x)),
    "clamped_swiglu": lambda x: x * sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu2": lambda x: x.relu().square(),
    "gelu": gelu,
}
"""By the values of `quire.kernels.ops.Activation`, of float32 numbers."""
