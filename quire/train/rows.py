"""Whole sequences as one batch of the decoder: their rows, and blocks made for the occasion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from quire.kernels.layer_state import CacheMemory, CarriedPart
from quire.kernels.ops import AttentionSpec, Batches, MixerCache, PagedBatch
from quire.models.decoder import Decoder
from quire.models.spec import LayerSpec
from quire.runner.kv_cache import KVCache
from quire.runner.layer_groups import LayerGroups

_BLOCK_SIZE = 16
"""Bits don't depend on it."""


@dataclass(frozen=True)
class Sequences:
    """Rows of whole sequences, one after the other."""

    lengths: tuple[int, ...]
    token_ids: Tensor
    """int64 [rows]."""
    positions: Tensor
    """int64 [rows]."""

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], device: torch.device) -> Sequences:
        lengths = tuple(map(len, tokens))
        ids = torch.tensor([token for one in tokens for token in one])
        positions = torch.cat([torch.arange(length) for length in lengths])
        return cls(lengths, ids.to(device), positions.to(device))

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each, and the end of the last."""
        return tuple(accumulate(self.lengths, initial=0))

    def make_blocks(self, decoder: Decoder) -> tuple[Batches, list[MixerCache]]:
        """What the decoder is told of these rows, and an empty cache that they fit into."""
        kernels, dtype, device = decoder.kernels, decoder.dtype, decoder.device
        groups = LayerGroups.of(
            decoder.spec, _BLOCK_SIZE, dtype, kernels.keys_at_once, longest=1, model_dtype=dtype
        )
        own = [-(-length // _BLOCK_SIZE) for length in self.lengths]
        per_group = sum(own)
        state = 0 if groups.state is None else groups.state.num_blocks
        first_state = 1 + per_group * len(groups.members)
        num_blocks = first_state + 2 * state * len(own)
        by_dimension = kernels.keys_by_dimension(dtype, _BLOCK_SIZE)
        cache = KVCache(
            decoder.spec, num_blocks, 0, _BLOCK_SIZE, dtype, device, by_dimension, groups
        )
        table = torch.zeros(len(own), max(own), dtype=torch.int64)
        for row, first in enumerate(accumulate(own[:-1], initial=1)):
            table[row, : own[row]] = torch.arange(first, first + own[row])
        states = None
        if state:
            numbers = torch.arange(first_state, num_blocks).view(2, len(own), state)
            states = numbers.to(device, torch.int32)
        rows = torch.arange(len(own))
        owners = rows.repeat_interleave(torch.tensor(self.lengths)).to(device)
        batches = []
        for group in range(len(groups.members)):
            blocks = (table + group * per_group).where(table > 0, 0).to(device)
            slots = blocks[owners, self.positions // _BLOCK_SIZE] * _BLOCK_SIZE
            batches.append(
                PagedBatch(
                    query_start=torch.tensor(self.starts, dtype=torch.int32, device=device),
                    context_lens=torch.tensor(self.lengths, dtype=torch.int32, device=device),
                    block_tables=blocks.int(),
                    table_rows=rows.to(device, torch.int32),
                    slot_mapping=slots + self.positions % _BLOCK_SIZE,
                    max_context_len=max(self.lengths),
                    state_tables=states,
                )
            )
        return tuple(batches), cache.layers

    def plain_batch(self) -> Batches:
        """The same for `Definition`, whose caches have a place for each row."""
        rows = torch.arange(len(self.token_ids), device=self.token_ids.device)
        starts = torch.tensor(self.starts, dtype=torch.int32)
        nothing = rows[:0].int()
        return (PagedBatch(starts, nothing, nothing.view(0, 0), nothing, rows, max(self.lengths)),)

    def plain_caches(self, layer: LayerSpec, dtype: torch.dtype) -> list[MixerCache]:
        """Those of one layer, for `Definition`."""
        device = self.token_ids.device
        caches: list[MixerCache] = []
        for mixer in layer.mixers:
            kept = mixer.layer_state(dtype, dtype)
            # a recurrence or a convolution has all of its sequence at once
            count = len(self.token_ids) if isinstance(mixer, AttentionSpec) else 0
            parts = [
                torch.zeros(1, part.heads, count, *part.shape, dtype=dtype, device=device)
                for part in kept.per_token
            ]
            memory = CacheMemory(parts, 0, [CarriedPart(())] * len(kept.carried))
            caches.append(mixer.layer_cache(memory))
        return caches
