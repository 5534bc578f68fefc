"""Loads compiled kernels and launches them, through CUDA's driver API."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache

import torch

from quire.errors import DeviceError

_MOST_DYNAMIC_SHARED, _SHARED_OF_A_BLOCK = 8, 97
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", c_uint), ("padding", c_uint), ("value", c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", c_uint),
    )


@cache
def find_driver() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuLaunchKernelEx.argtypes = [c_void_p] * 4
    except (OSError, AttributeError):  # none, or one that is older than CUDA 11.8
        return None
    return library


def call(name: str, *arguments: object) -> None:
    library = find_driver()
    if library is None:
        raise DeviceError("The CUDA driver's library libcuda.so.1 was not found.")
    status = getattr(library, name)(*arguments)
    if status:
        text = c_char_p()
        library.cuGetErrorString(status, byref(text))
        reason = text.value.decode() if text.value else "unknown"
        raise DeviceError(f"{name} failed with status {status}: {reason}")


def stream_of(device: torch.device) -> int:
    """torch's current stream on a device, as the driver knows it; `torch.cuda.current_stream` takes
    several times as long to make an object of it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


@cache
def most_shared_bytes(device: torch.device) -> int:
    """How much shared memory a block can have."""
    index = torch.cuda.current_device() if device.index is None else device.index
    number, found = c_int(), c_int()
    call("cuDeviceGet", byref(number), c_int(index))
    call("cuDeviceGetAttribute", byref(found), c_int(_SHARED_OF_A_BLOCK), number)
    return found.value


class Module:
    """Kernels in the memory of the current device."""

    def __init__(self, code: bytes, shared_bytes: Mapping[str, int], pdl: bool) -> None:
        """`shared_bytes`: of the kernels, by name, how much dynamic shared memory each takes."""
        torch.cuda.current_stream().synchronize()  # torch has made the device's context
        module = c_void_p()
        call("cuModuleLoadData", byref(module), code)
        self._shared_bytes = shared_bytes
        self._functions = {name: c_void_p() for name in shared_bytes}
        for name, function in self._functions.items():
            call("cuModuleGetFunction", byref(function), module, name.encode())
            size = c_int(shared_bytes[name])
            call("cuFuncSetAttribute", function, c_int(_MOST_DYNAMIC_SHARED), size)
        early = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
        early.value[0] = 1
        self._attributes = (_Attribute * 1)(early)
        self._num_attributes = 1 if pdl else 0

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        argument: ctypes.Structure,
        device: torch.device,
    ) -> None:
        """On torch's current stream; `argument` is copied."""
        config = _Config(
            grid=(c_uint * 3)(*grid, 1),
            block=(c_uint * 3)(threads, 1, 1),
            shared_bytes=self._shared_bytes[name],
            stream=stream_of(device),
            attributes=self._attributes,
            num_attributes=self._num_attributes,
        )
        arguments = (c_void_p * 1)(ctypes.addressof(argument))
        call("cuLaunchKernelEx", byref(config), self._functions[name], arguments, None)
