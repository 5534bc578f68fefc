"""Which layers share blocks: layers in groups, so that blocks of all groups have the same number of
bytes.

A block holds what the layers of one group keep of the same few tokens, or a piece of a state. Since
all blocks are equally large, any of them can become any group's: one free list, one budget of
bytes, nothing to move together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from quire.block_groups import BlockGroup, StateSpec
from quire.errors import UnsupportedModelError
from quire.kernels.layer_state import LayerState, StoredPart
from quire.kernels.ops import AttentionSpec, HeadShape
from quire.models.spec import ModelSpec

MOST_GROUPS = 8
"""Each has a block table of its own; with more, blocks are larger than they need to be instead."""
_STATE_INTERVAL = 4096
"""Tokens of a prompt after which another state is kept."""
_ALIGNMENT = 16
"""Bytes: where a head of a state begins."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers of a model in groups. A "place" is one mixer of one layer, counted through the
    model.
    """

    block_bytes: int
    """Of every block."""
    states: tuple[LayerState, ...]
    """What each group's places keep: the same within a group."""
    members: tuple[tuple[int, ...], ...]
    """By group, its places. The last group of a kind may have fewer than fit."""
    kept: tuple[BlockGroup, ...]
    """By group, how far back its tokens are kept, for the scheduler."""
    state: StateSpec | None = None
    carried: tuple[StoredPart, ...] = ()
    """The parts of a state, those of all recurrent places one after the other."""
    heads: tuple[HeadShape | None, ...] = ()
    """By group, the heads of its attention; None where it is none."""
    first_carried: Mapping[int, int] = field(default_factory=dict)
    """By recurrent place, which of `carried` is its first."""

    @property
    def is_uniform(self) -> bool:
        """Whether all blocks hold the same kind of tokens: then each layer's part of all blocks
        lies in one piece.
        """
        parts = {state.per_token for state in self.states}
        return len(parts) == 1 and self.state is None

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        block_size: int,
        cache_dtype: torch.dtype,
        keys_at_once: int = 1,
        longest: int | None = None,
        model_dtype: torch.dtype | None = None,
    ) -> LayerGroups:
        """The groups that take the fewest bytes for a block of tokens. Windows and chunks that are
        no shorter than the `longest` sequence count as none. `keys_at_once` is that of the kernels:
        how coarsely they round a window's begin. The cache's dtype is the model's, unless
        `model_dtype` says so.
        """
        longest = longest or spec.max_position
        states = [
            None
            if layer.reads_layer is not None
            else mixer.layer_state(cache_dtype, model_dtype or cache_dtype)
            for layer in spec.layers
            for mixer in layer.mixers
        ]
        groups = group_layers(states, block_size, keys_at_once, longest)
        mixers = [mixer for layer in spec.layers for mixer in layer.mixers]
        firsts = (mixers[members[0]] for members in groups.members)
        heads = tuple(one.heads if isinstance(one, AttentionSpec) else None for one in firsts)
        return replace(groups, heads=heads)


def group_layers(
    states: Sequence[LayerState | None],
    block_size: int,
    keys_at_once: int = 1,
    longest: int = 2**31,
) -> LayerGroups:
    """Groups of places that keep the same; None keeps nothing of its own."""
    kinds: dict[LayerState, list[int]] = {}
    for place, state in enumerate(states):
        if state is not None:
            kinds.setdefault(_as_kept(state, keys_at_once, longest), []).append(place)
    # Those that keep everything come first, as block tables list them.
    order = sorted(kinds, key=lambda kind: kind.keeps != "all")
    carried: list[StoredPart] = []
    first_carried: dict[int, int] = {}
    for place, state in enumerate(states):
        if state is not None and state.carried:
            first_carried[place] = len(carried)
            carried += state.carried
    block_bytes = _block_bytes([(kind, len(kinds[kind])) for kind in order], carried, block_size)
    members: list[tuple[int, ...]] = []
    held: list[LayerState] = []
    for kind in order:
        size = block_bytes // layer_bytes(kind, block_size)
        for first in range(0, len(kinds[kind]), size):
            members.append(tuple(kinds[kind][first : first + size]))
            held.append(kind)
    return LayerGroups(
        block_bytes=block_bytes,
        states=tuple(held),
        members=tuple(members),
        kept=tuple(BlockGroup(kind.keeps, kind.size) for kind in held),
        state=_state_spec(states, carried, block_bytes),
        carried=tuple(carried),
        first_carried=first_carried,
    )


def _as_kept(state: LayerState, keys_at_once: int, longest: int) -> LayerState:
    """With the window as kernels read it, or with none if it is longer than all sequences."""
    if state.keeps == "window" and state.size < longest:
        return replace(state, size=state.size + keys_at_once - 1)
    return (
        state
        if state.keeps == "records" or state.size < longest
        else replace(state, keeps="all", size=0)
    )


def layer_bytes(state: LayerState, block_size: int) -> int:
    """What one place takes of a block."""
    return sum(part_bytes(part, block_size) for part in state.per_token)


def part_bytes(part: StoredPart, block_size: int) -> int:
    """Whole words of four bytes, so that parts of all dtypes can lie behind each other."""
    return -(-part.nbytes * block_size // 4) * 4


def _block_bytes(
    kinds: Sequence[tuple[LayerState, int]], carried: Sequence[StoredPart], block_size: int
) -> int:
    """The size of blocks with which all layers take the least: a multiple of what some layer keeps."""
    sizes = [(layer_bytes(state, block_size), count) for state, count in kinds]
    least = max([size for size, _ in sizes] + [part.bytes_per_head for part in carried])
    candidates = {
        size * number
        for size, count in sizes
        for number in range(1, count + 1)
        if size * number >= least
    }
    candidates |= {least}

    def cost(block: int) -> tuple[bool, int, int]:
        groups = sum(-(-count // (block // size)) for size, count in sizes)
        return groups > max(MOST_GROUPS, len(kinds)), groups * block, groups

    best = min(sorted(candidates), key=cost)
    # With states, which begin at any block's begin: so that every block is aligned as the first one
    # is.
    return -(-best // _ALIGNMENT) * _ALIGNMENT if carried else best


def _state_spec(
    states: Sequence[LayerState | None], carried: Sequence[StoredPart], block_bytes: int
) -> StateSpec | None:
    if not carried:
        return None
    chunks = {state.size for state in states if state is not None and state.carried}
    if len(chunks) > 1:
        raise UnsupportedModelError(
            f"recurrent layers with different chunks, of {sorted(chunks)} tokens"
        )
    (chunk,) = chunks
    return StateSpec(
        chunk, len(state_places(carried, block_bytes)[1]), math.lcm(chunk, _STATE_INTERVAL)
    )


def state_places(
    carried: Sequence[StoredPart], block_bytes: int
) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Where the heads of a state's parts lie: for each part, the number of the block and the byte
    in it of each head; and how many bytes of each block are used. A head is never divided.
    """
    places: list[list[tuple[int, int]]] = []
    used = [0]
    for part in carried:
        size = -(-part.bytes_per_head // _ALIGNMENT) * _ALIGNMENT
        own: list[tuple[int, int]] = []
        for _ in range(part.heads):
            if used[-1] + part.bytes_per_head > block_bytes:
                used.append(0)
            own.append((len(used) - 1, used[-1]))
            used[-1] += size
        places.append(own)
    return places, used
