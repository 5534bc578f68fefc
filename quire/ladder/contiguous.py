"""The simplest cache of keys and values: room for a fixed number of tokens per sequence, side by side.

To the kernels it is a paged cache whose block is as long as a whole sequence: sequence i lives in block i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels.ops import HeadShape, Kernels, LayerCache, PagedBatch
from quire.models.decoder import Decoder


class ContiguousCache:
    """Keys and values of every layer, [num_sequences, kv_heads, capacity, head_dim] each."""

    def __init__(self, decoder: Decoder, num_sequences: int, capacity: int) -> None:
        spec, device = decoder.spec, decoder.device
        shape = (num_sequences, spec.heads.num_kv_heads, capacity, spec.heads.head_dim)

        def side() -> Tensor:
            return torch.empty(shape, dtype=decoder.dtype, device=device)

        self.layers = [LayerCache(side(), side()) for _ in range(spec.num_layers)]
        self.capacity = capacity
        self.lengths = [0] * num_sequences
        """How many tokens of each sequence are stored."""

    def keys(self, layer: int, sequence: int) -> Tensor:
        """What is stored of one sequence, [kv_heads, length, head_dim]; the rest of its room is empty."""
        return self.layers[layer].keys[sequence, :, : self.lengths[sequence]]

    @property
    def num_bytes(self) -> int:
        """What was allocated, used or not."""
        return sum(side.numel() * side.element_size() for layer in self.layers for side in (layer.keys, layer.values))


def contiguous_batch(
    spans: Sequence[tuple[int, int, int]], capacity: int, kernels: Kernels, shape: HeadShape, device: torch.device
) -> PagedBatch:
    """Tells the kernels which tokens are computed: of each span's sequence those from its start to its end."""
    query_start = [0]
    slots: list[int] = []
    for sequence, start, end in spans:
        slots += range(sequence * capacity + start, sequence * capacity + end)
        query_start.append(len(slots))
    lengths = [end for _, _, end in spans]
    # Shared out once for all layers: kernels that have to find out by themselves ask the device for the lengths.
    counts, ends = np.diff(query_start).astype(np.int32), np.array(lengths, np.int32)
    work = kernels.attention_work(counts, ends, np.arange(len(spans), dtype=np.int32), shape)
    return PagedBatch(
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=torch.tensor([[sequence] for sequence, _, _ in spans], dtype=torch.int32, device=device),
        table_rows=torch.arange(len(spans), dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        max_query_len=max(end - start for _, start, end in spans),
        max_context_len=max(lengths),
        work={name: torch.from_numpy(values).to(device) for name, values in work.items()},
    )


@torch.inference_mode()
def next_tokens(decoder: Decoder, cache: ContiguousCache, new_tokens: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Computes the new tokens of some sequences, stores their keys and values, and picks each one's likeliest next."""
    device = decoder.device
    spans = [(i, cache.lengths[i], cache.lengths[i] + len(tokens)) for i, tokens in new_tokens.items()]
    batch = contiguous_batch(spans, cache.capacity, decoder.kernels, decoder.spec.heads, device)
    token_ids = torch.tensor([token for tokens in new_tokens.values() for token in tokens], device=device)
    positions = torch.tensor([position for _, start, end in spans for position in range(start, end)], device=device)
    hidden = decoder(token_ids, positions, batch, cache.layers)
    for sequence, _, end in spans:
        cache.lengths[sequence] = end
    last_rows = batch.query_start[1:].long() - 1
    chosen = decoder.logits(hidden[last_rows]).float().argmax(-1).tolist()
    return dict(zip(new_tokens, chosen, strict=True))
