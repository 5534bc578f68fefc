"""The memory behind the block pool: what every layer keeps, on the device and on the host tier."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from quire.backends.select import device_of
from quire.kernels.layer_state import CacheMemory, CarriedPart
from quire.kernels.ops import MixerCache
from quire.kernels.tensor_memory import TensorMemory
from quire.models.spec import ModelSpec
from quire.runner.layer_groups import LayerGroups, layer_bytes, part_bytes, state_places
from quire.step import BlockCopy


def token_bytes(
    spec: ModelSpec, num_tokens: int, dtype: torch.dtype, groups: LayerGroups | None = None
) -> int:
    """What a block of so many tokens takes in all groups together, empty places included; states
    come on top.
    """
    groups = groups or LayerGroups.of(spec, num_tokens, dtype)
    return groups.block_bytes * len(groups.members)


class KVCache:
    """Blocks on the device, and slots for blocks on the host tier, where each is contiguous and
    pinned, so that it is one asynchronous copy.

    Where all layers keep the same, the device has [layers of a group, 2, num_blocks, kv_heads,
    block_size, head_dim] (and int8's scales, without the last dimension): each layer's part of all
    blocks is in one piece, as kernels read it soonest. Where they differ, it has [num_blocks,
    bytes], and a layer sees its part of each block with a stride: so any block can hold what any
    group keeps, or a piece of a state.

    The memory is not written here: where pages are committed on first use, a large cache costs
    nothing until then.
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
        """Without `groups` layers are grouped only if they differ in what they keep of a token."""
        groups = groups or LayerGroups.of(spec, block_size, dtype, longest=1)
        pinned = device_of(device).pinned
        self._groups = groups
        self._device: list[Tensor] = []
        self._host: list[Tensor] = []
        places: dict[int, list[Tensor]] = {}
        if groups.is_uniform:
            size = groups.block_bytes // layer_bytes(groups.states[0], block_size)
            # keys and values are equal parts
            for part, count in Counter(groups.states[0].per_token).items():
                shape = (part.heads, block_size, *part.shape)
                on_device = torch.empty(
                    size, count, num_blocks, *shape, dtype=part.dtype, device=device
                )
                on_host = pinned((num_host_blocks, size, count, *shape), part.dtype)
                self._device.append(on_device)
                self._host.append(on_host)
            for members in groups.members:
                for number, place in enumerate(members):
                    places[place] = [side for kind in self._device for side in kind[number]]
        else:
            self._device.append(
                torch.empty(num_blocks, groups.block_bytes, dtype=torch.uint8, device=device)
            )
            self._host.append(pinned((num_host_blocks, groups.block_bytes), torch.uint8))
            for members, state in zip(groups.members, groups.states, strict=True):
                at = 0
                for place in members:
                    places[place] = []
                    for part in state.per_token:
                        shape = (part.heads, block_size, *part.shape)
                        places[place].append(self._view(at, shape, part.dtype))
                        at += part_bytes(part, block_size)
        # Pinned memory stays: the driver would keep it, and it takes seconds to pin it again.
        self._memory = TensorMemory(
            self._device if device_of(device).is_gpu else [*self._device, *self._host]
        )
        self.places = places
        """What each mixer keeps, by its number in the model: a tensor [num_blocks, heads,
        block_size, ...] per part.
        """
        number_of = {
            place: group for group, members in enumerate(groups.members) for place in members
        }
        self.layers: list[MixerCache] = []
        """What each mixer reads and writes; one that has no keys of its own has those of the layer
        it reads.
        """
        firsts: list[int] = []
        for index, layer in enumerate(spec.layers):
            firsts.append(len(self.layers))
            for number, mixer in enumerate(layer.mixers):
                place = len(self.layers)
                if layer.reads_layer is not None:
                    self.layers.append(self.layers[firsts[layer.reads_layer] + number])
                    continue
                fp8_scales = (
                    spec.cache.scales_of(index) if dtype == torch.float8_e4m3fn else (1.0, 1.0)
                )
                first = groups.first_carried.get(place)
                count = len(groups.states[number_of[place]].carried)
                carried = () if first is None else range(first, first + count)
                memory = CacheMemory(
                    places[place],
                    number_of[place],
                    [self._carried_part(part) for part in carried],
                    fp8_scales,
                    keys_by_dimension,
                )
                self.layers.append(mixer.layer_cache(memory))

    @property
    def num_groups(self) -> int:
        return len(self._groups.members)

    @property
    def num_state_blocks(self) -> int:
        """Blocks of one state of the model's layers; 0 if they have none."""
        return 0 if self._groups.state is None else self._groups.state.num_blocks

    def state_head(self, part: int, head: int) -> tuple[int, Tensor]:
        """Where one head of one part of a state lies: in the state's block of that number,
        [num_blocks, *shape].
        """
        places, _ = state_places(self._groups.carried, self._groups.block_bytes)
        number, at = places[part][head]
        stored = self._groups.carried[part]
        return number, self._view(at, stored.shape, stored.dtype)

    def _carried_part(self, part: int) -> CarriedPart:
        """Its heads in runs: those in one block lie at equal distances."""
        stored = self._groups.carried[part]
        places, _ = state_places(self._groups.carried, self._groups.block_bytes)
        runs: list[tuple[int, Tensor]] = []
        for number, heads in itertools.groupby(places[part], key=lambda place: place[0]):
            starts = [at for _, at in heads]
            first = self._view(starts[0], stored.shape, stored.dtype)
            step = (starts[1] - starts[0]) // stored.dtype.itemsize if len(starts) > 1 else 1
            shape = (first.shape[0], len(starts), *stored.shape)
            strides = (first.stride(0), step, *first.stride()[1:])
            runs.append((number, first.as_strided(shape, strides)))
        return CarriedPart(tuple(runs))

    def _view(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The numbers that begin at one byte of every block."""
        (blocks,) = self._device
        numbers = blocks[:, at : at + dtype.itemsize * math.prod(shape)].view(dtype)
        return numbers.view(len(blocks), *shape) if shape else numbers.squeeze(1)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Carries out a step's copies in their order."""
        axis = 2 if self._groups.is_uniform else 0
        for copy in copies:
            for device, host in zip(self._device, self._host, strict=True):
                source = (
                    host[copy.source]
                    if copy.kind == "host_to_device"
                    else device.select(axis, copy.source)
                )
                target = (
                    host[copy.target]
                    if copy.kind == "device_to_host"
                    else device.select(axis, copy.target)
                )
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
        self.layers, self.places = [], {}
        self._device = self._host = []
        self._memory = TensorMemory(())
