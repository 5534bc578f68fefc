"""Time and memory of a piece of work."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from quire.backends.select import device_of
from quire.frontend.progress import BenchmarkBar
from quire.tools.bench.spread import Spread

Clock = Callable[[], float]
_T = TypeVar("_T")


def timed(
    work: Callable[[], _T], device: torch.device, clock: Clock = time.perf_counter
) -> tuple[float, _T]:
    """How long `work` takes, what it started on the device included, and what it returns."""
    synchronize(device)
    start = clock()
    result = work()
    synchronize(device)
    return clock() - start, result


def in_turn(
    ways: Mapping[str, Callable[[], _T]],
    repeats: int,
    device: torch.device,
    clock: Clock = time.perf_counter,
    bar: BenchmarkBar | None = None,
) -> dict[str, tuple[Spread, list[_T]]]:
    """Seconds and results of different ways to do something, one after the other in each of several
    passes, so that a busy moment hits all alike.
    """
    found: dict[str, list[tuple[float, _T]]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name, way in ways.items():
            if bar is not None:
                bar.begin(f"{name}, pass {repeat + 1}")
            found[name].append(timed(way, device, clock))
            if bar is not None:
                bar.advance()
    return {
        name: (Spread.of(s for s, _ in each), [result for _, result in each])
        for name, each in found.items()
    }


def warm_up(work: Callable[[], object], device: torch.device) -> None:
    """Runs `work` once, unmeasured, on a device whose kernels are compiled when they first meet a
    shape.
    """
    if device_of(device).is_gpu:
        work()


def synchronize(device: torch.device) -> None:
    """Waits for the device; a CPU has nothing in flight."""
    device_of(device).synchronize()


def peak_memory(work: Callable[[], object], device: torch.device) -> int | None:
    """The most memory `work` held beyond what was held before it, in bytes; None where nothing
    tells.
    """
    gc.collect()
    owner = device_of(device)
    owner.return_freed_memory()
    return owner.peak_memory(work)
