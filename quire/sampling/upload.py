"""Copies small arrays to the device without waiting for it.

A copy from ordinary memory makes the host wait until the device has done all earlier work. So on a
GPU several arrays are put into one pinned buffer, which is then copied asynchronously.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.backends.select import device_of
from quire.kernels.device import Device

Array = npt.NDArray[Any]

_ALIGNMENT = 16
"""Each array begins at a multiple of this many bytes: Triton compiles a kernel anew for another
alignment.
"""
_SMALLEST, _LARGEST = 2**14, 2**20
"""Sizes in bytes of the buffers that are kept for reuse. A larger upload gets a buffer from torch's
allocator.
"""


class Uploader:
    """Owns pinned buffers and uses them in turn. If the copy from the next one is not done yet,
    another buffer is made, so that nothing ever waits. Used by one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._place = device
        self._device = device_of(device)
        self._is_here = not self._device.is_gpu
        self._buffers: deque[_PinnedBuffer] = deque()
        """The least recently used one is first."""

    def upload(self, *arrays: Array) -> list[Tensor]:
        """The arrays as tensors on the device. On the CPU they may share the arrays' memory."""
        if self._is_here:
            return [_as_tensor(values) for values in arrays]
        begins = _begins(arrays)
        sent = torch.empty(begins[-1], dtype=torch.uint8, device=self._place)
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
        """Writes the arrays into one contiguous tensor on a GPU, each at the next multiple of 16
        bytes.
        """
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
            return _PinnedBuffer(size, self._device)
        buffer = None
        if self._buffers and self._buffers[0].copied.query():
            buffer = self._buffers.popleft()
        if buffer is None or len(buffer.memory) < size:
            buffer = _PinnedBuffer(max(1 << (size - 1).bit_length(), _SMALLEST), self._device)
        self._buffers.append(buffer)
        return buffer


class _PinnedBuffer:
    def __init__(self, size: int, device: Device) -> None:
        self.memory = device.pinned((size,), torch.uint8)
        self.array: npt.NDArray[np.uint8] = self.memory.numpy()
        self.copied = device.event()


def _begins(arrays: Sequence[Array]) -> list[int]:
    """Where each array begins, in bytes, and where the last one ends."""
    begins = [0]
    for values in arrays:
        begins.append(begins[-1] + -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return begins


def _as_tensor(values: Array) -> Tensor:
    # numpy calls a one-element field of a record contiguous whatever its strides are; torch wants
    # whole elements.
    if not values.flags.c_contiguous or any(stride % values.itemsize for stride in values.strides):
        values = values.copy()
    return torch.from_numpy(values)
