"""A device of another kind, to run on where there is no GPU: it computes as the CPU does, but lets
the host see nothing before it has waited for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from quire.backends import select
from quire.backends.cpu.device import CpuDevice
from quire.kernels.device import Device, DeviceMemory

_GARBAGE = 0x5A


class LateDevice(Device):
    """Its tensors are torch's CPU tensors; everything else is as on a GPU."""

    kind = "cpu"
    is_gpu = True
    collectives = "gloo"
    dtypes = torch.bfloat16, torch.float32
    has_int8_cache = False
    has_fp8_cache = False
    name = "a late device"

    used: ClassVar[Counter[str]] = Counter()
    """How often something was asked for that a CPU has no need of."""

    @classmethod
    def count(cls) -> int:
        return 1

    @classmethod
    def find(cls, name: str) -> LateDevice:
        return cls(torch.device(name))

    def fastest_dtype(self, is_quantized: bool) -> torch.dtype:
        return torch.float32

    def initialise(self) -> None:
        self.used["initialise"] += 1

    def make_current(self) -> None:
        self.used["make_current"] += 1

    def synchronize(self) -> None:
        self.used["synchronize"] += 1

    def free_memory(self) -> int:
        return 2**28

    def memory(self) -> DeviceMemory:
        return DeviceMemory(free=2**28, total=2**29, allocated=2**20)

    def peak_memory(self, compute: Callable[[], object]) -> int:
        self.used["peak_memory"] += 1
        compute()
        return 2**20

    def return_freed_memory(self) -> None:
        self.used["return_freed_memory"] += 1

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.used["pinned"] += 1
        found = torch.empty(shape, dtype=dtype)
        found.view(-1).view(torch.uint8).fill_(_GARBAGE)  # nobody may count on what is there
        return found

    def event(self) -> LateEvent:
        return LateEvent()

    def copy_stream(self) -> LateCopyStream:
        return LateCopyStream(self)

    def graph_pool(self) -> LateGraphPool:
        return LateGraphPool(self)


class LateEvent:
    """Comes when it is waited for, or was asked after a few times."""

    def __init__(self) -> None:
        self._asked_until = 0
        self.then: list[Callable[[], object]] = []
        """What the device does until then."""

    def record(self) -> None:
        self._asked_until = 3

    def query(self) -> bool:
        self._asked_until -= 1
        if self._asked_until > 0:
            return False
        self.synchronize()
        return True

    @torch.inference_mode()
    def synchronize(self) -> None:
        self._asked_until = 0
        for one in self.then:
            one()
        self.then.clear()


class LateCopyStream:
    """Until the event is waited for, there is garbage where the copies will be."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], LateEvent]:
        self._device.used["to_host"] += 1
        copies = [self._device.pinned(tensor.shape, tensor.dtype) for tensor in tensors]
        arrived = self._device.event()
        for copy, source in zip(copies, [tensor.clone() for tensor in tensors], strict=True):
            arrived.then.append(lambda copy=copy, source=source: copy.copy_(source))
        arrived.record()
        return copies, arrived


class LateGraphPool:
    """A graph is the function itself, which reads and writes the same memory every time."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def reset(self) -> None:
        pass

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self._device.used["capture"] += 1

        def replay() -> None:
            self._device.used["replay"] += 1
            compute()

        return replay


def use_late_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on it is what CPU tensors are on."""
    LateDevice.used.clear()
    assert select.DEVICES["cpu"] is CpuDevice
    monkeypatch.setitem(select.DEVICES, "cpu", LateDevice)
