"""Gemma 4's text part: heads of two sizes, values that are keys, layers that read another's cache,
vectors of tokens for each layer, experts beside the MLP.
"""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoints.fields import Fields
from quire.errors import UnsupportedModelError
from quire.kernels.ops import AttentionSpec, HeadShape, MoeSpec
from quire.models.config_parts import activation_of, kinds_of_layers, read_rope, read_window
from quire.models.family import Family
from quire.models.quirks import SEEING_PREFIXES, refuse
from quire.models.spec import LayerSpec, MlpSpec, ModelSpec

_FULL, _SLIDING = "full_attention", "sliding_attention"


def gemma4(config: Fields, spec: ModelSpec) -> ModelSpec:
    if config.raw("use_bidirectional_attention") == "all":
        raise UnsupportedModelError(f"{config.file}: attention to later tokens is not supported.")
    refuse(config, "use_bidirectional_attention", False, "vision")  # which is of images
    kinds = kinds_of_layers(config, spec, 6)
    kinds[-1] = _FULL  # where nothing is said
    bias, size = config.boolean("attention_bias", False), config.integer("intermediate_size")
    shared = config.integer("num_kv_shared_layers", 0, low=0, high=spec.num_layers - 1)
    first_reader = spec.num_layers - shared
    is_double = config.boolean("use_double_wide_mlp", False)
    layers = []
    for number, kind in enumerate(kinds):
        reads = number >= first_reader
        if reads and kind not in kinds[:first_reader]:
            raise config.error("num_kv_shared_layers", f"less: no layer has {kind} to read", shared)
        layer = LayerSpec(
            _attention(config, number, kind),
            read_rope(config, _heads(config, number, kind).head_dim, kind, theta=10_000.0),
            MlpSpec(size * 2 if reads and is_double else size, activation_of(spec)),
            qk_norm=True,
            value_norm=True,
            keys_are_values=config.boolean("attention_k_eq_v", False) and kind == _FULL,
            qkv_bias=bias,
            output_bias=bias,
            post_norms=True,
            experts=_experts(config, spec),
            stream_scale=True,
            reads_layer=first_reader - 1 - kinds[:first_reader][::-1].index(kind)
            if reads
            else None,
        )
        layers.append(layer)
    return replace(
        spec,
        layers=tuple(layers),
        embedding_scale=spec.hidden_size**0.5,
        logit_cap=config.number("final_logit_softcapping", 0.0),
        per_layer_size=config.integer("hidden_size_per_layer_input", 256, low=0),
        per_layer_vocab=config.integer("vocab_size_per_layer_input", 262_144),
    )


def _settings(config: Fields) -> Fields:
    """The last layer sees all, whatever the file says."""
    kinds = config.raw("layer_types")
    if not isinstance(kinds, list) or kinds[-1:] != [_SLIDING]:
        return config
    return config.with_values({"layer_types": [*kinds[:-1], _FULL]})


def _heads(config: Fields, number: int, kind: str) -> HeadShape:
    """A layer's: those of full attention are larger, and there may be fewer."""
    heads, kv = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    size = config.integer("head_dim")
    if kind == _FULL:
        size = config.integer("global_head_dim", 512)
        if config.boolean("attention_k_eq_v", False):
            kv = config.integer("num_global_key_value_heads", kv)
    if "per_layer_config" in config:  # as transformers writes it
        own = config.part("per_layer_config").part(str(number))
        size = own.integer("head_dim", config.integer("head_dim"))
        kv = own.integer("num_key_value_heads", config.integer("num_key_value_heads"))
    return HeadShape(heads, kv, size)


def _attention(config: Fields, number: int, kind: str) -> AttentionSpec:
    window = read_window(config, 512) if kind == _SLIDING else None
    if kind == _SLIDING and window is None:
        raise config.error("sliding_window", "a number, as layer_types has sliding_attention", None)
    return AttentionSpec(_heads(config, number, kind), 1.0, window)


def _experts(config: Fields, spec: ModelSpec) -> MoeSpec | None:
    if not config.boolean("enable_moe_block", False):
        return None
    return MoeSpec(
        num_experts=config.integer("num_experts", high=65_536),
        top_k=config.integer("top_k_experts"),
        intermediate_size=config.integer("moe_intermediate_size"),
        normalize_weights=True,
        activation=activation_of(spec),
        expert_scales=True,
    )


GEMMA4 = Family(
    "gemma4_text",
    "Gemma 4 (text)",
    ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    gemma4,
    settings=_settings,
    names={
        "mlp_norm": "pre_feedforward_layernorm",
        "experts_norm": "pre_feedforward_layernorm_2",
        "mlp_own_norm": "post_feedforward_layernorm_1",
        "experts_post_norm": "post_feedforward_layernorm_2",
        "router": "router.proj",
        "router_norm": "router.scale",
        "expert_scales": "router.per_expert_scale",
        "expert_gate": "",
        "experts_gate_up": "experts.gate_up_proj",
        "experts_down": "experts.down_proj",
        "per_layer_gate": "per_layer_input_gate",
        "per_layer_output": "per_layer_projection",
        "per_layer_post_norm": "post_per_layer_input_norm",
        "stream_scale": "layer_scalar",
    },
    outside={
        "per_layer_embedding": "embed_tokens_per_layer.weight",
        "per_layer_projection.weight": "per_layer_model_projection.weight",
        "per_layer_norm": "per_layer_projection_norm.weight",
    },
    prefixes=SEEING_PREFIXES,
    ties_whole=True,
    unused=tuple(
        f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
    ),
)
