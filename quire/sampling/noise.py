"""Random numbers without state: the noise of a sampled token is a function of (seed, position) only.

The keys made here select the noise that `quire.kernels.noise` defines.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Makes the random numbers of XTC independent of the tokens' noise: any constant would do.
_CHANCE = np.uint64(0xD1B54A32D192ED03)
# The same for acceptance by rejection: whether a guess is accepted, and the token drawn if it is not.
ACCEPTS, REDRAWS = np.uint64(0x8CB92BA72F3D8DD7), np.uint64(0xABC98388FB8FAC03)


def noise_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Two 32-bit words [rows, 2] from each row's seed and position (the splitmix64 mixer, twice)."""
    mixed = _mix64(_mix64(seeds) + positions.astype(np.uint64))
    return mixed.view(np.int32).reshape(-1, 2)


def chances(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number from 0 to below 1 per row, from its seed and position, independent of its noise."""
    mixed = _mix64(_mix64(seeds ^ _CHANCE) + positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
