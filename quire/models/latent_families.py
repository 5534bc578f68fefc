"""Families with latent attention: DeepSeek and those that follow it."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.fields import Fields
from quire.errors import UnsupportedModelError
from quire.kernels.latent import LatentSpec, latent_heads
from quire.kernels.ops import MoeSpec
from quire.models.config_parts import (
    mscale_of,
    query_scale,
    rope_settings,
    with_deepseek_experts,
)
from quire.models.family import Family
from quire.models.gguf_states import SIGMOID_GATING, SOFTMAX_GATING
from quire.models.quirks import SEEING_PREFIXES, TOWERS, refuse
from quire.models.spec import ModelSpec

WITH_INDEXER = (
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Glm5NextForConditionalGeneration",
)
"""Architectures that choose by a sparse indexer which tokens a query sees: refused by that name."""


def rotated_head(config: Fields) -> Fields:
    """Rope is read for the numbers of a head that it rotates."""
    return config.with_values({"head_dim": config.integer("qk_rope_head_dim")})


def with_latents(config: Fields, spec: ModelSpec, query_rank: int, interleaved: bool) -> ModelSpec:
    """Gives latent attention to all layers."""
    first = spec.layers[0]
    rope, num_heads = first.rope, spec.head_shapes[0].num_heads
    assert rope is not None
    rope_dim, nope_dim = config.integer("qk_rope_head_dim"), config.integer("qk_nope_head_dim")
    if rope_dim % 2:
        raise config.error("qk_rope_head_dim", "an even number, as rope turns pairs", rope_dim)
    for key, neutral in (("num_key_value_heads", num_heads), ("partial_rotary_factor", 1.0)):
        refuse(config, key, neutral)
    for scaling in (config.part("rope_parameters"), config.part("rope_scaling")):
        refuse(scaling, "partial_rotary_factor", 1.0)
    refuse(config, "index_topk")
    mixer = LatentSpec(
        latent_heads(num_heads, config.integer("kv_lora_rank"), rope_dim),
        (nope_dim + rope_dim) ** -0.5 * mscale_of(config, rope) ** 2,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim"),
        query_rank=query_rank,
        interleaved_rope=interleaved,
    )
    bias = config.boolean("attention_bias", False)
    return spec.with_layers(mixer=mixer, qkv_bias=bias, output_bias=bias)


def _query_rank(config: Fields, default: int) -> int:
    """null means that queries are made from the layer's input, an absent key the default."""
    if config.declares("q_lora_rank") and "q_lora_rank" not in config:
        return 0
    return config.integer("q_lora_rank", default)


def check_experts(config: Fields, spec: ModelSpec) -> None:
    """A token's experts must find room in its groups."""
    for moe in {layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)}:
        room = moe.num_experts // moe.num_groups * moe.top_groups
        if moe.top_k > room:
            expected = f"at most {room}, the experts of topk_group groups"
            raise config.error("num_experts_per_tok", expected, moe.top_k)


def _deepseek_v3(config: Fields, spec: ModelSpec, first: int | None = None) -> ModelSpec:
    refuse(config, "scoring_func", "sigmoid")
    refuse(config, "topk_method", "noaux_tc")
    refuse(config, "moe_layer_freq", 1)
    spec = with_deepseek_experts(config, spec, first)
    check_experts(config, spec)
    interleaved = config.boolean("rope_interleave", True)
    return with_latents(config, spec, _query_rank(config, 1536), interleaved)


def _deepseek_v2(config: Fields, spec: ModelSpec) -> ModelSpec:
    refuse(config, "scoring_func", "softmax")
    refuse(config, "moe_layer_freq", 1)
    refuse(config, "mlp_bias", False)
    # transformers leaves the weights as they are, DeepSeek's own code does not
    refuse(config, "norm_topk_prob", False)
    has_groups = config.integer("n_group", 1) > 1  # all that a GGUF file says of it
    method = config.string("topk_method", "group_limited_greedy" if has_groups else "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(
            f"{config.file}: topk_method {method!r} is not supported, only 'greedy' and "
            "'group_limited_greedy' are."
        )
    if method == "greedy":  # over all experts
        config = config.with_values({"n_group": 1, "topk_group": 1})
    spec = with_deepseek_experts(config, spec)
    layers = tuple(
        replace(layer, mlp=_softmax_experts(layer.mlp)) if isinstance(layer.mlp, MoeSpec) else layer
        for layer in spec.layers
    )
    spec = replace(spec, layers=layers)
    check_experts(config, spec)
    return with_latents(config, spec, _query_rank(config, 1536), interleaved=True)


def _softmax_experts(moe: MoeSpec) -> MoeSpec:
    """As the second version has them: a group is as good as its best expert."""
    return replace(
        moe,
        sigmoid_scores=False,
        choice_bias=False,
        normalize_weights=False,
        group_scores=1,
        float32_router=True,
    )


def _glm4_moe_lite(config: Fields, spec: ModelSpec) -> ModelSpec:
    dense = config.integer("first_k_dense_replace", 1, low=0)
    if "mlp_layer_types" in config:
        kinds = config.list_of("mlp_layer_types", str)
        dense = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
        if kinds != ["dense"] * dense + ["sparse"] * (spec.num_layers - dense):
            expected = f"{spec.num_layers} of dense or sparse, the dense ones first"
            raise config.error("mlp_layer_types", expected, kinds)
    return _deepseek_v3(config, spec, dense)


def _mistral4_settings(config: Fields) -> Fields:
    """Rope's share of a head is said twice: once as a number of dimensions, which counts."""
    config = rotated_head(config)
    rotated = config.integer("qk_rope_head_dim")
    share = rotated / (rotated + config.integer("qk_nope_head_dim"))
    key, changed = "partial_rotary_factor", dict[str, object]()
    for name in ("", "rope_parameters", "rope_scaling"):
        part = config.part(name) if name else config
        if key not in part:
            continue
        found = part.number(key)
        if abs(found - share) > 1e-6:
            raise part.error(key, f"{share:g} (by qk_rope_head_dim) or absent", found)
        rest = {one: part.raw(one) for one in part.names() if one != key}
        changed[name or key] = rest if name else None
    return config.with_values(changed)


def _mistral4(config: Fields, spec: ModelSpec) -> ModelSpec:
    """Softmax scores of experts in groups, and queries that are scaled by their position."""
    rope = rope_settings(config, "full_attention")[0]
    refuse(rope, "rope_type", "yarn")  # transformers rotates too many dimensions in others
    spec = with_deepseek_experts(config, spec)
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, sigmoid_scores=False, choice_bias=False))
        if isinstance(layer.mlp, MoeSpec)
        else layer
        for layer in spec.layers
    )
    spec = replace(spec, layers=layers)
    check_experts(config, spec)
    interleaved = config.boolean("rope_interleave", True)
    spec = with_latents(config, spec, _query_rank(config, 1024), interleaved)
    return spec.with_layers(query_scale=query_scale(config))


LATENT_NAMES = {
    "query": "self_attn.q_proj",
    "query_down": "self_attn.q_a_proj",
    "query_norm": "self_attn.q_a_layernorm",
    "query_up": "self_attn.q_b_proj",
    "latent": "self_attn.kv_a_proj_with_mqa",
    "latent_norm": "self_attn.kv_a_layernorm",
    "key_value_up": "self_attn.kv_b_proj",
    **{f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}

_GGUF_NAMES = {
    "query_down": "attn_q_a",
    "query_norm": "attn_q_a_norm",
    "query_up": "attn_q_b",
    "latent": "attn_kv_a_mqa",
    "latent_norm": "attn_kv_a_norm",
    "key_value_up": "attn_kv_b",
    "key_up": "attn_k_b",
    "value_up": "attn_v_b",
}
_GGUF_NEEDS = (
    "attention.kv_lora_rank", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "leading_dense_block_count", "expert_count", "expert_used_count", "expert_feed_forward_length",
    "expert_shared_count",
)  # fmt: skip


def _has_sigmoids(checkpoint: Checkpoint) -> bool:
    """Whether the scores of a file's experts are sigmoids. Files of before that was a key have a
    bias for the choice then.
    """
    gating = checkpoint.metadata.get("deepseek2.expert_gating_func", 0)
    if gating not in (0, SOFTMAX_GATING, SIGMOID_GATING):
        file = next((one.file for one in checkpoint.tensors.values()), "the GGUF file")
        raise UnsupportedModelError(
            f"{file}: deepseek2.expert_gating_func {gating!r} is not supported, only {SOFTMAX_GATING} (softmax) and "
            f"{SIGMOID_GATING} (sigmoid) are."
        )
    return gating == SIGMOID_GATING or (
        not gating and any(name.endswith(".exp_probs_b.bias") for name in checkpoint.tensors)
    )


LATENT: tuple[Family, ...] = (
    Family(
        "deepseek_v2", "DeepSeek-V2, V2-Lite", ("DeepseekV2ForCausalLM",), _deepseek_v2, "deepseek2",
        names=LATENT_NAMES, settings=rotated_head, gguf_names=_GGUF_NAMES, gguf_needs=_GGUF_NEEDS,
        gguf_fits=lambda checkpoint: not _has_sigmoids(checkpoint),
    ),
    Family(
        "deepseek_v3", "DeepSeek-V3, R1, Kimi K2", ("DeepseekV3ForCausalLM",), _deepseek_v3, "deepseek2",
        names=LATENT_NAMES, settings=rotated_head, has_drafting_layers=True, gguf_names=_GGUF_NAMES,
        gguf_needs=_GGUF_NEEDS,  # those of GLM-4.7-Flash, too
    ),
    Family(
        "mistral4", "Mistral 4 (text)", ("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"), _mistral4,
        names=LATENT_NAMES, settings=_mistral4_settings, prefixes=SEEING_PREFIXES, unused=TOWERS,
    ),
    Family(
        "glm4_moe_lite", "GLM-4.7-Flash", ("Glm4MoeLiteForCausalLM",), _glm4_moe_lite, "deepseek2", names=LATENT_NAMES,
        settings=rotated_head, has_drafting_layers=True,
    ),
)  # fmt: skip
