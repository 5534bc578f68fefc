"""A step that was sent off: its results come back by themselves, and are read when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.step import StepResult

Reader = Callable[[Sequence[Tensor]], StepResult]


class Results:
    """Brings tensors to the host on a stream of its own, so that the next step's work need not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _new_stream(device) if device.type == "cuda" else None

    def pending(self, tensors: Sequence[Tensor], read: Reader) -> PendingStep:
        """The step whose results are `tensors`, as `read` reads them once they are on the host."""
        if self._stream is None:
            return PendingStep(list(tensors), read, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return PendingStep(host, read, arrived, keep=tensors)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class PendingStep:
    """One submitted step."""

    def __init__(
        self, host: list[Tensor], read: Reader, arrived: torch.cuda.Event | None, keep: Sequence[Tensor] = ()
    ) -> None:
        self._host = host
        self._read = read
        self._arrived = arrived
        self._keep: Sequence[Tensor] = keep
        """The device's memory that is still being copied from."""
        self._result: StepResult | None = None

    @property
    def is_read(self) -> bool:
        """Whether somebody has waited for it already."""
        return self._result is not None

    def result(self) -> StepResult:
        if self._result is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._result = self._read(self._host)
            self._keep = ()
        return self._result
