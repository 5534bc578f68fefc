"""Families with layers that know earlier tokens by a state (`docs/recurrent.md`): what they read
from config.json, and the names of their tensors. Their entries stand with all others in
`families.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from quire.checkpoints.fields import Fields
from quire.errors import UnsupportedModelError
from quire.kernels.ops import Activation, MoeSpec
from quire.kernels.recurrent import ConvolutionSpec, GatedNormSpec, RecurrentSpec
from quire.models.config_parts import with_qwen_experts
from quire.models.spec import LayerSpec, Mixer, MlpSpec, ModelSpec, SideBySide


def only(config: Fields, **allowed: object) -> None:
    """Refuses settings that change the computation and are not the ones known."""
    for key, value in allowed.items():
        if config.raw(key) not in (None, value):
            raise UnsupportedModelError(
                f"{config.file}: {key} {config.raw(key)!r} is not supported, only {value!r} is."
            )


def mamba2(config: Fields, spec: ModelSpec, inner: int = 0) -> RecurrentSpec:
    """A state space layer as Granite, Bamba and others write it; `inner` is the size of its values."""
    heads, groups = config.integer("mamba_n_heads", 128), config.integer("mamba_n_groups", 1)
    inner = inner or config.integer("mamba_expand", 2) * spec.hidden_size
    if inner % heads or inner % groups:
        raise config.error("mamba_n_heads", f"a divisor of {inner}, as its groups are", heads)
    if config.raw("mamba_d_head") not in (None, "auto", inner // heads):
        raise config.error("mamba_d_head", f"auto or {inner // heads}", config.raw("mamba_d_head"))
    bias = config.boolean("mamba_proj_bias", False)
    return RecurrentSpec(
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=config.integer("mamba_d_state", 256),
        value_dim=inner // heads,
        taps=config.integer("mamba_d_conv", 4, low=2),
        conv_bias=config.boolean("mamba_conv_bias", True),
        is_delta=False,
        time_limits=_time_limits(config),
        norm=GatedNormSpec(inner // groups, gate_first=True),
        projection_bias=bias,
        output_bias=bias,
    )


def _time_limits(config: Fields) -> tuple[float, float]:
    found = config.raw("time_step_limit")
    if found is None:
        return 0.0, math.inf
    if isinstance(found, list):  # how transformers writes what JSON has no number for
        found = [math.inf if one == {"__float__": "Infinity"} else one for one in found]
        if len(found) == 2 and all(isinstance(one, int | float) and one >= 0 for one in found):
            return float(found[0]), float(found[1])
    raise config.error("time_step_limit", "two numbers from 0 on", found)


def mixed_layers(
    config: Fields, spec: ModelSpec, default: list[str], others: Mapping[str, Mixer]
) -> ModelSpec:
    """Layers whose `layer_types` are not attention get the mixers of `others`."""
    kinds = config.list_of("layer_types", str, default)
    attention = ("full_attention", "attention")
    if len(kinds) != spec.num_layers or not set(kinds) <= {*attention, *others}:
        allowed = " or ".join(("full_attention", *others))
        raise config.error("layer_types", f"{spec.num_layers} of {allowed}", kinds)
    layers = (
        layer
        if kind in attention
        else replace(
            layer, mixer=others[kind], rope=None, qk_norm=False, qkv_bias=False, output_bias=False,
            gated_attention=False,
        )
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )  # fmt: skip
    return replace(spec, layers=tuple(layers))


def qwen_linear(config: Fields, spec: ModelSpec) -> ModelSpec:
    """Gated attention in every fourth layer, the gated delta rule in the others."""
    values = config.integer("linear_value_head_dim", 128)
    delta = RecurrentSpec(
        num_key_heads=config.integer("linear_num_key_heads", 16),
        num_value_heads=config.integer("linear_num_value_heads", 32),
        key_dim=config.integer("linear_key_head_dim", 128),
        value_dim=values,
        taps=config.integer("linear_conv_kernel_dim", 4, low=2),
        norm=GatedNormSpec(values),
    )
    bias = config.boolean("attention_bias", False)
    spec = replace(spec, norm_offset=1.0).with_layers(
        qk_norm=True, gated_attention=True, qkv_bias=bias, output_bias=bias
    )
    every = config.integer("full_attention_interval", 4)
    default = [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(spec.num_layers)
    ]
    return mixed_layers(config, spec, default, {"linear_attention": delta})


def qwen3_next(config: Fields, spec: ModelSpec) -> ModelSpec:
    shared = config.integer("shared_expert_intermediate_size", 512, low=0)
    return with_qwen_experts(config, qwen_linear(config, spec), shared)


def qwen3_5_moe(config: Fields, spec: ModelSpec) -> ModelSpec:
    shared = config.integer("shared_expert_intermediate_size", 512, low=0)
    moe = MoeSpec(
        num_experts=config.integer("num_experts", 256, high=65_536),
        top_k=config.integer("num_experts_per_tok", 8),
        intermediate_size=config.integer("moe_intermediate_size", 512),
        normalize_weights=True,
        shared_intermediate_size=shared,
    )
    return qwen_linear(config, spec).with_layers(mlp=moe)


def lfm2(config: Fields, spec: ModelSpec) -> ModelSpec:
    size = config.integer("block_ff_dim", config.integer("intermediate_size", 12_288))
    if config.boolean("block_auto_adjust_ff_dim", True):
        size = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        multiple = config.integer("block_multiple_of", 256)
        size = -(-size // multiple) * multiple
    return _with_convolutions(config, spec.with_layers(mlp=MlpSpec(size)))


def _with_convolutions(config: Fields, spec: ModelSpec) -> ModelSpec:
    """A short convolution in layers that are not attention."""
    conv = ConvolutionSpec(
        spec.hidden_size,
        config.integer("conv_L_cache", 3, low=2),
        config.boolean("conv_bias", False),
        silu=False,
    )
    full = config.list_of("full_attn_idxs", int, list(range(spec.num_layers)))
    default = ["full_attention" if i in full else "conv" for i in range(spec.num_layers)]
    spec = replace(spec, rms_norm_eps=config.number("norm_eps", 1e-5)).with_layers(qk_norm=True)
    return mixed_layers(config, spec, default, {"conv": conv, **_in_gguf(config, conv)})


def _in_gguf(config: Fields, mixer: Mixer) -> dict[str, Mixer]:
    """What a GGUF file calls a layer without attention, whatever it has instead."""
    return {"linear_attention": mixer} if "general.architecture" in config else {}


def bamba(config: Fields, spec: ModelSpec) -> ModelSpec:
    full = config.list_of("attn_layer_indices", int, [])
    default = [
        "full_attention" if i in full else "linear_attention" for i in range(spec.num_layers)
    ]
    spec = _with_dense_biases(config, spec)
    mamba = mamba2(config, spec)
    return mixed_layers(config, spec, default, {"linear_attention": mamba, "mamba": mamba})


def _with_dense_biases(config: Fields, spec: ModelSpec) -> ModelSpec:
    mlp, bias = spec.layers[0].mlp, config.boolean("attention_bias", False)
    assert isinstance(mlp, MlpSpec)
    mlp = replace(mlp, bias=config.boolean("mlp_bias", False))
    return spec.with_layers(qkv_bias=bias, output_bias=bias, mlp=mlp)


def falcon_h1(config: Fields, spec: ModelSpec) -> ModelSpec:
    """Attention and a state space side by side in every layer, with factors nearly everywhere."""
    only(config, mamba_use_mlp=True, attn_layer_indices=[])

    def factor(key: str) -> float:
        return config.number(key, 1.0)

    def factors(key: str, count: int) -> tuple[float, ...]:
        found = config.numbers(key) if key in config else (1.0,) * count
        if len(found) != count:
            raise config.error(key, f"{count} numbers", list(found))
        return found

    mamba = mamba2(config, spec, config.integer("mamba_d_ssm", 0, low=0))
    groups, is_normed = mamba.num_key_heads, config.boolean("mamba_rms_norm", False)
    before_gate = config.boolean("mamba_norm_before_gate", True)
    gates, values, keys, queries, steps = factors("ssm_multipliers", 5)
    mamba = replace(
        mamba,
        norm=GatedNormSpec(mamba.value_size // groups if is_normed else 0, not before_gate),
        output_bias=config.boolean("projectors_bias", False),
        input_scales=(queries, keys, values, gates, steps),
    )
    spec = _with_dense_biases(config, spec)
    layer = spec.layers[0]
    attention, mlp = layer.attention, layer.mlp
    assert attention is not None
    assert isinstance(mlp, MlpSpec)
    # A factor of keys is one of their products with queries.
    attention = replace(attention, scale=attention.scale * factor("key_multiplier"))
    gate, down = factors("mlp_multipliers", 2)
    if mlp.bias and gate != 1:
        raise UnsupportedModelError(
            f"{config.file}: mlp_bias together with mlp_multipliers is not supported."
        )
    # Gate and up are multiplied with the gate's factor, and what comes of up divided by it again.
    mlp = replace(mlp, input_scale=gate, output_scale=down / gate)
    scales = (
        (factor("attention_in_multiplier"), factor("attention_out_multiplier")),
        (factor("ssm_in_multiplier"), factor("ssm_out_multiplier")),
    )
    spec = spec.with_layers(mixer=SideBySide((attention, mamba), scales), mlp=mlp)
    return replace(
        spec,
        embedding_scale=factor("embedding_multiplier"),
        logit_scale=factor("lm_head_multiplier"),
    )


def olmo_hybrid(config: Fields, spec: ModelSpec) -> ModelSpec:
    """Attention with norms behind it in every fourth layer, the gated delta rule in the others."""
    heads = spec.head_shapes[0].num_heads
    keys = config.integer("linear_num_key_heads", heads)
    key_dim = config.integer("linear_key_head_dim", max(1, int(0.75 * spec.hidden_size / keys)))
    value_dim = config.integer("linear_value_head_dim", 2 * key_dim)
    delta = RecurrentSpec(
        num_key_heads=keys,
        num_value_heads=config.integer("linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=value_dim,
        taps=config.integer("linear_conv_kernel_dim", 4, low=2),
        norm=GatedNormSpec(value_dim, eps=1e-5),
        beta_scale=2.0 if config.boolean("linear_allow_neg_eigval", True) else 1.0,
    )
    only(config, linear_use_gate=True)
    bias = config.boolean("attention_bias", False)
    # The published models have no rope; a file says so by a base that is null.
    parameters = config.part("rope_parameters")
    is_null = "rope_theta" in parameters.names() and parameters.raw("rope_theta") is None
    has_rope = not is_null and config.raw("rope_theta") is not None
    spec = spec.with_layers(
        rope=spec.layers[0].rope if has_rope else None,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        qk_norm_is_whole=True,
        pre_norms=False,
        post_norms=True,
    )
    count = spec.num_layers
    default = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(count)]
    if "full_attention" not in default:
        default[-1] = "full_attention"
    spec = mixed_layers(config, spec, default, {"linear_attention": delta})
    layers = (
        layer
        if layer.attention is not None
        else replace(layer, pre_norms=True, post_norms=False, qk_norm_is_whole=False)
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


_NEMOTRON_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def nemotron_h_settings(config: Fields) -> Fields:
    """The list of blocks is a word in older files (`M-M*-`), and its length the number of layers."""
    blocks: list[str] | str | None = config.raw("layers_block_type") or config.raw("layer_types")
    key = "layers_block_type"
    if key in config and config.raw("layer_types") not in (None, blocks):
        raise config.error(
            "layer_types", f"absent, or the same as {key}", config.raw("layer_types")
        )
    if blocks is None:
        key, pattern = "hybrid_override_pattern", config.string("hybrid_override_pattern")
        blocks = [_NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]
    legacy = {"mamba": "linear_attention", "attention": "full_attention"}
    kinds = [legacy.get(one, one) for one in blocks] if isinstance(blocks, list) else []
    if not kinds or not set(kinds) <= set(_NEMOTRON_LETTERS.values()):
        allowed = ", ".join(_NEMOTRON_LETTERS.values())
        raise config.error(key, f"a list of {allowed}", blocks)
    changed: dict[str, object] = {"layers_block_type": kinds, "num_hidden_layers": len(kinds)}
    changed |= {
        "rms_norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "hidden_act": config.string("mlp_hidden_act", "relu2"),
    }
    return config.with_values(changed)


def nemotron_h(config: Fields, spec: ModelSpec) -> ModelSpec:
    """Blocks of one kind each; here an MLP belongs to the mixer before it, if there is one."""
    only(
        config, mlp_hidden_act="relu2", mamba_hidden_act="silu", moe_latent_size=None,
        sliding_window=None, n_group=1, residual_in_fp32=False, attention_bias=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    heads, groups = config.integer("mamba_num_heads", 128), config.integer("n_groups", 8)
    size = config.integer("mamba_head_dim", 64)
    bias = config.boolean("use_bias", False)
    if heads % groups:
        raise config.error("n_groups", f"a divisor of {heads} heads", groups)
    mamba = RecurrentSpec(
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=config.integer("ssm_state_size", 128),
        value_dim=size,
        taps=config.integer("conv_kernel", 4, low=2),
        conv_bias=config.boolean("use_conv_bias", True),
        is_delta=False,
        time_limits=_time_limits(config),
        norm=GatedNormSpec(heads * size // groups, gate_first=True),
        projection_bias=bias,
        output_bias=bias,
    )
    kinds = config.list_of("layers_block_type", str)
    plain = spec.layers[0]
    assert isinstance(plain.mlp, MlpSpec)
    mlps: dict[str, MlpSpec | MoeSpec] = {
        "mlp": replace(plain.mlp, bias=config.boolean("mlp_bias", False), gated=False)
    }
    if "moe" in kinds:
        mlps["moe"] = _nemotron_experts(config)
    attention = replace(plain, rope=None, mlp=None)
    layers: list[LayerSpec] = []
    for kind in kinds:
        if kind not in mlps:
            is_full = kind == "full_attention"
            layers.append(attention if is_full else LayerSpec(mamba, None, None))
        elif layers and layers[-1].mlp is None:
            layers[-1] = replace(layers[-1], mlp=mlps[kind])
        else:
            layers.append(LayerSpec(SideBySide(()), None, mlps[kind]))
    return replace(spec, layers=tuple(layers))


def _nemotron_experts(config: Fields) -> MoeSpec:
    only(config, mlp_bias=False, n_shared_experts=1)
    return MoeSpec(
        num_experts=config.integer("n_routed_experts", 8, high=65_536),
        top_k=config.integer("num_experts_per_tok", 2),
        intermediate_size=config.integer("moe_intermediate_size", 7688),
        normalize_weights=config.boolean("norm_topk_prob", True),
        shared_intermediate_size=config.integer("moe_shared_expert_intermediate_size", 7688),
        activation=Activation.RELU2,
        shared_gate=False,
        sigmoid_scores=True,
        choice_bias=True,
        weight_scale=config.number("routed_scaling_factor", 1.0),
        gated=False,
    )


def lfm2_moe(config: Fields, spec: ModelSpec) -> ModelSpec:
    """LFM2 whose MLPs are experts, but in the first layers."""
    moe = MoeSpec(
        num_experts=config.integer("num_experts", 32, high=65_536),
        top_k=config.integer("num_experts_per_tok", 4),
        intermediate_size=config.integer("moe_intermediate_size", 1792),
        normalize_weights=config.boolean("norm_topk_prob", True),
        sigmoid_scores=True,
        choice_bias=config.boolean("use_expert_bias", True),
        weight_scale=config.number("routed_scaling_factor", 1.0),
    )
    dense = config.integer("num_dense_layers", 2, low=0)
    layers = (
        layer if i < dense else replace(layer, mlp=moe)
        for i, layer in enumerate(_with_convolutions(config, spec).layers)
    )
    eps = config.number("norm_eps", 1e-5)
    return replace(spec, layers=tuple(layers), rms_norm_eps=eps)


MAMBA_NAMES = {
    "mixer_input": "mamba.in_proj",
    "convolution": "mamba.conv1d",
    "mixer_log_rate": "mamba.A_log",
    "mixer_time_bias": "mamba.dt_bias",
    "mixer_skip": "mamba.D",
    "mixer_norm": "mamba.norm",
    "mixer_output": "mamba.out_proj",
}
_DELTA_NAMES = {
    "convolution": "linear_attn.conv1d",
    "mixer_log_rate": "linear_attn.A_log",
    "mixer_time_bias": "linear_attn.dt_bias",
    "mixer_norm": "linear_attn.norm",
    "mixer_output": "linear_attn.out_proj",
}
QWEN3_NEXT_NAMES = _DELTA_NAMES | {
    "mixer_input": "linear_attn.in_proj_qkvz",
    "mixer_gates": "linear_attn.in_proj_ba",
}
QWEN3_5_NAMES = _DELTA_NAMES | {
    "mixer_qkv": "linear_attn.in_proj_qkv",
    "mixer_gate": "linear_attn.in_proj_z",
    "mixer_decay": "linear_attn.in_proj_a",
    "mixer_beta": "linear_attn.in_proj_b",
}
LFM2_NAMES = {
    "attention_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "output": "self_attn.out_proj",
    "query_norm": "self_attn.q_layernorm",
    "key_norm": "self_attn.k_layernorm",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
    "mixer_input": "conv.in_proj",
    "convolution": "conv.conv",
    "mixer_output": "conv.out_proj",
}
LFM2_MOE_NAMES = LFM2_NAMES | {
    "router": "feed_forward.gate",
    "choice_bias": "feed_forward.expert_bias",
    "expert_gate": "feed_forward.experts.{expert}.w1",
    "expert_up": "feed_forward.experts.{expert}.w3",
    "expert_down": "feed_forward.experts.{expert}.w2",
    "experts_gate_up": "feed_forward.experts.gate_up_proj",
    "experts_down": "feed_forward.experts.down_proj",
}
BAMBA_NAMES = MAMBA_NAMES | {
    "mlp_norm": "pre_ff_layernorm",
    **{part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}
OLMO_HYBRID_NAMES = {
    "attention_norm": "attention_layer_norm",
    "mlp_norm": "feedforward_layer_norm",
    "mixer_query": "linear_attn.q_proj",
    "mixer_key": "linear_attn.k_proj",
    "mixer_value": "linear_attn.v_proj",
    "mixer_gate": "linear_attn.g_proj",
    "mixer_decay": "linear_attn.a_proj",
    "mixer_beta": "linear_attn.b_proj",
    "query_convolution": "linear_attn.q_conv1d",
    "key_convolution": "linear_attn.k_conv1d",
    "value_convolution": "linear_attn.v_conv1d",
    "mixer_log_rate": "linear_attn.A_log",
    "mixer_time_bias": "linear_attn.dt_bias",
    "mixer_norm": "linear_attn.o_norm",
    "mixer_output": "linear_attn.o_proj",
}
NEMOTRON_H_NAMES = {
    name: tensor.replace("mamba.", "mixer.") for name, tensor in MAMBA_NAMES.items()
} | {
    "attention_norm": "norm",
    "mlp_norm": "norm",
    "query": "mixer.q_proj",
    "key": "mixer.k_proj",
    "value": "mixer.v_proj",
    "output": "mixer.o_proj",
    "up": "mixer.up_proj",
    "down": "mixer.down_proj",
    "router": "mixer.gate",
    "choice_bias": "mixer.gate.e_score_correction_bias",
    "shared_up": "mixer.shared_experts.up_proj",
    "shared_down": "mixer.shared_experts.down_proj",
    "expert_up": "mixer.experts.{expert}.up_proj",
    "expert_down": "mixer.experts.{expert}.down_proj",
    "experts_up": "mixer.experts.up_proj",
    "experts_down": "mixer.experts.down_proj",
}
