"""Which kernels a device and dtype get."""

from __future__ import annotations

import logging

import torch

from quire.errors import DeviceError
from quire.kernels.cpu.kernels import CpuKernels
from quire.kernels.ops import Kernels
from quire.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)


def select_kernels(device: torch.device, dtype: torch.dtype, name: str = "auto") -> Kernels:
    """The fastest kernels there are for `device` and `dtype`, or those called `name` ("reference", "cpu").

    "auto" falls back to the reference kernels with one warning where the CPU kernels can't be built; asked for
    by name, a backend that can't run here is a DeviceError.
    """
    if name not in ("auto", "reference", "cpu"):
        raise DeviceError(f'There are no kernels called "{name}"; choose auto, reference or cpu.')
    fits_cpu = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    if name == "cpu" and not fits_cpu:
        raise DeviceError(f"The cpu kernels compute on the CPU in float32 or bfloat16, not on {device} in {dtype}.")
    if name == "reference" or not fits_cpu:
        return ReferenceKernels()
    try:
        return CpuKernels()
    except DeviceError as error:
        if name == "cpu":
            raise
        logger.warning("Running on the reference kernels, which are several times slower. %s", error)
        return ReferenceKernels()
