"""The way of small arrays to the device, without waiting for it.

A copy from ordinary memory makes the host wait until the device has done everything before it. So on a GPU an array
is copied to pinned memory first. torch lends that memory and takes it back for others only when the copy out of it
is done, so nobody here has to keep it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes; kernels may be compiled anew for arrays that begin elsewhere."""


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device. On the CPU it may share the array's memory."""
    return upload_all(device, values)[0]


def upload_all(device: torch.device, *arrays: npt.NDArray[Any]) -> list[Tensor]:
    """Several arrays on the device, which travel as one."""
    tensors = [_as_tensor(values) for values in arrays]
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    sizes = [tensor.nbytes for tensor in tensors]
    starts = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for tensor, start, size in zip(tensors, starts, sizes, strict=False):
        packed[start : start + size].view(tensor.dtype).copy_(tensor.view(-1))
    sent = packed.to(device, non_blocking=True)
    return [
        sent[start : start + size].view(tensor.dtype).view(tensor.shape)
        for tensor, start, size in zip(tensors, starts, sizes, strict=False)
    ]


def _as_tensor(values: npt.NDArray[Any]) -> Tensor:
    # A field of a single record counts as being in one piece, whatever its strides are; torch wants whole elements.
    if not values.flags.c_contiguous or any(stride % values.itemsize for stride in values.strides):
        values = values.copy()
    return torch.from_numpy(values)
