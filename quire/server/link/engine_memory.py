"""What the engine process takes of memory, for /metrics."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from quire.backends.select import device_of

_PAUSE = 1.0
"""Seconds between two looks: asking a driver takes a while."""


class EngineMemory:
    """Looks from time to time. Names are those of `quire_..._bytes` gauges."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._next = 0.0
        self.last: dict[str, int] = {}
        """What was found the last time."""

    def look(self, now: float) -> dict[str, int]:
        """Bytes by name; nothing where the last look was just now."""
        if now < self._next:
            return {}
        self._next = now + _PAUSE
        found = {"engine_resident_memory": _resident()}
        if (memory := self._device.memory()) is not None:
            found["gpu_memory_used"] = memory.total - memory.free
            found["gpu_memory_total"] = memory.total
            found["gpu_memory_allocated"] = memory.allocated
        self.last = found
        return found


def _resident() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
