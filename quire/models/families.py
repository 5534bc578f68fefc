"""The families of models Quire runs: one entry each, naming what differs from plain Llama.

A new family of this kind is one `Family` below: the names its files go by, and a function that
reads its quirks from `config.json`. Everything shared (sizes, rope) is read by `read_config` in
`model_config.py`. GGUF files say the same under other names (`gguf_spec.py`), so they are read by
the same functions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.checkpoints.fields import Fields
from quire.errors import UnsupportedModelError
from quire.kernels.ops import Activation
from quire.models.classic_families import CLASSIC
from quire.models.config_parts import (
    activation_of,
    read_rope,
    with_deepseek_experts,
    with_qwen_experts,
    with_qwen_windows,
    with_window,
    with_windows,
)
from quire.models.family import Family
from quire.models.further_families import FURTHER
from quire.models.gemma4_family import GEMMA4
from quire.models.gguf_states import (
    FALCON_H1_GGUF_SETTINGS,
    LFM2_GGUF_NAMES,
    LFM2_GGUF_SETTINGS,
    NEMOTRON_H_GGUF_NAMES,
    NEMOTRON_H_GGUF_SETTINGS,
    QWEN3_NEXT_GGUF_NAMES,
    SIGMOID_GATING,
    STATE_SPACE_GGUF_NAMES,
    STATE_SPACE_KEYS,
)
from quire.models.kimi_family import KIMI
from quire.models.latent_families import LATENT
from quire.models.llama4_family import LLAMA4
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
    with_biases,
)
from quire.models.recurrent_families import (
    BAMBA_NAMES,
    LFM2_MOE_NAMES,
    LFM2_NAMES,
    MAMBA_NAMES,
    NEMOTRON_H_NAMES,
    OLMO_HYBRID_NAMES,
    QWEN3_5_NAMES,
    QWEN3_NEXT_NAMES,
    bamba,
    falcon_h1,
    lfm2,
    lfm2_moe,
    mamba2,
    mixed_layers,
    nemotron_h,
    nemotron_h_settings,
    olmo_hybrid,
    qwen3_5_moe,
    qwen3_next,
    qwen_linear,
)
from quire.models.spec import MlpSpec, ModelSpec, RopeSpec


def _smollm3(config: Fields, spec: ModelSpec) -> ModelSpec:
    interval = config.integer("no_rope_layer_interval", 4)
    every_nth = [int((i + 1) % interval != 0) for i in range(spec.num_layers)]
    # 1 where rope is used, whatever the name says
    rope = config.list_of("no_rope_layers", int, every_nth)
    if len(rope) != spec.num_layers:
        raise config.error("no_rope_layers", f"a list of {spec.num_layers} numbers", rope)
    has_window = config.boolean("use_sliding_window", False) and "sliding_window" in config
    default = ["full_attention" if use or not has_window else "sliding_attention" for use in rope]
    spec = llama(config, with_windows(config, spec, default, window=None))
    layers = zip(spec.layers, rope, strict=True)
    return replace(
        spec, layers=tuple(layer if use else replace(layer, rope=None) for layer, use in layers)
    )


def _mistral(config: Fields, spec: ModelSpec) -> ModelSpec:
    default = ["sliding_attention"] * spec.num_layers
    if "layer_types" in config:
        return with_windows(config, spec, default)
    return with_window(config, spec, 4096)


def _mixtral(config: Fields, spec: ModelSpec) -> ModelSpec:
    return with_window(config, spec.with_layers(mlp=mixtral_experts(config, spec)), None)


def _qwen2(config: Fields, spec: ModelSpec) -> ModelSpec:
    first_window_layer = config.integer("max_window_layers", 28, low=0)
    windows = [i >= first_window_layer for i in range(spec.num_layers)]
    return with_qwen_windows(config, spec, windows).with_layers(qkv_bias=True)


def _qwen2_moe(config: Fields, spec: ModelSpec) -> ModelSpec:
    last_window_layer = config.integer("max_window_layers", 28, low=0)
    windows = [i % 2 == 0 and i < last_window_layer for i in range(spec.num_layers)]
    spec = with_qwen_windows(config, spec, windows)
    spec = with_qwen_experts(config, spec, config.integer("shared_expert_intermediate_size", 5632))
    return spec.with_layers(qkv_bias=config.boolean("qkv_bias", True))


def _qwen3(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    return _qwen2(config, spec).with_layers(qk_norm=True, qkv_bias=bias, output_bias=bias)


def _qwen3_moe(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    if config.boolean("use_sliding_window", False):
        spec = with_window(config, spec, 4096)
    return with_qwen_experts(config, spec).with_layers(
        qk_norm=True, qkv_bias=bias, output_bias=bias
    )


def _gemma3(config: Fields, spec: ModelSpec) -> ModelSpec:
    theta = config.number("rope_local_base_freq", 10_000.0, low=1e-6)
    return gemma(config, spec, (0.0, 0.0), 6, _local_rope(config, spec, theta)).with_layers(
        qk_norm=True
    )


def _local_rope(config: Fields, spec: ModelSpec, theta: float) -> RopeSpec:
    """The rope of layers with a sliding window, which `rope_scaling` does not stretch."""
    if "sliding_attention" not in config.part("rope_parameters"):
        return RopeSpec(theta)
    head_dim = spec.head_shapes[0].head_dim
    return read_rope(config, head_dim, "sliding_attention", theta=theta)


def _olmo3(config: Fields, spec: ModelSpec) -> ModelSpec:
    theta = config.number("rope_theta", 500_000.0, low=1e-6)
    return with_windows(config, olmo2(config, spec), 4, rope=_local_rope(config, spec, theta))


def _granite_moe(config: Fields, spec: ModelSpec) -> ModelSpec:
    shared = config.integer("shared_intermediate_size", 0, low=0)
    moe = replace(mixtral_experts(config, spec), shared_intermediate_size=shared, shared_gate=False)
    return granite(config, spec).with_layers(mlp=moe)


def _granite_hybrid(config: Fields, spec: ModelSpec) -> ModelSpec:
    if config.string("position_embedding_type", "nope") != "rope":
        spec = spec.with_layers(rope=None)
    if config.integer("num_local_experts", 8, low=0):
        spec = _granite_moe(config, spec)
    else:
        shared = config.integer("shared_intermediate_size", 1024)
        dense = MlpSpec(shared, activation_of(spec))
        spec = granite(config, spec).with_layers(mlp=dense)
    inner = config.integer("mamba_d_ssm", 0, low=0) if "general.architecture" in config else 0
    mamba = mamba2(config, spec, inner)
    kinds = {"mamba": mamba, "linear_attention": mamba}
    return mixed_layers(config, spec, ["mamba"] * spec.num_layers, kinds)


def _glm(config: Fields, spec: ModelSpec) -> ModelSpec:
    return spec.with_layers(qkv_bias=config.boolean("attention_bias", True))


def _glm4(config: Fields, spec: ModelSpec) -> ModelSpec:
    return _glm(config, spec).with_layers(post_norms=True)


def _glm4_moe(config: Fields, spec: ModelSpec) -> ModelSpec:
    qk_norm, bias = config.boolean("use_qk_norm", False), config.boolean("attention_bias", False)
    return with_deepseek_experts(config, spec).with_layers(qk_norm=qk_norm, qkv_bias=bias)


def _cohere2(config: Fields, spec: ModelSpec) -> ModelSpec:
    spec = with_windows(config, llama(config, spec).with_layers(parallel=True), 4)
    layers = tuple(
        one if one.attention and one.attention.sliding_window else replace(one, rope=None)
        for one in spec.layers
    )
    eps, scale = config.number("layer_norm_eps", 1e-5), config.number("logit_scale", 0.0625)
    return replace(spec, layers=layers, layer_norm=True, rms_norm_eps=eps, logit_scale=scale)


def _starcoder2(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("use_bias", True)
    spec = replace(
        spec, layer_norm=True, norm_bias=True, rms_norm_eps=config.number("norm_epsilon", 1e-5)
    )
    return with_biases(with_window(config, spec, None), bias, bias, bias, gated=False)


def _seed_oss(config: Fields, spec: ModelSpec) -> ModelSpec:
    qkv, output = (
        config.boolean("attention_bias", True),
        config.boolean("attention_out_bias", False),
    )
    return with_biases(spec, qkv, output, config.boolean("mlp_bias", False))


def _ernie4_5(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("use_bias", False)
    return with_biases(spec, bias, bias, bias)


def _gpt_oss(config: Fields, spec: ModelSpec) -> ModelSpec:
    limits = config.number("swiglu_limit", 7.0), config.number("swiglu_alpha", 1.702)
    if limits != (7.0, 1.702):
        raise UnsupportedModelError(
            f"{config.file}: swiglu_limit and swiglu_alpha of {limits} are not supported."
        )
    bias = config.boolean("attention_bias", True)
    moe = replace(mixtral_experts(config, spec), activation=Activation.CLAMPED_SWIGLU, bias=True)
    return with_windows(
        config,
        spec.with_layers(qkv_bias=bias, output_bias=bias, sinks=True, mlp=moe),
        2,
        window=128,
    )


_GRANITE_MOE_NAMES = {
    "router": "block_sparse_moe.router.layer",
    "expert_gate": "",
    "experts_gate_up": "block_sparse_moe.input_linear.weight",
    "experts_down": "block_sparse_moe.output_linear.weight",
    "shared_gate_up": "shared_mlp.input_linear",
    "shared_down": "shared_mlp.output_linear",
}
_STACKED_GRANITE_NAMES = {
    "router": "block_sparse_moe.router",
    "experts_gate_up": "block_sparse_moe.experts.gate_up_proj",
    "experts_down": "block_sparse_moe.experts.down_proj",
}
_GRANITE4_NAMES = _GRANITE_MOE_NAMES | {
    "gate_up": "shared_mlp.input_linear",
    "down": "shared_mlp.output_linear",
}
_GLM_NAMES = {"gate_up": "mlp.gate_up_proj"}
_GLM4_NAMES = {
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
} | _GLM_NAMES
_GLM4_MOE_NAMES = {
    f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}

FAMILIES: tuple[Family, ...] = (
    # GGUF files of Mistral and Mixtral call themselves llama.
    Family(
        "mixtral", "Mixtral", ("MixtralForCausalLM",), _mixtral, "llama", "expert_count",
        names=MIXTRAL_NAMES, stacked_names=STACKED_MIXTRAL_NAMES, gguf_interleaved_rope=True,
    ),
    Family(
        "mistral", "Mistral", ("MistralForCausalLM", "Mistral3ForConditionalGeneration"), _mistral, "llama",
        "attention.sliding_window", gguf_interleaved_rope=True, ties_whole=True,
        prefixes=SEEING_PREFIXES, unused=TOWERS,
    ),
    Family(
        "llama", "Llama (2, 3.x, TinyLlama, SmolLM2), Falcon 3", ("LlamaForCausalLM",), llama, "llama",
        gguf_interleaved_rope=True,
    ),
    Family(
        "smollm3", "SmolLM3", ("SmolLM3ForCausalLM",), _smollm3, "smollm3",
        gguf_interleaved_rope=True,
    ),
    Family("qwen2", "Qwen2, Qwen2.5", ("Qwen2ForCausalLM",), _qwen2, "qwen2"),
    Family("qwen2_moe", "Qwen2-MoE", ("Qwen2MoeForCausalLM",), _qwen2_moe, "qwen2moe"),
    Family("qwen3", "Qwen3", ("Qwen3ForCausalLM",), _qwen3, "qwen3"),
    Family(
        "qwen3_moe", "Qwen3-MoE", ("Qwen3MoeForCausalLM",), _qwen3_moe, "qwen3moe",
        gguf_settings={"norm_topk_prob": True},
    ),
    Family(
        "gemma2", "Gemma 2", ("Gemma2ForCausalLM",), partial(gemma, caps=(50.0, 30.0), full_every=2), "gemma2",
        names={"mlp_norm": "pre_feedforward_layernorm"},
    ),
    Family(
        "gemma3_text", "Gemma 3 (text)", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), _gemma3, "gemma3",
        names={"mlp_norm": "pre_feedforward_layernorm"}, ties_whole=True, prefixes=SEEING_PREFIXES, unused=TOWERS,
    ),
    Family(
        "phi3", "Phi-3, Phi-4", ("Phi3ForCausalLM",), partial(with_window, default=None), "phi3",
        has_partial_rope=True,
        names={"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
        gguf_names={"qkv": "attn_qkv", "gate_up": "ffn_up"},
    ),
    Family("olmo3", "OLMo 3", ("Olmo3ForCausalLM",), _olmo3, "olmo2", "attention.sliding_window"),
    Family("olmo2", "OLMo 2", ("Olmo2ForCausalLM",), olmo2, "olmo2"),
    Family("granite", "Granite 3", ("GraniteForCausalLM",), granite, "granite", gguf_interleaved_rope=True),
    Family(
        "granitemoeshared", "Granite 3 with shared experts", ("GraniteMoeSharedForCausalLM",), _granite_moe,
        "granitemoe", "expert_shared_feed_forward_length", names=_GRANITE_MOE_NAMES,
        stacked_names=_STACKED_GRANITE_NAMES, gguf_interleaved_rope=True,
    ),
    Family(
        "granitemoe", "Granite 3 with experts", ("GraniteMoeForCausalLM",), _granite_moe, "granitemoe",
        names=_GRANITE_MOE_NAMES, stacked_names=_STACKED_GRANITE_NAMES, gguf_interleaved_rope=True,
    ),
    Family(
        "granitemoehybrid", "Granite 4", ("GraniteMoeHybridForCausalLM",), _granite_hybrid, "granitehybrid",
        names=_GRANITE4_NAMES | MAMBA_NAMES, stacked_names=_STACKED_GRANITE_NAMES, gguf_interleaved_rope=True,
        gguf_names=STATE_SPACE_GGUF_NAMES, gguf_settings={"mamba_proj_bias": False},
        gguf_needs=(
            "attention.head_count_kv", "attention.scale", "expert_count", "expert_used_count", "feed_forward_length",
            "rope.scaling.finetuned", *STATE_SPACE_KEYS,
        ),
        gguf_fixed={"rope.scaling.finetuned": False},  # what stands there for rope
    ),
    Family(
        "qwen3_next", "Qwen3-Next", ("Qwen3NextForCausalLM",), qwen3_next, "qwen3next",
        has_partial_rope=True, names=QWEN3_NEXT_NAMES, has_drafting_layers=True,
        gguf_names=QWEN3_NEXT_GGUF_NAMES, gguf_settings={"norm_topk_prob": True},
        gguf_needs=(
            "rope.dimension_count", "expert_count", "expert_used_count", "expert_feed_forward_length",
            "expert_shared_feed_forward_length", "full_attention_interval", *STATE_SPACE_KEYS,
        ),
    ),
    Family(
        "qwen3_5_text", "Qwen3.5 (text)", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), qwen_linear,
        has_partial_rope=True, names=QWEN3_5_NAMES, has_drafting_layers=True,
        prefixes=("model", "model.language_model"), unused=("model.visual.",),
    ),
    Family(
        "qwen3_5_moe_text", "Qwen3.5 with experts (text)",
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), qwen3_5_moe,
        has_partial_rope=True, names=QWEN3_5_NAMES, has_drafting_layers=True,
        prefixes=("model", "model.language_model"), unused=("model.visual.",),
    ),
    Family("olmo_hybrid", "OLMo Hybrid", ("OlmoHybridForCausalLM",), olmo_hybrid, names=OLMO_HYBRID_NAMES),
    Family(
        "nemotron_h", "Nemotron-H, Nemotron Nano 2 and 3", ("NemotronHForCausalLM",), nemotron_h, "nemotron_h",
        gguf_others={
            "nemotron_h_moe": (
                "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
                "expert_weights_norm", "expert_weights_scale",
            )
        },
        gguf_names=NEMOTRON_H_GGUF_NAMES, gguf_settings=NEMOTRON_H_GGUF_SETTINGS, gguf_interleaved_rope=True,
        gguf_needs=("attention.head_count_kv", "attention.key_length", "feed_forward_length", *STATE_SPACE_KEYS),
        gguf_lists=("attention.head_count_kv", "feed_forward_length"),
        names=NEMOTRON_H_NAMES, final_norm="norm_f", embedding="embeddings",
        prefixes=("backbone", "model"), settings=nemotron_h_settings, numbers_blocks=True, has_drafting_layers=True,
    ),
    Family(
        "falcon_h1", "Falcon-H1", ("FalconH1ForCausalLM",), falcon_h1, "falcon-h1", names=BAMBA_NAMES,
        final_norm="final_layernorm", gguf_names=STATE_SPACE_GGUF_NAMES, gguf_settings=FALCON_H1_GGUF_SETTINGS,
        gguf_needs=("feed_forward_length", "attention.head_count_kv", *STATE_SPACE_KEYS),
    ),
    Family(
        "bamba", "Bamba", ("BambaForCausalLM",), bamba, has_partial_rope=True, names=BAMBA_NAMES,
        final_norm="final_layernorm",
    ),
    Family(
        "lfm2", "LFM2", ("Lfm2ForCausalLM",), lfm2, "lfm2", names=LFM2_NAMES, final_norm="embedding_norm",
        gguf_names=LFM2_GGUF_NAMES, gguf_final_norm="token_embd_norm", gguf_settings=LFM2_GGUF_SETTINGS,
        gguf_needs=("shortconv.l_cache", "feed_forward_length", "attention.head_count_kv"),
        gguf_fixed={"attention.sliding_window": 0},
    ),
    Family(
        "lfm2_moe", "LFM2 with experts", ("Lfm2MoeForCausalLM",), lfm2_moe, "lfm2moe", names=LFM2_MOE_NAMES,
        final_norm="embedding_norm", gguf_names=LFM2_GGUF_NAMES, gguf_final_norm="token_embd_norm",
        gguf_settings=LFM2_GGUF_SETTINGS | {"norm_topk_prob": True, "use_expert_bias": True},
        gguf_needs=(
            "shortconv.l_cache", "attention.head_count_kv", "expert_count", "expert_used_count",
            "expert_feed_forward_length", "leading_dense_block_count",
        ),
        gguf_fixed={"attention.sliding_window": 0, "expert_gating_func": SIGMOID_GATING},
    ),
    Family(
        "glm", "GLM-4-9B", ("GlmForCausalLM",), _glm,
        has_partial_rope=True, names=_GLM_NAMES, interleaved_rope=True,
    ),
    Family(
        "glm4", "GLM-4-0414, GLM-Z1", ("Glm4ForCausalLM",), _glm4, "glm4", has_partial_rope=True,
        names=_GLM4_NAMES, gguf_names={"gate_up": "ffn_up"}, interleaved_rope=True, gguf_interleaved_rope=True,
    ),
    Family(
        "glm4_moe", "GLM-4.5", ("Glm4MoeForCausalLM",), _glm4_moe, "glm4moe",
        has_partial_rope=True, names=_GLM4_MOE_NAMES, gguf_names={"mlp_norm": "post_attention_norm"},
        has_drafting_layers=True,
    ),
    Family(
        "cohere2", "Command R7B, Command A", ("Cohere2ForCausalLM",), _cohere2, "cohere2",
        interleaved_rope=True, gguf_interleaved_rope=True,
    ),
    Family(
        "starcoder2", "StarCoder 2", ("Starcoder2ForCausalLM",), _starcoder2, "starcoder2",
        names={"up": "mlp.c_fc", "down": "mlp.c_proj"},
    ),
    Family(
        "seed_oss", "Seed-OSS", ("SeedOssForCausalLM",), _seed_oss, "seed_oss",
        gguf_names={"mlp_norm": "post_attention_norm"},
    ),
    Family(
        "ernie4_5", "ERNIE 4.5 (dense)", ("Ernie4_5ForCausalLM",), _ernie4_5, "ernie4_5",
        interleaved_rope=True, gguf_interleaved_rope=True,
    ),
    Family(
        "hunyuan_v1_dense", "Hunyuan (dense)", ("HunYuanDenseV1ForCausalLM",), hunyuan, "hunyuan-dense",
        has_rope_alpha=True,
        names={"query_norm": "self_attn.query_layernorm", "key_norm": "self_attn.key_layernorm"},
    ),
    Family(
        "gpt_oss", "gpt-oss", ("GptOssForCausalLM",), _gpt_oss, "gpt-oss",
        names={"router": "mlp.router", "expert_gate": ""}, alternating_gate_up=True,
        turned_experts=True,
        turned_for_peft=True,
        gguf_names={"mlp_norm": "post_attention_norm"}, gguf_settings={"rope_parameters": {"truncate": False}},
    ),
    GEMMA4,
    LLAMA4,
    KIMI,
    *FURTHER,
    *LATENT,
    *CLASSIC,
)  # fmt: skip


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)
