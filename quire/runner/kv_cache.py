"""The memory behind the block pool: keys and values of every layer, on the device and on the host tier."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire.kernels.ops import LayerCache
from quire.models.spec import ModelSpec
from quire.step import BlockCopy


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """What one block costs: keys and values of `block_size` tokens in every layer."""
    return 2 * spec.num_layers * spec.kv_size * block_size * dtype.itemsize


class KVCache:
    """[layers, 2, num_blocks, kv_heads, block_size, head_dim], and the same with host slots for the tier.

    Memory is asked for but not touched here, so an operating system that commits pages on first use gives
    a large cache for free until it is needed.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (spec.num_kv_heads, block_size, spec.head_dim)
        self._device = torch.empty(spec.num_layers, 2, num_blocks, *shape, dtype=dtype, device=device)
        self._host = torch.empty(
            spec.num_layers, 2, num_host_blocks, *shape, dtype=dtype, pin_memory=device.type == "cuda"
        )
        self.layers = [LayerCache(keys, values) for keys, values in self._device]

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Carries out a step's copies in their order."""
        for copy in copies:
            source, target = self._sides(copy)
            target[:, :, copy.target].copy_(source[:, :, copy.source])

    def release(self) -> None:
        """Gives the memory back; the cache can't be used afterwards."""
        self.layers = []
        self._device = self._host = torch.empty(0)

    def _sides(self, copy: BlockCopy) -> tuple[Tensor, Tensor]:
        if copy.kind == "device_to_host":
            return self._device, self._host
        if copy.kind == "host_to_device":
            return self._host, self._device
        return self._device, self._device
