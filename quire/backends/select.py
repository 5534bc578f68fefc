"""Which devices there are, and which kernels a device and dtype get."""

from __future__ import annotations

import logging

import torch

from quire.backends.cpu.device import CpuDevice
from quire.backends.cpu.kernels import CpuKernels
from quire.backends.triton.device import CudaDevice
from quire.errors import DeviceError
from quire.kernels.device import Device
from quire.kernels.ops import Kernels
from quire.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)

DEVICES: dict[str, type[Device]] = {device.kind: device for device in (CudaDevice, CpuDevice)}
"""By the word that users and torch have for it. `auto` takes the first of which there is one."""


def pick_device(name: str) -> Device:
    """The device that a user calls auto (a GPU if there is one), cpu, cuda or cuda:N."""
    found = device_class(name)
    return found.find(found.kind if name == "auto" else name)


def device_class(name: str) -> type[Device]:
    """The kind of device that such a word is for; nothing is asked of the device itself."""
    if name == "auto":
        return next(device for device in DEVICES.values() if device.count())
    return _class_for(torch.device(name))


def device_of(place: torch.device) -> Device:
    """The device that the tensors of a place are on."""
    return _class_for(place)(place)


def _class_for(place: torch.device) -> type[Device]:
    if place.type not in DEVICES:
        raise DeviceError(f"There is no device called {place}; choose one of {', '.join(DEVICES)}.")
    return DEVICES[place.type]


def select_kernels(device: torch.device, dtype: torch.dtype, name: str = "auto") -> Kernels:
    """The fastest kernels there are for `device` and `dtype`, or those called `name` ("reference",
    "cpu", "triton").

    "auto" falls back to the reference kernels with one warning where the others can't be had; asked
    for by name, a backend that can't run here is a DeviceError.
    """
    if name not in ("auto", "reference", "cpu", "triton"):
        raise DeviceError(
            f'There are no kernels called "{name}"; choose auto, reference, cpu or triton.'
        )
    if name == "triton" or (name == "auto" and device.type == CudaDevice.kind):
        return _triton_kernels(device, dtype, name)
    fits_cpu = device.type == CpuDevice.kind and dtype in (torch.float32, torch.bfloat16)
    if name == "cpu" and not fits_cpu:
        raise DeviceError(
            f"The cpu kernels compute on the CPU in float32 or bfloat16, not on {device} in {dtype}."
        )
    if name == "reference" or not fits_cpu:
        return ReferenceKernels()
    try:
        return CpuKernels()
    except DeviceError as error:
        if name == "cpu":
            raise
        logger.warning(
            "Running on the reference kernels, which are several times slower. %s", error
        )
        return ReferenceKernels()


def _triton_kernels(device: torch.device, dtype: torch.dtype, name: str) -> Kernels:
    problem = f"they run on NVIDIA GPUs, not on {device}"
    if device.type == CudaDevice.kind:
        try:
            # triton comes with torch's CUDA builds only
            from quire.backends.triton.kernels import TritonKernels
        except ImportError as error:
            problem = f"{error} (pip install triton)"
        else:
            return TritonKernels(dtype)
    if name == "triton":
        raise DeviceError(f"The triton kernels can't be used: {problem}.")
    logger.warning("Running on the reference kernels, which are many times slower: %s.", problem)
    return ReferenceKernels()
