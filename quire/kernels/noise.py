"""The noise of sampled tokens: each vocabulary entry's 32 random bits are a keyed hash of its id.

There is no generator with a state, so it does not matter in which step, batch or order a token is sampled. The C++
kernels compute the same bits; `quire.sampling.noise` makes the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [rows, vocab_size] in float32 from int32 keys [rows, 2]."""
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits = token_ids * _signed(0x9E3779B1) ^ keys[:, :1]
    bits = _mix32(_mix32(bits) ^ keys[:, 1:])
    # 31 bits: float32 keeps small uniform numbers exactly, and those give the largest noise.
    uniform = ((_shift(bits, 1).float() + 0.5) * 2.0**-31).clamp_max_(_LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix32(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 16)) * _signed(0x7FEB352D)
    value = (value ^ _shift(value, 15)) * _signed(0x846CA68B)
    return value ^ _shift(value, 16)


def _shift(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: torch's keeps the sign."""
    return (value >> bits) & ((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
