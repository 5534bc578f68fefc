"""Rung 6 in isolation: the same attention by different kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.ops import AttentionSpec, HeadShape, Kernels, LayerCache, PagedBatch
from quire.models.decoder import Decoder
from quire.tools.ladder.contiguous import contiguous_batch

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_by_definition(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(Q·Kᵀ/√d)·V with a causal mask, as in the paper: all scores are in memory at once.

    query [tokens, heads, head_dim]; keys and values [kv_heads, tokens, head_dim].
    """
    tokens, heads, head_dim = query.shape
    group = heads // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) / head_dim**0.5
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.matmul(weights, values).transpose(0, 1)


def torch_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """torch's own fused kernel: fast, but its bits depend on the number of queries."""
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )
    return output[0].transpose(0, 1)


def kernel_attention(
    kernels: Kernels, batch: PagedBatch, query: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """A backend's attention; the sequence is one block of its cache."""
    _, num_heads, head_dim = query.shape
    spec = AttentionSpec(HeadShape(num_heads, len(keys), head_dim), head_dim**-0.5)
    return kernels.attention(query, LayerCache(keys[None], values[None]), batch, spec)


def attention_ways(decoder: Decoder, backends: Sequence[Kernels], tokens: int) -> dict[str, Attend]:
    """By name: the definition, torch's and each backend's, for one prompt of so many tokens."""
    spec, device = decoder.spec, decoder.device
    ways: dict[str, Attend] = {
        "by definition": attention_by_definition,
        "torch's fused one": torch_attention,
    }
    for kernels in backends:
        batch = contiguous_batch([(0, 0, tokens)], tokens, kernels, spec.head_shapes[0], device)
        ways[f"{kernels.name} kernels"] = partial(kernel_attention, kernels, batch)
    return ways
