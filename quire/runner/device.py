"""Which device and number format to compute with, and how much memory there is."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from quire.checkpoints.checkpoint import UNSAID, StoredCache
from quire.errors import DeviceError
from quire.process import gc_pauses
from quire.process.granted import available_memory, granted_cores

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8_CACHE_FROM = (8, 9)  # the compute capability of Ada


def pick_device(name: str) -> torch.device:
    """`auto` takes a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise DeviceError(f"device {name}: torch sees no GPU here (it is {build}). Use --device cpu.")
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise DeviceError(f"device {name}: there are {torch.cuda.device_count()} GPUs, numbered from 0.")
    return torch.device("cuda", index)


def pick_dtype(name: str, device: torch.device, is_quantized: bool = False) -> torch.dtype:
    """`auto` takes what is fastest: bfloat16 where the hardware multiplies it, float32 otherwise; with quantised
    weights on a CPU always float32, which has the same bits on all of them."""
    if name != "auto":
        dtype = _DTYPES[name]
        if dtype is torch.float16 and device.type == "cpu":
            raise DeviceError("dtype float16 is not supported on the CPU. Use bfloat16 or float32.")
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if _cpu_multiplies_bfloat16() and not is_quantized else torch.float32


def pick_cache_dtype(name: str, dtype: torch.dtype, device: torch.device, stored: StoredCache = UNSAID) -> torch.dtype:
    """How keys and values are stored. `auto`: in FP8 where the checkpoint says so and a GPU has it, where it is quick;
    else as the model computes them."""
    is_gpu = device.type == "cuda"
    if name == "int8" and is_gpu:
        raise DeviceError("kv_cache_dtype int8 is for the CPU. Use fp8 or auto on a GPU.")
    if name == "fp8" or (name == "auto" and stored.format == "fp8" and is_gpu):
        stored.check_fp8()
        if not is_gpu or torch.cuda.get_device_capability(device) >= FP8_CACHE_FROM:
            return torch.float8_e4m3fn
        if name == "fp8":
            raise DeviceError("kv_cache_dtype fp8 is for CPUs and for NVIDIA GPUs from Ada and Hopper on. Use auto.")
    return torch.int8 if name == "int8" else dtype


def wake(device: torch.device) -> None:
    """Initialises a GPU, which takes a fraction of a second during which other Python threads can run."""
    if device.type == "cuda":
        torch.empty(1, device=device)


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """For the start-up message."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)"
    return f"{name}, {str(dtype).removeprefix('torch.')}"


def use_own_cores() -> None:
    """Sets torch to one thread per core that this process really has: torch counts the cores it may run on, but not how
    much of their time a container is granted. A number set by the user (OMP_NUM_THREADS) stays."""
    cores = granted_cores(Path("/"))
    if cores < torch.get_num_threads() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def return_freed_memory() -> None:
    """Gives freed memory back to the operating system; without this, allocators keep it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    gc_pauses.return_freed_memory()


def _cpu_multiplies_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return False
    return " amx_bf16" in flags or " avx512_bf16" in flags
