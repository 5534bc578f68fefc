"""Which device and number format to compute with, and how much memory there is."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from quire.errors import DeviceError
from quire.process import gc_pauses

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def pick_cache_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """How keys and values are stored; `auto`: as the model computes them."""
    if name == "int8" and device.type != "cpu":
        raise DeviceError("kv_cache_dtype int8 is for the CPU. Use fp8 or auto on a GPU.")
    if name == "fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise DeviceError("kv_cache_dtype fp8 is for NVIDIA GPUs from Ada and Hopper on. Use int8 on a CPU, else auto.")
    return {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(name, dtype)


def wake(device: torch.device) -> None:
    """Makes a GPU ready for use, which takes a fraction of a second and none of Python's time."""
    if device.type == "cuda":
        torch.empty(1, device=device)


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """For the start-up message."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)"
    return f"{name}, {str(dtype).removeprefix('torch.')}"


def use_own_cores() -> None:
    """One thread for each core this process really has: torch counts those it may run on, but not what a container's
    share of their time amounts to. A number that the user has set stays."""
    cores = _cgroup_cores(Path("/"))
    if cores < torch.get_num_threads() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_system_available(), _cgroup_available())


def return_freed_memory() -> None:
    """Hands what was freed back to the operating system: allocators keep it for themselves otherwise."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    gc_pauses.return_freed_memory()


def _cpu_multiplies_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return False
    return " amx_bf16" in flags or " avx512_bf16" in flags


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # No /proc (macOS): half of what is installed is a fair guess at what can be had.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_cores(root: Path) -> int:
    """Whole cores in the time that control groups grant, one at least; a very large number where they don't say. With
    more threads than that, all of them would be stopped for a while again and again."""
    cores = 2.0**31
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (
            int((root / "sys/fs/cgroup/cpu" / name).read_text()) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        cores = quota / period if quota > 0 else cores
    with contextlib.suppress(OSError, StopIteration):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        path = next(line for line in lines if line.startswith("0::/")).removeprefix("0::/")
        base = root / "sys/fs/cgroup"
        for folder in (base / path, *(base / path).parents):
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                share = (folder / "cpu.max").read_text().split()
                cores = min(cores, int(share[0]) / int(share[1]))
            if folder == base:
                break
    return max(1, int(cores))


def _cgroup_available() -> int:
    """What a container's limit leaves; a very large number where there is none."""
    unlimited = 2**63
    folder = Path("/sys/fs/cgroup")
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (folder / limit_file).read_text().strip()
            used = (folder / used_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and used.isdigit():
            return max(int(limit) - int(used), 0)
    return unlimited
