"""How fast it could be: the bytes a workload must read and the products it must compute, at the
rates this very device reads and multiplies at in this very run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from quire.tools.plan.work import Itemsizes, Rates, Work, decode_work, prompt_work, workload_work

__all__ = [
    "Itemsizes",
    "Rates",
    "Work",
    "decode_work",
    "gpu_seconds",
    "measure_rates",
    "prompt_work",
    "timed_by_gpu",
    "workload_work",
]


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The best of several tries each. Takes about 4 GiB of a GPU's memory while it runs."""
    rates = Rates(_read_bandwidth(device), _multiply_rate(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def _read_bandwidth(device: torch.device) -> float:
    on_gpu = device.type == "cuda"
    memory = torch.ones(2**30 if on_gpu else 2**26, dtype=torch.int32, device=device)
    read_all = _gpu_reader(memory) if on_gpu else memory.max
    return memory.numel() * memory.element_size() / _best_seconds(read_all, device)


def _multiply_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2.0 * size**3 / _best_seconds(lambda: torch.mm(left, right, out=out), device)


def _gpu_reader(memory: Tensor) -> Callable[[], object]:
    # needs Triton, which a machine without a GPU may not have
    from quire.tools.bench.gpu.read_kernel import BLOCK, read_blocks

    programs, rest = divmod(memory.numel(), BLOCK)
    assert not rest
    found = torch.empty(programs, dtype=torch.int32, device=memory.device)
    return lambda: read_blocks[(programs,)](memory, found, BLOCK, num_warps=8)


def _best_seconds(run: Callable[[], object], device: torch.device, tries: int = 10) -> float:
    seconds = gpu_seconds if device.type == "cuda" else _cpu_seconds
    return min([seconds(run) for _ in range(tries + 2)][2:])  # the first ones warm up


@contextmanager
def timed_by_gpu() -> Iterator[Callable[[], float]]:
    """Gives what tells the seconds of the work inside by the device's own clock, so that launching
    does not count.
    """
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def seconds() -> float:
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    began.record()
    yield seconds
    ended.record()


def gpu_seconds(run: Callable[[], object]) -> float:
    with timed_by_gpu() as seconds:
        run()
    return seconds()


def _cpu_seconds(run: Callable[[], object]) -> float:
    began = perf_counter()
    run()
    return perf_counter() - began
