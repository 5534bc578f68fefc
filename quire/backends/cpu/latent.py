"""Latent attention on C++ code: what stands around the attention itself, which is that of all
layers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.backends.cpu import functions
from quire.backends.cpu.recording import Calls
from quire.backends.cpu.recurrent import RecurrentKernels
from quire.backends.cpu.strided import takes_latents, with_whole_rows
from quire.kernels.latent import LatentSpec
from quire.kernels.ops import LatentNorm, LayerCache
from quire.kernels.weights import Weight

_threads = torch.get_num_threads


class LatentKernels(RecurrentKernels):
    """The kernels of layers with latents."""

    has_amx: bool

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self._linear_heads = calls.by_dtype(functions.linear_heads)
        self._latent_heads = calls.by_dtype(functions.latent_heads)

    def captures(self, part: object) -> bool:
        if isinstance(part, LatentSpec):
            return takes_latents(part.heads.head_dim, part.rank)
        return super().captures(part)

    def linear_heads(self, x: Tensor, weight: Weight) -> Tensor:
        rows, heads, depth = x.shape
        count, columns, size = weight.shape
        if (count, size) != (heads, depth) or weight.tensor.dtype != x.dtype:
            raise ValueError(f"the weight {weight.shape} was not packed for x {tuple(x.shape)}")
        x = x if x.stride(2) == 1 else x.contiguous()
        out = self._empty(rows, heads, columns, dtype=x.dtype)
        self._linear_heads[x.dtype](
            x=x,
            x_stride=x.stride(0),
            x_head_stride=x.stride(1),
            weight=weight.tensor,
            out=out,
            rows=rows,
            heads=heads,
            columns=columns,
            depth=depth,
            num_threads=_threads(),
            use_amx=self.has_amx,
        )
        return out

    def latent_to_cache_(
        self,
        absorbed: Tensor,
        rotated: Tensor,
        latent: Tensor,
        norm: LatentNorm,
        positions: Tensor,
        cos_sin: Tensor | None,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> Tensor:
        rows, heads, rank = absorbed.shape
        rope_dim = rotated.shape[2]
        rotated = rotated if rotated.stride(2) == 1 else rotated.contiguous()
        latent, positions = with_whole_rows(latent), positions.long().contiguous()
        query = self._empty(rows, heads, rank + rope_dim, dtype=absorbed.dtype)
        key = self._empty(rows, 1, rank + rope_dim, dtype=absorbed.dtype)
        self._latent_heads[absorbed.dtype](
            absorbed=absorbed.contiguous(),
            rotated=rotated,
            rotated_stride=rotated.stride(0),
            rotated_head_stride=rotated.stride(1),
            latent=latent,
            latent_stride=latent.stride(0),
            weight=norm.weight,
            positions=positions,
            cos_sin=cos_sin,
            query=query,
            key=key,
            rows=rows,
            heads=heads,
            rank=rank,
            rope_dim=rope_dim,
            eps=norm.eps,
            num_threads=_threads(),
        )
        # the values are a part of what is written
        self.write_kv_(key, key, replace(cache, values=cache.keys), slot_mapping)
        return query
