"""What a layer keeps of a sequence, as data: the cache's blocks, the memory plan and the
scheduler's groups follow.

A mixer (attention, or whatever else lets tokens see those before them) says which numbers it keeps
for each token, how far back it reads them, and which it carries on as a state. Nothing else asks
what kind of layer it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, dtype


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Numbers that a layer keeps for each token, or in each state: those of every head side by
    side.
    """

    heads: int
    shape: tuple[int, ...]
    """Of one head's numbers; () if it is one."""
    dtype: dtype

    @property
    def bytes_per_head(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.heads * self.bytes_per_head


@dataclass(frozen=True, slots=True)
class LayerState:
    """What one layer keeps. In a block of n tokens a part lies as [heads, n, *shape]."""

    per_token: tuple[StoredPart, ...]
    keeps: Literal["all", "window", "chunk", "records"] = "all"
    """How far back tokens are read, as in `quire.block_groups.BlockGroup`."""
    size: int = 0
    """Tokens of the window or chunk."""
    num_heads: int = 0
    """Query heads. Layers that differ in them divide their attention differently, so they have
    lists of work and hence groups of their own.
    """
    carried: tuple[StoredPart, ...] = ()
    """The state that is carried from chunk to chunk, if it keeps records; each head's numbers are
    in one piece.
    """

    @property
    def bytes_per_token(self) -> int:
        return sum(part.nbytes for part in self.per_token)


class CacheMemory(NamedTuple):
    """The memory of one mixer, from which it makes what its kernels read and write."""

    parts: Sequence[Tensor]
    """Of `LayerState.per_token`: [num_blocks, heads, block_size, ...] each."""
    group: int
    """Its index in `quire.kernels.ops.Batches`."""
    carried: Sequence[CarriedPart] = ()
    fp8_scales: tuple[float, float] = (1.0, 1.0)
    """Of all FP8 keys, and of all FP8 values."""
    keys_by_dimension: bool = False


@dataclass(frozen=True)
class CarriedPart:
    """Where one layer's part of the states lies: heads in the blocks of a state, in runs that are
    together in one of them.
    """

    runs: tuple[tuple[int, Tensor], ...]
    """The number of the block among those of a state, and the memory [num_blocks, heads, *shape]."""

    @cached_property
    def places(self) -> Tensor:
        """int64 [heads, 3], for kernels that go by addresses: of each head the number of its block,
        its address in the first of all blocks, and the bytes from block to block. Memory that
        sleeps has the same addresses when it wakes.
        """
        return torch.tensor(self._places(), device=self.runs[0][1].device)

    @cached_property
    def alignment(self) -> int:
        """What divides the addresses of all heads in all blocks, 16 at most."""
        return math.gcd(16, *(part for _, *parts in self._places() for part in parts))

    def _places(self) -> list[tuple[int, int, int]]:
        return [
            (number, memory[0, head].data_ptr(), memory.stride(0) * memory.itemsize)
            for number, memory in self.runs
            for head in range(memory.shape[1])
        ]

    def read(self, blocks: Tensor) -> Tensor:
        """[heads, *shape] of the state in these blocks."""
        return torch.cat([memory[blocks[number]] for number, memory in self.runs])

    def write(self, blocks: Tensor, numbers: Tensor) -> None:
        """Puts numbers into blocks, head by head, wherever each head's memory lies."""
        first = 0
        for number, memory in self.runs:
            end = first + memory.shape[1]
            memory[blocks[number]] = numbers[first:end].to(memory.dtype)
            first = end
