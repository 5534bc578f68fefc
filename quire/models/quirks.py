"""What several families do alike, read from config.json into a spec that holds the rest."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoints.fields import Fields
from quire.errors import UnsupportedModelError
from quire.kernels.ops import MoeSpec
from quire.models.config_parts import activation_of, with_windows
from quire.models.spec import MlpSpec, ModelSpec, RopeSpec

SEEING_PREFIXES = ("model", "model.language_model", "language_model.model")
"""Of the text part of models that also see: alone, as transformers writes it since version 5, as
before.
"""
TOWERS = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)
"""What else is in such files."""
MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{expert}.w1",
    "expert_up": "block_sparse_moe.experts.{expert}.w3",
    "expert_down": "block_sparse_moe.experts.{expert}.w2",
}
STACKED_MIXTRAL_NAMES = {
    "router": "mlp.gate",
    "choice_bias": "mlp.e_score_correction_bias",
    "experts_gate_up": "mlp.experts.gate_up_proj",
    "experts_down": "mlp.experts.down_proj",
}


def refuse(config: Fields, key: str, *neutral: object) -> None:
    """Raises UnsupportedModelError if a setting asks for what is not computed here."""
    value = config.raw(key)
    if value is not None and value not in neutral:
        allowed = " or ".join(map(repr, neutral)) or "null"
        raise UnsupportedModelError(
            f"{config.file}: {key} {value!r} is not supported, only {allowed} is."
        )


def with_biases(
    spec: ModelSpec, qkv: bool, output: bool, mlp: bool, gated: bool = True
) -> ModelSpec:
    """The same spec with biases in all layers alike, and with or without a gate in the MLP."""
    dense = spec.layers[0].mlp
    assert isinstance(dense, MlpSpec)
    return spec.with_layers(
        qkv_bias=qkv, output_bias=output, mlp=replace(dense, bias=mlp, gated=gated)
    )


def llama(config: Fields, spec: ModelSpec) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    return with_biases(spec, bias, bias, config.boolean("mlp_bias", False))


def mixtral_experts(config: Fields, spec: ModelSpec) -> MoeSpec:
    return MoeSpec(
        num_experts=config.integer("num_local_experts", 8, high=65_536),
        top_k=config.integer("num_experts_per_tok", 2),
        intermediate_size=config.integer("intermediate_size"),
        normalize_weights=True,
        activation=activation_of(spec),
    )


def gemma(
    config: Fields,
    spec: ModelSpec,
    caps: tuple[float, float],
    full_every: int,
    rope: RopeSpec | None = None,
) -> ModelSpec:
    """What Gemmas share: capped logits, norms on both sides, windows in most layers."""
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


def olmo2(config: Fields, spec: ModelSpec) -> ModelSpec:
    """Norms behind instead of before, and of all heads' queries and keys together."""
    return llama(config, spec).with_layers(
        pre_norms=False, post_norms=True, qk_norm=True, qk_norm_is_whole=True
    )


def granite(config: Fields, spec: ModelSpec) -> ModelSpec:
    """Factors on embeddings, attention, residuals and logits."""
    scale = config.number("attention_multiplier", 1.0)
    return replace(
        llama(config, spec).with_attention(scale=scale),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0, low=1e-6),
    )


def hunyuan(config: Fields, spec: ModelSpec) -> ModelSpec:
    """Queries and keys are normed after the rotation, not before."""
    return llama(config, spec).with_layers(qk_norm=True, qk_norm_after_rope=True)
