"""What a GGUF file's metadata and its tensors' names say of a model, under the names that
config.json has for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.fields import Fields
from quire.errors import UnsupportedModelError

MAX_LAYERS = 1024
KEYS = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon", "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "alibi_bias_max": "attention.max_alibi_bias", "clip_qkv": "attention.clamp_kqv",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache", "num_dense_layers": "leading_dense_block_count",
    "mamba_n_heads": "ssm.time_step_rank", "mamba_n_groups": "ssm.group_count", "mamba_d_conv": "ssm.conv_kernel",
    "linear_num_value_heads": "ssm.time_step_rank", "linear_num_key_heads": "ssm.group_count",
    "linear_key_head_dim": "ssm.state_size", "linear_conv_kernel_dim": "ssm.conv_kernel",
    "mamba_num_heads": "ssm.time_step_rank", "n_groups": "ssm.group_count", "ssm_state_size": "ssm.state_size",
    "conv_kernel": "ssm.conv_kernel", "moe_latent_size": "moe_latent_size",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "full_attention_interval": "full_attention_interval",
    "mamba_d_state": "ssm.state_size", "mamba_d_ssm": "ssm.inner_size",
    "sliding_window": "attention.sliding_window",
    "rope_local_base_freq": "rope.freq_base_swa", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale", "logit_scale": "logit_scale",
    "num_experts": "expert_count", "num_local_experts": "expert_count", "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count", "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale",
}  # fmt: skip
"""What config.json calls a setting, and what GGUF does, after the architecture's name."""


def gguf_settings(checkpoint: Checkpoint, file: str, of_family: Mapping[str, Any]) -> Fields:
    """The settings by the names they have in config.json; `of_family` are those that no GGUF file
    of a family says.
    """
    metadata, tensor_names = checkpoint.metadata, checkpoint.tensors
    name = Fields(metadata, file).string("general.architecture")
    prefix = f"{name}."
    fields, general = Fields(metadata, file, prefix), Fields(metadata, file)
    heads = fields.integer("attention.head_count")
    latent = _latent(fields, heads) if "attention.kv_lora_rank" in fields else {}
    head_dim = latent.get("head_dim") or _head_dim(fields, heads)
    tokens = metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list | tuple) else 0
    ids = {key: f"tokenizer.ggml.{key}_token_id" for key in ("bos", "eos", "eot", "eom")}
    bos, *ends = (general.integer(key, low=0) if key in general else None for key in ids.values())
    num_blocks = fields.integer("block_count", high=MAX_LAYERS)
    if "attention.layer_norm_epsilon" not in fields:
        fields.number("attention.layer_norm_rms_epsilon")  # no family's default stands for it
    sizes = fields.raw("feed_forward_length")
    made: dict[str, Any] = {
        "head_dim": head_dim,
        "vocab_size": fields.integer("vocab_size", num_tokens),
        "num_hidden_layers": num_blocks - fields.integer("nextn_predict_layers", 0, low=0),
        "intermediate_size": _one_count(fields, "feed_forward_length", num_blocks)
        if isinstance(sizes, list | tuple)
        else fields.integer("feed_forward_length", 0, low=0) or 1,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "rope_parameters": _rope(fields, head_dim, checkpoint),
        "bos_token_id": bos,
        "eos_token_id": list(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
        "mlp_only_layers": [
            i for i in range(num_blocks) if f"blk.{i}.ffn_gate_inp.weight" not in tensor_names
        ],
        "attention_out_bias": "blk.0.attn_output.bias" in tensor_names,
        **dict.fromkeys(
            ("attention_bias", "qkv_bias", "use_bias"), "blk.0.attn_q.bias" in tensor_names
        ),
        "mlp_bias": "blk.0.ffn_gate.bias" in tensor_names,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensor_names,
        **dict.fromkeys(
            ("mamba_conv_bias", "use_conv_bias"), _is_in_a_layer("ssm_conv1d.bias", tensor_names)
        ),
        "mamba_rms_norm": _is_in_a_layer("ssm_norm.weight", tensor_names),
        "norm_topk_prob": fields.boolean("expert_weights_norm", False),
    }
    kv_heads = fields.raw("attention.head_count_kv")
    if isinstance(kv_heads, list | tuple):  # 0 where a layer has no attention
        made["num_key_value_heads"] = _one_count(fields, "attention.head_count_kv", num_blocks)
        kinds = ["full_attention" if one else "linear_attention" for one in kv_heads]
        kinds = kinds[: made["num_hidden_layers"]]
        made["layer_types"] = kinds
        if isinstance(sizes, list | tuple):  # a layer is one of the three
            mlp = "moe" if fields.integer("expert_count", 0, low=0) else "mlp"
            pairs = zip(kinds, sizes, strict=False)
            made["layers_block_type"] = [mlp if size else kind for kind, size in pairs]
    made |= latent
    if not fields.integer("expert_count", 0, low=0):
        made["shared_intermediate_size"] = made["intermediate_size"]
    if "ssm.inner_size" in fields:
        inner, state_heads = fields.integer("ssm.inner_size"), fields.integer("ssm.time_step_rank")
        if inner % state_heads:
            raise fields.error("ssm.inner_size", f"a multiple of {state_heads} heads", inner)
        made["linear_value_head_dim"] = made["mamba_head_dim"] = inner // state_heads
    for key, value in of_family.items():
        made[key] = made[key] | value if isinstance(value, dict) else value
    renamed = {key: prefix + own for key, own in KEYS.items() if key not in made}
    return Fields({**metadata, **made}, file, renamed=renamed)


def _head_dim(fields: Fields, heads: int) -> int:
    known = "attention.key_length" in fields
    size = (
        fields.integer("attention.key_length")
        if known
        else fields.head_size("embedding_length", heads)
    )
    if fields.integer("attention.value_length", size) != size:
        raise UnsupportedModelError(
            f"{fields.file}: keys and values of different sizes are not supported."
        )
    return size


def _latent(fields: Fields, heads: int) -> dict[str, Any]:
    """Sizes of latent attention. Newer files call the size of what the cache holds a key's, and
    have other keys for the heads that are made of it.
    """
    suffix = "_mla" if "attention.key_length_mla" in fields else ""
    key_size = fields.integer(f"attention.key_length{suffix}")
    rotated = fields.integer("rope.dimension_count", high=key_size - 1)
    return {
        "head_dim": rotated,
        "num_key_value_heads": heads,
        "kv_lora_rank": fields.integer("attention.kv_lora_rank"),
        "q_lora_rank": fields.raw("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_size - rotated,
        "v_head_dim": fields.integer(f"attention.value_length{suffix}"),
    }


def _is_in_a_layer(name: str, tensor_names: Iterable[str]) -> bool:
    return any(one.startswith("blk.") and one.endswith(f".{name}") for one in tensor_names)


def _one_count(fields: Fields, key: str, num_blocks: int) -> int:
    """What a list has for each layer, or 0 for it."""
    found = fields.list_of(key, int)
    counts = set(found) - {0}
    if len(found) != num_blocks or len(counts) != 1 or min(counts) < 0:
        raise fields.error(key, f"a list of {num_blocks} numbers, each one the same or 0", found)
    return int(counts.pop())


def _rope(fields: Fields, head_dim: int, checkpoint: Checkpoint) -> dict[str, Any]:
    """What config.json calls `rope_parameters`."""
    tensor_names = checkpoint.tensors
    rope: dict[str, Any] = {}
    if "rope.freq_base" in fields:
        rope["rope_theta"] = fields.number("rope.freq_base", low=1e-6)
    if "rope.dimension_count" in fields:
        rotated = fields.integer("rope.dimension_count")
        # of which the product's whole part is taken: 30 / 44 * 44 would be 29
        share = rotated / head_dim
        rope["partial_rotary_factor"] = (
            share if int(head_dim * share) == rotated else math.nextafter(share, 2)
        )
    if "rope_freqs.weight" in tensor_names:
        return rope | {
            "rope_type": "factors",
            "factors": checkpoint.read("rope_freqs.weight").tolist(),
        }
    original = fields.integer(
        "rope.scaling.original_context_length",
        fields.integer("context_length", 2048, high=2**31),
        high=2**31,
    )
    if "rope_factors_long.weight" in tensor_names:
        long, short = (
            checkpoint.read(f"rope_factors_{kind}.weight").tolist() for kind in ("long", "short")
        )
        found = {
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": original,
        }
        factor = fields.number("rope.scaling.attn_factor", 1.0)
        return rope | found | {"rope_type": "longrope", "attention_factor": factor}
    kind = fields.string("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{fields.file}: rope scaling {kind!r} is not supported, only linear and yarn are."
        )
    if kind == "none":
        return rope
    factor = fields.number("rope.scaling.factor", low=1e-6)
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = original
        rope |= _yarn(fields, factor)
    return rope


def _yarn(fields: Fields, factor: float) -> dict[str, Any]:
    """What yarn has besides."""
    if (strength := fields.number("rope.scaling.yarn_ext_factor", 1.0)) != 1.0:
        raise UnsupportedModelError(
            f"{fields.file}: rope.scaling.yarn_ext_factor {strength:g} is not supported, only 1 is."
        )
    found: dict[str, Any] = {
        f"beta_{side}": fields.number(f"rope.scaling.yarn_beta_{side}", default)
        for side, default in (("fast", 32.0), ("slow", 1.0))
    }
    if "rope.scaling.yarn_log_multiplier" in fields and "attention.kv_lora_rank" in fields:
        # of one tenth; files don't say `mscale` and mean the same by it
        mscale = fields.number("rope.scaling.yarn_log_multiplier") / 0.1
        return found | {"mscale": mscale, "mscale_all_dim": mscale}
    plain = 0.1 * math.log(max(factor, 1.0)) + 1.0
    own = fields.number("rope.scaling.yarn_attn_factor", plain)
    return found | {"attention_factor": own * fields.number("rope.scaling.attn_factor", 1.0)}
