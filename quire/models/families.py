"""The families of models Quire runs: one entry each, naming what differs from plain Llama.

A new family of this kind is one `Family` below: the names its files go by, and a function that reads its
quirks from `config.json`. Everything shared (sizes, rope, windows) is read by `read_config`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.ops import Activation, AttentionSpec, HeadShape, MoeSpec
from quire.models.compressed import read_layout
from quire.models.fields import Fields
from quire.models.files import read_json
from quire.models.spec import LayerSpec, MlpSpec, ModelSpec, RopeSpec

MAX_CONFIG_BYTES = 16 * 2**20
MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class MoeNames:
    """How a checkpoint names a layer's experts, by default Qwen's way; `{expert}` is the expert's number."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{expert}.gate_proj"
    up: str = "mlp.experts.{expert}.up_proj"
    down: str = "mlp.experts.{expert}.down_proj"
    packed_gate_up: str = "mlp.experts.gate_up_proj"
    packed_down: str = "mlp.experts.down_proj"


_MIXTRAL_MOE = MoeNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{expert}.w1",
    up="block_sparse_moe.experts.{expert}.w3",
    down="block_sparse_moe.experts.{expert}.w2",
)


@dataclass(frozen=True, slots=True)
class Family:
    """One line of models."""

    name: str
    architectures: tuple[str, ...]
    """What `architectures` says in config.json."""
    gguf_architecture: str | None
    """What `general.architecture` says in a GGUF file, if such files exist."""
    quirks: Callable[[Fields, ModelSpec], ModelSpec]
    """Reads what is particular to the family from config.json into a spec that holds the rest."""
    tie_embeddings: bool = False
    """What an absent `tie_word_embeddings` means."""
    rope_theta: float = 10_000.0
    """What an absent `rope_theta` means."""
    head_dim: int | None = None
    """What an absent `head_dim` means; None: hidden_size / heads."""
    moe_names: MoeNames = MoeNames()
    gguf_interleaved_rope: bool = False
    """GGUF files hold the rows of q and k reordered for rope over neighbouring dimensions."""
    gguf_no_rope_interval: int = 0
    """Every so many layers there is no rope, which GGUF files leave out; 0: it is everywhere."""
    gguf_normalizes_experts: bool = False
    """What GGUF files leave out of `MoeSpec.normalize_weights`."""


def _llama(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    mlp = MlpSpec(config.integer("intermediate_size"), _read_activation(config), config.boolean("mlp_bias", False))
    return spec.with_layers(qkv_bias=bias, output_bias=bias, mlp=mlp)


def _smollm3(config: Fields, spec: ModelSpec) -> ModelSpec:
    interval = config.integer("no_rope_layer_interval", 4)
    every_nth = [int((i + 1) % interval != 0) for i in range(spec.num_layers)]
    rope = config.list_of("no_rope_layers", int, every_nth)  # 1 where rope is used, whatever the name says
    if len(rope) != spec.num_layers:
        raise config.error("no_rope_layers", f"a list of {spec.num_layers} numbers", rope)
    default = ["full_attention" if use else "sliding_attention" for use in rope]
    spec = _llama(config, _with_window_types(config, spec, default, window=None))
    layers = zip(spec.layers, rope, strict=True)
    return replace(spec, layers=tuple(layer if use else replace(layer, rope=None) for layer, use in layers))


def _mistral(config: Fields, spec: ModelSpec) -> ModelSpec:
    return _with_window(spec, _window(config, 4096))


def _mixtral(config: Fields, spec: ModelSpec) -> ModelSpec:
    moe = MoeSpec(
        num_experts=config.integer("num_local_experts", 8, high=65_536),
        top_k=config.integer("num_experts_per_tok", 2),
        intermediate_size=config.integer("intermediate_size"),
        normalize_weights=True,
    )
    return _with_window(spec.with_layers(mlp=moe), _window(config, None))


def _qwen2(config: Fields, spec: ModelSpec) -> ModelSpec:
    first_window_layer = config.integer("max_window_layers", 28, low=0)
    default = ["sliding_attention" if i >= first_window_layer else "full_attention" for i in range(spec.num_layers)]
    return _with_window_types(config, spec, default).with_layers(qkv_bias=True)


def _qwen2_moe(config: Fields, spec: ModelSpec) -> ModelSpec:
    last_window_layer = config.integer("max_window_layers", 28, low=0)
    windows = [i % 2 == 0 and i < last_window_layer for i in range(spec.num_layers)]
    default = ["sliding_attention" if window else "full_attention" for window in windows]
    shared = config.integer("shared_expert_intermediate_size", 5632)
    spec = _with_sparse_layers(config, _with_window_types(config, spec, default), shared)
    return spec.with_layers(qkv_bias=config.boolean("qkv_bias", True))


def _qwen3(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    return _qwen2(config, spec).with_layers(qk_norm=True, qkv_bias=bias, output_bias=bias)


def _qwen3_moe(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    if config.boolean("use_sliding_window", False):
        spec = _mistral(config, spec)
    return _with_sparse_layers(config, spec).with_layers(qk_norm=True, qkv_bias=bias, output_bias=bias)


FAMILIES: tuple[Family, ...] = (
    Family("llama", ("LlamaForCausalLM",), "llama", _llama, gguf_interleaved_rope=True, gguf_normalizes_experts=True),
    Family(
        "smollm3",
        ("SmolLM3ForCausalLM",),
        "smollm3",
        _smollm3,
        tie_embeddings=True,
        rope_theta=2_000_000.0,
        gguf_interleaved_rope=True,
        gguf_no_rope_interval=4,
    ),
    # GGUF files of Mistral and Mixtral call themselves llama.
    Family("mistral", ("MistralForCausalLM",), None, _mistral),
    Family("mixtral", ("MixtralForCausalLM",), None, _mixtral, rope_theta=1_000_000.0, moe_names=_MIXTRAL_MOE),
    Family("qwen2", ("Qwen2ForCausalLM",), "qwen2", _qwen2),
    Family("qwen2_moe", ("Qwen2MoeForCausalLM",), "qwen2moe", _qwen2_moe),
    Family("qwen3", ("Qwen3ForCausalLM",), "qwen3", _qwen3, head_dim=128),
    Family("qwen3_moe", ("Qwen3MoeForCausalLM",), "qwen3moe", _qwen3_moe, gguf_normalizes_experts=True),
)


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def supported_architectures() -> str:
    return ", ".join(name for family in FAMILIES for name in family.architectures)


def read_config(path: Path) -> ModelSpec:
    """The spec of a model in Hugging Face layout, from its config.json and generation_config.json."""
    config = Fields(read_json(path, MAX_CONFIG_BYTES), str(path))
    family = _find_family(config)
    read_layout(config)  # refuses ways of quantising that can't be read
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = config.integer("head_dim", family.head_dim or max(hidden_size // num_heads, 1))
    rope = _read_rope(config, family)
    max_position = config.integer("max_position_embeddings", 2048, high=2**31)
    if rope.kind == "yarn":
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    mlp = MlpSpec(config.integer("intermediate_size"), _read_activation(config))
    spec = ModelSpec(
        family=family.name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        layers=(LayerSpec(plain_attention(num_heads, num_kv_heads, head_dim), rope, mlp),) * num_layers,
        max_position=max_position,
        tie_embeddings=config.boolean("tie_word_embeddings", family.tie_embeddings),
        eos_token_ids=_read_eos(config, path.with_name("generation_config.json")),
        bos_token_id=config.integer("bos_token_id", low=0) if "bos_token_id" in config else None,
    )
    spec = family.quirks(config, spec)
    check_spec(spec, config.file)
    return spec


def check_spec(spec: ModelSpec, file: str) -> None:
    """Refuses sizes that can't belong together, before anything is made of them."""

    def require(holds: bool, message: str) -> None:
        if not holds:
            raise ModelFormatError(f"{file}: {message}")

    heads = spec.heads
    queries, keys = heads.num_heads, heads.num_kv_heads
    require(queries % keys == 0, f"{queries} attention heads can't share {keys} key-value heads evenly")
    require(heads.head_dim % 2 == 0, f"head_dim is {heads.head_dim}, but rope needs an even number")
    for layer in spec.layers:
        if layer.rope is not None and layer.rope.kind == "factors":
            count = len(layer.rope.freq_factors)
            require(count == heads.head_dim // 2, f"{count} rope factors for {heads.head_dim // 2} frequencies")
        if isinstance(layer.mlp, MoeSpec):
            top_k, num_experts = layer.mlp.top_k, layer.mlp.num_experts
            require(top_k <= num_experts, f"{top_k} experts per token of {num_experts}")


def plain_attention(num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None) -> AttentionSpec:
    """What nearly all families have."""
    return AttentionSpec(HeadShape(num_heads, num_kv_heads, head_dim), head_dim**-0.5, window)


def _find_family(config: Fields) -> Family:
    names = config.list_of("architectures", str, [])
    if not names:
        model_type = config.string("model_type", "")
        names = [f.architectures[0] for f in FAMILIES if f.name == model_type] or [f"model_type {model_type!r}"]
    for family in FAMILIES:
        if names[0] in family.architectures:
            return family
    raise UnsupportedModelError(
        f"{config.file}: the architecture {names[0]} is not supported. Supported: {supported_architectures()}."
    )


def _read_activation(config: Fields) -> Activation:
    name = config.string("hidden_act", "silu")
    if name not in ("silu", "swish"):
        raise UnsupportedModelError(f"{config.file}: hidden_act {name!r} is not supported, only silu is.")
    return Activation.SILU


def _read_rope(config: Fields, family: Family) -> RopeSpec:
    """Both ways of writing it: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
    scaling = config.part("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    theta = scaling.number("rope_theta", config.number("rope_theta", family.rope_theta), low=1e-6)
    if scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError(f"{config.file}: rope over a part of the head dimension is not supported.")
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind == "default":
        return RopeSpec(theta)
    max_position = config.integer("max_position_embeddings", 2048, high=2**31)
    original = scaling.integer("original_max_position_embeddings", max_position, high=2**31)
    if kind == "linear":
        return RopeSpec(theta, "linear", factor=scaling.number("factor", low=1e-6))
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.error("high_freq_factor", f"above low_freq_factor ({low})", high)
        factor = scaling.number("factor", low=1e-6)
        return RopeSpec(theta, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        factor = scaling.number("factor", max_position / original, low=1e-6)
        return RopeSpec(
            theta,
            "yarn",
            factor,
            original,
            beta_fast=scaling.number("beta_fast", 32.0) or 32.0,
            beta_slow=scaling.number("beta_slow", 1.0) or 1.0,
            truncate=scaling.boolean("truncate", True),
            attention_factor=_yarn_attention_factor(scaling, factor),
        )
    raise UnsupportedModelError(
        f"{config.file}: rope type {kind!r} is not supported. Supported: default, linear, llama3, yarn."
    )


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    if "attention_factor" in scaling:
        return scaling.number("attention_factor")
    mscale, all_dim = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How yarn sharpens attention for a stretched context."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _window(config: Fields, default: int | None) -> int | None:
    """`sliding_window`, where null and 0 mean none and only an absent key means the family's default."""
    if not config.declares("sliding_window"):
        return default
    return config.integer("sliding_window", 0, low=0, high=2**31) or None


def _with_window(spec: ModelSpec, window: int | None) -> ModelSpec:
    return spec.with_layers(attention=replace(spec.layers[0].attention, sliding_window=window))


def _with_window_types(config: Fields, spec: ModelSpec, default: list[str], window: int | None = 4096) -> ModelSpec:
    """Windows on the layers `layer_types` marks, where `use_sliding_window` turns them on at all."""
    if not config.boolean("use_sliding_window", False):
        return spec
    window = _window(config, window)
    kinds = config.list_of("layer_types", str, default)
    if len(kinds) != spec.num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.error("layer_types", f"{spec.num_layers} of full_attention or sliding_attention", kinds)
    layers = []
    for layer, kind in zip(spec.layers, kinds, strict=True):
        own = window if kind == "sliding_attention" else None
        layers.append(replace(layer, attention=replace(layer.attention, sliding_window=own)))
    return replace(spec, layers=tuple(layers))


def _with_sparse_layers(config: Fields, spec: ModelSpec, shared: int = 0) -> ModelSpec:
    """Qwen's way of saying which layers have experts."""
    experts = config.integer("num_experts", config.integer("num_local_experts", 0, low=0), low=0, high=65_536)
    moe = MoeSpec(
        num_experts=experts,
        top_k=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        normalize_weights=config.boolean("norm_topk_prob", False),
        shared_intermediate_size=shared,
    )
    dense = set(config.list_of("mlp_only_layers", int, []))
    step = config.integer("decoder_sparse_step", 1)
    layers = (
        replace(layer, mlp=moe) if i not in dense and experts > 0 and (i + 1) % step == 0 else layer
        for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def _read_eos(config: Fields, generation_config: Path) -> tuple[int, ...]:
    """The model's end tokens; generation_config.json knows chat models' further ones."""
    found: dict[int, None] = {}
    sources = [config]
    if os.path.lexists(generation_config):
        sources.append(Fields(read_json(generation_config, MAX_CONFIG_BYTES), str(generation_config)))
    for source in sources:
        value = source.raw("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise source.error("eos_token_id", "a token id or a list of them", value)
            found[token_id] = None
    return tuple(found)
