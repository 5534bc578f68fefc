"""What lets tokens see those before them: attention, recurrences, convolutions over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.latent import LatentSpec
from quire.kernels.ops import (
    AttentionSpec,
    Batches,
    HeadNorms,
    Kernels,
    LatentNorm,
    LayerCache,
    MixerCache,
)
from quire.kernels.recurrent import (
    ConvolutionCache,
    ConvolutionSpec,
    RecurrentCache,
    RecurrentSpec,
    RecurrentWeights,
)
from quire.models.linear import Linear, Rows, linear_pair
from quire.models.parameters import Parameters
from quire.models.rope import query_factors
from quire.models.spec import LayerSpec, Mixer, ModelSpec


@dataclass(frozen=True, slots=True)
class Batch(Rows):
    """What every layer is told of the rows it computes."""

    positions: Tensor
    """int64 [rows]: where in its sequence each row stands."""
    paged: Batches
    per_layer: Tensor | None = None
    """[rows, layers * size]: the vectors that each token has for each layer, where it has some."""


class MixerModule(Protocol):
    """One mixer with its weights."""

    def __call__(self, batch: Batch, x: Tensor, cache: MixerCache) -> Tensor: ...


def position_factors(parameters: Parameters, layer: LayerSpec) -> Tensor | None:
    """What a layer's queries are multiplied with, by position."""
    if (scale := layer.query_scale) is None:
        return None
    positions = parameters.num_positions
    return parameters.constant(scale, lambda: query_factors(scale, positions))


class Attention:
    """Packed query, key and value projections, perhaps normed heads, rope, attention over the
    cache.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        spec: ModelSpec,
        layer: LayerSpec,
        mixer: AttentionSpec,
        cos_sin: Tensor | None,
    ) -> None:
        self.spec = mixer
        self.cos_sin = cos_sin
        self.has_keys = layer.reads_layer is None
        self.keys_are_values = layer.keys_are_values
        self.value_norm = parameters.ones(mixer.heads.head_dim) if layer.value_norm else None
        self.eps = spec.rms_norm_eps
        self.is_gated = layer.gated_attention
        self.norms: HeadNorms | None = None
        if layer.qk_norm:
            has_weights, size = layer.qk_norm_weights, mixer.heads.head_dim
            query = (
                parameters.vector(f"{name}.query_norm") if has_weights else parameters.ones(size)
            )
            has_own = has_weights and self.has_keys
            key = parameters.vector(f"{name}.key_norm") if has_own else query
            offset = spec.norm_offset if has_weights else 0.0
            self.norms = HeadNorms(query, key, spec.rms_norm_eps, offset, layer.qk_norm_after_rope)
        self.factors = position_factors(parameters, layer)
        self.sinks = parameters.vector(f"{name}.sinks") if layer.sinks else None
        self.qkv = parameters.linear(f"{name}.qkv")
        self.qkv_limit = layer.qkv_limit
        self.slopes: Tensor | None = None
        if slopes := mixer.slopes:
            self.slopes = parameters.constant(("slopes", slopes), lambda: torch.tensor(slopes))
        self.output = parameters.linear(f"{name}.output")

    def __call__(self, batch: Batch, x: Tensor, cache: MixerCache) -> Tensor:
        assert isinstance(cache, LayerCache)
        kernels, paged, spec = batch.kernels, batch.paged[cache.group], self.spec
        qkv, gate = self.qkv(batch, x), None
        if self.qkv_limit:
            kernels.clamp_(qkv, self.qkv_limit)
        if self.is_gated:
            qkv, gate = qkv.split_with_sizes((qkv.shape[1] - spec.output_size, spec.output_size), 1)
        if self.has_keys and (self.value_norm is not None or self.keys_are_values):
            qkv = self._with_values(kernels, qkv)
        if self.has_keys:
            query = kernels.qkv_to_cache_(
                qkv,
                spec.heads,
                self.norms,
                batch.positions,
                self.cos_sin,
                cache,
                paged.slot_mapping,
            )
        else:
            query = kernels.query_heads(qkv, spec.heads, self.norms, batch.positions, self.cos_sin)
        if self.factors is not None:
            query = kernels.scale_rows(query.flatten(1), self.factors, batch.positions)
            query = query.view(-1, spec.heads.num_heads, spec.heads.head_dim)
        attended = kernels.attention(query, cache, paged, spec, self.sinks, self.slopes)
        output = attended.flatten(1)
        return self.output(batch, output if gate is None else kernels.sigmoid_mul(gate, output))

    def _with_values(self, kernels: Kernels, qkv: Tensor) -> Tensor:
        """The packed row with its values made of keys, or normed."""
        heads = self.spec.heads
        size = heads.num_kv_heads * heads.head_dim
        values, width = qkv[:, -size:], qkv.shape[1]
        if self.value_norm is not None:
            by_head = values.view(len(qkv), heads.num_kv_heads, heads.head_dim)
            values = kernels.rms_norm(by_head, self.value_norm, self.eps).flatten(1)
        return torch.cat((qkv[:, : width if self.keys_are_values else -size], values), 1)


class LatentAttention:
    """Attention over latents: each head's matrix for keys is multiplied with its queries, the one
    for values with what it attended to.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        layer: LayerSpec,
        mixer: LatentSpec,
        cos_sin: Tensor | None,
    ) -> None:
        heads = mixer.heads.num_heads
        self.spec = mixer
        self.cos_sin = cos_sin
        self.query_down: Linear | None = None
        if mixer.query_rank:
            self.query_down = parameters.linear(f"{name}.query_down")
            self.query_norm = parameters.vector(f"{name}.query_norm")
        self.query = parameters.linear(f"{name}.query")
        self.latent = parameters.linear(f"{name}.latent")
        self.norm = LatentNorm(parameters.vector(f"{name}.latent_norm"), mixer.norm_eps)
        self.key_up = parameters.heads(f"{name}.key_up", heads, is_turned=True)
        self.value_up = parameters.heads(f"{name}.value_up", heads)
        self.output = parameters.linear(f"{name}.output")
        self.factors = position_factors(parameters, layer)

    def __call__(self, batch: Batch, x: Tensor, cache: MixerCache) -> Tensor:
        assert isinstance(cache, LayerCache)
        kernels, paged, spec = batch.kernels, batch.paged[cache.group], self.spec
        if self.query_down is None:
            query, latent = linear_pair(batch, x, self.query, self.latent)
        else:
            down, latent = linear_pair(batch, x, self.query_down, self.latent)
            query = self.query(batch, kernels.rms_norm(down, self.query_norm, spec.norm_eps))
        if self.factors is not None:
            query = kernels.scale_rows(query, self.factors, batch.positions)
        query = query.view(len(x), -1, spec.query_dim)
        plain, rotated = query.split_with_sizes((spec.nope_dim, spec.rope_dim), 2)
        query = self.key_up.queries_(
            batch,
            plain,
            rotated,
            latent,
            self.norm,
            batch.positions,
            self.cos_sin,
            cache,
            paged.slot_mapping,
        )
        attended = kernels.attention(query, cache, paged, spec)
        return self.output(batch, self.value_up(batch, attended).flatten(1))


class Recurrent:
    """Packed projections, a convolution over time, a recurrence with a state, a norm with a gate.
    Gates may be made by products of their own.
    """

    def __init__(
        self, parameters: Parameters, name: str, spec: ModelSpec, mixer: RecurrentSpec
    ) -> None:
        self.spec = mixer
        self.eps = spec.rms_norm_eps if mixer.norm.eps is None else mixer.norm.eps
        self.input = parameters.linear(f"{name}.input")
        if mixer.gate_rank:
            self.decay = parameters.linear(f"{name}.decay")
            self.gate = parameters.linear(f"{name}.gate")
        self.taps = parameters.vector(f"{name}.convolution.weight")
        self.taps_bias = parameters.optional_vector(f"{name}.convolution.bias")
        self.weights = RecurrentWeights(
            parameters.vector(f"{name}.log_rate"),
            parameters.vector(f"{name}.time_bias"),
            parameters.optional_vector(f"{name}.skip"),
        )
        self.norm = parameters.optional_vector(f"{name}.norm")
        self.output = parameters.linear(f"{name}.output")

    def __call__(self, batch: Batch, x: Tensor, cache: MixerCache) -> Tensor:
        assert isinstance(cache, RecurrentCache)
        kernels, paged, spec = batch.kernels, batch.paged[cache.group], self.spec
        convolution, rank = spec.convolution, spec.gate_rank
        packed = self.input(batch, x)
        if spec.input_scales:
            packed = _scaled(kernels, packed, spec)
        decay_gates: Tensor | None = None
        if rank:
            made_from = (convolution.channels, rank, rank, spec.num_gates)
            mixed, decay, gate, gates = packed.split_with_sizes(made_from, 1)
            decay_gates, gate = self.decay(batch, decay), self.gate(batch, gate)
        else:
            sizes = (convolution.channels, spec.value_size, spec.num_gates)
            mixed, gate, gates = packed.split_with_sizes(sizes, 1)
        mixed = kernels.convolve_(
            mixed, self.taps, self.taps_bias, convolution, cache.convolution, paged
        )
        output = kernels.recur_(mixed, gates, self.weights, spec, cache, paged, decay_gates)
        output = kernels.gated_norm(output, gate, self.norm, self.eps, spec.norm)
        return self.output(batch, output)


def _scaled(kernels: Kernels, packed: Tensor, spec: RecurrentSpec) -> Tensor:
    """A packed row whose parts have factors of their own."""
    parts = zip(packed.split_with_sizes(spec.packed_sizes, 1), spec.input_scales, strict=True)
    return torch.cat([kernels.scale_add(part.contiguous(), scale) for part, scale in parts], 1)


class ShortConvolution:
    """A convolution over time between two gates."""

    def __init__(self, parameters: Parameters, name: str, mixer: ConvolutionSpec) -> None:
        self.spec = mixer
        self.input = parameters.linear(f"{name}.input")
        self.taps = parameters.vector(f"{name}.convolution.weight")
        self.taps_bias = parameters.optional_vector(f"{name}.convolution.bias")
        self.output = parameters.linear(f"{name}.output")

    def __call__(self, batch: Batch, x: Tensor, cache: MixerCache) -> Tensor:
        assert isinstance(cache, ConvolutionCache)
        kernels, paged = batch.kernels, batch.paged[cache.group]
        before, behind, inputs = self.input(batch, x).chunk(3, 1)
        inputs = kernels.multiply(before, inputs)
        mixed = kernels.convolve_(inputs, self.taps, self.taps_bias, self.spec, cache, paged)
        return self.output(batch, kernels.multiply(behind, mixed))


def make_mixer(
    parameters: Parameters,
    name: str,
    spec: ModelSpec,
    layer: LayerSpec,
    mixer: Mixer,
    cos_sin: Tensor | None,
) -> MixerModule:
    """The mixer with the parameters of this name."""
    if isinstance(mixer, LatentSpec):
        return LatentAttention(parameters, name, layer, mixer, cos_sin)
    if isinstance(mixer, AttentionSpec):
        return Attention(parameters, name, spec, layer, mixer, cos_sin)
    if isinstance(mixer, ConvolutionSpec):
        return ShortConvolution(parameters, name, mixer)
    return Recurrent(parameters, name, spec, mixer)


class Mixers:
    """A layer's mixer, or several that are side by side: their outputs are added."""

    def __init__(self, parts: Sequence[MixerModule], scales: Sequence[tuple[float, float]]) -> None:
        self.parts = parts
        self._scales = scales
        """Of what each takes and gives."""

    def __call__(self, batch: Batch, x: Tensor, caches: Sequence[MixerCache]) -> Tensor:
        total: Tensor | None = None
        scale_add = batch.kernels.scale_add
        for part, cache, (before, behind) in zip(self.parts, caches, self._scales, strict=True):
            output = part(batch, x if before == 1 else scale_add(x, before), cache)
            output = output if behind == 1 else scale_add(output, behind)
            total = output if total is None else scale_add(total, 1.0, output)
        assert total is not None
        return total
