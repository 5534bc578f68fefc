"""The process that receives a trainer's weights: `python -m quire.server.link.weight_receiver`, started
by the engine's process, and that process's side of it.

A process of its own, since a broadcast of another size than was announced, or a connection that
breaks, may end a process that takes part in it. What it receives goes into a file in memory that
the engine's process has made.
"""

from __future__ import annotations

import mmap
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch

from quire.checkpoints.memory_file import MemoryFile
from quire.errors import EngineError
from quire.process.child import Child, ParentLines, end_with_parent, ignore_terminal_signals

_START_SECONDS = 60.0
"""For the process to start, beside what the group may take to come together."""


@dataclass(frozen=True)
class Place:
    """Where and as whom an engine takes part."""

    address: str
    port: int
    rank: int
    world_size: int
    backend: str
    device: str
    seconds: float


class WeightReceiver:
    """The engine's side. Every method waits; `close` may be called meanwhile, from another thread."""

    def __init__(self, place: Place) -> None:
        """Returns when the group has come together."""
        self._seconds = place.seconds
        self._child = Child("quire.server.link.weight_receiver")
        self.is_broken = False
        try:
            self._ask({"join": vars(place)}, place.seconds + _START_SECONDS)
        except BaseException:
            self.close()
            raise

    def receive(self, file: MemoryFile, runs: list[tuple[int, int]]) -> None:
        """One broadcast for each run of bytes: where it begins in the file, and its size."""
        path = f"/proc/{os.getpid()}/fd/{file.fileno}"
        self._ask(
            {"receive": runs, "file": path},
            len(runs) * self._seconds + _START_SECONDS,
        )

    def _ask(self, message: dict[str, Any], seconds: float) -> None:
        try:
            answer = self._child.ask(message, seconds)
        except (OSError, ValueError) as error:
            self.is_broken = True
            how = self._child.wait(1.0)
            why = f"{type(error).__name__}" if how is None else f"the process that receives {how}"
            self.close()
            raise EngineError(
                f"the transfer broke off: {why}; the trainer may have left, or sent other sizes than it announced"
            ) from error
        if "error" in answer:
            self.is_broken = True
            self.close()
            raise EngineError(answer["error"])

    def close(self) -> None:
        """Ends the process, and with it this engine's part of the group."""
        self._child.kill()


def main() -> int:
    """The process: joins, then receives as it is told, until its parent is gone."""
    ignore_terminal_signals()
    end_with_parent()
    from quire.parallel.transfer import TransferGroup

    parent = ParentLines()
    group: TransferGroup | None = None
    for message in parent:
        try:
            if "join" in message:
                group = TransferGroup(**message["join"])
            else:
                assert group is not None
                for start, size in message["receive"]:
                    _receive(group, message["file"], start, size)
        except Exception as error:
            parent.answer({"error": str(error)})
        else:
            parent.answer({})
    return 0


def _receive(group: Any, path: str, start: int, size: int) -> None:
    """Straight into the file, where the group takes memory of the host."""
    begin = start - start % mmap.ALLOCATIONGRANULARITY
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), start - begin + size, offset=begin)
    target = torch.frombuffer(memory, dtype=torch.uint8, offset=start - begin, count=size)
    if group.is_nccl:
        here = torch.empty(size, dtype=torch.uint8, device=group.device)
        group.broadcast(here)
        target.copy_(here)
    else:
        group.broadcast(target)


if __name__ == "__main__":
    sys.exit(main())
