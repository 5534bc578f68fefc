"""A group of ranks that gather tensors from each other: NCCL between GPUs, gloo between CPUs.

The group is an object, not torch's global one, so that a program may have several, and its own
beside them. It meets through a file in a folder of its own, and listens on 127.0.0.1 only.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from quire.errors import EngineError
from quire.kernels.device import Device

ADDRESS = "127.0.0.1"


class GroupError(EngineError):
    """The ranks can't work together any more."""


class Group:
    """One rank's way to the others. Every rank must make the same calls in the same order."""

    def __init__(
        self, store: c10d.Store, rank: int, size: int, device: Device, shared: bool, seconds: float
    ):
        """`shared`: several ranks compute on the same GPU, which NCCL refuses, so what they gather
        goes through the host's memory. No gather takes longer than `seconds`.
        """
        self.rank = rank
        self.size = size
        self.seconds = seconds
        self._place = device.torch_device
        self._is_nccl = device.collectives == "nccl" and not shared
        self.name = "NCCL" if self._is_nccl else "gloo"
        self._backend = (
            _nccl(store, rank, size, seconds)
            if self._is_nccl
            else _gloo(store, rank, size, seconds)
        )
        self.gathered_bytes = 0
        """That this rank has received."""
        self.num_gathers = 0

    @classmethod
    def meet(
        cls, folder: Path, rank: int, size: int, device: Device, shared: bool, seconds: float
    ) -> Group:
        """Waits for all ranks to come to a folder."""
        store = c10d.FileStore(str(folder / "ranks"), size)
        store.set_timeout(timedelta(seconds=seconds))
        return cls(store, rank, size, device, shared, seconds)

    @property
    def can_capture(self) -> bool:
        """Whether gathers may be part of a graph."""
        return self._is_nccl

    @property
    def has_met(self) -> bool:
        """Whether ranks, once all have gathered, find each other without the store."""
        return not self._is_nccl

    def all_gather(self, own: Tensor) -> Tensor:
        """[ranks, ...]: what every rank gave, all of the same shape."""
        result = torch.empty(self.size, *own.shape, dtype=own.dtype, device=own.device)
        if own.numel() == 0:
            return result
        self.num_gathers += 1
        self.gathered_bytes += own.nbytes * (self.size - 1)
        is_moved = own.device.type != "cpu" and not self._is_nccl
        # As bytes: a gather changes nothing about them, and not every backend knows every kind of
        # number.
        source = _bytes(own.cpu() if is_moved else own.contiguous())
        target = torch.empty(result.shape, dtype=own.dtype) if is_moved else result
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=self.seconds)
        try:
            self._backend._allgather_base(_bytes(target), source, options).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise GroupError(
                f"rank {self.rank} could not gather from the others: {_first_line(error)}"
            ) from error
        return result.copy_(target) if is_moved else result

    def lowest(self, numbers: Sequence[int]) -> list[int]:
        """Each of some numbers as small as the smallest of any rank."""
        own = torch.tensor(numbers, device=self._place)
        lowest: list[int] = self.all_gather(own).amin(0).tolist()
        return lowest

    def close(self) -> None:
        """Lets go of what GPUs keep for it."""
        if self._is_nccl:
            self.abort()

    def abort(self) -> None:
        """Ends gathers that wait for ranks which will not come."""
        with contextlib.suppress(Exception):  # it is broken anyhow
            self._backend.abort()


def _gloo(store: c10d.Store, rank: int, size: int, seconds: float) -> c10d.Backend:
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=seconds)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=ADDRESS)]
    try:
        return c10d.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise GroupError(
            f"rank {rank} could not reach the other ranks: {_first_line(error)}"
        ) from error


def _nccl(store: c10d.Store, rank: int, size: int, seconds: float) -> c10d.Backend:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    # A gather that takes too long ends with an error; the process stays, to say so.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^\]]*\]\s*", "", lines[0])  # where in gloo's source it was
