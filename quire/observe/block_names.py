"""Names of blocks, eight bytes each, that engines and whoever sends them requests compute alike.

A block's name is a sum modulo 2**64: that of the block before it times one constant, plus its
tokens times constants of their own. So a few calls of numpy name all blocks of a prompt, where the
chain of sha256 that the engine's cache has takes a microsecond for each. Different blocks have the
same name with a probability of less than 2**-46; that, and whoever brings it about on purpose,
costs a detour at most: the engine's cache compares tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import mul

import numpy as np
import numpy.typing as npt

Names = npt.NDArray[np.uint64]

NAME_BYTES = 8
_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
"""Odd, so it can be divided by; far from 1 in its low bits, so blocks in another order have other
names.
"""
_UNSTEP = pow(_STEP, -1, 2**64)


class BlockNamer:
    """Names blocks of one size."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._factors = [_digest(b"token %d" % place) | 1 for place in range(block_size)]
        self._factor_array = np.array(self._factors, np.uint64)
        self._plain_start = _stepped(self.start(()))
        self._powers = self._inverse_powers = np.ones(1, np.uint64)

    def start(self, extra_keys: Sequence[str]) -> int:
        """What stands before a prompt's first block: whatever else its keys and values depend on.
        Never 0, lest blocks of nothing but token 0 have one name.
        """
        encoded = [extra_key.encode("utf-8", "surrogatepass") for extra_key in extra_keys]
        return _digest(b"".join(len(one).to_bytes(8, "little") + one for one in encoded))

    def following(
        self, before: int, token_ids: Sequence[int], extra_keys: Sequence[str] = ()
    ) -> int:
        """The name of a block of these tokens, by that of the block before it and by what else it
        depends on.
        """
        own: int = sum(map(mul, self._factors, token_ids)) + (
            self.start(extra_keys) if extra_keys else 0
        )
        return (before * _STEP + own) & _MASK

    def names(self, packed: bytes, cache_salt: str | None = None) -> Names:
        """Those of a prompt's full blocks, as far as they can be found in a cache (one token is
        always computed). `packed`: its token ids as little-endian int32.
        """
        size = self.block_size
        count = max(0, (len(packed) // 4 - 1) // size)
        if count > len(self._powers):
            self._powers, self._inverse_powers = (
                _powers(_STEP, 2 * count),
                _powers(_UNSTEP, 2 * count),
            )
        tokens = np.frombuffer(packed, "<i4", count * size).astype(np.uint64).reshape(count, size)
        # With own = sum of tokens x factors: name[i] = own[i] + step * name[i - 1] = step**i *
        # (step * start + sum of own[k] / step**k).
        sums = tokens @ self._factor_array
        sums *= self._inverse_powers[:count]
        np.add.accumulate(sums, out=sums)  # as np.cumsum, which takes three times as long to call
        sums += self._plain_start if cache_salt is None else _stepped(self.start((cache_salt,)))
        sums *= self._powers[:count]
        return sums


def pack_names(names: Sequence[int] | Names) -> bytes:
    return np.array(names, "<u8").tobytes()


def unpack_names(packed: bytes) -> Names:
    return np.frombuffer(packed, "<u8").astype(np.uint64, copy=False)


def _stepped(start: int) -> Names:
    """As an array of one: to add a number to an array takes numpy twice as long."""
    return np.array([start * _STEP & _MASK], np.uint64)


def _powers(base: int, count: int) -> Names:
    return np.cumprod(np.array([1] + [base] * (count - 1), np.uint64), dtype=np.uint64)


def _digest(data: bytes) -> int:
    return int.from_bytes(
        hashlib.sha256(b"quire block name: " + data).digest()[:NAME_BYTES], "little"
    )
