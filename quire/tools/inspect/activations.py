"""What runs through a model, stage by stage: to compare two models, and to find where a NaN began."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from quire.errors import InvalidRequestError
from quire.models.decoder import Decoder
from quire.models.mixers import Attention, Batch, LatentAttention
from quire.tools.ladder.contiguous import ContiguousCache, as_token_tensor


@dataclass(frozen=True, slots=True)
class Stage:
    """What a part of the model gives for each token, [tokens, size] in float32."""

    name: str
    """`embedding`, `layers.3.attention.query`, `.key` and `.value` (as projected, before norms and
    rotation), `layers.3.attention` and `layers.3.mlp` (what they add to the residual stream),
    `layers.3` (the stream behind the layer), `final_norm`, `logits`.
    """
    values: Tensor

    @property
    def num_bad(self) -> int:
        """How many values are NaN or infinite."""
        return int((~self.values.isfinite()).sum())

    @property
    def largest(self) -> float:
        """The largest magnitude among those that are numbers."""
        finite = self.values[self.values.isfinite()]
        return float(finite.abs().max()) if finite.numel() else 0.0


@torch.inference_mode()
def trace(decoder: Decoder, token_ids: Sequence[int]) -> Iterator[Stage]:
    """The stages of one forward pass over some tokens, in their order."""
    if not token_ids:
        raise InvalidRequestError("tokens", "there are none to trace")
    cache = ContiguousCache(decoder, num_sequences=1, capacity=len(token_ids))
    paged = cache.batch(decoder, [(0, 0, len(token_ids))])
    batch = Batch(decoder.kernels, torch.arange(len(token_ids), device=decoder.device), (paged,))
    tokens = as_token_tensor(decoder, token_ids)
    x = decoder.embed(batch, tokens)
    batch = decoder.with_layer_inputs(batch, tokens, x)
    yield _stage("embedding", x)
    residual: Tensor | None = None
    inner: list[Stage] = []
    caches = iter(cache.layers)
    for i, layer in enumerate(decoder.layers):
        inner.clear()
        own = list(islice(caches, len(layer.attention.parts)))
        parts = {"attention": layer.attention} | ({} if layer.mlp is None else {"mlp": layer.mlp})
        projections = [
            (one, name, getattr(one, name))
            for one in layer.attention.parts
            for name in _projections(one)
        ]
        try:
            for one, name, projection in projections:
                where = f"layers.{i}.attention"
                watched: object = _Watched(projection, f"{where}.{name}", inner)
                if isinstance(one, Attention):
                    watched = _WatchedProjection(one, where, inner)
                setattr(one, name, watched)
            for name, part in parts.items():
                setattr(layer, name, _Watched(part, f"layers.{i}.{name}", inner))
            x, residual = layer(batch, x, residual, own)
        finally:
            for name, part in parts.items():
                setattr(layer, name, part)
            for one, name, projection in projections:
                setattr(one, name, projection)
        # attention first, whatever was computed first
        yield from sorted(inner, key=lambda stage: stage.name.endswith(".mlp"))
        yield _stage(f"layers.{i}", x.float() + (0.0 if residual is None else residual.float()))
    total = x if residual is None else decoder.kernels.scale_add(x, 1.0, residual)
    normed = decoder.final_norm(batch, total)
    yield _stage("final_norm", normed)
    yield _stage("logits", decoder.logits(normed))


def first_bad(decoder: Decoder, token_ids: Sequence[int]) -> Stage | None:
    """Where the first NaN or infinity comes from; None: there is none."""
    return next((stage for stage in trace(decoder, token_ids) if stage.num_bad), None)


def _projections(mixer: object) -> tuple[str, ...]:
    """What makes queries and keys of the layer's input, where it attends."""
    if isinstance(mixer, Attention):
        return ("qkv",)
    return ("query", "latent") if isinstance(mixer, LatentAttention) else ()


def _stage(name: str, values: Tensor) -> Stage:
    return Stage(name, values.detach().float().cpu().clone())


class _Watched:
    """A part of a layer whose result is written down."""

    def __init__(self, part: object, name: str, seen: list[Stage]) -> None:
        self._part = part
        self._name = name
        self._seen = seen

    def __call__(self, *arguments: object) -> Tensor:
        result: Tensor = self._part(*arguments)  # type: ignore[operator]
        self._seen.append(_stage(self._name, result))
        return result


class _WatchedProjection:
    """The packed projection of an attention layer, whose parts are written down one by one."""

    def __init__(self, attention: Attention, name: str, seen: list[Stage]) -> None:
        self._projection = attention.qkv
        self._name = name
        self._seen = seen
        heads = attention.spec.heads
        self._sizes = {"query": heads.num_heads * heads.head_dim}
        if attention.has_keys:
            self._sizes["key"] = heads.num_kv_heads * heads.head_dim
        if attention.has_keys and not attention.keys_are_values:
            self._sizes["value"] = heads.num_kv_heads * heads.head_dim
        if attention.is_gated:
            self._sizes["gate"] = attention.spec.output_size

    def __call__(self, batch: Batch, x: Tensor) -> Tensor:
        packed = self._projection(batch, x)
        parts = packed.split_with_sizes(tuple(self._sizes.values()), 1)
        for name, part in zip(self._sizes, parts, strict=True):
            self._seen.append(_stage(f"{self._name}.{name}", part))
        return packed
