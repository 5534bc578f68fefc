"""Memory for results, which is used again when nobody holds them."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 64


class ResultMemory:
    """Parts of one block of memory; a part is free again when the last tensor on it is gone.

    Results of prompts are megabytes. `malloc` gets such pieces from the system and gives them back,
    and at their first use every 4 KiB stop the program: that took a fifth of the time of a prompt
    of 512 tokens.
    """

    def __init__(self, block: Tensor) -> None:
        self._block: NDArray[np.uint8] = block.numpy()
        self._num_bytes = 0
        """Of the block, those that were ever given out; behind them it is free."""
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Where parts begin that came back, by their size: layers are alike, and so are their
        results.
        """
        self._held: set[int] = set()
        """Numbers of parts that somebody holds: when they were given out, counted from the first."""
        self._numbers = count()
        self.is_too_small = False
        """Whether there was ever no room."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """A tensor whose numbers are not set; None where there is no room for it."""
        if not self._held:  # what comes next may have other sizes
            self._num_bytes = 0
            self._free.clear()
        num_bytes = math.prod(shape) * dtype.itemsize
        size = (num_bytes // _ALIGNMENT + 1) * _ALIGNMENT
        if free := self._free[size]:
            begin = free.pop()
        elif self._num_bytes + size > len(self._block):
            self.is_too_small = True
            return None
        else:
            begin, self._num_bytes = self._num_bytes, self._num_bytes + size
        part = self._block[begin : begin + num_bytes]
        self._held.add(number := next(self._numbers))
        # torch holds `part` as long as its storage.
        weakref.finalize(part, self._give_back, number, begin, size).atexit = False
        return torch.from_numpy(part).view(dtype).view(shape)

    def _give_back(self, number: int, begin: int, size: int) -> None:
        self._free[size].append(begin)
        # last: with none held, `empty` takes all as free, in whatever thread this one is
        self._held.discard(number)
