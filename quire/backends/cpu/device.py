"""The CPU as a device: it is the host, so everything is there when a call returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.kernels.device import Device
from quire.process import gc_pauses
from quire.process.granted import available_memory, peak_resident


class CpuDevice(Device):
    """All cores that torch uses, and the memory of the host."""

    kind = "cpu"
    is_gpu = False
    collectives = "gloo"
    dtypes = torch.bfloat16, torch.float32
    has_int8_cache = True
    has_fp8_cache = True

    @classmethod
    def count(cls) -> int:
        return 1

    @classmethod
    def find(cls, name: str) -> CpuDevice:
        return cls(torch.device(name))

    @property
    def name(self) -> str:
        return f"cpu ({torch.get_num_threads()} threads)"

    def fastest_dtype(self, is_quantized: bool) -> torch.dtype:
        """bfloat16 where the hardware multiplies it; with quantised weights always float32, which
        has the same bits on all CPUs.
        """
        return torch.bfloat16 if _multiplies_bfloat16() and not is_quantized else torch.float32

    def initialise(self) -> None:
        """It is ready."""

    def make_current(self) -> None:
        """It is what torch uses where nothing is said."""

    def synchronize(self) -> None:
        """Nothing is in flight."""

    def free_memory(self) -> int:
        return available_memory()

    def memory(self) -> None:
        return None

    def peak_memory(self, compute: Callable[[], object]) -> int | None:
        """Of the whole process, as the system sees it."""
        try:
            # resets VmHWM, the peak of resident memory
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return None
        start = peak_resident()
        compute()
        end = peak_resident()
        return None if start is None or end is None else end - start

    def return_freed_memory(self) -> None:
        gc_pauses.return_freed_memory()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Ordinary memory: nobody else reads it."""
        return torch.empty(shape, dtype=dtype)

    def event(self) -> HostEvent:
        return HostEvent()

    def copy_stream(self) -> None:
        return None

    def graph_pool(self) -> None:
        """`Kernels.record` does what graphs do elsewhere."""
        return


class HostEvent:
    """The host is past all that it has done."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def _multiplies_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return False
    return " amx_bf16" in flags or " avx512_bf16" in flags
