"""The way of small arrays to the device, without waiting for it.

A copy from ordinary memory makes the host wait until the device has done everything before it. So on a GPU the arrays
are put into pinned memory first, and from there several of them travel as one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

_ALIGNMENT = 16
"""Bytes; kernels are compiled anew for arrays that begin elsewhere."""
_SMALLEST, _LARGEST = 2**14, 2**20
"""Bytes of the buffers that are kept. What needs more gets memory that torch lends and takes back."""


class Uploader:
    """Owns pinned buffers and uses them in turn. One whose copy is not done yet is left alone and another one taken, so
    there are soon as many as copies are ever under way, and nobody waits. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: deque[_PinnedBuffer] = deque()
        """The one that was used longest ago is first."""

    def upload(self, *arrays: Array) -> list[Tensor]:
        """The arrays on the device. On the CPU they may share their memory."""
        if self._device.type != "cuda":
            return [_as_tensor(values) for values in arrays]
        begins = _begins(arrays)
        sent = torch.empty(begins[-1], dtype=torch.uint8, device=self._device)
        self._copy(arrays, begins, sent)
        views: dict[np.dtype[Any], Tensor] = {}
        tensors = []
        for values, begin in zip(arrays, begins, strict=False):
            if values.dtype not in views:
                views[values.dtype] = sent.view(torch.from_numpy(np.empty(0, values.dtype)).dtype)
            first = begin // values.itemsize
            flat = views[values.dtype][first : first + values.size]
            tensors.append(flat if values.ndim == 1 else flat.view(values.shape))
        return tensors

    def upload_into(self, target: Tensor, *arrays: Array) -> None:
        """Puts the arrays into one tensor in a single piece on a GPU, each from the next multiple of 16 bytes on."""
        begins = _begins(arrays)
        self._copy(arrays, begins, target.view(torch.uint8)[: begins[-1]])

    def _copy(self, arrays: Sequence[Array], begins: Sequence[int], sent: Tensor) -> None:
        buffer = self._take_buffer(begins[-1])
        for values, begin in zip(arrays, begins, strict=False):
            buffer.array[begin : begin + values.nbytes].view(values.dtype)[:] = values.reshape(-1)
        sent.copy_(buffer.memory[: begins[-1]], non_blocking=True)
        buffer.copied.record()

    def _take_buffer(self, size: int) -> _PinnedBuffer:
        if size > _LARGEST:
            return _PinnedBuffer(size)
        buffer = None
        if self._buffers and self._buffers[0].is_free():
            buffer = self._buffers.popleft()
        if buffer is None or len(buffer.memory) < size:
            buffer = _PinnedBuffer(max(1 << (size - 1).bit_length(), _SMALLEST))
        self._buffers.append(buffer)
        return buffer


class _PinnedBuffer:
    def __init__(self, size: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.array: npt.NDArray[np.uint8] = self.memory.numpy()
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def is_free(self) -> bool:
        return bool(self.copied.query())  # type: ignore[no-untyped-call]


def _begins(arrays: Sequence[Array]) -> list[int]:
    """Where each array begins, in bytes, and where the last one ends."""
    begins = [0]
    for values in arrays:
        begins.append(begins[-1] + -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return begins


def _as_tensor(values: Array) -> Tensor:
    # A field of a single record counts as being in one piece, whatever its strides are; torch wants whole elements.
    if not values.flags.c_contiguous or any(stride % values.itemsize for stride in values.strides):
        values = values.copy()
    return torch.from_numpy(values)
