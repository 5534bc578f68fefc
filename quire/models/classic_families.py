"""Families with LayerNorm, biases, packed, learned or sloping things: GPT-2 and those that came after
it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.checkpoints.fields import Fields
from quire.errors import UnsupportedModelError
from quire.models.config_parts import activation_of
from quire.models.family import Family
from quire.models.quirks import refuse, with_biases
from quire.models.spec import MlpSpec, ModelSpec, RopeSpec, alibi_slopes


def _renamed(config: Fields, names: dict[str, str]) -> Fields:
    """Settings under their usual names, where the file has the family's own."""
    found = {usual: config.raw(own) for usual, own in names.items() if own in config}
    return config.with_values(found)


def _with_layer_norm(config: Fields, spec: ModelSpec, key: str) -> ModelSpec:
    eps = config.number(key, 1e-5)
    return replace(spec, layer_norm=True, norm_bias=True, rms_norm_eps=eps)


_GPT_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}


def _gpt_settings(config: Fields) -> Fields:
    config = _renamed(config, _GPT_KEYS)
    hidden = config.integer("hidden_size")
    return config.with_values(
        {
            "intermediate_size": config.integer("n_inner", 4 * hidden),
            "num_key_value_heads": config.raw("num_attention_heads"),
            "head_dim": None,
        }
    )


def _gpt2(config: Fields, spec: ModelSpec) -> ModelSpec:
    refuse(config, "add_cross_attention", False)
    spec = with_biases(spec, True, True, True, gated=False).with_layers(rope=None)
    if not config.boolean("scale_attn_weights", True):
        spec = spec.with_attention(scale=1.0)
    if config.boolean("scale_attn_by_inverse_layer_idx", False):
        layers = (
            layer.with_attention(scale=layer.attention.scale / (number + 1))
            for number, layer in enumerate(spec.layers)
            if layer.attention is not None
        )
        spec = replace(spec, layers=tuple(layers))
    spec = replace(spec, num_learned_positions=spec.max_position)
    return _with_layer_norm(config, spec, "layer_norm_epsilon")


def _gptj(config: Fields, spec: ModelSpec) -> ModelSpec:
    size = spec.head_shapes[0].head_dim
    rotated = config.integer("rotary_dim", 64)
    if rotated > size or rotated % 2:
        raise config.error("rotary_dim", f"even and at most the head's {size}", rotated)
    rope = RopeSpec(rotated=rotated if rotated < size else 0)
    spec = with_biases(spec, False, False, True, gated=False).with_layers(rope=rope, parallel=True)
    return replace(_with_layer_norm(config, spec, "layer_norm_epsilon"), head_bias=True)


def _gpt_neox_settings(config: Fields) -> Fields:
    # under other names these count only within `rope_parameters`
    return config.with_values(
        {
            "num_key_value_heads": config.raw("num_attention_heads"),
            "head_dim": None,
            "partial_rotary_factor": config.number("rotary_pct", 0.25),
            "rope_theta": config.number("rotary_emb_base", 10_000.0),
        }
    )


def _gpt_neox(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("attention_bias", True)
    is_parallel = config.boolean("use_parallel_residual", True)
    spec = with_biases(spec, bias, bias, True, gated=False).with_layers(
        parallel=is_parallel, parallel_norms=is_parallel
    )
    return _with_layer_norm(config, spec, "layer_norm_eps")


def _falcon_settings(config: Fields) -> Fields:
    config = _renamed(config, {"hidden_act": "activation", "hidden_size": "n_embed"})
    heads: Any = config.raw("num_attention_heads")
    if config.boolean("new_decoder_architecture", False):
        key_heads = config.raw("num_kv_heads") or heads
    else:
        key_heads = 1 if config.boolean("multi_query", True) else heads
    size = config.integer("ffn_hidden_size", 4 * config.integer("hidden_size"))
    return config.with_values(
        {"num_key_value_heads": key_heads, "intermediate_size": size, "head_dim": None}
    )


def _falcon(config: Fields, spec: ModelSpec) -> ModelSpec:
    refuse(config, "alibi", False)
    is_new, is_parallel = (
        config.boolean("new_decoder_architecture", False),
        config.boolean("parallel_attn", True),
    )
    num_norms = config.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    if num_norms > 2 or (num_norms == 2) > is_new or is_new > is_parallel:
        raise UnsupportedModelError(
            f"{config.file}: num_ln_in_parallel_attn {num_norms} with new_decoder_architecture "
            f"{is_new} and parallel_attn {is_parallel} is not supported."
        )
    bias = config.boolean("bias", False)
    spec = with_biases(spec, bias, bias, bias, gated=False).with_layers(
        parallel=is_parallel, parallel_norms=num_norms == 2
    )
    return _with_layer_norm(config, spec, "layer_norm_epsilon")


def _phi(config: Fields, spec: ModelSpec) -> ModelSpec:
    refuse(config, "qk_layernorm", False)
    spec = with_biases(spec, True, True, True, gated=False).with_layers(parallel=True)
    return replace(_with_layer_norm(config, spec, "layer_norm_eps"), head_bias=True)


def _opt_settings(config: Fields) -> Fields:
    config = _renamed(config, {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"})
    heads = config.raw("num_attention_heads")
    return config.with_values({"num_key_value_heads": heads, "head_dim": None})


def _opt(config: Fields, spec: ModelSpec) -> ModelSpec:
    refuse(config, "do_layer_norm_before", True)
    refuse(config, "_remove_final_layer_norm", False)
    refuse(config, "word_embed_proj_dim", spec.hidden_size)
    bias = config.boolean("enable_bias", True)
    has_weights = config.boolean("layer_norm_elementwise_affine", True)
    return replace(
        with_biases(spec, bias, bias, bias, gated=False).with_layers(rope=None),
        layer_norm=True,
        norm_weights=has_weights,
        norm_bias=has_weights,
        rms_norm_eps=1e-5,
        num_learned_positions=spec.max_position,
    )


def _bloom_settings(config: Fields) -> Fields:
    names = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    names |= {"hidden_size": "n_embed", "max_position_embeddings": "seq_length"}
    config = _renamed(config, names)
    return config.with_values(
        {
            "num_key_value_heads": config.raw("num_attention_heads"),
            "intermediate_size": 4 * config.integer("hidden_size"),
            "hidden_act": "gelu_pytorch_tanh",
            "head_dim": None,
        }
    )


def _bloom(config: Fields, spec: ModelSpec) -> ModelSpec:
    refuse(config, "apply_residual_connection_post_layernorm", False)
    spec = with_biases(_with_slopes(spec, 8.0), True, True, True, gated=False)
    return replace(_with_layer_norm(config, spec, "layer_norm_epsilon"), embedding_norm=True)


def _with_slopes(spec: ModelSpec, max_bias: float) -> ModelSpec:
    """Attention that knows positions by ALiBi alone."""
    slopes = alibi_slopes(spec.head_shapes[0].num_heads, max_bias)
    return spec.with_attention(slopes=slopes).with_layers(rope=None)


_MPT_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
_MPT_FIXED: dict[str, tuple[object, ...]] = {
    "expansion_ratio": (4,),
    "no_bias": (True,),
    "logit_scale": (),
    "norm_type": ("layernorm", "low_precision_layernorm"),
    "fuse_norm_attn_norm": (False,),
    "block_overrides": (),
}
"""Settings of MPT of which transformers computes these values only, whatever the file says."""
_MPT_FIXED_ATTENTION: dict[str, tuple[object, ...]] = {
    "attn_type": ("multihead_attention",),
    "kv_n_heads": (),
    "qk_ln": (False,),
    "qk_gn": (False,),
    "prefix_lm": (False,),
    "alibi": (True,),
    "rope": (False,),
    "sliding_window_size": (-1,),
}


def _mpt_settings(config: Fields) -> Fields:
    for key, computed in _MPT_FIXED.items():
        refuse(config, key, *computed)
    attention, mlp = config.part("attn_config"), config.part("ffn_config")
    for key, computed in _MPT_FIXED_ATTENTION.items():
        refuse(attention, key, *computed)
    refuse(mlp, "ffn_type", "mptmlp")
    refuse(mlp, "ffn_hidden_size")
    refuse(mlp.part("ffn_act_fn"), "name", "gelu")
    config = _renamed(config, _MPT_KEYS)
    own = ("clip_qkv", "softmax_scale", "alibi_bias_max")
    return config.with_values(
        {
            "num_key_value_heads": config.raw("num_attention_heads"),
            "intermediate_size": 4 * config.integer("hidden_size"),
            "hidden_act": "gelu",
            "head_dim": None,
            **{key: attention.raw(key) for key in own},
        }
    )


def _mpt(config: Fields, spec: ModelSpec) -> ModelSpec:
    limit = config.number("clip_qkv", 0.0, low=0.0)
    spec = _with_slopes(spec, config.number("alibi_bias_max", 8.0, low=1e-6))
    if "softmax_scale" in config:
        spec = spec.with_attention(scale=config.number("softmax_scale"))
    spec = with_biases(spec, False, False, False, gated=False).with_layers(qkv_limit=limit)
    eps = config.number("layer_norm_epsilon", 1e-5)
    return replace(spec, layer_norm=True, rms_norm_eps=eps)


def _apertus_settings(config: Fields) -> Fields:
    refuse(config, "hidden_act", "xielu")
    return config.with_values({"hidden_act": "silu"})  # the MLP's spec says what it is


def _apertus(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    mlp = MlpSpec(config.integer("intermediate_size"), activation_of(spec), gated=False, xielu=True)
    return spec.with_layers(qk_norm=True, qkv_bias=bias, output_bias=bias, mlp=mlp)


_MASKS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
_GPT2_NAMES = {
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "qkv": "attn.c_attn",
    "output": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_GPTJ_NAMES = {
    "attention_norm": "ln_1",
    **{side: f"attn.{side[0]}_proj" for side in ("query", "key", "value")},
    "output": "attn.out_proj",
    "up": "mlp.fc_in",
    "down": "mlp.fc_out",
}
_4H = {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
_OPT_NAMES = {
    "attention_norm": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
    "output": "self_attn.out_proj",
    "up": "fc1",
    "down": "fc2",
}
_APERTUS_NAMES = {
    "attention_norm": "attention_layernorm",
    "mlp_norm": "feedforward_layernorm",
    "positive_alpha": "mlp.act_fn.alpha_p",
    "negative_alpha": "mlp.act_fn.alpha_n",
}

_BLOOM_NAMES = _4H | {"qkv": "self_attention.query_key_value", "output": "self_attention.dense"}
_MPT_NAMES = {
    "attention_norm": "norm_1",
    "mlp_norm": "norm_2",
    "qkv": "attn.Wqkv",
    "output": "attn.out_proj",
    "up": "ffn.up_proj",
    "down": "ffn.down_proj",
}
_EMBEDDING_NORM = {
    f"embedding_norm{suffix}": f"word_embeddings_layernorm.{kind}"
    for suffix, kind in (("", "weight"), ("_bias", "bias"))
}
_GGUF_EMBEDDING_NORM = {
    f"embedding_norm{suffix}": f"token_embd_norm.{kind}"
    for suffix, kind in (("", "weight"), ("_bias", "bias"))
}

CLASSIC: tuple[Family, ...] = (
    Family(
        "gpt2", "GPT-2", ("GPT2LMHeadModel",), _gpt2, settings=_gpt_settings, names=_GPT2_NAMES,
        turned_products=True, prefixes=("transformer", ""), layers="h", embedding="wte", final_norm="ln_f",
        outside={"position_embedding": "wpe.weight"}, ignored=_MASKS,
    ),
    Family(
        "gptj", "GPT-J", ("GPTJForCausalLM",), _gptj, settings=_gpt_settings, names=_GPTJ_NAMES,
        interleaved_rope=True, prefixes=("transformer",), layers="h", embedding="wte", final_norm="ln_f",
        ignored=_MASKS,
    ),
    Family(
        "gpt_neox", "GPT-NeoX, Pythia", ("GPTNeoXForCausalLM",), _gpt_neox, settings=_gpt_neox_settings,
        has_partial_rope=True, prefixes=("gpt_neox",), embedding="embed_in", final_norm="final_layer_norm",
        head="embed_out", qkv_by_key_head=True, ignored=_MASKS,
        names=_4H | {"qkv": "attention.query_key_value", "output": "attention.dense"},
    ),
    Family(
        "falcon", "Falcon", ("FalconForCausalLM",), _falcon, settings=_falcon_settings,
        prefixes=("transformer",), layers="h", embedding="word_embeddings", final_norm="ln_f",
        qkv_by_key_head=True, parallel_names={"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"},
        names=_4H | {"qkv": "self_attention.query_key_value", "output": "self_attention.dense"},
    ),
    Family(
        "phi", "Phi-1, Phi-1.5, Phi-2", ("PhiForCausalLM",), _phi, has_partial_rope=True,
        final_norm="final_layernorm",
        names={"output": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"},
    ),
    Family(
        "opt", "OPT", ("OPTForCausalLM",), _opt, settings=_opt_settings, names=_OPT_NAMES,
        prefixes=("model.decoder", "decoder"), final_norm="final_layer_norm",
        outside={"position_embedding": "embed_positions.weight"}, first_position=2,
    ),
    Family(
        "bloom", "BLOOM, BLOOMZ", ("BloomForCausalLM",), _bloom, "bloom", settings=_bloom_settings,
        names=_BLOOM_NAMES, prefixes=("transformer", ""), layers="h", embedding="word_embeddings",
        final_norm="ln_f", qkv_by_key_head=True, outside=_EMBEDDING_NORM,
        gguf_needs=("attention.layer_norm_epsilon",), gguf_names={"qkv": "attn_qkv"},
        gguf_outside=_GGUF_EMBEDDING_NORM, gguf_settings={"hidden_act": "gelu_pytorch_tanh"},
    ),
    Family(
        "mpt", "MPT", ("MPTForCausalLM", "MptForCausalLM"), _mpt, "mpt", settings=_mpt_settings,
        names=_MPT_NAMES, prefixes=("transformer",), layers="blocks", embedding="wte", final_norm="norm_f",
        gguf_needs=("attention.max_alibi_bias",), gguf_names={"qkv": "attn_qkv"},
        gguf_settings={"hidden_act": "gelu"},
    ),
    Family(
        "apertus", "Apertus", ("ApertusForCausalLM",), _apertus, settings=_apertus_settings,
        names=_APERTUS_NAMES, ignored=(".act_fn.beta", ".act_fn.eps"), constants={".act_fn.beta": 0.5},
    ),
)  # fmt: skip
