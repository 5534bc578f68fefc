"""The memory behind the block pool: keys and values of every layer, on the device and on the host tier."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from quire.kernels.ops import LayerCache
from quire.kernels.tensor_memory import TensorMemory
from quire.models.spec import ModelSpec
from quire.step import BlockCopy


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers in groups of equal size: a block holds keys and values of one group, any block of any group. Layers
    with a sliding window have groups of their own, the last ones, so that blocks before the window can be freed."""

    size: int
    members: tuple[tuple[int, ...], ...]
    """By group, its layers; the last group with a window, and the last without, may have fewer than `size`."""
    num_windowed: int = 0
    window: int = 0
    """How far back layers with a window read, in tokens."""

    @classmethod
    def of(cls, spec: ModelSpec, keys_at_once: int = 1, longest: int | None = None) -> LayerGroups:
        """At most eight groups, of the size that leaves the fewest places empty; one group if no window is shorter than
        the `longest` sequence. `keys_at_once` is that of the kernels: how coarsely they round a window's begin."""
        windows = [layer.attention.sliding_window or 0 for layer in spec.layers]
        kinds = [[i for i, window in enumerate(windows) if bool(window) is has_one] for has_one in (False, True)]
        if not 0 < max(windows) < (longest or spec.max_position):
            return cls(spec.num_layers, (tuple(range(spec.num_layers)),))
        counts = {size: sum(-(-len(kind) // size) for kind in kinds) for size in range(1, spec.num_layers + 1)}
        few = [size for size, count in counts.items() if count <= 8]
        size = min(few, key=lambda size: (counts[size] * size, counts[size]))
        members = (tuple(kind[at : at + size]) for kind in kinds for at in range(0, len(kind), size))
        return cls(size, tuple(members), -(-len(kinds[1]) // size), max(windows) + keys_at_once - 1)


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype, groups: LayerGroups | None = None) -> int:
    """What `block_size` tokens take: a block of each group, with keys and values of all layers (and int8's scales)."""
    heads, groups = spec.heads, groups or LayerGroups.of(spec)
    per_head = heads.head_dim * dtype.itemsize + (torch.float32.itemsize if dtype == torch.int8 else 0)
    return 2 * groups.size * len(groups.members) * heads.num_kv_heads * per_head * block_size


class KVCache:
    """On the device [layers of a group, 2, num_blocks, kv_heads, block_size, head_dim]; on the host tier [slots,
    layers, 2, ...], where a block is contiguous and pinned, so that it is one asynchronous copy. An int8 cache has a
    second tensor of scales, without the last dimension.

    The memory is not written here: where pages are committed on first use, a large cache costs nothing until then.
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
        groups: LayerGroups | None = None,
    ) -> None:
        """Without `groups` all layers are in one."""
        groups = groups or LayerGroups(spec.num_layers, (tuple(range(spec.num_layers)),))
        size, pinned = groups.size, device.type == "cuda"
        shape = (spec.heads.num_kv_heads, block_size)
        kinds = [((*shape, spec.heads.head_dim), dtype)] + ([(shape, torch.float32)] if dtype == torch.int8 else [])
        self._device = [torch.empty(size, 2, num_blocks, *each, dtype=kind, device=device) for each, kind in kinds]
        self._host = [
            torch.empty(num_host_blocks, size, 2, *each, dtype=kind, pin_memory=pinned) for each, kind in kinds
        ]
        # Pinned memory stays: the driver would keep it, and it takes seconds to pin it again.
        self._memory = TensorMemory(self._device if pinned else [*self._device, *self._host])
        layers: dict[int, LayerCache] = {}
        for group, own in enumerate(groups.members):
            for place, layer in enumerate(own):
                sides = (side for kind in self._device for side in kind[place])
                fp8_scales = spec.cache.scales_of(layer) if dtype == torch.float8_e4m3fn else (1.0, 1.0)
                layers[layer] = replace(LayerCache(*sides), fp8_scales=fp8_scales, group=group)
        self.layers = [layers[layer] for layer in range(spec.num_layers)]
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

    def sleep(self) -> None:
        """Gives the memory back, and with it all keys and values."""
        self._memory.sleep(keep=False)

    def wake(self) -> None:
        """Takes the memory again, for other keys and values."""
        self._memory.wake()

    def release(self) -> None:
        """Sleeps for good: the cache can't be used afterwards."""
        self.sleep()
        self.layers = []
        self._device = self._host = []
        self._memory = TensorMemory(())
