"""Random numbers without state: the noise of a sampled token is a function of (seed, position)
only.

Seed and position make a row's keys; each vocabulary entry's 32 random bits are a keyed hash of its
id. So it does not matter in which step, batch or order a token is sampled. The C++ kernels compute
the same bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LARGEST_BELOW_ONE = 1.0 - 2.0**-24
# Makes the random numbers of XTC independent of the tokens' noise: any constant would do.
_CHANCE = np.uint64(0xD1B54A32D192ED03)
# The same for acceptance by rejection: whether a draft token is accepted, and the token drawn if it
# is not.
ACCEPTS, RESAMPLES = np.uint64(0x8CB92BA72F3D8DD7), np.uint64(0xABC98388FB8FAC03)


def noise_keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """Two 32-bit words [rows, 2] from each row's seed and position (the splitmix64 mixer, twice)."""
    mixed = _mix64(_mix64(seeds) + positions.astype(np.uint64))
    return mixed.view(np.int32).reshape(-1, 2)


def chances(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number from 0 to below 1 per row, from its seed and position, independent of its noise."""
    mixed = _mix64(_mix64(seeds ^ _CHANCE) + positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [rows, vocab_size] in float32 from int32 keys [rows, 2]."""
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits = token_ids * _signed(0x9E3779B1) ^ keys[:, :1]
    bits = _mix32(_mix32(bits) ^ keys[:, 1:])
    # 31 bits: float32 keeps small uniform numbers exactly, and those give the largest noise.
    uniform = ((_shift(bits, 1).float() + 0.5) * 2.0**-31).clamp_max_(_LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix64(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _mix32(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 16)) * _signed(0x7FEB352D)
    value = (value ^ _shift(value, 15)) * _signed(0x846CA68B)
    return value ^ _shift(value, 16)


def _shift(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: torch's keeps the sign."""
    return (value >> bits) & ((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
