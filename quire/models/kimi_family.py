"""Kimi Linear: Kimi Delta Attention in most layers, in the others latent attention without rope."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoints.fields import Fields
from quire.kernels.recurrent import GatedNormSpec, RecurrentSpec
from quire.models.config_parts import with_deepseek_experts
from quire.models.family import Family
from quire.models.latent_families import (
    LATENT_NAMES,
    check_experts,
    rotated_head,
    with_latents,
)
from quire.models.quirks import MIXTRAL_NAMES, refuse
from quire.models.recurrent_families import mixed_layers
from quire.models.spec import ModelSpec

_PUBLISHED = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_routed_experts": "num_local_experts",
}
"""Usual names of settings that its files call otherwise."""
_LINEAR = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Settings that its published files have in `linear_attn_config`."""
_LAYERS = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
"""And lists of layers there, the first of which is number 1."""


def _settings(config: Fields) -> Fields:
    found = {name: config.raw(own) for name, own in _PUBLISHED.items() if own in config}
    linear = config.part("linear_attn_config")
    for name in linear.names():
        if name not in (*_LINEAR.values(), *_LAYERS):
            refuse(linear, name)
    found |= {name: linear.raw(own) for name, own in _LINEAR.items() if own in linear}
    if "layer_types" not in config and any(name in linear for name in _LAYERS):
        found["layer_types"] = _kinds(linear, config.integer("num_hidden_layers"))
    return rotated_head(config.with_values(found))


def _kinds(linear: Fields, num_layers: int) -> list[str]:
    numbers = {name: linear.list_of(name, int, []) for name in _LAYERS}
    kinds = {number: _LAYERS[name] for name, own in numbers.items() for number in own}
    if sorted(number for own in numbers.values() for number in own) != [*range(1, num_layers + 1)]:
        expected = f"each number from 1 to {num_layers} once, together with full_attn_layers"
        raise linear.error("kda_layers", expected, linear.raw("kda_layers"))
    return [kinds[number] for number in range(1, num_layers + 1)]


def _kimi_linear(config: Fields, spec: ModelSpec) -> ModelSpec:
    refuse(config, "hidden_act", "silu")
    refuse(config, "mla_use_nope", True)
    refuse(config, "rope_scaling")
    refuse(config, "moe_router_activation_func", "sigmoid")
    refuse(config, "moe_layer_freq", 1)
    refuse(config, "use_grouped_topk", True)
    count, head_dim = spec.num_layers, config.integer("linear_head_dim")
    heads = config.integer("linear_num_heads")
    kda = RecurrentSpec(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        taps=config.integer("linear_conv_kernel_dim", low=2),
        norm=GatedNormSpec(head_dim, sigmoid=True),
        gate_rank=head_dim,
    )
    rank = config.integer("q_lora_rank") if "q_lora_rank" in config else 0
    spec = with_latents(config, spec, rank, interleaved=False).with_layers(rope=None)
    sparse = with_deepseek_experts(config, spec, first=0)
    check_experts(config, sparse)
    dense = config.integer("first_k_dense_replace", 1, low=0)
    kinds = ["dense" if number < dense else "sparse" for number in range(count)]
    kinds = config.list_of("mlp_layer_types", str, kinds)
    if len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise config.error("mlp_layer_types", f"{count} of dense or sparse", kinds)
    layers = (
        (spec if kind == "dense" else sparse).layers[number] for number, kind in enumerate(kinds)
    )
    default = [
        "full_attention" if number and number % 4 == 0 else "linear_attention"
        for number in range(count)
    ]
    spec = replace(spec, layers=tuple(layers))
    return mixed_layers(config, spec, default, {"linear_attention": kda})


_CONVOLUTIONS = {
    f"{side}_convolution": f"self_attn.{side[0]}_conv1d" for side in ("query", "key", "value")
}
_MLP = ("gate", "up", "down")
_NAMES = {
    **LATENT_NAMES,
    **MIXTRAL_NAMES,
    **_CONVOLUTIONS,
    "choice_bias": "block_sparse_moe.gate.e_score_correction_bias",
    **{f"shared_{part}": f"block_sparse_moe.shared_experts.{part}_proj" for part in _MLP},
    **{f"mixer_{side}": f"self_attn.{side[0]}_proj" for side in ("query", "key", "value", "beta")},
    "mixer_decay_down": "self_attn.f_a_proj",
    "mixer_decay": "self_attn.f_b_proj",
    "mixer_gate_down": "self_attn.g_a_proj",
    "mixer_gate": "self_attn.g_b_proj",
    "mixer_log_rate": "self_attn.A_log",
    "mixer_time_bias": "self_attn.dt_bias",
    "mixer_norm": "self_attn.o_norm",
    "mixer_output": "self_attn.o_proj",
}
_STACKED_NAMES = {
    "router": "mlp.gate",
    "choice_bias": "mlp.gate.e_score_correction_bias",
    "experts_gate_up": "mlp.experts.gate_up_proj",
    "experts_down": "mlp.experts.down_proj",
    **{f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in _MLP},
}
_OTHER_NAMES = {
    # as transformers writes them
    **{part: f"block_sparse_moe.{part}_proj" for part in _MLP},
    # and with `save_original_format=False`
    "convolution": "self_attn.conv1d",
    "mixer_decay_down": "self_attn.forget_gate.f_a_proj",
    "mixer_decay": "self_attn.forget_gate.f_b_proj",
    "mixer_log_rate": "self_attn.forget_gate.A_log",
    "mixer_time_bias": "self_attn.forget_gate.dt_bias",
}

KIMI = Family(
    "kimi_linear", "Kimi Linear", ("KimiLinearForCausalLM",), _kimi_linear, names=_NAMES,
    stacked_names=_STACKED_NAMES, other_names=_OTHER_NAMES, settings=_settings,
)  # fmt: skip
