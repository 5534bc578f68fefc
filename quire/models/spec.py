"""ModelSpec: everything the decoder needs to know about a model, and nothing else.

A spec is read once from `config.json` or GGUF metadata (see `families.py`) and is
frozen: whatever can be computed from it is a property, so no two fields can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.checkpoints.checkpoint import UNSAID, StoredCache
from quire.kernels.latent import LatentSpec
from quire.kernels.ops import Activation, AttentionSpec, HeadShape, MoeSpec
from quire.kernels.recurrent import ConvolutionSpec, RecurrentSpec


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding: the base frequencies and how they are stretched for longer
    contexts.
    """

    theta: float = 10_000.0
    kind: Literal["plain", "linear", "llama3", "yarn", "factors", "proportional"] = "plain"
    factor: float = 1.0
    original_max_position: int = 0
    """Context length before stretching (llama3, yarn, factors that come in two lists)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original/low_freq_factor are stretched fully."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original/high_freq_factor are kept."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """yarn: the range of rotations over the original context in which frequencies are blended."""
    truncate: bool = True
    """yarn: round that range to whole dimensions."""
    attention_factor: float = 1.0
    """yarn: cos and sin are multiplied by this (already resolved from mscale when the config says
    so).
    """
    freq_factors: tuple[float, ...] = ()
    """factors: each frequency is divided by its own factor (how GGUF files carry llama3
    stretching).
    """
    short_factors: tuple[float, ...] = ()
    """Used instead of `freq_factors` where `max_model_len` is at most the original context
    (longrope). A sequence's own length does not matter: if it did, its first keys would change when
    it grows.
    """
    rotated: int = 0
    """How many dimensions of a head are rotated (in a checkpoint its first ones); 0: all."""
    backwards: bool = False
    """Rotates by the negative angle."""
    num_turning: int = 0
    """proportional: how many frequencies are not 0, the first ones."""


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Sharpens attention late in a sequence: queries at position p are multiplied by
    1 + strength * log(1 + floor((p + offset) / interval)).
    """

    strength: float
    interval: int
    offset: int = 0


def alibi_slopes(num_heads: int, max_bias: float) -> tuple[float, ...]:
    """ALiBi's slope of each head: a geometric series that ends at 2^-max_bias for a power of two;
    further heads take every other number of the series for twice as many.
    """
    whole = 2 ** (num_heads.bit_length() - 1)
    first = [2.0 ** (-max_bias * (i + 1) / whole) for i in range(whole)]
    between = [2.0 ** (-max_bias * (2 * i + 1) / (2 * whole)) for i in range(num_heads - whole)]
    return (*first, *between)


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """An MLP: activation(gate) * up, then down."""

    intermediate_size: int
    activation: Activation = Activation.SILU
    bias: bool = False
    gated: bool = True
    """If not, it is activation(up), then down."""
    input_scale: float = 1.0
    output_scale: float = 1.0
    """Factors of what it takes and gives."""
    xielu: bool = False
    """The activation is xIELU, which has two numbers of its own; not of an MLP with a gate."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Several mixers of one layer: they take the same input, and their outputs are added in this
    order. A layer that is an MLP alone has none.
    """

    parts: tuple[Mixer, ...]
    scales: tuple[tuple[float, float], ...] = ()
    """Factors of what each takes and gives; (): none."""


Mixer = AttentionSpec | ConvolutionSpec | RecurrentSpec  # and LatentSpec, a kind of attention
"""What lets tokens see those before them. A new kind says how wide its packed input and its output
are, what it keeps (`layer_state`, `layer_cache`), how it is divided among devices (`share`) and what
it costs (`bytes_read`, `flops`, `prompt_flops`). Which parameters it has says `ModelSpec.parameters`,
and how it is computed a class in `mixers.py`.
"""


EXPERTS_NORMS = ("experts_norm", "mlp_own_norm", "experts_post_norm")
"""Norms of a layer with experts beside its MLP: of what they take, of what the MLP gives, of what
they give.
"""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: what lets tokens see those before them (its mixer), and the MLP that follows it."""

    mixer: Mixer | SideBySide
    rope: RopeSpec | None
    """How queries and keys are rotated; None: not at all."""
    mlp: MlpSpec | MoeSpec | None
    """None: the layer is its mixer alone."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before rope."""
    qk_norm_is_whole: bool = False
    """One norm over all heads of the query, and one over those of the key."""
    qk_norm_after_rope: bool = False
    qk_norm_weights: bool = True
    """Whether these norms have weights."""
    query_scale: QueryScale | None = None
    """A factor of queries, behind rope and norms."""
    qkv_limit: float = 0.0
    """Queries, keys and values are clamped to this magnitude, before norms and rope; 0: they stay."""
    value_norm: bool = False
    """RMSNorm without weights over each value head."""
    keys_are_values: bool = False
    """Values are what the product for keys gives, before norm and rope."""
    qkv_bias: bool = False
    output_bias: bool = False
    pre_norms: bool = True
    """Whether the inputs of attention and MLP are normed."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP are normed before they are added to the residual
    stream.
    """
    parallel: bool = False
    """Attention and MLP take the same input, and their sum is added to the residual stream."""
    parallel_norms: bool = False
    """Where they do: each norms it by itself, otherwise they share a norm."""
    gated_attention: bool = False
    """What attention gives is multiplied by the sigmoid of a gate, number by number."""
    sinks: bool = False
    """Each head has one more score in its softmax, which belongs to no key."""
    experts: MoeSpec | None = None
    """Experts beside the MLP: with norms of their own before and behind them, added to the MLP's
    output, which has another norm then.
    """
    stream_scale: bool = False
    """Whether the residual stream behind the layer is multiplied by a number of the layer's."""
    reads_layer: int | None = None
    """The layer whose keys and values it reads, an earlier one with the same mixer; it has none of
    its own then.
    """

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Its mixer, or those that are side by side."""
        return self.mixer.parts if isinstance(self.mixer, SideBySide) else (self.mixer,)

    @property
    def attention(self) -> AttentionSpec | None:
        """Its attention, if it has some; layers have one at most."""
        return next((one for one in self.mixers if isinstance(one, AttentionSpec)), None)

    def with_mixers(self, changed: Callable[[Mixer], Mixer]) -> LayerSpec:
        """The same layer with each of its mixers changed."""
        own = tuple(map(changed, self.mixers))
        return replace(
            self,
            mixer=replace(self.mixer, parts=own) if isinstance(self.mixer, SideBySide) else own[0],
        )

    @property
    def mixer_scales(self) -> tuple[tuple[float, float], ...]:
        """Factors of what each of its mixers takes and gives."""
        found = self.mixer.scales if isinstance(self.mixer, SideBySide) else ()
        return found or ((1.0, 1.0),) * len(self.mixers)

    def with_attention(self, **changes: Any) -> LayerSpec:
        """The same layer with these fields of its attention changed."""
        return self.with_mixers(
            lambda one: replace(one, **changes) if isinstance(one, AttentionSpec) else one
        )

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of the layer's norms, besides those of queries and keys."""
        parts = (["attention"] if self.mixers else []) + (["mlp"] if self.mlp is not None else [])
        before = parts[:1] if self.parallel and not self.parallel_norms else parts
        names = [f"{part}_norm" for part in before] if self.pre_norms else []
        names += [f"{part}_post_norm" for part in parts] if self.post_norms else []
        names += EXPERTS_NORMS if self.experts is not None else ()
        return tuple(names)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the decoder: a matrix [out, in], a stack of them [experts, out, in] or a
    vector.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...] = ()
    """Where several tensors of a checkpoint are stacked (query, key and value): how many rows each
    of them fills.
    """
    keep_float32: bool = False
    """Kept in float32 whatever the model's dtype is."""
    stays_plain: bool = False
    """Kept as plain numbers, whatever its format in the checkpoint and what `quantization` says."""
    is_vector: bool = False
    """In a checkpoint it has no columns: a matrix of one column here, so that its rows are stacked,
    ordered and divided as a weight's are.
    """

    def rows_of(self, part: int) -> slice:
        """The rows that tensor number `part` of the stack fills."""
        start = sum(self.rows[:part])
        return slice(start, start + self.rows[part])


POSITIONS = "position_embedding"
"""The parameter with the learned vectors of positions."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only transformer."""

    family: str
    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]
    max_position: int
    """The longest sequence the model was made for."""
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    layer_norm: bool = False
    """Norms are LayerNorm instead of RMSNorm (except those of queries and keys)."""
    norm_bias: bool = False
    norm_weights: bool = True
    """Whether norms have weights (for those of queries and keys the layer says it)."""
    norm_offset: float = 0.0
    """Added to the weights of norms; to those of LayerNorm when they are loaded."""
    embedding_norm: bool = False
    """Whether what the first layer takes is normed before."""
    num_learned_positions: int = 0
    """Rows of a table of which each token adds the one of its position to its embedding; 0: there
    is none.
    """
    head_bias: bool = False
    per_layer_size: int = 0
    """Each token has a vector of this size for each layer, from a table and from its embedding; 0:
    none.
    """
    per_layer_vocab: int = 0
    """Rows of that table."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    """Logits become cap * tanh(logit / cap); 0: no cap."""
    cache: StoredCache = UNSAID
    """What the checkpoint says about the format of cached keys and values."""
    passes_on: Literal["", "normed", "stream"] = ""
    """Of layers for multi-token prediction, which take hidden states of a model and the embeddings of
    the tokens behind them, and have its embedding and head: what the next token takes of them, their
    final hidden state or the residual stream before its norm. "": a model of its own.
    """

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Those of all layers, in their order."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    @property
    def head_shapes(self) -> tuple[HeadShape, ...]:
        """The different shapes of heads of its attention, in the order of the first layers that
        have them.
        """
        found = (one.heads for one in self.mixers if isinstance(one, AttentionSpec))
        return tuple(dict.fromkeys(found))

    def with_layers(self, **changes: Any) -> ModelSpec:
        """The same model with these fields of all its layers changed."""
        return replace(self, layers=tuple(replace(layer, **changes) for layer in self.layers))

    def with_attention(self, **changes: Any) -> ModelSpec:
        """The same model with these fields of all its attention changed."""
        return replace(self, layers=tuple(layer.with_attention(**changes) for layer in self.layers))

    def parameters(self) -> dict[str, Parameter]:
        """Names and shapes of all parameters of the decoder."""
        found = dict(self._norm("final_norm"))
        if self.passes_on:
            found |= dict(self._norm("token_norm")) | dict(self._norm("hidden_norm"))
            found |= dict(_linear("joined", 2 * self.hidden_size, (self.hidden_size,)))
        else:
            found["embedding"] = Parameter((self.vocab_size, self.hidden_size))
        if self.num_learned_positions:
            found[POSITIONS] = Parameter((self.num_learned_positions, self.hidden_size))
        if self.embedding_norm:
            found |= dict(self._norm("embedding_norm"))
        if not self.tie_embeddings and not self.passes_on:
            found["head"] = Parameter((self.vocab_size, self.hidden_size))
        if self.head_bias:
            found["head_bias"] = Parameter((self.vocab_size,))
        if size := self.per_layer_size:
            width = self.num_layers * size
            found["per_layer_embedding"] = Parameter((self.per_layer_vocab, width))
            found |= dict(_linear("per_layer_projection", self.hidden_size, (width,)))
            found["per_layer_norm"] = Parameter((size,))
        for i, layer in enumerate(self.layers):
            found |= {
                f"layers.{i}.{name}": parameter for name, parameter in self._layer_parameters(layer)
            }
        return found

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(parameter.shape) for parameter in self.parameters().values())

    def _norm(self, name: str) -> Iterator[tuple[str, Parameter]]:
        if not self.norm_weights:
            return
        for one in (name, f"{name}_bias") if self.norm_bias else (name,):
            yield one, Parameter((self.hidden_size,))

    def _layer_parameters(self, layer: LayerSpec) -> Iterator[tuple[str, Parameter]]:
        hidden = self.hidden_size
        for name in layer.norms:
            yield from self._norm(name)
        yield from self.mixer_parameters(layer)
        if isinstance(layer.mlp, MlpSpec):
            yield from _mlp("mlp", hidden, layer.mlp)
        elif layer.mlp is not None:
            yield from _moe("mlp", hidden, layer.mlp)
        if layer.experts is not None:
            yield "experts.router_norm", Parameter((hidden,))
            yield from _moe("experts", hidden, layer.experts)
        if size := self.per_layer_size:
            yield from _linear("per_layer_gate", hidden, (size,))
            yield from _linear("per_layer_output", size, (hidden,))
            yield from self._norm("per_layer_post_norm")
        if layer.stream_scale:
            yield "stream_scale", Parameter((1,), keep_float32=True)

    def mixer_parameters(self, layer: LayerSpec) -> Iterator[tuple[str, Parameter]]:
        """Those of a layer's mixers, by their names in the layer."""
        for name, mixer in zip(mixer_names(layer), layer.mixers, strict=True):
            for one, parameter in self._parameters_of(layer, mixer):
                yield f"{name}.{one}", parameter

    def _parameters_of(self, layer: LayerSpec, mixer: Mixer) -> Iterator[tuple[str, Parameter]]:
        if isinstance(mixer, LatentSpec):
            return self._latent_parameters(layer, mixer)
        if isinstance(mixer, AttentionSpec):
            return self._attention_parameters(layer, mixer.heads)
        if isinstance(mixer, ConvolutionSpec):
            return self._convolution_parameters(mixer)
        return self._recurrent_parameters(mixer)

    def _convolution_parameters(self, mixer: ConvolutionSpec) -> Iterator[tuple[str, Parameter]]:
        hidden, size = self.hidden_size, mixer.channels
        yield from _linear("input", hidden, (size, size, size), mixer.bias)
        yield from _convolution(mixer)
        yield from _linear("output", size, (hidden,), mixer.bias)

    def _recurrent_parameters(self, mixer: RecurrentSpec) -> Iterator[tuple[str, Parameter]]:
        hidden, heads = self.hidden_size, mixer.num_value_heads
        yield from _linear("input", hidden, mixer.packed_sizes, mixer.projection_bias)
        if mixer.gate_rank:
            yield from _linear("decay", mixer.gate_rank, (mixer.decay_size,))
            yield from _linear("gate", mixer.gate_rank, (mixer.value_size,))
        yield from _convolution(mixer.convolution, mixer.packed_sizes[:3])
        for name in ("log_rate", "time_bias", *(() if mixer.is_delta else ("skip",))):
            size = mixer.decay_size if name == "time_bias" else heads
            yield name, Parameter((size,), keep_float32=True)
        if mixer.norm.group_size:
            size = mixer.value_dim if mixer.is_delta else mixer.value_size
            yield "norm", Parameter((size,))
        yield from _linear("output", mixer.value_size, (hidden,), mixer.output_bias)

    def _attention_parameters(
        self, layer: LayerSpec, heads: HeadShape
    ) -> Iterator[tuple[str, Parameter]]:
        hidden, has_keys = self.hidden_size, layer.reads_layer is None
        query, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        if layer.qk_norm and layer.qk_norm_weights:
            sizes = (query, kv) if layer.qk_norm_is_whole else (heads.head_dim, heads.head_dim)
            yield "query_norm", Parameter(sizes[:1])
            if has_keys:
                yield "key_norm", Parameter(sizes[1:])
        if layer.sinks:
            yield "sinks", Parameter((heads.num_heads,), keep_float32=True)
        sides = (kv,) if layer.keys_are_values else (kv, kv)
        rows = (query, *sides) if has_keys else (query,)
        rows = (*rows, query) if layer.gated_attention else rows
        yield from _linear("qkv", hidden, rows, layer.qkv_bias)
        yield from _linear("output", query, (hidden,), layer.output_bias)

    def _latent_parameters(
        self, layer: LayerSpec, mixer: LatentSpec
    ) -> Iterator[tuple[str, Parameter]]:
        hidden, heads, rank = self.hidden_size, mixer.heads.num_heads, mixer.rank
        if mixer.query_rank:
            yield from _linear("query_down", hidden, (mixer.query_rank,), layer.qkv_bias)
            yield "query_norm", Parameter((mixer.query_rank,))
        yield from _linear("query", mixer.query_rank or hidden, (heads * mixer.query_dim,))
        yield from _linear("latent", hidden, (mixer.heads.head_dim,), layer.qkv_bias)
        yield "latent_norm", Parameter((rank,))
        # what makes a head's keys and values from a latent
        yield "key_up.weight", Parameter((heads * mixer.nope_dim, rank), stays_plain=True)
        yield "value_up.weight", Parameter((heads * mixer.value_dim, rank), stays_plain=True)
        yield from _linear("output", mixer.output_size, (hidden,), layer.output_bias)


def mixer_names(layer: LayerSpec) -> tuple[str, ...]:
    """What the names of its mixers' parameters begin with."""
    names = ("attention", *(f"attention_{number}" for number in range(1, len(layer.mixers))))
    return names[: len(layer.mixers)]


def _linear(
    name: str, size: int, rows: tuple[int, ...], bias: bool = False
) -> Iterator[tuple[str, Parameter]]:
    stacked = rows if len(rows) > 1 else ()
    yield f"{name}.weight", Parameter((sum(rows), size), stacked)
    if bias:
        yield f"{name}.bias", Parameter((sum(rows),), stacked)


def _convolution(
    mixer: ConvolutionSpec, rows: tuple[int, ...] = ()
) -> Iterator[tuple[str, Parameter]]:
    yield "convolution.weight", Parameter((mixer.channels, mixer.taps), rows, keep_float32=True)
    if mixer.bias:
        yield "convolution.bias", Parameter((mixer.channels,), rows, keep_float32=True)


def _mlp(name: str, hidden: int, mlp: MlpSpec) -> Iterator[tuple[str, Parameter]]:
    size = mlp.intermediate_size
    if mlp.gated:
        yield from _linear(f"{name}.gate_up", hidden, (size, size), mlp.bias)
    else:
        yield from _linear(f"{name}.up", hidden, (size,), mlp.bias)
    yield from _linear(f"{name}.down", size, (hidden,), mlp.bias)
    if mlp.xielu:
        for one in ("positive", "negative"):
            yield f"{name}.{one}_alpha", Parameter((1,), keep_float32=True)


def _moe(name: str, hidden: int, mlp: MoeSpec) -> Iterator[tuple[str, Parameter]]:
    size, shared = mlp.intermediate_size, mlp.shared_intermediate_size
    if mlp.gated:
        yield f"{name}.gate_up", Parameter((mlp.num_experts, 2 * size, hidden), (size, size))
    else:
        yield f"{name}.up", Parameter((mlp.num_experts, size, hidden))
    yield f"{name}.down", Parameter((mlp.num_experts, hidden, size))
    if mlp.bias:
        count = mlp.num_experts
        yield f"{name}.gate_up_bias", Parameter((count, 2 * size, 1), (size, size), is_vector=True)
        yield f"{name}.down_bias", Parameter((count, hidden, 1), is_vector=True)
    for part, router in _linear(f"{name}.router", hidden, (mlp.num_experts,), mlp.bias):
        yield part, replace(router, keep_float32=mlp.has_float32_router)
    if mlp.choice_bias:
        yield f"{name}.choice_bias", Parameter((mlp.num_experts,), keep_float32=True)
    if mlp.expert_scales:
        yield f"{name}.expert_scales", Parameter((mlp.num_experts,), keep_float32=True)
    if shared:
        yield from _mlp(f"{name}.shared", hidden, MlpSpec(shared, gated=mlp.gated))
    if shared and mlp.shared_gate:
        yield from _linear(f"{name}.shared_gate", hidden, (1,))
