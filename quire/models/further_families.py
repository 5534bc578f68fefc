"""More families, each of them near to one in `families.py`."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoints.fields import Fields
from quire.errors import UnsupportedModelError
from quire.kernels.ops import Activation, MoeSpec
from quire.models.config_parts import (
    activation_of,
    query_scale,
    read_window,
    with_deepseek_experts,
    with_window,
    with_windows,
)
from quire.models.family import Family
from quire.models.quirks import (
    MIXTRAL_NAMES,
    SEEING_PREFIXES,
    STACKED_MIXTRAL_NAMES,
    TOWERS,
    gemma,
    granite,
    hunyuan,
    llama,
    mixtral_experts,
    olmo2,
    refuse,
    with_biases,
)
from quire.models.spec import MlpSpec, ModelSpec, RopeSpec


def _gemma1(config: Fields, spec: ModelSpec) -> ModelSpec:
    refuse(config, "use_bidirectional_attention", False)
    if activation_of(spec) is Activation.GELU:  # what its first files call the tanh form
        size = config.integer("intermediate_size")
        spec = spec.with_layers(mlp=MlpSpec(size, Activation.GELU_TANH))
    bias = config.boolean("attention_bias", False)
    spec = replace(spec, norm_offset=1.0, embedding_scale=spec.hidden_size**0.5)
    return spec.with_layers(qkv_bias=bias, output_bias=bias)


def _vaultgemma(config: Fields, spec: ModelSpec) -> ModelSpec:
    return gemma(config, spec, (50.0, 30.0), 2).with_layers(post_norms=False)


def _ministral(config: Fields, spec: ModelSpec) -> ModelSpec:
    kind = "full_attention" if read_window(config, 4096) is None else "sliding_attention"
    return with_windows(config, spec, [kind] * spec.num_layers)


def _exaone4(config: Fields, spec: ModelSpec) -> ModelSpec:
    spec = spec.with_layers(pre_norms=False, post_norms=True, qk_norm=True)
    if read_window(config, 4096) is None:
        return with_windows(config, spec, ["full_attention"] * spec.num_layers)
    return _without_full_rope(with_windows(config, spec, 4))


def _without_full_rope(spec: ModelSpec) -> ModelSpec:
    """Only layers with a window know positions."""
    layers = tuple(
        one if one.attention and one.attention.sliding_window else replace(one, rope=None)
        for one in spec.layers
    )
    return replace(spec, layers=layers)


def _helium(config: Fields, spec: ModelSpec) -> ModelSpec:
    qkv = config.boolean("attention_bias", False)
    return with_biases(spec, qkv, False, config.boolean("mlp_bias", False))


def _cwm(config: Fields, spec: ModelSpec) -> ModelSpec:
    default = ["sliding_attention" if i % 4 else "full_attention" for i in range(spec.num_layers)]
    spec = with_biases(spec, False, False, config.boolean("mlp_bias", False))
    return with_windows(config, spec, default, 8192)


def _olmo_experts(config: Fields, spec: ModelSpec) -> MoeSpec:
    return MoeSpec(
        num_experts=config.integer("num_experts", 64, high=65_536),
        top_k=config.integer("num_experts_per_tok", 8),
        intermediate_size=config.integer("intermediate_size"),
        normalize_weights=config.boolean("norm_topk_prob", False),
        activation=activation_of(spec),
    )


def _olmoe(config: Fields, spec: ModelSpec) -> ModelSpec:
    refuse(config, "clip_qkv")
    moe = _olmo_experts(config, spec)
    return llama(config, spec).with_layers(mlp=moe, qk_norm=True, qk_norm_is_whole=True)


def _flex_olmo(config: Fields, spec: ModelSpec) -> ModelSpec:
    return olmo2(config, spec).with_layers(mlp=_olmo_experts(config, spec))


def _dots1(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    first = config.integer("max_window_layers", 62, low=0)
    has_window = read_window(config, 4096) is not None
    default = [
        "sliding_attention" if has_window and i >= first else "full_attention"
        for i in range(spec.num_layers)
    ]
    spec = with_deepseek_experts(config, spec).with_layers(
        qk_norm=True, qkv_bias=bias, output_bias=bias
    )
    return with_windows(config, spec, default)


def _minimax_m2(config: Fields, spec: ModelSpec) -> ModelSpec:
    moe = replace(mixtral_experts(config, spec), sigmoid_scores=True, choice_bias=True)
    return spec.with_layers(mlp=moe, qk_norm=True, qk_norm_is_whole=True)


def _solar_open(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    return with_deepseek_experts(config, spec, first=0).with_layers(qkv_bias=bias)


def _hunyuan_moe(config: Fields, spec: ModelSpec) -> ModelSpec:
    size = config.integer("intermediate_size")
    moe = MoeSpec(
        num_experts=_same_in_all(config, "num_experts", 1, high=65_536),
        top_k=_same_in_all(config, "moe_topk", 1),
        intermediate_size=size,
        normalize_weights=True,
        shared_intermediate_size=size,
        activation=activation_of(spec),
        shared_gate=False,
    )
    bias = config.boolean("attention_bias", False)
    return hunyuan(config, spec).with_layers(mlp=moe, qkv_bias=bias, output_bias=bias)


def _same_in_all(config: Fields, key: str, default: int, high: int = 2**24) -> int:
    """A number, or a list of it for each layer."""
    value = config.raw(key)
    if not isinstance(value, list):
        return config.integer(key, default, high=high)
    if len(set(map(str, value))) != 1:
        raise config.error(key, "the same number in all layers", value)
    return Fields({key: value[0]}, config.file).integer(key, high=high)


def _cohere(config: Fields, spec: ModelSpec) -> ModelSpec:
    refuse(config, "use_qk_norm", False)
    spec = llama(config, spec).with_layers(parallel=True)
    eps, scale = config.number("layer_norm_eps", 1e-5), config.number("logit_scale", 0.0625)
    return replace(spec, layer_norm=True, rms_norm_eps=eps, logit_scale=scale)


def _stablelm(config: Fields, spec: ModelSpec) -> ModelSpec:
    refuse(config, "qk_layernorm", False)
    spec = spec.with_layers(
        qkv_bias=config.boolean("use_qkv_bias", False),
        parallel=config.boolean("use_parallel_residual", False),
    )
    eps = config.number("layer_norm_eps", 1e-5)
    return replace(spec, layer_norm=True, norm_bias=True, rms_norm_eps=eps)


def _hyperclovax(config: Fields, spec: ModelSpec) -> ModelSpec:
    default = spec.head_shapes[0].head_dim ** -0.5
    scale = config.number("attention_multiplier", default)
    spec = replace(
        granite(config, spec).with_attention(scale=scale),
        logit_scale=config.number("logits_scaling", 1.0),
    )
    return spec.with_layers(post_norms=config.boolean("use_post_norm", True))


def _arcee(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    return with_biases(spec, bias, bias, config.boolean("mlp_bias", False), gated=False)


def _jais2(config: Fields, spec: ModelSpec) -> ModelSpec:
    eps = config.number("layer_norm_eps", 1e-5)
    return replace(_arcee(config, spec), layer_norm=True, norm_bias=True, rms_norm_eps=eps)


def _ernie4_5_moe(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("use_bias", False)
    size = config.integer("moe_intermediate_size", 1536)
    moe = MoeSpec(
        num_experts=config.integer("moe_num_experts", 64, high=65_536),
        top_k=config.integer("moe_k", 6),
        intermediate_size=size,
        normalize_weights=True,
        shared_intermediate_size=size * config.integer("moe_num_shared_experts", 2, low=0),
        activation=activation_of(spec),
        shared_gate=False,
        choice_bias=True,
    )
    least = config.number("moe_norm_min", 1e-12)  # no sum of the best scores is below their share
    if least * moe.num_experts > moe.top_k:
        raise config.error("moe_norm_min", f"at most {moe.top_k / moe.num_experts:g}", least)
    if bias:
        raise UnsupportedModelError(
            f"{config.file}: use_bias true is not supported beside experts, only false is."
        )
    first, interval = (
        config.integer("moe_layer_start_index", 1, low=0),
        config.integer("moe_layer_interval", 1),
    )
    last = config.integer("moe_layer_end_index", -1, low=-1)
    last = spec.num_layers - 1 if last == -1 else last
    layers = tuple(
        replace(layer, mlp=moe) if (i + 1) % interval == 0 and first <= i <= last else layer
        for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers)


def _nemotron(config: Fields, spec: ModelSpec) -> ModelSpec:
    spec = replace(spec, layer_norm=True, norm_bias=True, norm_offset=1.0)
    return replace(_arcee(config, spec), rms_norm_eps=config.number("norm_eps", 1e-5))


def _nanochat(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    cap = config.number("final_logit_softcapping", 0.0)
    rope = replace(spec.layers[0].rope or RopeSpec(), backwards=True)
    spec = with_biases(spec, bias, bias, False, gated=False).with_layers(
        qk_norm=True, qk_norm_after_rope=True, qk_norm_weights=False, rope=rope
    )
    return replace(spec, norm_weights=False, embedding_norm=True, logit_cap=cap)


def _ministral3(config: Fields, spec: ModelSpec) -> ModelSpec:
    refuse(config, "layer_types")
    return with_window(config, spec, None).with_layers(query_scale=query_scale(config))


_PRE_MLP_NORM = {"mlp_norm": "pre_feedforward_layernorm"}
_SHARED_EXPERTS = {
    f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
_HUNYUAN_NAMES = {
    "query_norm": "self_attn.query_layernorm",
    "key_norm": "self_attn.key_layernorm",
    "router": "mlp.gate.wg",
    **{f"shared_{part}": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_MINIMAX_NAMES = MIXTRAL_NAMES | {"choice_bias": "block_sparse_moe.e_score_correction_bias"}
_HYPERCLOVAX_NAMES = {"attention_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"}
_ERNIE_MOE_NAMES = _SHARED_EXPERTS | {"choice_bias": "mlp.moe_statics.e_score_correction_bias"}
_STACKED_ERNIE_NAMES = {
    "choice_bias": "mlp.gate.moe_statics.e_score_correction_bias",
    "experts_gate_up": "mlp.experts.gate_up_proj",
    "experts_down": "mlp.experts.down_proj",
}

FURTHER: tuple[Family, ...] = (
    Family("gemma", "Gemma", ("GemmaForCausalLM",), _gemma1),
    Family("vaultgemma", "VaultGemma", ("VaultGemmaForCausalLM",), _vaultgemma, names=_PRE_MLP_NORM),
    Family("ministral", "Ministral", ("MinistralForCausalLM",), _ministral),
    Family("exaone4", "EXAONE 4", ("Exaone4ForCausalLM",), _exaone4),
    Family("helium", "Helium", ("HeliumForCausalLM",), _helium, interleaved_rope=True),
    Family("cwm", "Code World Model", ("CwmForCausalLM",), _cwm),
    Family("olmoe", "OLMoE", ("OlmoeForCausalLM",), _olmoe),
    Family("flex_olmo", "FlexOlmo", ("FlexOlmoForCausalLM",), _flex_olmo),
    Family("dots1", "dots.llm1", ("Dots1ForCausalLM",), _dots1, names=_SHARED_EXPERTS),
    Family(
        "minimax_m2", "MiniMax-M2", ("MiniMaxM2ForCausalLM",), _minimax_m2, has_partial_rope=True,
        names=_MINIMAX_NAMES, stacked_names=STACKED_MIXTRAL_NAMES, has_drafting_layers=True,
    ),
    Family("solar_open", "Solar Open", ("SolarOpenForCausalLM",), _solar_open, names=_SHARED_EXPERTS),
    Family(
        "hunyuan_v1_moe", "Hunyuan with experts", ("HunYuanMoEV1ForCausalLM",), _hunyuan_moe,
        has_rope_alpha=True, names=_HUNYUAN_NAMES,
    ),
    Family("cohere", "Command R", ("CohereForCausalLM",), _cohere, interleaved_rope=True),
    Family("stablelm", "StableLM", ("StableLmForCausalLM",), _stablelm, has_partial_rope=True),
    Family("hyperclovax", "HyperCLOVA X", ("HyperCLOVAXForCausalLM",), _hyperclovax, names=_HYPERCLOVAX_NAMES),
    Family("arcee", "AFM (Arcee)", ("ArceeForCausalLM",), _arcee),
    Family("nemotron", "Nemotron 3, Nemotron 4, Minitron", ("NemotronForCausalLM",), _nemotron, has_partial_rope=True),
    Family(
        "nanochat", "nanochat", ("NanoChatForCausalLM",), _nanochat,
        names={"up": "mlp.fc1", "down": "mlp.fc2"},
    ),
    Family(
        "ministral3", "Ministral 3 (text)", ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
        _ministral3, ties_whole=True, prefixes=SEEING_PREFIXES, unused=TOWERS,
    ),
    Family("jais2", "Jais 2", ("Jais2ForCausalLM",), _jais2),
    Family(
        "ernie4_5_moe", "ERNIE 4.5 with experts", ("Ernie4_5_MoeForCausalLM",), _ernie4_5_moe,
        interleaved_rope=True, names=_ERNIE_MOE_NAMES, stacked_names=_STACKED_ERNIE_NAMES,
    ),
)  # fmt: skip
