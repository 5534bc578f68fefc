"""A trainer's side of a transfer by a process group: `POST /init_weight_transfer_engine` and
`/update_weights` make the engines of a server take part.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from quire.parallel.packs import PACKED_BYTES, packs
from quire.parallel.transfer import TransferBackend, TransferGroup


class WeightSender:
    """Rank 0 of the group. It waits for the engines, so the server has to be asked meanwhile, in
    another thread; the same goes for `send`.
    """

    def __init__(
        self,
        port: int,
        world_size: int,
        *,
        address: str = "127.0.0.1",
        backend: TransferBackend = "gloo",
        device: str = "cpu",
        seconds: float = 120.0,
    ) -> None:
        """`world_size`: this process and what `GET /get_world_size` says."""
        self._group = TransferGroup(address, port, 0, world_size, backend, device, seconds)

    @staticmethod
    def describe(
        tensors: Iterable[tuple[str, Tensor]], packed_bytes: int | None = None
    ) -> dict[str, Any]:
        """The `update_info` with which the server receives these tensors."""
        pairs = list(tensors)
        info: dict[str, Any] = {
            "names": [name for name, _ in pairs],
            "dtype_names": [str(one.dtype).removeprefix("torch.") for _, one in pairs],
            "shapes": [list(one.shape) for _, one in pairs],
        }
        if packed_bytes is not None:
            info |= {"packed": True, "packed_buffer_size_bytes": packed_bytes}
        return info

    def send(self, tensors: Iterable[tuple[str, Tensor]], packed_bytes: int | None = None) -> None:
        """Broadcasts them, in the order that was told; with `packed_bytes` (`PACKED_BYTES` is
        vLLM's) several together.
        """
        own = [_bytes(one).to(self._group.device) for _, one in tensors]
        if packed_bytes is None:
            together = [[one] for one in own]
        else:
            together = [own[few] for few in packs([len(one) for one in own], packed_bytes)]
        for few in together:
            self._group.broadcast(few[0] if len(few) == 1 else torch.cat(few))

    def close(self) -> None:
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


__all__ = ["PACKED_BYTES", "WeightSender"]
