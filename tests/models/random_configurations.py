"""Draws configurations of a family over the fields that transformers' class for it knows, and saves
tiny models with them as users' folders are: keys left out, older spellings, tied or not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.models.families import family_named

Values = dict[str, Any]
Draw = Callable[[Random, Values], Any]
UNLISTED: dict[str, Any] = {"mistral4": transformers.Mistral4ForCausalLM}
"""Classes that transformers has and its table of classes lacks."""
ABSENT = object()
"""Drawn for a field that is not set."""

NEUTRAL = frozenset(
    {
        *(field.name for field in dataclasses.fields(transformers.PreTrainedConfig)),
        *("use_cache", "initializer_range", "init_std", "pretraining_tp", "is_decoder"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "eod_token_id", "sep_token_id"),
        *("attention_dropout", "hidden_dropout", "classifier_dropout", "residual_dropout"),
        *("embedding_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "emb_pdrop", "dropout"),
        *("layerdrop", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
        *("summary_first_dropout", "init_device", "slow_but_exact", "reorder_and_upcast_attn"),
        *("num_mtp_layers", "mamba_chunk_size", "norm_type"),
        *("num_logits_to_keep", "use_mamba_kernels", "chunk_size", "mamba_ssm_cache_dtype"),
        *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),
        *("linear_dt_init_floor", "time_step_min", "time_step_max", "time_step_floor", "expand"),
        *("moe_shared_expert_overlap", "rescale_prenorm_residual", "z_loss_coefficient"),
        *("num_nextn_predict_layers",),
    }
)
"""Fields that don't change what a model computes at inference."""


def config_class(family: str) -> Any:
    return CONFIG_MAPPING[family]


def fields_of(family: str) -> dict[str, Any]:
    """What may change the computation: fields of the family's class, with their defaults."""
    return {
        field.name: field.default
        for field in dataclasses.fields(config_class(family))
        if field.name not in NEUTRAL
    }


def one_of(*values: Any) -> Draw:
    return lambda rng, _: rng.choice(values)


BOOLEAN = one_of(True, False, ABSENT)
SCALE = one_of(1.0, 0.5, 3.0, ABSENT)


def draw_rope(rng: Random, values: Values) -> Values:
    kind = rng.choice(["default", "default", "linear", "llama3", "yarn", "dynamic", "longrope"])
    found: Values = {"rope_theta": rng.choice([10_000.0, 500_000.0]), "rope_type": kind}
    if kind != "default":
        found["factor"] = rng.choice([2.0, 4.0, 8.0])
    if kind in ("llama3", "yarn", "longrope"):
        found["original_max_position_embeddings"] = rng.choice([8, 32, 64])
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "yarn":
        found |= rng.choice(
            [
                {},
                {"beta_fast": 16.0, "beta_slow": 2.0},
                {"mscale": 1.0, "mscale_all_dim": 0.5},
                {"attention_factor": 1.2, "truncate": False},
            ]
        )
    if kind == "longrope":  # prompts are longer than this: see docs/exactness.md
        found["original_max_position_embeddings"] = 8
    return found


def add_long_factors(family: str, values: Values, rope: Values) -> None:
    """The lists of longrope, one number for each pair of dimensions."""
    made = config_class(family)(**{**values, "rope_parameters": None})
    head = getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads
    pairs = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    for side, size in (("long", 2), ("short", 1)):
        rope[f"{side}_factor"] = [1.0 + 0.3 * i * size for i in range(pairs)]


def draw_layer_types(rng: Random, values: Values) -> Any:
    if rng.random() < 0.4:
        return ABSENT
    kinds = ("full_attention", "sliding_attention")
    return [rng.choice(kinds) for _ in range(values["num_hidden_layers"])]


def draw_mlp_types(rng: Random, values: Values) -> Any:
    if rng.random() < 0.5:
        return ABSENT
    dense = rng.randint(0, 2)
    return ["dense" if i < dense else "sparse" for i in range(values["num_hidden_layers"])]


def num_experts(rng: Random, _: Values) -> int:
    return rng.choice([3, 4, 8])


def top_k(name: str) -> Draw:
    return lambda rng, values: rng.randint(1, min(values[name], 4))


DRAWS: dict[str, Draw] = {
    "num_key_value_heads": lambda _, values: values["num_key_value_heads"],
    "hidden_act": one_of("silu", "gelu_pytorch_tanh", "gelu", "relu2", ABSENT, ABSENT),
    "hidden_activation": one_of("silu", "gelu_pytorch_tanh", "gelu", "relu2", ABSENT),
    "head_dim": one_of(8, 12, 16, 20, ABSENT),
    "sliding_window": one_of(5, 16, 33, ABSENT),
    "use_sliding_window": one_of(True, False, ABSENT),
    "max_window_layers": one_of(0, 1, 2, ABSENT),
    "layer_types": draw_layer_types,
    "rms_norm_eps": one_of(1e-5, 1e-6, 1e-3, ABSENT),
    "tie_word_embeddings": BOOLEAN,
    **dict.fromkeys(
        (
            "attention_bias",
            "mlp_bias",
            "use_bias",
            "qkv_bias",
            "attention_out_bias",
            "use_qkv_bias",
        ),
        BOOLEAN,
    ),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), num_experts),
    "moe_intermediate_size": one_of(1, 8, 20),
    "norm_topk_prob": BOOLEAN,
    "decoder_sparse_step": one_of(1, 2, ABSENT),
    "mlp_only_layers": one_of([], [0], [1], ABSENT),
    "shared_expert_intermediate_size": one_of(12),
    "shared_intermediate_size": one_of(0, 12, ABSENT),
    "n_shared_experts": one_of(1, 2),
    "routed_scaling_factor": SCALE,
    "first_k_dense_replace": one_of(0, 1, 2, ABSENT),
    "n_group": one_of(1, 2, ABSENT),
    "topk_group": one_of(1),
    "use_qk_norm": BOOLEAN,
    "moe_num_experts": num_experts,
    "moe_num_shared_experts": one_of(0, 1, 2, ABSENT),
    "moe_k": one_of(1, 2, 3),
    "moe_layer_start_index": one_of(0, 1, ABSENT),
    "moe_layer_end_index": one_of(0, 2, -1, ABSENT),
    "moe_layer_interval": one_of(1, 2, ABSENT),
    "moe_topk": one_of(1, 2, 3),
    "use_parallel_residual": BOOLEAN,
    "use_post_norm": BOOLEAN,
    "sliding_window_pattern": one_of(2, 3, ABSENT),
    # latent attention
    "kv_lora_rank": one_of(8, 24, 30),
    "q_lora_rank": one_of(None, 12, 20),
    "qk_nope_head_dim": one_of(4, 10, 16),
    "qk_rope_head_dim": one_of(4, 8, 10),
    "v_head_dim": one_of(6, 8, 12),
    "rope_interleave": BOOLEAN,
    "topk_method": one_of("greedy", "group_limited_greedy", ABSENT),
    "mlp_layer_types": draw_mlp_types,
    # scales
    "embedding_multiplier": SCALE,
    "logits_scaling": SCALE,
    "residual_multiplier": SCALE,
    "attention_multiplier": one_of(0.1, 0.5, ABSENT),
    "logit_scale": SCALE,
    "layer_norm_eps": one_of(1e-5, 1e-3, ABSENT),
    "norm_eps": one_of(1e-5, 1e-3, ABSENT),
    "norm_epsilon": one_of(1e-5, 1e-3, ABSENT),
    "query_pre_attn_scalar": one_of(8, 20, ABSENT),
    "attn_logit_softcapping": one_of(None, 2.0, ABSENT),
    "final_logit_softcapping": one_of(None, 5.0, ABSENT),
    "no_rope_layers": lambda rng, values: rng.choice(
        [ABSENT, [rng.randint(0, 1) for _ in range(values["num_hidden_layers"])]]
    ),
    "no_rope_layer_interval": one_of(2, 3, ABSENT),
    "vocab_size_per_layer_input": lambda _, values: values["vocab_size"],
    "hidden_size_per_layer_input": one_of(0, 6, 8),
    "attention_k_eq_v": BOOLEAN,
    "enable_moe_block": BOOLEAN,
    "use_double_wide_mlp": BOOLEAN,
    "top_k_experts": one_of(1, 2, 3),
    "n_inner": one_of(24, 40, ABSENT),
    "ffn_dim": one_of(24, 40),
    "ffn_hidden_size": one_of(24, 40, ABSENT),
    **dict.fromkeys(
        ("activation_function", "activation"), one_of("gelu_new", "gelu", "relu", "silu", ABSENT)
    ),
    "layer_norm_epsilon": one_of(1e-5, 1e-3, ABSENT),
    **dict.fromkeys(
        (
            "scale_attn_weights",
            "scale_attn_by_inverse_layer_idx",
            "enable_bias",
            "layer_norm_elementwise_affine",
            "multi_query",
            "parallel_attn",
            "bias",
        ),
        BOOLEAN,
    ),
    "rotary_dim": one_of(4, 8),
    "intermediate_size_mlp": one_of(24, 40),
    "interleave_moe_layer_step": one_of(1, 2, ABSENT),
    "attention_chunk_size": one_of(5, 16, 33),
    "attn_temperature_tuning": BOOLEAN,
    "floor_scale": one_of(4, 16),
    "attn_scale": one_of(0.1, 0.5, ABSENT),
}
"""What is drawn for a field, in this order; sizes and rope are drawn for every family."""

NEVER_SET: dict[str, tuple[str, ...]] = {
    "gemma3_text": ("attn_logit_softcapping",),
    "cohere": ("use_qk_norm",),
    "ernie4_5_moe": ("use_bias",),
    "apertus": ("hidden_act",),
    "llama4_text": ("layer_types",),
    "deepseek_v2": ("mlp_bias", "norm_topk_prob"),
    "mpt": ("logit_scale",),
}
"""By family, fields whose other values are refused by name: see `test_config.py`."""
OLD_ROPE_KEYS = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
LATE = ("num_experts_per_tok", "topk_group")


def draw_values(rng: Random, family: str) -> Values:
    """Arguments of the family's class of configurations."""
    known = fields_of(family)
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 3])
    values: Values = {
        "vocab_size": rng.choice([61, 128]),
        "hidden_size": heads * 2 * rng.choice([4, 9]),
        "intermediate_size": rng.choice([24, 40]),
        "num_hidden_layers": rng.choice([1, 2, 3, 5]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    values["initializer_range"] = min(0.2, 1.0 / values["hidden_size"] ** 0.5)
    for name, draw in DRAWS.items():
        if name in known and name not in NEVER_SET.get(family, ()):
            drawn = draw(rng, values)
            if drawn is not ABSENT:
                values[name] = drawn
    if "num_experts_per_tok" in known:
        own = next(
            name
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if name in known
        )
        values["num_experts_per_tok"] = rng.randint(1, min(values[own], 4))
    if "rope_parameters" in known:
        values["rope_parameters"] = draw_rope(rng, values)
    adjust(rng, family, values)
    ropes = values.get("rope_parameters") or {}
    for rope in (ropes, ropes.get("full_attention", {})):
        if rope.get("rope_type") == "longrope":
            add_long_factors(family, values, rope)
    return values


def adjust(rng: Random, family: str, values: Values) -> None:
    """What only one family has, or what its fields allow together."""
    layers = values["num_hidden_layers"]
    if family in ("gemma3_text", "olmo3"):
        local = {"rope_theta": rng.choice([1000.0, 10_000.0]), "rope_type": "default"}
        if rng.random() < 0.7:
            values["rope_parameters"] = {
                "full_attention": values["rope_parameters"],
                "sliding_attention": local,
            }
        else:
            values.pop("rope_parameters")
    if family == "falcon" and rng.random() < 0.5:
        values |= {"new_decoder_architecture": True, "parallel_attn": True}
        values["num_kv_heads"] = values["num_key_value_heads"]
        if rng.random() < 0.5:
            values["num_ln_in_parallel_attn"] = rng.choice([1, 2])
    if family in ("gpt_neox", "phi"):
        values["hidden_size"] = 16 * values["num_attention_heads"]
        values["rope_parameters"]["partial_rotary_factor"] = rng.choice([0.25, 0.5, 1.0])
    if family == "gemma4_text":
        values |= {"global_head_dim": rng.choice([8, 24]), "head_dim": rng.choice([8, 16])}
        if rng.random() < 0.5:
            values["num_global_key_value_heads"] = 1
        values["sliding_window"] = rng.choice([5, 16, 33])
        values["layer_types"] = [
            rng.choice(["sliding_attention", "full_attention"]),
            *(["sliding_attention", "full_attention"] * 3),
        ][: max(layers, 2)]
        values["num_hidden_layers"] = layers = max(layers, 2)
        values["layer_types"][-1] = "full_attention"
        values["num_kv_shared_layers"] = rng.randint(0, max(0, layers - 3))
        values["rope_parameters"] = rng.choice(
            [
                None,
                {
                    "full_attention": {
                        "rope_type": "proportional",
                        "partial_rotary_factor": 0.5,
                        "rope_theta": 500_000.0,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                },
            ]
        )
    if family in ("glm", "glm4", "glm4_moe"):
        # half of it is rotated, in pairs
        values["head_dim"] = rng.choice([8, 16, 20])
        values["rope_parameters"] = {"rope_theta": 10_000.0, "rope_type": "default"}
        if rng.random() < 0.5:
            values["rope_parameters"]["partial_rotary_factor"] = 0.5
    if family == "phi3":
        rope = values["rope_parameters"]
        if rope["rope_type"] not in ("default", "longrope"):
            values["rope_parameters"] = {"rope_theta": 10_000.0, "rope_type": "default"}
        values["original_max_position_embeddings"] = 8
    if family == "ministral3":
        values["rope_parameters"] |= {"llama_4_scaling_beta": rng.choice([0.1, 0.5])}
        values["rope_parameters"]["original_max_position_embeddings"] = rng.choice([8, 32])
    if family == "mistral4":
        values["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": rng.choice([10_000.0, 500_000.0]),
            "factor": rng.choice([2.0, 8.0]),
            "llama_4_scaling_beta": rng.choice([0.1, 0.5]),
            "original_max_position_embeddings": rng.choice([8, 32]),
            **rng.choice([{}, {"mscale": 1.0, "mscale_all_dim": 0.5}]),
        }
    if family == "mpt":
        values["attn_config"] = {
            "clip_qkv": rng.choice([None, 0.3, 2.0]),
            "softmax_scale": rng.choice([None, 0.3]),
        }
    if family == "hunyuan_v1_moe":  # transformers can't run it without
        values["head_dim"] = rng.choice([8, 12, 16, 20])
    if family == "helium":
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    if family in ("minimax_m2", "stablelm", "nemotron"):
        share = rng.choice([0.25, 0.5, 1.0])
        values["head_dim"] = 16
        if family == "stablelm":
            values.pop("head_dim")
            values["hidden_size"] = 16 * values["num_attention_heads"]
        values["rope_parameters"]["partial_rotary_factor"] = share
    if (
        family in ("hunyuan_v1_dense", "hunyuan_v1_moe")
        and values["rope_parameters"]["rope_type"] == "dynamic"
    ):
        values["rope_parameters"] |= {"alpha": 50.0, "factor": 1.0}
    if family == "granitemoehybrid":
        values |= {"layer_types": ["attention"] * layers, "mamba_n_heads": 2}
        values["shared_intermediate_size"] = rng.choice([8, 12])
        values["position_embedding_type"] = rng.choice(["rope", None])
        if rng.random() < 0.5:
            values["num_local_experts"] = 0
    if "kv_lora_rank" in values:  # no keys are kept
        values["num_key_value_heads"] = values["num_attention_heads"]
        values.pop("head_dim", None)
        has_groups = values.get("topk_method", "group_limited_greedy") != "greedy"
        values["n_group"] = rng.choice([1, 2]) if has_groups else 1
        values["topk_group"] = 1
    if values.get("n_group", 1) > 1:
        values["n_routed_experts"] = 8
        values["topk_group"] = rng.randint(1, 2)
        values["num_experts_per_tok"] = rng.randint(1, 4)
    if "sliding_attention" in values.get("layer_types", ()):
        values["sliding_window"] = rng.choice([5, 16, 33])
        if "use_sliding_window" in fields_of(family):
            values["use_sliding_window"] = True
    if "mlp_only_layers" in values:
        values["mlp_only_layers"] = [i for i in values["mlp_only_layers"] if i < layers]


def random_model(config: Any, seed: int) -> Any:
    """A transformers model with every parameter random: biases and norms too, which start out as 0
    and 1.
    """
    torch.manual_seed(seed)
    config._attn_implementation = config._experts_implementation = "eager"
    if config.model_type in UNLISTED:
        model = UNLISTED[config.model_type](config).eval().float()
    else:
        model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "sinks" in name or "alpha" in name:
                parameter.normal_(std=0.3)
            elif (
                "norm" in name or ".ln" in name or name.endswith(("router.scale", "_expert_scale"))
            ):
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
    return model


def save_model(rng: Random, family: str, values: Values, folder: Path) -> None:
    """A folder with a model of these values, written as files of users are: see `vary_config`."""
    seed = rng.randrange(1000)
    model = random_model(config_class(family)(**values), seed)
    model.save_pretrained(folder, save_original_format=rng.random() < 0.7)
    vary_config(rng, family, folder)


def vary_config(rng: Random, family: str, folder: Path) -> None:
    """Leaves keys out that say what the class assumes, and writes rope as older files do."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    for name, default in fields_of(family).items():
        if name in values and values[name] == default and rng.random() < 0.5:
            del values[name]
    rope = values.get("rope_parameters")
    how = rng.choice(["new", "old", "beside", "both levels"])
    if rope and "rope_type" in rope:
        if how == "old":
            del values["rope_parameters"]
            theta, share = OLD_ROPE_KEYS.get(family, ("rope_theta", "partial_rotary_factor"))
            values[theta] = rope.pop("rope_theta")
            if rope.get("partial_rotary_factor") is not None:
                values[share] = rope.pop("partial_rotary_factor")
            rope["type"] = rope.pop("rope_type")
            values["rope_scaling"] = None if rope == {"type": "default"} else rope
        elif (
            how == "beside"
            and rope["rope_type"] == "default"
            and family not in ("phi3", "ministral3")
        ):
            values["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
            if "partial_rotary_factor" in rope:
                values["rope_scaling"]["partial_rotary_factor"] = rope["partial_rotary_factor"]
        elif how == "both levels" and rope["rope_type"] in ("yarn", "llama3"):
            values["original_max_position_embeddings"] = 48
    file.write_text(json.dumps(values))
    if values.get("tie_word_embeddings") and rng.random() < 0.3:
        add_head(folder, family)


def add_head(folder: Path, family: str) -> None:
    """A tied model whose file has another head all the same."""
    own = family_named(family)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors[f"{own.prefixes[0]}.{own.embedding}.weight"]
    tensors[f"{own.head}.weight"] = torch.randn_like(embedding) * 0.2
    save_file(tensors, file, {"format": "pt"})


def load_reference(folder: Path) -> Any:
    """What transformers makes of the folder."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    return (
        UNLISTED.get(family, transformers.AutoModelForCausalLM)
        .from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        .eval()
    )


def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def check_greedy(model: Any, prompt: list[int], answer: list[int]) -> None:
    """The answer is what transformers would choose: at each position, given all before it, its own
    argmax.
    """
    logits = reference_logits(model, prompt + answer)
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
