"""ModelSpec: everything the decoder needs to know about a model, and nothing else.

A spec is read once from `config.json` or GGUF metadata (see `families.py` and `gguf_spec.py`) and is
frozen: whatever can be computed from it is a property, so no two fields can disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
class MoeSpec:
    """A mixture-of-experts MLP: softmax routing to `top_k` of `num_experts`, plus perhaps a shared one."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize_weights: bool
    """Whether the chosen experts' probabilities are rescaled to sum to one."""
    shared_intermediate_size: int = 0
    """Size of an expert every token goes through, weighed by a sigmoid gate of its own; 0 for none."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    sliding_window: int | None = None
    """A query sees this many most recent keys, itself included; None sees all."""
    use_rope: bool = True
    use_moe: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only transformer."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    layers: tuple[LayerSpec, ...]
    max_position: int
    """The longest sequence the model was made for."""
    tie_embeddings: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head before rope."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    moe: MoeSpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Counted from the shapes, without making the model."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        attention += (self.query_size + 2 * self.kv_size) * self.qkv_bias + self.hidden_size * self.output_bias
        attention += 2 * self.head_dim * self.qk_norm
        total = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2) + self.hidden_size
        for layer in self.layers:
            total += attention + 2 * self.hidden_size
            if layer.use_moe:
                assert self.moe is not None
                total += self.moe.num_experts * (3 * self.moe.intermediate_size + 1) * self.hidden_size
                if self.moe.shared_intermediate_size:
                    total += (3 * self.moe.shared_intermediate_size + 1) * self.hidden_size
            else:
                total += 3 * self.intermediate_size * self.hidden_size
                total += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        return total
