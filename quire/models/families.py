"""The families of models Quire runs: one entry each, naming what differs from plain Llama.

A new family of this kind is one `Family` below: the names its files go by, and a function that
reads its quirks from `config.json`. Everything shared (sizes, rope) is read by `read_config` in
`model_config.py`. GGUF files say the same under other names (`gguf_spec.py`), so they are read by
the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from quire.checkpoints.fields import Fields
from quire.errors import UnsupportedModelError
from quire.kernels.ops import Activation, MoeSpec
from quire.models.config_parts import (
    ROPE_TYPES,
    read_rope,
    with_deepseek_experts,
    with_qwen_experts,
    with_window,
    with_windows,
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


@dataclass(frozen=True, slots=True)
class Family:
    """One line of models."""

    name: str
    """What `model_type` says in config.json."""
    title: str
    """Its models, for people."""
    architectures: tuple[str, ...]
    """What `architectures` says in config.json."""
    quirks: Callable[[Fields, ModelSpec], ModelSpec]
    """Reads what is particular to the family from config.json into a spec that holds the rest."""
    gguf: str | None = None
    """What `general.architecture` says in a GGUF file, if such files exist."""
    gguf_key: str = ""
    """Where families share a GGUF architecture, the first one whose key the file has is taken; ""
    fits any file.
    """
    gguf_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that GGUF files leave out, by their names in config.json."""
    tie_embeddings: bool = False
    """What an absent `tie_word_embeddings` means."""
    rope_theta: float = 10_000.0
    """What an absent `rope_theta` means."""
    rope_types: tuple[str, ...] = ROPE_TYPES
    partial_rotary: float | None = None
    """What an absent `partial_rotary_factor` means; None: heads are always rotated whole."""
    activation: str = "silu"
    """What `hidden_act` must say."""
    head_dim: int | None = None
    """What an absent `head_dim` means; None: hidden_size / heads."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's tensors that are not the usual ones (see `names.py`), "" where there is no
    such tensor.
    """
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    interleaved_rope: bool = False
    """Rope rotates neighbouring dimensions (2i, 2i + 1): rows of q and k are reordered when they
    are loaded.
    """
    gguf_interleaved_rope: bool = False
    """The same for GGUF files, which may have q and k in another order than Hugging Face's."""
    alternating_gate_up: bool = False
    """Gate and up rows of stacked experts alternate (row 0 gate, row 1 up, ...)."""
    final_norm: str = "norm"
    embedding: str = "embed_tokens"
    prefixes: tuple[str, ...] = ("model",)
    """What the names of embedding, layers and final norm begin with; the first one is usual."""
    unused: tuple[str, ...] = ()
    """What the names of tensors begin with that are not for text: they are left out."""
    settings: Callable[[Fields], Fields] | None = None
    """Brings config.json into the usual form before it is read."""
    numbers_blocks: bool = False
    """Mixers and MLPs are layers of their own in the files, each with one norm."""
    has_drafting_layers: bool = False
    """Files may hold layers for multi-token prediction, after the last one or under a name of their
    own; they are ignored.
    """


def _with_biases(
    spec: ModelSpec, qkv: bool, output: bool, mlp: bool, gated: bool = True
) -> ModelSpec:
    dense = spec.layers[0].mlp
    assert isinstance(dense, MlpSpec)
    return spec.with_layers(
        qkv_bias=qkv, output_bias=output, mlp=replace(dense, bias=mlp, gated=gated)
    )


def _llama(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    return _with_biases(spec, bias, bias, config.boolean("mlp_bias", False))


def _smollm3(config: Fields, spec: ModelSpec) -> ModelSpec:
    interval = config.integer("no_rope_layer_interval", 4)
    every_nth = [int((i + 1) % interval != 0) for i in range(spec.num_layers)]
    # 1 where rope is used, whatever the name says
    rope = config.list_of("no_rope_layers", int, every_nth)
    if len(rope) != spec.num_layers:
        raise config.error("no_rope_layers", f"a list of {spec.num_layers} numbers", rope)
    default = ["full_attention" if use else "sliding_attention" for use in rope]
    if config.boolean("use_sliding_window", False):
        spec = with_windows(config, spec, default, window=None)
    layers = zip(_llama(config, spec).layers, rope, strict=True)
    return replace(
        spec, layers=tuple(layer if use else replace(layer, rope=None) for layer, use in layers)
    )


def _mixtral_experts(config: Fields) -> MoeSpec:
    return MoeSpec(
        num_experts=config.integer("num_local_experts", 8, high=65_536),
        top_k=config.integer("num_experts_per_tok", 2),
        intermediate_size=config.integer("intermediate_size"),
        normalize_weights=True,
    )


def _mixtral(config: Fields, spec: ModelSpec) -> ModelSpec:
    return with_window(config, spec.with_layers(mlp=_mixtral_experts(config)), None)


def _qwen2(config: Fields, spec: ModelSpec) -> ModelSpec:
    first_window_layer = config.integer("max_window_layers", 28, low=0)
    default = [
        "sliding_attention" if i >= first_window_layer else "full_attention"
        for i in range(spec.num_layers)
    ]
    spec = (
        with_windows(config, spec, default) if config.boolean("use_sliding_window", False) else spec
    )
    return spec.with_layers(qkv_bias=True)


def _qwen2_moe(config: Fields, spec: ModelSpec) -> ModelSpec:
    last_window_layer = config.integer("max_window_layers", 28, low=0)
    windows = [i % 2 == 0 and i < last_window_layer for i in range(spec.num_layers)]
    default = ["sliding_attention" if window else "full_attention" for window in windows]
    spec = (
        with_windows(config, spec, default) if config.boolean("use_sliding_window", False) else spec
    )
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


def _gemma(
    config: Fields,
    spec: ModelSpec,
    caps: tuple[float, float],
    full_every: int,
    rope: RopeSpec | None = None,
) -> ModelSpec:
    if config.boolean("use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{config.file}: attention to later tokens is not supported.")
    heads, bias = spec.head_shapes[0], config.boolean("attention_bias", False)
    # GGUF files leave it out; the models of 27B are those with 46 and 62 layers.
    divided = (
        spec.hidden_size / heads.num_heads if spec.num_layers in (46, 62) else float(heads.head_dim)
    )
    scale = config.number("query_pre_attn_scalar", divided, low=1e-6) ** -0.5
    keys = ("attn_logit_softcapping", caps[0]), ("final_logit_softcapping", caps[1])
    cap, logit_cap = (
        config.number(key, 0.0) if config.declares(key) else default for key, default in keys
    )
    if cap and not caps[0]:
        raise UnsupportedModelError(
            f"{config.file}: attn_logit_softcapping is not supported in this family."
        )
    spec = spec.with_attention(scale=scale, soft_cap=cap)
    spec = spec.with_layers(post_norms=True, qkv_bias=bias, output_bias=bias)
    spec = replace(
        spec, norm_offset=1.0, embedding_scale=spec.hidden_size**0.5, logit_cap=logit_cap
    )
    return with_windows(config, spec, full_every, rope=rope)


def _gemma3(config: Fields, spec: ModelSpec) -> ModelSpec:
    local = RopeSpec(config.number("rope_local_base_freq", 10_000.0, low=1e-6))
    return _gemma(config, spec, (0.0, 0.0), 6, _local_rope(config, spec, local)).with_layers(
        qk_norm=True
    )


def _local_rope(config: Fields, spec: ModelSpec, default: RopeSpec) -> RopeSpec:
    """The rope of layers with a sliding window, which is not stretched for longer contexts."""
    if "sliding_attention" not in config.part("rope_parameters"):
        return default
    return read_rope(
        config, spec.head_shapes[0].head_dim, default.theta, None, ROPE_TYPES, "sliding_attention"
    )


def _olmo2(config: Fields, spec: ModelSpec) -> ModelSpec:
    return _llama(config, spec).with_layers(
        pre_norms=False, post_norms=True, qk_norm=True, qk_norm_is_whole=True
    )


def _olmo3(config: Fields, spec: ModelSpec) -> ModelSpec:
    local = RopeSpec(config.number("rope_theta", 500_000.0, low=1e-6))
    return with_windows(config, _olmo2(config, spec), 4, rope=_local_rope(config, spec, local))


def _granite(config: Fields, spec: ModelSpec) -> ModelSpec:
    scale = config.number("attention_multiplier", 1.0)
    return replace(
        _llama(config, spec).with_attention(scale=scale),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0, low=1e-6),
    )


def _granite_moe(config: Fields, spec: ModelSpec) -> ModelSpec:
    shared = config.integer("shared_intermediate_size", 0, low=0)
    moe = replace(_mixtral_experts(config), shared_intermediate_size=shared, shared_gate=False)
    return _granite(config, spec).with_layers(mlp=moe)


def _granite_hybrid(config: Fields, spec: ModelSpec) -> ModelSpec:
    if config.string("position_embedding_type", "nope") != "rope":
        spec = spec.with_layers(rope=None)
    if config.integer("num_local_experts", 8, low=0):
        spec = _granite_moe(config, spec)
    else:
        shared = config.integer("shared_intermediate_size", 1024)
        spec = _granite(config, spec).with_layers(mlp=MlpSpec(shared))
    mamba = mamba2(config, spec)
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
    spec = with_windows(config, _llama(config, spec).with_layers(parallel=True), 4)
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
    return _with_biases(with_window(config, spec, None), bias, bias, bias, gated=False)


def _seed_oss(config: Fields, spec: ModelSpec) -> ModelSpec:
    qkv, output = (
        config.boolean("attention_bias", True),
        config.boolean("attention_out_bias", False),
    )
    return _with_biases(spec, qkv, output, config.boolean("mlp_bias", False))


def _ernie4_5(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("use_bias", False)
    return _with_biases(spec, bias, bias, bias)


def _hunyuan(config: Fields, spec: ModelSpec) -> ModelSpec:
    return _llama(config, spec).with_layers(qk_norm=True, qk_norm_after_rope=True)


def _gpt_oss(config: Fields, spec: ModelSpec) -> ModelSpec:
    limits = config.number("swiglu_limit", 7.0), config.number("swiglu_alpha", 1.702)
    if limits != (7.0, 1.702):
        raise UnsupportedModelError(
            f"{config.file}: swiglu_limit and swiglu_alpha of {limits} are not supported."
        )
    bias = config.boolean("attention_bias", True)
    moe = replace(_mixtral_experts(config), activation=Activation.CLAMPED_SWIGLU, bias=True)
    return with_windows(
        config,
        spec.with_layers(qkv_bias=bias, output_bias=bias, sinks=True, mlp=moe),
        2,
        window=128,
    )


_MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{expert}.w1",
    "expert_up": "block_sparse_moe.experts.{expert}.w3",
    "expert_down": "block_sparse_moe.experts.{expert}.w2",
}
_GRANITE_MOE_NAMES = {
    "router": "block_sparse_moe.router.layer",
    "expert_gate": "",
    "experts_gate_up": "block_sparse_moe.input_linear.weight",
    "experts_down": "block_sparse_moe.output_linear.weight",
    "shared_gate_up": "shared_mlp.input_linear",
    "shared_down": "shared_mlp.output_linear",
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
        rope_theta=1_000_000.0, names=_MIXTRAL_NAMES, gguf_interleaved_rope=True,
    ),
    Family(
        "mistral", "Mistral", ("MistralForCausalLM",), partial(with_window, default=4096), "llama",
        "attention.sliding_window", gguf_interleaved_rope=True,
    ),
    Family(
        "llama", "Llama (2, 3.x, TinyLlama, SmolLM2), Falcon 3", ("LlamaForCausalLM",), _llama, "llama",
        gguf_interleaved_rope=True, rope_types=(*ROPE_TYPES, "factors"),
    ),
    Family(
        "smollm3", "SmolLM3", ("SmolLM3ForCausalLM",), _smollm3, "smollm3",
        tie_embeddings=True, rope_theta=2_000_000.0, gguf_interleaved_rope=True,
    ),
    Family("qwen2", "Qwen2, Qwen2.5", ("Qwen2ForCausalLM",), _qwen2, "qwen2"),
    Family("qwen2_moe", "Qwen2-MoE", ("Qwen2MoeForCausalLM",), _qwen2_moe, "qwen2moe"),
    Family("qwen3", "Qwen3", ("Qwen3ForCausalLM",), _qwen3, "qwen3", head_dim=128),
    Family(
        "qwen3_moe", "Qwen3-MoE", ("Qwen3MoeForCausalLM",), _qwen3_moe, "qwen3moe",
        gguf_settings={"norm_topk_prob": True},
    ),
    Family(
        "gemma2", "Gemma 2", ("Gemma2ForCausalLM",), partial(_gemma, caps=(50.0, 30.0), full_every=2), "gemma2",
        tie_embeddings=True, activation="gelu_pytorch_tanh", head_dim=256,
        names={"mlp_norm": "pre_feedforward_layernorm"},
    ),
    Family(
        "gemma3_text", "Gemma 3 (text)", ("Gemma3ForCausalLM",), _gemma3, "gemma3",
        tie_embeddings=True, activation="gelu_pytorch_tanh", head_dim=256, rope_theta=1_000_000.0,
        names={"mlp_norm": "pre_feedforward_layernorm"},
    ),
    Family(
        "phi3", "Phi-3, Phi-4", ("Phi3ForCausalLM",), partial(with_window, default=None), "phi3",
        rope_types=("default", "longrope"), partial_rotary=1.0,
        names={"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
        gguf_names={"qkv": "attn_qkv", "gate_up": "ffn_up"},
    ),
    Family("olmo3", "OLMo 3", ("Olmo3ForCausalLM",), _olmo3, "olmo2", "attention.sliding_window", rope_theta=500_000.0),
    Family("olmo2", "OLMo 2", ("Olmo2ForCausalLM",), _olmo2, "olmo2"),
    Family("granite", "Granite 3", ("GraniteForCausalLM",), _granite, "granite", gguf_interleaved_rope=True),
    Family(
        "granitemoeshared", "Granite 3 with shared experts", ("GraniteMoeSharedForCausalLM",), _granite_moe,
        "granitemoe", "expert_shared_feed_forward_length", names=_GRANITE_MOE_NAMES, gguf_interleaved_rope=True,
    ),
    Family(
        "granitemoe", "Granite 3 with experts", ("GraniteMoeForCausalLM",), _granite_moe, "granitemoe",
        names=_GRANITE_MOE_NAMES, gguf_interleaved_rope=True,
    ),
    Family(
        "granitemoehybrid", "Granite 4", ("GraniteMoeHybridForCausalLM",), _granite_hybrid,
        names=_GRANITE4_NAMES | MAMBA_NAMES,
    ),
    Family(
        "qwen3_next", "Qwen3-Next", ("Qwen3NextForCausalLM",), qwen3_next,
        head_dim=256, partial_rotary=0.25, names=QWEN3_NEXT_NAMES, has_drafting_layers=True,
    ),
    Family(
        "qwen3_5_text", "Qwen3.5 (text)", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), qwen_linear,
        head_dim=256, partial_rotary=0.25, names=QWEN3_5_NAMES, has_drafting_layers=True,
        prefixes=("model", "model.language_model"), unused=("model.visual.",),
    ),
    Family(
        "qwen3_5_moe_text", "Qwen3.5 with experts (text)",
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), qwen3_5_moe,
        head_dim=256, partial_rotary=0.25, names=QWEN3_5_NAMES, has_drafting_layers=True,
        prefixes=("model", "model.language_model"), unused=("model.visual.",),
    ),
    Family("olmo_hybrid", "OLMo Hybrid", ("OlmoHybridForCausalLM",), olmo_hybrid, names=OLMO_HYBRID_NAMES),
    Family(
        "nemotron_h", "Nemotron-H, Nemotron Nano 2 and 3", ("NemotronHForCausalLM",), nemotron_h,
        activation="relu2", head_dim=128, names=NEMOTRON_H_NAMES, final_norm="norm_f", embedding="embeddings",
        prefixes=("backbone", "model"), settings=nemotron_h_settings, numbers_blocks=True, has_drafting_layers=True,
    ),
    Family(
        "falcon_h1", "Falcon-H1", ("FalconH1ForCausalLM",), falcon_h1, names=BAMBA_NAMES, final_norm="final_layernorm",
    ),
    Family(
        "bamba", "Bamba", ("BambaForCausalLM",), bamba, partial_rotary=0.5, names=BAMBA_NAMES,
        final_norm="final_layernorm",
    ),
    Family(
        "lfm2", "LFM2", ("Lfm2ForCausalLM",), lfm2, tie_embeddings=True, rope_theta=1_000_000.0,
        names=LFM2_NAMES, final_norm="embedding_norm",
    ),
    Family(
        "lfm2_moe", "LFM2 with experts", ("Lfm2MoeForCausalLM",), lfm2_moe, tie_embeddings=True,
        rope_theta=1_000_000.0, names=LFM2_MOE_NAMES, final_norm="embedding_norm",
    ),
    Family(
        "glm", "GLM-4-9B", ("GlmForCausalLM",), _glm,
        head_dim=128, partial_rotary=0.5, names=_GLM_NAMES, interleaved_rope=True,
    ),
    Family(
        "glm4", "GLM-4-0414, GLM-Z1", ("Glm4ForCausalLM",), _glm4, "glm4", head_dim=128, partial_rotary=0.5,
        names=_GLM4_NAMES, gguf_names={"gate_up": "ffn_up"}, interleaved_rope=True, gguf_interleaved_rope=True,
    ),
    Family(
        "glm4_moe", "GLM-4.5", ("Glm4MoeForCausalLM",), _glm4_moe, "glm4moe",
        head_dim=128, partial_rotary=0.5, names=_GLM4_MOE_NAMES, gguf_names={"mlp_norm": "post_attention_norm"},
        has_drafting_layers=True,
    ),
    Family(
        "cohere2", "Command R7B, Command A", ("Cohere2ForCausalLM",), _cohere2, "cohere2",
        tie_embeddings=True, interleaved_rope=True, gguf_interleaved_rope=True,
    ),
    Family(
        "starcoder2", "StarCoder 2", ("Starcoder2ForCausalLM",), _starcoder2, "starcoder2",
        tie_embeddings=True, activation="gelu_pytorch_tanh", names={"up": "mlp.c_fc", "down": "mlp.c_proj"},
    ),
    Family(
        "seed_oss", "Seed-OSS", ("SeedOssForCausalLM",), _seed_oss, "seed_oss",
        head_dim=128, gguf_names={"mlp_norm": "post_attention_norm"},
    ),
    Family(
        "ernie4_5", "ERNIE 4.5 (dense)", ("Ernie4_5ForCausalLM",), _ernie4_5, "ernie4_5", tie_embeddings=True,
        rope_theta=500_000.0, head_dim=128, interleaved_rope=True, gguf_interleaved_rope=True,
    ),
    Family(
        "hunyuan_v1_dense", "Hunyuan (dense)", ("HunYuanDenseV1ForCausalLM",), _hunyuan, "hunyuan-dense",
        rope_types=("default", "dynamic"),
        names={"query_norm": "self_attn.query_layernorm", "key_norm": "self_attn.key_layernorm"},
    ),
    Family(
        "gpt_oss", "gpt-oss", ("GptOssForCausalLM",), _gpt_oss, "gpt-oss", rope_theta=150_000.0, head_dim=64,
        names={"router": "mlp.router", "expert_gate": ""}, alternating_gate_up=True,
        gguf_names={"mlp_norm": "post_attention_norm"}, gguf_settings={"rope_parameters": {"truncate": False}},
    ),
)  # fmt: skip


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)
