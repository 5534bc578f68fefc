"""Latent attention: what is kept of a token is one short vector, from which the keys and values of
all heads could be made.

Others make them for prompts, and for decoding bring the matrices that make them to the other side
of the products ("absorbed"), which gives other bits. Here all rows are computed in the absorbed
form: attention with one key head for all query heads, whose value is the first part of its key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, dtype, float32, int8

from quire.kernels.layer_state import CacheMemory, LayerState, StoredPart
from quire.kernels.ops import AttentionSpec, HeadShape, LatentNorm, LayerCache
from quire.kernels.shares import MixerShare, times
from quire.kernels.weights import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec(AttentionSpec):
    """A mixer whose `heads` are those of the absorbed form: one key head, of the latent's numbers
    (which are its value, too) and then those that rope rotates.
    """

    nope_dim: int
    """Numbers of a query head that are not rotated, before they are absorbed."""
    rope_dim: int
    """Numbers of a head that rope rotates, its last ones: a key has them for all heads together, also
    in layers without rope.
    """
    value_dim: int
    """Numbers of a head in what the output's product takes."""
    query_rank: int = 0
    """Queries are made from so many numbers, which are normed; 0: from the layer's input."""
    norm_eps: float = 1e-6
    """Of the norms of the latent and of what queries are made from."""
    interleaved_rope: bool = True
    """In a checkpoint rope rotates neighbouring dimensions (2i, 2i + 1)."""

    @property
    def rank(self) -> int:
        """Numbers of a latent without the rotated ones."""
        return self.heads.head_dim - self.rope_dim

    @property
    def query_dim(self) -> int:
        """Of a query head before it is absorbed."""
        return self.nope_dim + self.rope_dim

    @property
    def rotary_size(self) -> int:
        return self.rope_dim

    @property
    def input_size(self) -> int:
        """Of the products of the layer's input: for queries, and for the latent."""
        queries = self.query_rank or self.heads.num_heads * self.query_dim
        return queries + self.heads.head_dim

    @property
    def output_size(self) -> int:
        return self.heads.num_heads * self.value_dim

    def layer_state(self, cache_dtype: dtype, model_dtype: dtype) -> LayerState:
        """The latent of every token, once; with int8, its scale."""
        latent = StoredPart(1, (self.heads.head_dim,), cache_dtype)
        scales = (StoredPart(1, (), float32),) if cache_dtype == int8 else ()
        return LayerState((latent, *scales), num_heads=self.heads.num_heads)

    def layer_cache(self, memory: CacheMemory) -> LayerCache:
        """Values are a part of the keys, so both lie by token, whatever the kernels prefer."""
        keys, scales = (*memory.parts, None)[:2]
        assert keys is not None
        both = (memory.fp8_scales[0],) * 2
        return LayerCache(keys, keys[..., : self.rank], scales, scales, both, memory.group)

    def share(self, rank: int, size: int) -> MixerShare[AttentionSpec]:
        """By query heads; every rank has the latent."""
        own = self.heads.share(rank, size)
        heads, latent = own.query, slice(0, self.heads.head_dim)
        rows = {
            "query_down": (slice(0, self.query_rank),),
            "query": (times(heads, self.query_dim),),
            "latent": (latent,),
            "key_up": (times(heads, self.nope_dim),),
            "value_up": (times(heads, self.value_dim),),
        }
        mixer = replace(self, heads=own.shape)
        return MixerShare(mixer, rows, times(heads, self.value_dim), self.output_size)

    def bytes_read(self, context: int, itemsize: float) -> float:
        """Each latent once: values are a part of it."""
        return context * self.heads.head_dim * itemsize

    def flops(self, context: int) -> float:
        per_key = 2.0 * self.heads.num_heads * (self.heads.head_dim + self.rank)
        return per_key * context

    def prompt_flops(self, length: int) -> float:
        return self.flops(1) * (length * (length + 1) // 2)


@dataclass(frozen=True, slots=True)
class LatentHeads(HeadShape):
    """Heads of the absorbed form: kernels that divide attention differently for them know it by
    this type.
    """

    rank: int
    """Numbers of a latent without the rotated ones."""


def latent_heads(num_heads: int, rank: int, rope_dim: int) -> LatentHeads:
    """Those of the absorbed form."""
    return LatentHeads(num_heads, 1, rank + rope_dim, rank)


class _Kernels(Protocol):
    """What the definitions below are made of."""

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor: ...
    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor: ...
    def write_kv_(
        self, keys: Tensor, values: Tensor, cache: LayerCache, slot_mapping: Tensor
    ) -> None: ...


def latent_queries_(
    self: Any,
    plain: Tensor,
    rotated: Tensor,
    key_up: Weight,
    latent: Tensor,
    norm: LatentNorm,
    positions: Tensor,
    cos_sin: Tensor | None,
    cache: LayerCache,
    slot_mapping: Tensor,
) -> Tensor:
    """See `Kernels.latent_queries_`."""
    absorbed = self.linear_heads(plain, key_up)
    found: Tensor = self.latent_to_cache_(
        absorbed, rotated, latent, norm, positions, cos_sin, cache, slot_mapping
    )
    return found


def linear_heads(self: _Kernels, x: Tensor, weight: Weight) -> Tensor:
    """See `Kernels.linear_heads`."""
    heads = enumerate(weight.experts)
    return torch.stack([self.linear(x[:, head], one) for head, one in heads], 1)


def latent_to_cache_(
    self: _Kernels,
    absorbed: Tensor,
    rotated: Tensor,
    latent: Tensor,
    norm: LatentNorm,
    positions: Tensor,
    cos_sin: Tensor | None,
    cache: LayerCache,
    slot_mapping: Tensor,
) -> Tensor:
    """See `Kernels.latent_to_cache_`."""
    rank = absorbed.shape[2]
    normed = self.rms_norm(latent[:, :rank].contiguous(), norm.weight, norm.eps).unsqueeze(1)
    shared = latent[:, None, rank:]
    if cos_sin is not None:
        shared, rotated = (self.rope(one, positions, cos_sin) for one in (shared, rotated))
    key = torch.cat((normed, shared), 2)
    # the values are a part of what is written
    self.write_kv_(key, key, replace(cache, values=cache.keys), slot_mapping)
    return torch.cat((absorbed, rotated), 2)
