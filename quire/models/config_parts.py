"""The parts of config.json that many families write alike: rope, windows, experts, activations, end
tokens.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

from quire.checkpoints.fields import Fields
from quire.checkpoints.files import read_json
from quire.errors import UnsupportedModelError
from quire.kernels.ops import Activation, AttentionSpec, HeadShape, MoeSpec
from quire.models.spec import MlpSpec, ModelSpec, QueryScale, RopeSpec

MAX_CONFIG_BYTES = 16 * 2**20
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu": Activation.GELU,
    "relu2": Activation.RELU2,
    "relu": Activation.RELU,
}
ROPE_TYPES = (
    "default", "linear", "llama3", "yarn", "longrope", "dynamic", "factors", "proportional",
)  # fmt: skip


def plain_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None
) -> AttentionSpec:
    """Attention as nearly all families have it: scaled by 1 / sqrt(head_dim)."""
    return AttentionSpec(HeadShape(num_heads, num_kv_heads, head_dim), head_dim**-0.5, window)


def read_activation(config: Fields, default: str) -> Activation:
    """The activation; one that no kernel computes is refused."""
    key = "hidden_activation" if "hidden_activation" in config else "hidden_act"
    name = config.string(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{config.file}: {key} {name!r} is not supported, only {', '.join(_ACTIVATIONS)} are."
        )
    return _ACTIVATIONS[name]


def rope_settings(config: Fields, kind_of_layer: str) -> tuple[Fields, bool]:
    """The settings of a kind of layer, and whether they stand apart from other kinds'. What
    `rope_scaling` says counts more than `rope_parameters`: users add it to files that have both.
    """
    found, added = config.part("rope_parameters"), config.part("rope_scaling")
    is_apart = kind_of_layer in found
    if is_apart:
        found = found.part(kind_of_layer)
        stretched = {name: added.raw(name) for name in added.names()}
        return found.with_values(stretched if kind_of_layer == "full_attention" else {}), True
    return (added if added.names() else found), False


def read_rope(
    config: Fields,
    head_dim: int,
    kind_of_layer: str = "full_attention",
    *,
    theta: float,
    is_partial: bool = False,
    has_alpha: bool = False,
) -> RopeSpec:
    """Reads all ways of writing rope: `rope_parameters`, for all layers or by kind of layer, and
    the older `rope_theta` with `rope_scaling`. `theta` is the base that an absent `rope_theta`
    means; for the rest see `Family`.
    """
    scaling, is_apart = rope_settings(config, kind_of_layer)
    theta = scaling.number("rope_theta", theta, low=1e-6)
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{config.file}: rope type {kind!r} is not supported, only {', '.join(ROPE_TYPES)} are."
        )
    share = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if kind == "proportional":
        turning = int(share * head_dim // 2)
        factor = scaling.number("factor", 1.0, low=1e-6)
        return RopeSpec(theta, kind="proportional", factor=factor, num_turning=turning)
    if not is_partial and kind == "default":  # nobody reads it
        share = 1.0
    rotated = int(head_dim * share)
    if share != 1.0 and (not is_partial or rotated % 2 or not 0 < rotated <= head_dim):
        raise UnsupportedModelError(
            f"{config.file}: partial_rotary_factor {share:g} is not supported in this model: "
            "rope turns whole heads, or an even number of a head's dimensions."
        )
    plain = RopeSpec(theta, rotated=rotated if rotated < head_dim else 0)
    max_position = config.integer("max_position_embeddings", 2048, high=2**31)
    # where it stands on both levels, the outer one counts
    outer = "original_max_position_embeddings" in config and not is_apart
    original = (config if outer else scaling).integer(
        "original_max_position_embeddings", max_position, high=2**31
    )
    if kind == "linear":
        return replace(plain, kind="linear", factor=scaling.number("factor", low=1e-6))
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.error("high_freq_factor", f"above low_freq_factor ({low})", high)
        return replace(
            plain,
            kind="llama3",
            factor=scaling.number("factor", low=1e-6),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
        factor = scaling.number("factor", max_position / original, low=1e-6)
        fast, slow = (
            scaling.number("beta_fast", 32.0) or 32.0,
            scaling.number("beta_slow", 1.0) or 1.0,
        )
        return replace(
            plain,
            kind="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=fast,
            beta_slow=slow,
            truncate=scaling.boolean("truncate", True),
            attention_factor=_yarn_attention_factor(scaling, factor),
        )
    if kind == "longrope":
        factor = scaling.number("factor", max_position / original, low=1e-6)
        stretched = (
            math.sqrt(1 + math.log(factor) / math.log(original))
            if factor > 1 and original > 1
            else 1.0
        )
        return replace(
            plain,
            kind="factors",
            original_max_position=original,
            freq_factors=scaling.numbers("long_factor"),
            short_factors=scaling.numbers("short_factor"),
            attention_factor=scaling.number("attention_factor", stretched),
        )
    if kind == "factors":
        return replace(plain, kind="factors", freq_factors=scaling.numbers("factors"))
    if kind == "dynamic" and has_alpha and "alpha" in scaling:
        alpha = scaling.number("alpha", low=1e-6)
        return replace(plain, theta=theta * alpha ** (head_dim / (head_dim - 2)))
    # Otherwise dynamic rope turns as plain rope does up to the length that the model was made for;
    # it is not stretched beyond that, where a sequence's first keys would change as it grows.
    return plain


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


def mscale_of(config: Fields, rope: RopeSpec) -> float:
    """What the scale of attention is multiplied with, twice, where a family's rope is stretched and
    says `mscale_all_dim`.
    """
    scaling, _ = rope_settings(config, "full_attention")
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    all_dim = scaling.number("mscale_all_dim", 0.0)
    if kind == "default" or not all_dim:
        return 1.0
    if rope.kind not in ("yarn", "linear", "llama3"):
        raise UnsupportedModelError(
            f"{config.file}: mscale_all_dim is not supported with rope of type {kind!r}."
        )
    return yarn_mscale(rope.factor, all_dim)


def query_scale(config: Fields) -> QueryScale:
    """How Ministral 3 and Mistral 4 sharpen attention late in a sequence."""
    rope = rope_settings(config, "full_attention")[0]
    key = "original_max_position_embeddings"  # as in `read_rope`
    interval = (config if key in config else rope).integer(key, high=2**31)
    return QueryScale(rope.number("llama_4_scaling_beta"), interval)


def read_window(config: Fields, default: int | None) -> int | None:
    """`sliding_window`, where null and 0 mean none and only an absent key means the family's
    default.
    """
    if not config.declares("sliding_window"):
        return default
    return config.integer("sliding_window", 0, low=0, high=2**31) or None


def with_window(config: Fields, spec: ModelSpec, default: int | None) -> ModelSpec:
    """Sets the same window on all layers."""
    return spec.with_attention(sliding_window=read_window(config, default))


def kinds_of_layers(config: Fields, spec: ModelSpec, default: list[str] | int) -> list[str]:
    """`layer_types`; where that is absent: the default list, or full attention in every
    `default`-th layer.
    """
    if isinstance(default, int) and "layer_types" not in config:
        full = config.integer("sliding_window_pattern", default)
        default = [
            "sliding_attention" if (i + 1) % full else "full_attention"
            for i in range(spec.num_layers)
        ]
    kinds = config.list_of("layer_types", str, default if isinstance(default, list) else [])
    if len(kinds) != spec.num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.error(
            "layer_types", f"{spec.num_layers} of full_attention or sliding_attention", kinds
        )
    return kinds


def with_windows(
    config: Fields,
    spec: ModelSpec,
    default: list[str] | int,
    window: int | None = 4096,
    rope: RopeSpec | None = None,
) -> ModelSpec:
    """Sets windows on the layers that `layer_types` marks; these layers may have a `rope` of their
    own.
    """
    window = read_window(config, window)
    layers = []
    for layer, kind in zip(spec.layers, kinds_of_layers(config, spec, default), strict=True):
        if kind == "sliding_attention":
            if window is None:
                raise config.error(
                    "sliding_window", "a number, as layer_types has sliding_attention", None
                )
            layer = replace(
                layer.with_attention(sliding_window=window),
                rope=layer.rope if rope is None else rope,
            )
        layers.append(layer)
    return replace(spec, layers=tuple(layers))


def with_qwen_windows(config: Fields, spec: ModelSpec, windows: list[bool]) -> ModelSpec:
    """Windows on the layers of `layer_types`, or by default on those of `windows`; there is none
    without `use_sliding_window`.
    """
    is_used = config.boolean("use_sliding_window", False)
    has_window = is_used and read_window(config, 4096) is not None
    default = ["sliding_attention" if has_window and one else "full_attention" for one in windows]
    if not is_used and "sliding_attention" in kinds_of_layers(config, spec, default):
        raise config.error(
            "use_sliding_window", "true, as layer_types has sliding_attention", False
        )
    return with_windows(config, spec, default)


def activation_of(spec: ModelSpec) -> Activation:
    """The model's, which experts have, too."""
    dense = spec.layers[0].mlp
    assert isinstance(dense, MlpSpec)
    return dense.activation


def with_qwen_experts(config: Fields, spec: ModelSpec, shared: int = 0) -> ModelSpec:
    """Gives experts to the layers that Qwen's settings name."""
    experts = config.integer(
        "num_experts", config.integer("num_local_experts", 0, low=0), low=0, high=65_536
    )
    moe = MoeSpec(
        num_experts=experts,
        top_k=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        normalize_weights=config.boolean("norm_topk_prob", False),
        shared_intermediate_size=shared,
        activation=activation_of(spec),
    )
    dense = set(config.list_of("mlp_only_layers", int, []))
    step = config.integer("decoder_sparse_step", 1)
    layers = (
        replace(layer, mlp=moe) if i not in dense and experts > 0 and (i + 1) % step == 0 else layer
        for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def with_deepseek_experts(config: Fields, spec: ModelSpec, first: int | None = None) -> ModelSpec:
    """Experts as DeepSeek has them: sigmoid scores, a bias for the choice, shared experts, the
    `first` layers dense, which is a setting of most families.
    """
    size = config.integer("moe_intermediate_size")
    num_experts = config.integer("n_routed_experts", high=65_536)
    num_groups = config.integer("n_group", 1)
    if num_experts % num_groups or (num_groups > 1 and num_experts < 2 * num_groups):
        raise config.error(
            "n_group",
            f"a divisor of {num_experts} experts, with two of them in a group",
            num_groups,
        )
    moe = MoeSpec(
        num_experts,
        config.integer("num_experts_per_tok"),
        size,
        config.boolean("norm_topk_prob", True),
        size * config.integer("n_shared_experts", 1, low=0),
        activation=activation_of(spec),
        shared_gate=False,
        num_groups=num_groups,
        top_groups=config.integer("topk_group", 1, high=num_groups),
        sigmoid_scores=True,
        choice_bias=True,
        weight_scale=config.number("routed_scaling_factor", 1.0),
    )
    if first is None:
        first = config.integer("first_k_dense_replace", 0, low=0)
    layers = (
        layer if i < first else replace(layer, mlp=moe) for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def read_eos(config: Fields, generation_config: Path | None) -> tuple[int, ...]:
    """The model's end tokens; generation_config.json has further ones of chat models."""
    found: dict[int, None] = {}
    sources = [config]
    if generation_config is not None and os.path.lexists(generation_config):
        sources.append(
            Fields(read_json(generation_config, MAX_CONFIG_BYTES), str(generation_config))
        )
    for source in sources:
        value = source.raw("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise source.error("eos_token_id", "a token id or a list of them", value)
            found[token_id] = None
    return tuple(found)
