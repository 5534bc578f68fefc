"""Llama 4's text part: attention in chunks, layers without rope, queries that are scaled by position,
experts whose inputs are weighed.
"""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoints.fields import Fields
from quire.kernels.ops import MoeSpec
from quire.models.config_parts import activation_of
from quire.models.family import Family
from quire.models.spec import LayerSpec, MlpSpec, ModelSpec, QueryScale

_CHUNKED, _FULL = "chunked_attention", "full_attention"


def llama4(config: Fields, spec: ModelSpec) -> ModelSpec:
    count, interval = spec.num_layers, config.integer("no_rope_layer_interval", 4)
    every_nth = [int((number + 1) % interval != 0) for number in range(count)]
    # 1 where rope is used, whatever the name says
    has_rope = config.list_of("no_rope_layers", int, []) or every_nth
    if len(has_rope) != count:
        raise config.error("no_rope_layers", f"a list of {count} numbers", has_rope)
    default = [_CHUNKED if one else _FULL for one in has_rope]
    kinds = config.list_of("layer_types", str, default)
    if len(kinds) != count or not set(kinds) <= {_CHUNKED, _FULL}:
        raise config.error("layer_types", f"{count} of {_FULL} or {_CHUNKED}", kinds)
    step = config.integer("interleave_moe_layer_step", 1)
    with_experts = config.list_of("moe_layers", int, list(range(step - 1, count, step)))
    dense = MlpSpec(config.integer("intermediate_size_mlp", 16_384), activation_of(spec))
    moe, bias = _experts(config, spec), config.boolean("attention_bias", False)
    layers = [
        replace(
            _positions(config, layer, bool(has_rope[number])),
            mlp=moe if number in with_experts else dense,
            qkv_bias=bias,
            output_bias=bias,
        )
        for number, layer in enumerate(spec.layers)
    ]
    if _CHUNKED in kinds:
        chunk = config.integer("attention_chunk_size")
        layers = [
            layer.with_attention(chunk=chunk) if kind == _CHUNKED else layer
            for layer, kind in zip(layers, kinds, strict=True)
        ]
    return replace(spec, layers=tuple(layers))


def _positions(config: Fields, layer: LayerSpec, has_rope: bool) -> LayerSpec:
    if has_rope:
        qk_norm = config.boolean("use_qk_norm", True)
        return replace(layer, qk_norm=qk_norm, qk_norm_after_rope=True, qk_norm_weights=False)
    scale = None
    if config.boolean("attn_temperature_tuning", True):
        strength = config.number("attn_scale", 0.1)
        scale = QueryScale(strength, config.integer("floor_scale", 8192), offset=1)
    return replace(layer, rope=None, query_scale=scale)


def _experts(config: Fields, spec: ModelSpec) -> MoeSpec:
    size = config.integer("intermediate_size")
    return MoeSpec(
        num_experts=config.integer("num_local_experts", 16, high=65_536),
        top_k=config.integer("num_experts_per_tok", 1),
        intermediate_size=size,
        normalize_weights=False,
        shared_intermediate_size=size,
        activation=activation_of(spec),
        shared_gate=False,
        sigmoid_scores=True,
        scales_inputs=True,
    )


LLAMA4 = Family(
    "llama4_text",
    "Llama 4 (text)",
    ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    llama4,
    names={
        **{part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        **{
            f"shared_{part}": f"feed_forward.shared_expert.{part}_proj"
            for part in ("gate", "up", "down")
        },
        "router": "feed_forward.router",
        "expert_gate": "",
        "experts_gate_up": "feed_forward.experts.gate_up_proj",
        "experts_down": "feed_forward.experts.down_proj",
    },
    interleaved_rope=True,
    turned_experts=True,
    text_has_head=True,
    prefixes=("model", "language_model.model"),
    unused=("vision_model.", "multi_modal_projector."),
)
