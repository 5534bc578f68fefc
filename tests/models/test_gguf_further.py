"""GGUF files whose tensors llama.cpp's converters change, written here from random models by the
rules of those converters, against transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.mpt import modeling_mpt

from quire.backends.cpu.kernels import CpuKernels
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.models.load import open_model
from tests.decoding import all_logits, load_decoder
from tests.models.random_configurations import config_class, random_model, reference_logits

CPU = torch.device("cpu")


def write(
    path: Path, architecture: str, settings: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    """A file with these settings, by their keys after the architecture's name. Arrays are in Q8_0."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in settings.items():
        if value is None:
            continue
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_eos_token_id(2)
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            writer.add_tensor(name, tensor, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def named(architecture: str, model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the names that the `gguf` package gives them."""
    (number,) = (each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    found = {}
    for name, value in state.items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        found[own] = value
    return found


def assert_same_logits(path: Path, model: Any) -> None:
    files, rng = open_model(path), Random(7)
    tokens = [rng.randrange(model.config.vocab_size) for _ in range(40)]
    found = all_logits(load_decoder(files, CpuKernels(), torch.float32, CPU), tokens)
    torch.testing.assert_close(found, reference_logits(model, tokens), atol=1e-4, rtol=0)
    assert files.spec.eos_token_ids == (2,)


steeper = modeling_mpt.build_mpt_alibi_tensor
SIZES = {"vocab_size": 61, "initializer_range": 0.2, "pad_token_id": 0}


def bloom(heads: int) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    config = config_class("bloom")(**SIZES, hidden_size=8 * heads, n_layer=2, n_head=heads)
    model, size = random_model(config, 3), config.hidden_size
    state = {}
    for name, value in model.state_dict().items():
        if "query_key_value" in name:  # by sides instead of by heads
            value = value.view(heads, 3, 8, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
        state[name.removeprefix("transformer.")] = value
    settings = {
        "context_length": 512,
        "embedding_length": size,
        "feed_forward_length": 4 * size,
        "block_count": 2,
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "vocab_size": 61,
    }
    return model, settings, named("bloom", model, state)


def mpt(heads: int) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    attention = {"clip_qkv": 0.4, "alibi_bias_max": 4}
    config = config_class("mpt")(
        **SIZES, d_model=8 * heads, n_layers=2, n_heads=heads, attn_config=attention
    )
    model, size = random_model(config, 3), config.hidden_size
    settings = {
        "context_length": 512,
        "embedding_length": size,
        "feed_forward_length": 4 * size,
        "block_count": 2,
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.clamp_kqv": 0.4,
        "attention.max_alibi_bias": 4.0,
        "vocab_size": 61,
    }
    return model, settings, named("mpt", model, model.state_dict())


@pytest.mark.parametrize("heads", [3, 4])
@pytest.mark.parametrize("make", [bloom, mpt])
def test_models_with_alibi_are_those_of_transformers(
    make: Any, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its `alibi_bias_max`, which transformers ignores."""
    monkeypatch.setattr(
        modeling_mpt,
        "build_mpt_alibi_tensor",
        lambda heads, length, _, device: steeper(heads, length, 4, device),
    )
    model, settings, tensors = make(heads)
    path = tmp_path / "model.gguf"
    write(path, make.__name__, settings, tensors)
    assert_same_logits(path, model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.max_alibi_bias": 0.0}, r"attention\.max_alibi_bias should be"),
        ({"attention.max_alibi_bias": None}, r"mpt\.attention\.max_alibi_bias is missing"),
        ({"attention.clamp_kqv": float("nan")}, r"attention\.clamp_kqv should be"),
    ],
)
def test_wrong_settings_of_mpt_are_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, settings, tensors = mpt(4)
    write(tmp_path / "model.gguf", "mpt", settings | changes, tensors)
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=message):
        open_model(tmp_path / "model.gguf")


def test_what_mpt_has_beside_its_slopes_is_refused_by_its_tensor(tmp_path: Path) -> None:
    _, settings, tensors = mpt(4)
    for name in ("position_embd.weight", "blk.0.attn_q_norm.weight", "blk.0.ffn_up.bias"):
        write(tmp_path / "model.gguf", "mpt", settings, tensors | {name: torch.ones(32)})
        with pytest.raises(ModelFormatError, match=name):
            load_decoder(open_model(tmp_path / "model.gguf"), CpuKernels(), torch.float32, CPU)


LATENT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.8,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 16,
    "beta_slow": 2,
}
PLAIN = {"rope_type": "default", "rope_theta": 50_000.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "DeepSeek-V2": (
        "deepseek_v2",
        {
            "q_lora_rank": 20,
            "first_k_dense_replace": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": PLAIN,
        },
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "q_lora_rank": 20,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "without the strength of yarn": (
        "deepseek_v3",
        {"q_lora_rank": None, "first_k_dense_replace": 0, "rope_parameters": YARN}
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "GLM-4.7-Flash": (
        "glm4_moe_lite",
        {
            "q_lora_rank": 20,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "rope_parameters": PLAIN,
        },
    ),
}


def latent(name: str, is_split: bool = True) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """As llama.cpp's converter makes them, or as it did before it divided `kv_b`."""
    family, values = MODELS[name]
    model = random_model(config_class(family)(**(LATENT | values)), 3)
    config, rope = model.config, model.config.rope_parameters
    heads, nope, size = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    rotated, rank = config.qk_rope_head_dim, config.kv_lora_rank
    state: dict[str, Tensor] = {}
    for one, value in model.state_dict().items():
        start = one.rpartition(".mlp.experts.")[0] or one.rpartition(".self_attn.")[0]
        if one.endswith("experts.gate_up_proj"):
            for side, rows in zip(("gate", "up"), value.chunk(2, 1), strict=True):
                state[f"{start}.mlp.experts.{side}_proj.weight"] = rows
        elif one.endswith("experts.down_proj"):
            state[f"{one}.weight"] = value
        elif one.endswith("kv_b_proj.weight") and is_split:
            keys, values_up = value.view(heads, nope + size, rank).split([nope, size], 1)
            state[f"{start}.self_attn.k_b_proj.weight"] = keys.transpose(1, 2)
            state[f"{start}.self_attn.v_b_proj.weight"] = values_up
        else:
            state[one.replace("e_score_correction_bias", "e_score_correction.bias")] = value
    head = {
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": nope + rotated,
        "attention.value_length_mla": size,
        "attention.head_count_kv": 1,
    }
    if not is_split:
        head = {"attention.key_length": nope + rotated, "attention.value_length": size}
        head["attention.head_count_kv"] = heads
    is_sigmoid = family != "deepseek_v2"
    dense = getattr(config, "first_k_dense_replace", None)
    settings = {
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": 3,
        "vocab_size": 61,
        "attention.head_count": heads,
        **head,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": rank,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "leading_dense_block_count": 1 if dense is None else dense,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_count": 8,
        "expert_shared_count": 2,
        "expert_used_count": 2,
        "expert_weights_scale": 1.8,
        "expert_weights_norm": True if is_sigmoid and config.norm_topk_prob else None,
        "expert_gating_func": 2 if is_sigmoid else 1,
        "rope.dimension_count": rotated,
        "rope.freq_base": rope["rope_theta"],
    }
    if config.n_group is not None and config.n_group > 1:
        settings["expert_group_count"] = config.n_group
        settings["expert_group_used_count"] = config.topk_group
    if rope["rope_type"] == "yarn":
        settings |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
        }
        if "mscale_all_dim" in rope:
            settings["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return model, settings, named("deepseek2", model, state)


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_latent_attention_is_that_of_transformers(
    name: str, is_split: bool, tmp_path: Path
) -> None:
    model, settings, tensors = latent(name, is_split)
    write(tmp_path / "model.gguf", "deepseek2", settings, tensors)
    assert_same_logits(tmp_path / "model.gguf", model)


def test_files_without_a_gating_function_say_it_by_a_bias_for_the_choice(tmp_path: Path) -> None:
    for name in ("GLM-4.7-Flash", "DeepSeek-V2-Lite"):
        model, settings, tensors = latent(name)
        settings["expert_gating_func"] = None
        write(tmp_path / "model.gguf", "deepseek2", settings, tensors)
        assert_same_logits(tmp_path / "model.gguf", model)


def test_a_quantised_matrix_of_keys_is_turned_as_plain_ones_are(tmp_path: Path) -> None:
    """Quantised along what it is multiplied with in llama.cpp, which is not its inner size."""
    model, settings, tensors = latent("DeepSeek-V3")
    config = model.config
    settings["attention.key_length_mla"] = config.kv_lora_rank + 32 - config.kv_lora_rank + 8
    plain: dict[str, Tensor] = {}
    stored: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(0)
    for layer in range(3):
        name = f"blk.{layer}.attn_k_b.weight"
        wide = torch.randn(4, 32, 32, generator=generator) * 0.2
        data = gguf.quantize(wide.numpy(), gguf.GGMLQuantizationType.Q8_0)
        stored[name] = data
        plain[name] = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType.Q8_0))
        query = f"blk.{layer}.attn_q_b.weight"
        plain[query] = torch.randn(4 * 40, 20, generator=generator) * 0.2
    found = []
    for changes in (plain, {**plain, **stored}):
        path = tmp_path / f"{len(found)}.gguf"
        write(path, "deepseek2", settings, tensors | changes)
        decoder = load_decoder(open_model(path), CpuKernels(), torch.float32, CPU)
        found.append(all_logits(decoder, list(range(1, 30))))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_gating_func": 3}, r"expert_gating_func 3 is not supported"),
        ({"attention.kv_lora_rank": None}, r"different sizes|kv_lora_rank is missing"),
        ({"rope.dimension_count": 40}, r"rope\.dimension_count should be"),
        ({"attention.value_length_mla": 0}, r"value_length_mla should be"),
        ({"expert_count": None}, r"deepseek2\.expert_count is missing"),
        ({"expert_used_count": 5}, r"expert_used_count should be at most 4"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, r"yarn_ext_factor 0\.5 is not supported"),
        ({"rope.scaling.yarn_beta_fast": "16"}, r"yarn_beta_fast should be"),
    ],
)
def test_wrong_settings_of_latent_attention_are_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, settings, tensors = latent("DeepSeek-V3")
    write(tmp_path / "model.gguf", "deepseek2", settings | changes, tensors)
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=message):
        open_model(tmp_path / "model.gguf")


def test_sizes_that_heads_do_not_have_name_the_tensor(tmp_path: Path) -> None:
    _, settings, tensors = latent("DeepSeek-V3")
    changed = settings | {"attention.value_length_mla": 12}
    write(tmp_path / "model.gguf", "deepseek2", changed, tensors)
    with pytest.raises(ModelFormatError, match="attn_v_b"):
        load_decoder(open_model(tmp_path / "model.gguf"), CpuKernels(), torch.float32, CPU)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    model, settings, tensors = latent("DeepSeek-V3")
    settings |= {"block_count": 4, "nextn_predict_layers": 1}
    more = {"blk.3.attn_norm.weight": torch.ones(48), "blk.3.nextn.enorm.weight": torch.ones(48)}
    write(tmp_path / "model.gguf", "deepseek2", settings, tensors | more)
    assert_same_logits(tmp_path / "model.gguf", model)
