"""Which number formats an engine computes in and keeps keys and values in: what was asked for and
what a device has.
"""

from __future__ import annotations

import torch

from quire.checkpoints.checkpoint import UNSAID, StoredCache
from quire.errors import DeviceError
from quire.kernels.device import Device

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_dtype(name: str, device: Device, is_quantized: bool = False) -> torch.dtype:
    """`auto` takes what is fastest on the device, for weights that are quantised or not."""
    if name == "auto":
        return device.fastest_dtype(is_quantized)
    dtype = _DTYPES[name]
    if dtype not in device.dtypes:
        known = " or ".join(str(one).removeprefix("torch.") for one in device.dtypes)
        raise DeviceError(
            f"dtype {name} is not supported on the {device.kind.upper()}. Use {known}."
        )
    return dtype


def pick_cache_dtype(
    name: str, dtype: torch.dtype, device: Device, stored: StoredCache = UNSAID
) -> torch.dtype:
    """How keys and values are stored. `auto`: in FP8 where the checkpoint says so and a GPU has it,
    where it is quick; else as the model computes them.
    """
    if name == "int8" and not device.has_int8_cache:
        raise DeviceError("kv_cache_dtype int8 is for the CPU. Use fp8 or auto on a GPU.")
    if name == "fp8" or (name == "auto" and stored.format == "fp8" and device.is_gpu):
        stored.check_fp8()
        if device.has_fp8_cache:
            return torch.float8_e4m3fn
        if name == "fp8":
            raise DeviceError(
                "kv_cache_dtype fp8 is for CPUs and for NVIDIA GPUs from Ada and Hopper on. Use auto."
            )
    return torch.int8 if name == "int8" else dtype
