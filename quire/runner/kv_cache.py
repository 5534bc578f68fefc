"""The memory behind the block pool: keys and values of every layer, on the device and on the host tier."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from quire.kernels.ops import LayerCache
from quire.models.spec import ModelSpec
from quire.step import BlockCopy


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """What one block costs: keys and values of `block_size` tokens in every layer, and the scales of int8 ones."""
    heads = spec.heads
    per_head = heads.head_dim * dtype.itemsize + (torch.float32.itemsize if dtype == torch.int8 else 0)
    return 2 * spec.num_layers * heads.num_kv_heads * per_head * block_size


class KVCache:
    """[layers, 2, num_blocks, kv_heads, block_size, head_dim], and for the tier [slots, layers, 2, ...]: a block on the
    host lies in one piece, so that it travels in one copy, from pinned memory and without anybody waiting. A cache of
    int8 has tensors of scales besides, without the last dimension.

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
        keys_by_dimension: bool = False,
    ) -> None:
        layers, pinned = spec.num_layers, device.type == "cuda"
        shape = (spec.heads.num_kv_heads, block_size)
        kinds = [((*shape, spec.heads.head_dim), dtype)] + ([(shape, torch.float32)] if dtype == torch.int8 else [])
        self._device = [torch.empty(layers, 2, num_blocks, *each, dtype=kind, device=device) for each, kind in kinds]
        self._host = [
            torch.empty(num_host_blocks, layers, 2, *each, dtype=kind, pin_memory=pinned) for each, kind in kinds
        ]
        self.layers = [
            LayerCache(*(side for kind in self._device for side in kind[layer])) for layer in range(spec.num_layers)
        ]
        if keys_by_dimension:
            by_dimension = (num_blocks, spec.heads.num_kv_heads, spec.heads.head_dim, block_size)
            self.layers = [replace(layer, keys=layer.keys.view(by_dimension).mT) for layer in self.layers]

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Carries out a step's copies in their order."""
        for copy in copies:
            for device, host in zip(self._device, self._host, strict=True):
                source = host[copy.source] if copy.kind == "host_to_device" else device[:, :, copy.source]
                target = host[copy.target] if copy.kind == "device_to_host" else device[:, :, copy.target]
                target.copy_(source, non_blocking=True)

    def release(self) -> None:
        """Gives the memory back; the cache can't be used afterwards."""
        self.layers = []
        self._device = self._host = []
