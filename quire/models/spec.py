"""ModelSpec: everything the decoder needs to know about a model, and nothing else.

A spec is read once from `config.json` or GGUF metadata (see `families.py` and `gguf_spec.py`) and is
frozen: whatever can be computed from it is a property, so no two fields can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.kernels.ops import Activation, AttentionSpec, HeadShape, MoeSpec


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding: the base frequencies and how they are stretched for longer contexts."""

    theta: float = 10_000.0
    kind: Literal["plain", "linear", "llama3", "yarn", "factors"] = "plain"
    factor: float = 1.0
    original_max_position: int = 0
    """Context length before stretching (llama3, yarn)."""
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
    """yarn: cos and sin are multiplied by this (already resolved from mscale when the config says so)."""
    freq_factors: tuple[float, ...] = ()
    """factors: each frequency is divided by its own factor (how GGUF files carry llama3 stretching)."""


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A gated MLP: activation(gate) * up, then down."""

    intermediate_size: int
    activation: Activation = Activation.SILU
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: attention and what follows it."""

    attention: AttentionSpec
    rope: RopeSpec | None
    """How queries and keys are rotated; None: not at all."""
    mlp: MlpSpec | MoeSpec
    qk_norm: bool = False
    """RMSNorm over each query and key head before rope."""
    qkv_bias: bool = False
    output_bias: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the decoder: a matrix [out, in], a stack of them [experts, out, in] or a vector."""

    shape: tuple[int, ...]
    rows: tuple[int, ...] = ()
    """Where several tensors of a checkpoint are stacked along the output (query, key and value): how many rows of the
    parameter each of them fills."""

    def rows_of(self, part: int) -> slice:
        """Those that part `part` of the stack fills."""
        start = sum(self.rows[:part])
        return slice(start, start + self.rows[part])


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

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> HeadShape:
        """The same in all layers: they share one cache and one list of attention work."""
        return self.layers[0].attention.heads

    def with_layers(self, **changes: Any) -> ModelSpec:
        """The same model with these fields of all its layers changed."""
        return replace(self, layers=tuple(replace(layer, **changes) for layer in self.layers))

    def parameters(self) -> dict[str, Parameter]:
        """All parameters by their names, without making the model."""
        found = {
            "embedding": Parameter((self.vocab_size, self.hidden_size)),
            "final_norm": Parameter((self.hidden_size,)),
        }
        if not self.tie_embeddings:
            found["head"] = Parameter((self.vocab_size, self.hidden_size))
        for i, layer in enumerate(self.layers):
            found |= {f"layers.{i}.{name}": parameter for name, parameter in self._layer_parameters(layer)}
        return found

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(parameter.shape) for parameter in self.parameters().values())

    def _layer_parameters(self, layer: LayerSpec) -> Iterator[tuple[str, Parameter]]:
        hidden, heads = self.hidden_size, layer.attention.heads
        query, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        yield "attention_norm", Parameter((hidden,))
        yield "mlp_norm", Parameter((hidden,))
        if layer.qk_norm:
            yield "attention.query_norm", Parameter((heads.head_dim,))
            yield "attention.key_norm", Parameter((heads.head_dim,))
        yield from _linear("attention.qkv", hidden, (query, kv, kv), layer.qkv_bias)
        yield from _linear("attention.output", query, (hidden,), layer.output_bias)
        mlp = layer.mlp
        if isinstance(mlp, MlpSpec):
            yield from _mlp("mlp", hidden, mlp.intermediate_size, mlp.bias)
            return
        size, shared = mlp.intermediate_size, mlp.shared_intermediate_size
        yield "mlp.gate_up", Parameter((mlp.num_experts, 2 * size, hidden), (size, size))
        yield "mlp.down", Parameter((mlp.num_experts, hidden, size))
        yield from _linear("mlp.router", hidden, (mlp.num_experts,))
        if shared:
            yield from _mlp("mlp.shared", hidden, shared)
            yield from _linear("mlp.shared_gate", hidden, (1,))


def _linear(name: str, size: int, rows: tuple[int, ...], bias: bool = False) -> Iterator[tuple[str, Parameter]]:
    stacked = rows if len(rows) > 1 else ()
    yield f"{name}.weight", Parameter((sum(rows), size), stacked)
    if bias:
        yield f"{name}.bias", Parameter((sum(rows),), stacked)


def _mlp(name: str, hidden: int, size: int, bias: bool = False) -> Iterator[tuple[str, Parameter]]:
    yield from _linear(f"{name}.gate_up", hidden, (size, size), bias)
    yield from _linear(f"{name}.down", size, (hidden,), bias)
