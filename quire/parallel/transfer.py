"""A trainer and the engines that it gives its weights to, as a process group: rank 0 broadcasts bytes,
the others receive them. NCCL between GPUs, gloo between CPUs.

They meet through a TCPStore that rank 0 has opened at an address all of them can reach.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Literal

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from quire.backends.select import device_of
from quire.errors import EngineError

TransferBackend = Literal["gloo", "nccl"]


class TransferError(EngineError):
    """The group can't go on: a new one has to be made."""


class TransferGroup:
    """One rank's way to the others. All make the same broadcasts, in the same order."""

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        backend: TransferBackend,
        device: str = "cpu",
        seconds: float = 120.0,
    ) -> None:
        """Waits for all ranks to come; nothing takes longer than `seconds`, nor does a broadcast."""
        self.is_nccl = backend == "nccl"
        self.device = torch.device(device if self.is_nccl else "cpu")
        self._timeout = timedelta(seconds=seconds)
        try:
            store = c10d.PrefixStore(
                "quire-weights",
                c10d.TCPStore(
                    address,
                    port,
                    world_size,
                    is_master=rank == 0,
                    timeout=self._timeout,
                    wait_for_workers=False,
                ),
            )
            store.set_timeout(self._timeout)
            if self.is_nccl:
                device_of(self.device).make_current()
                options = c10d.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                self._group: c10d.Backend = c10d.ProcessGroupNCCL(store, rank, world_size, options)
            else:
                gloo = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                gloo._timeout = self._timeout
                own = own_address(address, port)
                gloo._devices = [c10d.ProcessGroupGloo.create_device(hostname=own)]
                self._group = c10d.ProcessGroupGloo(store, rank, world_size, gloo)
        except RuntimeError as error:  # torch's own errors are, too
            raise TransferError(f"the group did not come together: {_first_line(error)}") from error
        self._store = store

    def broadcast(self, data: Tensor) -> None:
        """Bytes, from rank 0 to all. Their number goes first: a receiver may get fewer than it has
        room for and not notice, or end for getting more.
        """
        size = torch.tensor([data.numel()], dtype=torch.int64, device=self.device)
        self._broadcast(size)
        if int(size) != data.numel():
            raise TransferError(
                f"the transfer broke off: {int(size)} bytes come where {data.numel()} were announced"
            )
        self._broadcast(data)

    def _broadcast(self, data: Tensor) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        try:
            self._group.broadcast([data], options).wait()  # type: ignore[attr-defined]
            if self.is_nccl:
                device_of(self.device).synchronize()
        except RuntimeError as error:
            raise TransferError(f"the transfer broke off: {_first_line(error)}") from error

    def close(self) -> None:
        with contextlib.suppress(Exception):  # it may be broken
            self._group.abort()


def own_address(address: str, port: int) -> str:
    """Of this machine, as the other sees it."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as one:
            one.connect(place)  # of a datagram socket: nothing is sent
            return str(one.getsockname()[0])
    except OSError as error:
        raise TransferError(f"{address} can't be reached: {error.strerror or error}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
