"""The contract of a device: where tensors lie, what can be had there, and what goes on there beside
the host.

`cpu/device.py` and `triton/device.py` have one each; `select.py` finds the one for a user's word or
a tensor. All that the rest of Quire does with streams, events, pinned memory, graphs and readings
of memory is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the work of a device, which goes on beside the host's."""

    def record(self) -> None:
        """Puts it behind all that the device was told so far."""

    def query(self) -> bool:
        """Whether the device is past it; true as well before it was recorded."""

    def synchronize(self) -> None:
        """Waits until the device is past it."""


class CopyStream(Protocol):
    """Copies results to the host while the device goes on with the next step."""

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        """Copies that begin when all that was started so far is computed; they may be read once the
        event has come. The tensors must live until then.
        """


class GraphPool(Protocol):
    """Makes graphs that share one memory: of all of them, one runs at a time."""

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Notes what `compute` would do on the device, without doing it; the returned function does
        all of it in one launch, on the same memory.
        """

    def reset(self) -> None:
        """Begins anew with other memory, when all its graphs are gone."""


class DeviceMemory(NamedTuple):
    """A reading, in bytes."""

    free: int
    total: int
    allocated: int
    """By tensors of this process."""


class Device(ABC):
    """One device. It has no state but its place, so that objects for the same place are
    interchangeable: streams and the like belong to who asked for them.
    """

    kind: ClassVar[str]
    """As users and torch call such devices: cpu, cuda."""
    is_gpu: ClassVar[bool]
    """Computes beside the host, out of memory of its own: calls return before their work is done,
    to read a result is to wait, and a step fails if memory is missing. Limits are larger by
    default.
    """
    collectives: ClassVar[Literal["nccl", "gloo"]]
    """What several of them gather tensors with; with gloo through the memory of the host."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        """For torch: where tensors are made."""

    def __str__(self) -> str:
        """As users call it: cpu, cuda:0."""
        return str(self.torch_device)

    # Which there are.

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """How many of this kind this process sees."""

    @classmethod
    @abstractmethod
    def find(cls, name: str) -> Device:
        """The one that a user calls cpu, cuda or cuda:1; a DeviceError says why it can't be had."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is, for people."""

    # What it computes with.

    @property
    @abstractmethod
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """That models can be computed in."""

    @abstractmethod
    def fastest_dtype(self, is_quantized: bool) -> torch.dtype:
        """The default, for weights that are quantised or not."""

    @property
    @abstractmethod
    def has_int8_cache(self) -> bool:
        """Whether keys and values can be kept in int8."""

    @property
    @abstractmethod
    def has_fp8_cache(self) -> bool:
        """Whether keys and values can be kept in FP8."""

    # Its life in this process.

    @abstractmethod
    def initialise(self) -> None:
        """Gets it ready, which takes a fraction of a second on a GPU, during which other Python
        threads can run.
        """

    @abstractmethod
    def make_current(self) -> None:
        """Has this thread use it where nothing else is said, as libraries do that know of no other."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until all that was started is computed."""

    # Memory.

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes that can be had now."""

    @abstractmethod
    def memory(self) -> DeviceMemory | None:
        """A reading of memory of its own; None if it has none but the host's."""

    @abstractmethod
    def peak_memory(self, compute: Callable[[], object]) -> int | None:
        """The most bytes that `compute` held beyond what was held before; None where nothing tells."""

    @abstractmethod
    def return_freed_memory(self) -> None:
        """Gives freed memory back, the host's included; allocators keep it otherwise."""

    # Beside the host.

    @abstractmethod
    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New memory of the host, not written yet, which the device reads and writes without the
        host's help.
        """

    @abstractmethod
    def event(self) -> Event:
        """A new event."""

    @abstractmethod
    def copy_stream(self) -> CopyStream | None:
        """None where results are there when a call returns, and the next step may compute in their
        memory.
        """

    @abstractmethod
    def graph_pool(self) -> GraphPool | None:
        """None where there are no graphs."""
