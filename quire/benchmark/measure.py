"""Time and memory of a piece of work, with the spread of its repeats."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from quire.runner.device import return_freed_memory

Clock = Callable[[], float]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Spread:
    """What repeats of one measurement gave, as they came."""

    values: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def per(self, amount: float, unit: str) -> Spread:
        """`amount` over each value: tokens over seconds gives tokens per second."""
        return Spread(tuple(amount / value for value in self.values), unit)


def timed(work: Callable[[], _T], device: torch.device, clock: Clock = time.perf_counter) -> tuple[float, _T]:
    """How long `work` takes, what it started on the device included, and what it returns."""
    synchronize(device)
    start = clock()
    result = work()
    synchronize(device)
    return clock() - start, result


def warm_up(work: Callable[[], object], device: torch.device) -> None:
    """Runs `work` once, unmeasured, on a device whose kernels are compiled when they first meet a shape."""
    if device.type == "cuda":
        work()


def synchronize(device: torch.device) -> None:
    """Waits for the device; a CPU has nothing in flight."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(work: Callable[[], object], device: torch.device) -> int | None:
    """The most memory `work` held beyond what was held before it, in bytes; None where nothing tells."""
    gc.collect()
    return_freed_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of resident memory
    except OSError:
        return None
    start = _status_bytes("VmHWM")
    work()
    end = _status_bytes("VmHWM")
    return None if start is None or end is None else end - start


def load_average() -> str:
    """How busy the machine is: figures from a busy machine say little."""
    try:
        return f"{os.getloadavg()[0]:.1f}"
    except OSError:
        return "unknown"


def _status_bytes(field: str) -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None
