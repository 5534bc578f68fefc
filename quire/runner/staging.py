"""The way of a step's numbers to the device: all of them in one copy from pinned memory, which waits for nobody."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]


class StagingRing:
    """Pinned buffers, used in turn. A buffer is written again only when the copy out of it is done, which with
    more buffers than steps in flight has always happened long before."""

    def __init__(self, device: torch.device, depth: int = 4) -> None:
        self._device = device
        self._slots = [_Slot() for _ in range(depth)] if device.type == "cuda" else []
        self._next = 0

    def upload(self, arrays: Sequence[Int32Array], target: Tensor | None = None) -> list[Tensor]:
        """The arrays on the device, flattened, each after the one before: in `target`, or in memory of their own."""
        if not self._slots:
            return [torch.from_numpy(np.ascontiguousarray(values).reshape(-1)) for values in arrays]
        # Every part begins at a multiple of 16 bytes: kernels are compiled anew for less.
        begins = [0]
        for values in arrays:
            begins.append(begins[-1] + -(-values.size // 4) * 4)
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        staged = slot.fill(arrays, begins)
        if target is None:
            sent = torch.empty(len(staged), dtype=torch.int32, device=self._device)
        else:
            sent = target[: len(staged)]
        sent.copy_(staged, non_blocking=True)
        slot.copied.record()
        return [sent[begin : begin + values.size] for begin, values in zip(begins, arrays, strict=False)]


class _Slot:
    def __init__(self) -> None:
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._buffer = torch.empty(0, dtype=torch.int32)

    def fill(self, arrays: Sequence[Int32Array], begins: Sequence[int]) -> Tensor:
        """Puts the arrays where they begin; one more entry says where the last one ends."""
        self.copied.synchronize()
        size = begins[-1]
        if len(self._buffer) < size:
            self._buffer = torch.empty(max(1 << (size - 1).bit_length(), 4096), dtype=torch.int32, pin_memory=True)
        staged = self._buffer.numpy()
        for begin, values in zip(begins, arrays, strict=False):
            staged[begin : begin + values.size] = values.reshape(-1)
        return self._buffer[:size]
