"""The memory behind the block pool: keys and values of every layer, on the device and on the host tier."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quire.kernels.ops import LayerCache
from quire.models.spec import ModelSpec
from quire.step import BlockCopy


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """What one block costs: keys and values of `block_size` tokens in every layer."""
    heads = spec.heads
    return 2 * spec.num_layers * heads.num_kv_heads * heads.head_dim * block_size * dtype.itemsize


class KVCache:
    """[layers, 2, num_blocks, kv_heads, block_size, head_dim], and for the tier [slots, layers, 2, ...]: a block on the
    host lies in one piece, so that it travels in one copy, from pinned memory and without anybody waiting.

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
        shape = (spec.heads.num_kv_heads, block_size, spec.heads.head_dim)
        self._device = torch.empty(spec.num_layers, 2, num_blocks, *shape, dtype=dtype, device=device)
        self._host = torch.empty(
            num_host_blocks, spec.num_layers, 2, *shape, dtype=dtype, pin_memory=device.type == "cuda"
        )
        self.layers = [LayerCache(keys, values) for keys, values in self._device]

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Carries out a step's copies in their order."""
        for copy in copies:
            source = self._host[copy.source] if copy.kind == "host_to_device" else self._device[:, :, copy.source]
            target = self._host[copy.target] if copy.kind == "device_to_host" else self._device[:, :, copy.target]
            target.copy_(source, non_blocking=True)

    def release(self) -> None:
        """Gives the memory back; the cache can't be used afterwards."""
        self.layers = []
        self._device = self._host = torch.empty(0)
