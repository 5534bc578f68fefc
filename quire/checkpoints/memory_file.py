"""Tensors gathered in a file that lies in memory and has no name: what comes from a trainer, piece
by piece, until weights are replaced by it.

Other processes of this user read it by its path, which ends with this process: nothing is left
behind, however that dies.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quire.checkpoints.checkpoint import Checkpoint, TensorInfo
from quire.checkpoints.files import FileStamp, open_checked
from quire.errors import CapacityError, EngineError
from quire.kernels.formats import FORMATS, PLAIN
from quire.process.granted import available_memory

_AT_ONCE = 2**24
"""Bytes; between two times somebody may have it stopped."""
_SPARE = 2**28
"""Bytes of the host's memory that are left alone."""


class MemoryFile:
    """Grows with every tensor. One thread writes at a time."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise EngineError("tensors are gathered in a file in memory, which only Linux has")
        self._fd = os.memfd_create("quire-weights")
        self._path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        self._end = 0
        self._tensors: dict[str, TensorInfo] = {}

    @property
    def fileno(self) -> int:
        """For a child that fills what was reserved."""
        return self._fd

    def reserve(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        """Room for a tensor, in memory that can be had, right behind the last one; until it is added
        or `cut`.
        """
        num_bytes = math.prod(shape) * FORMATS[dtype].num_bytes
        offset = self._end
        available = available_memory() - _SPARE
        if num_bytes > available:
            raise CapacityError(
                f"{name} takes {num_bytes / 2**20:,.0f} MiB of the host's memory, of which "
                f"{max(available, 0) / 2**20:,.0f} MiB can be had"
            )
        try:
            os.posix_fallocate(self._fd, offset, max(num_bytes, 1))
        except OSError as error:
            raise CapacityError(f"no memory for {name}: {error.strerror or error}") from error
        self._end = offset + num_bytes
        return TensorInfo(name, shape, dtype, self._path, num_bytes, offset)

    def add(self, *infos: TensorInfo) -> None:
        """Their numbers are there."""
        self._tensors |= {info.name: info for info in infos}

    @property
    def end(self) -> int:
        """Where the next tensor goes: what `cut` goes back to."""
        return self._end

    def cut(self, end: int) -> None:
        """Gives back what was reserved from there on."""
        os.ftruncate(self._fd, end)
        self._end = end

    def write(self, name: str, tensor: Tensor) -> None:
        """Adds plain numbers, from any device."""
        info = self.reserve(name, PLAIN[tensor.dtype].name, tuple(tensor.shape))
        plain = tensor.detach().contiguous().cpu().view(-1)
        if plain.numel():
            data = plain.view(torch.uint8).numpy().data
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done : done + _AT_ONCE], info.offset + done)
        self.add(info)

    def copy(self, stored: Checkpoint, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Adds all tensors of files, byte by byte, or nothing; other threads run meanwhile. Ends
        early, with an error, once it is not wanted any more.
        """
        start, infos = self._end, []
        try:
            for own in stored.tensors.values():
                info = self.reserve(own.name, own.dtype, own.shape)
                infos.append(info)
                _copy_bytes(own, stored.stamp_of(own.file), self._fd, info.offset, is_wanted)
        except BaseException:
            self.cut(start)
            raise
        self.add(*infos)

    def checkpoint(self) -> Checkpoint:
        """All that was added until now; nothing may be added as long as it is read."""
        status = os.fstat(self._fd)
        stamp = status.st_ino, status.st_size, status.st_mtime_ns
        return Checkpoint("safetensors", dict(self._tensors), {self._path: stamp})

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def close(self) -> None:
        """Gives the memory back. Does nothing the second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


def _copy_bytes(
    info: TensorInfo, stamp: FileStamp, target: int, offset: int, is_wanted: Callable[[], bool]
) -> None:
    with open_checked(info.file, stamp) as file:
        done = 0
        while done < info.num_bytes:
            if not is_wanted():
                raise EngineError("the update was forgotten while it was read")
            data = os.pread(file.fileno(), min(_AT_ONCE, info.num_bytes - done), info.offset + done)
            if not data:
                raise EngineError(f"{info.file.name} was cut while it was read")
            done += os.pwrite(target, data, offset + done)
