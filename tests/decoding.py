"""The plainest way to run a decoder in a test: one sequence, blocks given by hand, no engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.layer_state import CacheMemory
from quire.kernels.ops import AttentionSpec, HeadShape, Kernels, LayerCache, PagedBatch
from quire.models.decoder import Decoder
from quire.models.load import Progress, load_planned
from quire.models.weight_plan import ModelFiles, plan_weights

BLOCK_SIZE = 16


def load_decoder(
    files: ModelFiles,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int | None = None,
    progress: Progress | None = None,
    quantization: str = "auto",
) -> Decoder:
    """A decoder with its weights on the device, in the formats that `plan_weights` chooses."""
    return load_planned(
        plan_weights(files, kernels, dtype, device, quantization), max_position, progress
    )


def make_caches(
    decoder: Decoder, num_blocks: int, block_size: int = BLOCK_SIZE
) -> list[LayerCache]:
    """Caches full of NaN: whoever reads a slot nobody wrote is found out."""
    caches: list[LayerCache] = []
    for layer in decoder.spec.layers:
        if layer.reads_layer is not None:
            caches.append(caches[layer.reads_layer])
            continue
        mixer = layer.attention
        assert mixer is not None
        parts = [
            torch.full(
                (num_blocks, part.heads, block_size, *part.shape),
                float("nan"),
                dtype=part.dtype,
                device=decoder.device,
            )
            for part in mixer.layer_state(decoder.dtype, decoder.dtype).per_token
        ]
        caches.append(mixer.layer_cache(CacheMemory(parts, 0)))
    return caches


def paged_batch(
    sequences: Sequence[tuple[int, int, Sequence[int]]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> PagedBatch:
    """A batch of (start, number of new tokens, block table) per sequence."""
    width = max(len(table) for _, _, table in sequences)
    tables = torch.zeros(len(sequences), width, dtype=torch.int32)
    slots: list[int] = []
    query_start = [0]
    for i, (start, count, table) in enumerate(sequences):
        tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
        slots += [
            table[t // block_size] * block_size + t % block_size
            for t in range(start, start + count)
        ]
        query_start.append(query_start[-1] + count)
    context_lens = [start + count for start, count, _ in sequences]
    return PagedBatch(
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        table_rows=torch.arange(len(sequences), dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        max_context_len=max(context_lens),
    )


def attend(
    kernels: Kernels,
    query: Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    scale: float,
    window: int | None,
) -> Tensor:
    """`Kernels.attention` with heads as the tensors have them."""
    heads = HeadShape(query.shape[1], cache.keys.shape[1], query.shape[2])
    return kernels.attention(query, cache, batch, AttentionSpec(heads, scale, window))


@torch.inference_mode()
def run_tokens(
    decoder: Decoder, caches: list[LayerCache], tokens: Sequence[int], start: int
) -> Tensor:
    """Logits of tokens[start:], the earlier ones being in the caches already (blocks 1, 2, 3, … in
    order).
    """
    block_size = caches[0].block_size
    table = list(range(1, 1 + -(-len(tokens) // block_size)))
    device = decoder.device
    batch = paged_batch([(start, len(tokens) - start, table)], block_size, device)
    hidden = decoder(
        torch.tensor(tokens[start:], device=device),
        torch.arange(start, len(tokens), device=device),
        (batch,),
        caches,
    )
    return decoder.logits(hidden).float()


def all_logits(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    caches = make_caches(decoder, 1 + -(-len(tokens) // BLOCK_SIZE))
    return run_tokens(decoder, caches, tokens, 0)


def greedy(decoder: Decoder, prompt: Sequence[int], num_tokens: int) -> list[int]:
    caches = make_caches(decoder, 1 + -(-(len(prompt) + num_tokens) // BLOCK_SIZE))
    tokens, done = list(prompt), 0
    for _ in range(num_tokens):
        logits = run_tokens(decoder, caches, tokens, done)
        done = len(tokens)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]
