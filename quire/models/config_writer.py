"""config.json for a model that has none, such as one from a GGUF file: what `read_config` makes the same spec of."""

from __future__ import annotations

from typing import Any

from quire.errors import UnsupportedModelError
from quire.kernels.ops import MoeSpec
from quire.models.families import family_named
from quire.models.spec import MlpSpec, ModelSpec, RopeSpec


def huggingface_family(spec: ModelSpec) -> str:
    """What Hugging Face calls a spec's family: GGUF files of Mistral and Mixtral call themselves llama."""
    if spec.family != "llama":
        return spec.family
    if isinstance(spec.layers[0].mlp, MoeSpec):
        return "mixtral"
    return "mistral" if spec.layers[0].attention.sliding_window else "llama"


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """The settings of config.json. Not all that a GGUF file can say has a place there: whoever writes them compares
    what is read back."""
    layer, heads = spec.layers[0], spec.heads
    family = family_named(huggingface_family(spec))
    mlps = [one.mlp for one in spec.layers]
    dense = next((mlp for mlp in mlps if isinstance(mlp, MlpSpec)), MlpSpec(1))
    moe = next((mlp for mlp in mlps if isinstance(mlp, MoeSpec)), None)
    config: dict[str, Any] = {
        "architectures": [family.architectures[0]],
        "model_type": family.name,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": dense.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.rms_norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids),
        "rope_parameters": _rope(next((one.rope for one in spec.layers if one.rope is not None), RopeSpec())),
        "sliding_window": layer.attention.sliding_window,
        "attention_bias": layer.output_bias,
        "mlp_bias": dense.bias,
    }
    if family.name == "smollm3":
        config["no_rope_layers"] = [int(one.rope is not None) for one in spec.layers]
    if family.name == "qwen2_moe":
        config["qkv_bias"] = layer.qkv_bias
    if moe is not None and family.name == "mixtral":
        config |= {"num_local_experts": moe.num_experts, "intermediate_size": moe.intermediate_size}
    if moe is not None:
        config |= {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.intermediate_size,
            "shared_expert_intermediate_size": moe.shared_intermediate_size,
            "norm_topk_prob": moe.normalize_weights,
            "mlp_only_layers": [i for i, mlp in enumerate(mlps) if isinstance(mlp, MlpSpec)],
        }
    return config


def _rope(rope: RopeSpec) -> dict[str, Any]:
    if rope.kind == "factors":
        raise UnsupportedModelError("a factor for each rope frequency has no place in config.json")
    written: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "default" if rope.kind == "plain" else rope.kind}
    if rope.kind != "plain":
        written["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        written["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        written |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        written |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        written["attention_factor"] = rope.attention_factor
    return written
