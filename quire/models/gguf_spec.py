"""The spec of a model in a GGUF file, from its metadata and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from quire.errors import UnsupportedModelError
from quire.kernels.ops import MoeSpec
from quire.models.families import FAMILIES, MAX_LAYERS, Family, check_spec, plain_attention, yarn_mscale
from quire.models.fields import Fields
from quire.models.spec import LayerSpec, MlpSpec, ModelSpec, RopeSpec


def read_gguf_spec(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    read_rope_factors: Callable[[], tuple[float, ...]],
    file: str,
) -> ModelSpec:
    """`read_rope_factors` reads the tensor `rope_freqs.weight`; it is called only where the file has one."""
    family = _find_family(metadata, file)
    fields = Fields(metadata, file, prefix=f"{family.gguf_architecture}.")
    general = Fields(metadata, file)
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", max(hidden_size // num_heads, 1))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{file}: keys and values of different sizes are not supported.")
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{file}: rope over a part of the head dimension is not supported.")
    tokens = general.raw("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list | tuple) else 0
    moe = _read_moe(fields, family)
    num_layers = fields.integer("block_count", high=MAX_LAYERS)
    window = fields.integer("attention.sliding_window", 0, low=0) or None
    max_position = fields.integer("context_length", 2048, high=2**31)
    rope = _read_rope(fields, tensor_names, read_rope_factors, max_position)
    mlp = MlpSpec(fields.integer("feed_forward_length", 1, low=0) or 1, bias="blk.0.ffn_gate.bias" in tensor_names)
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    layer = LayerSpec(
        plain_attention(num_heads, num_kv_heads, head_dim, window),
        rope,
        mlp,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
    )
    interval = family.gguf_no_rope_interval
    layers = tuple(
        replace(
            layer,
            rope=None if interval and (i + 1) % interval == 0 else rope,
            mlp=moe if moe is not None and f"blk.{i}.ffn_gate_inp.weight" in tensor_names else mlp,
        )
        for i in range(num_layers)
    )
    ids = {key: f"tokenizer.ggml.{key}_token_id" for key in ("bos", "eos", "eot", "eom")}
    bos, *ends = (general.integer(key, low=0) if key in general else None for key in ids.values())
    spec = ModelSpec(
        family=family.name,
        vocab_size=fields.integer("vocab_size", num_tokens),
        hidden_size=hidden_size,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        layers=layers,
        max_position=max_position,
        tie_embeddings="output.weight" not in tensor_names,
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
        bos_token_id=bos,
    )
    check_spec(spec, file)
    return spec


def _find_family(metadata: Mapping[str, Any], file: str) -> Family:
    name = Fields(metadata, file).string("general.architecture")
    for family in FAMILIES:
        if family.gguf_architecture == name:
            return family
    supported = ", ".join(family.gguf_architecture for family in FAMILIES if family.gguf_architecture)
    raise UnsupportedModelError(f"{file}: the architecture {name!r} is not supported. Supported: {supported}.")


def _read_moe(fields: Fields, family: Family) -> MoeSpec | None:
    num_experts = fields.integer("expert_count", 0, low=0, high=65_536)
    if not num_experts:
        return None
    shared = fields.integer("expert_shared_feed_forward_length", 0, low=0)
    return MoeSpec(
        num_experts=num_experts,
        top_k=fields.integer("expert_used_count"),
        intermediate_size=fields.integer("expert_feed_forward_length", fields.integer("feed_forward_length", 1)),
        normalize_weights=family.gguf_normalizes_experts,
        shared_intermediate_size=shared,
    )


def _read_rope(
    fields: Fields, tensor_names: Collection[str], read_rope_factors: Callable[[], tuple[float, ...]], max_position: int
) -> RopeSpec:
    theta = fields.number("rope.freq_base", 10_000.0, low=1e-6)
    if "rope_freqs.weight" in tensor_names:
        return RopeSpec(theta, "factors", freq_factors=read_rope_factors())
    kind = fields.string("rope.scaling.type", "none")
    if kind == "none":
        return RopeSpec(theta)
    factor = fields.number("rope.scaling.factor", low=1e-6)
    if kind == "linear":
        return RopeSpec(theta, "linear", factor)
    if kind == "yarn":
        original = fields.integer("rope.scaling.original_context_length", max_position, high=2**31)
        attention_factor = yarn_mscale(factor) * fields.number("rope.scaling.attn_factor", 1.0)
        return RopeSpec(theta, "yarn", factor, original, attention_factor=attention_factor)
    raise UnsupportedModelError(f"{fields.file}: rope scaling {kind!r} is not supported, only linear and yarn are.")
