"""DeepSeek and those that follow it: published settings, files as they are published, and settings
that are refused. Random configurations are in `test_random_configurations.py`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.checkpoints.sources import resolve
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.latent import LatentSpec
from quire.load import open_tokenizer
from quire.models.load import open_model
from quire.models.model_config import read_config
from quire.models.spec import ModelSpec
from quire.models.weight_plan import plan_weights
from quire.runner.kv_cache import token_bytes
from tests.decoding import all_logits, load_decoder
from tests.models.random_configurations import config_class, random_model
from tests.models.test_foreign_quantization import by_block

CPU = torch.device("cpu")
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
EXPERTS = {"n_routed_experts": 64, "hidden_size": 2048, "moe_layer_freq": 1, "hidden_act": "silu"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": {
        **EXPERTS,
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163_840,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0,
        "vocab_size": 102_400,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "max_position_embeddings": 163_840,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "vocab_size": 129_280,
    },
    "GLM-4.7-Flash": {
        **EXPERTS,
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "first_k_dense_replace": 1,
        "intermediate_size": 10_240,
        "num_attention_heads": 20,
        "num_hidden_layers": 47,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "topk_method": "noaux_tc",
        "vocab_size": 154_880,
    },
}
"""What matters of their config.json; what is left out there is what the class assumes."""
SMALL = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "max_position_embeddings": 64,
}


def read(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder / "config.json")


@pytest.mark.parametrize(
    ("name", "parameters", "scale"),
    [
        ("DeepSeek-V2-Lite", 15_706_484_224, 192**-0.5 * 1.2608**2),
        ("DeepSeek-V3", 671_026_419_200, 192**-0.5 * 1.3689**2),
        ("GLM-4.7-Flash", 29_943_393_920, 256**-0.5),
    ],
)
def test_published_models_have_their_published_sizes(
    name: str, parameters: int, scale: float, tmp_path: Path
) -> None:
    """Without layers for multi-token prediction, of which DeepSeek-V3 has 13 billion more."""
    spec = read(tmp_path, PUBLISHED[name])
    assert spec.num_parameters == parameters
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        # 512 numbers and 64 rotated ones, once for keys and values
        assert token_bytes(spec, 16, dtype) == 16 * spec.num_layers * 576 * dtype.itemsize
    for mixer in spec.mixers:
        assert isinstance(mixer, LatentSpec)
        assert mixer.scale == pytest.approx(scale, rel=1e-4)


def save_model(values: dict[str, Any], folder: Path) -> None:
    random_model(config_class("deepseek_v3")(**values), 3).save_pretrained(folder)


def change_tensors(folder: Path, changed: dict[str, Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **changed}, file, {"format": "pt"})


def logits_of(folder: Path, quantization: str = "auto") -> Tensor:
    decoder = load_decoder(
        open_model(folder), CpuKernels(), torch.float32, CPU, quantization=quantization
    )
    rng = Random(1)
    return all_logits(decoder, [rng.randrange(64) for _ in range(20)])


def test_layers_for_multi_token_prediction_are_left_out_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(SMALL, tmp_path)
    expected = logits_of(tmp_path)
    more = ("eh_proj.weight", "self_attn.q_a_proj.weight", "shared_head.norm.weight")
    change_tensors(tmp_path, {f"model.layers.2.{name}": torch.ones(4) for name in more})
    assert torch.equal(logits_of(tmp_path), expected)
    with caplog.at_level(logging.WARNING), pytest.raises(Exception, match="tokenizer"):
        open_tokenizer(resolve(str(tmp_path), offline=True))
    assert "3 tensors of layers for multi-token prediction are left out" in caplog.text


def test_fp8_weights_in_blocks_are_read_as_deepseek_stores_them(tmp_path: Path) -> None:
    """The matrix that is divided into that of keys and that of values, too."""
    sizes = {"hidden_size": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 40, "v_head_dim": 32}
    values = {**SMALL, **sizes, "first_k_dense_replace": 2}
    folders = [tmp_path / name for name in ("plain", "fp8")]
    for folder in folders:
        save_model(values, folder)
    meant: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folders[0] / "model.safetensors").items():
        if "self_attn" in name and tensor.dim() == 2 and tensor.shape[1] % 128 == 0:
            made, meant[name] = by_block(name.removesuffix(".weight"), tensor)
            stored |= made
    assert "model.layers.0.self_attn.kv_b_proj.weight" in meant
    change_tensors(folders[0], meant)
    change_tensors(folders[1], stored)
    file = folders[1] / "config.json"
    config = json.loads(file.read_text()) | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    }
    file.write_text(json.dumps(config))
    assert torch.equal(*map(logits_of, folders))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_model_is_quantised_without_the_matrices_that_are_absorbed(
    quantization: str, tmp_path: Path
) -> None:
    save_model({**SMALL, "hidden_size": 64, "kv_lora_rank": 32, "v_head_dim": 8}, tmp_path)
    plan = plan_weights(open_model(tmp_path), CpuKernels(), torch.float32, CPU, quantization)
    formats = {name: [one.name for one in found] for name, found in plan.formats.items()}
    assert formats["layers.0.attention.key_up.weight"] == ["F32"]
    assert formats["layers.0.attention.value_up.weight"] == ["F32"]
    assert formats["layers.0.attention.latent.weight"] != ["F32"]
    assert (logits_of(tmp_path, quantization) - logits_of(tmp_path)).abs().max() < 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim should be an even number"),
        ({"kv_lora_rank": 0}, "kv_lora_rank should be a whole number from 1"),
        ({"v_head_dim": -3}, "v_head_dim should be a whole number from 1"),
        ({"q_lora_rank": 0}, "q_lora_rank should be a whole number from 1"),
        ({"qk_nope_head_dim": "8"}, "qk_nope_head_dim should be a whole number"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported, only 4"),
        ({"n_group": 3}, "n_group should be a divisor of 8"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok should be at most 4"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ({"index_topk": 2048}, "index_topk 2048 is not supported"),
        ({"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim is not supported with rope of type 'dynamic'",
        ),
        ({"rope_interleave": "yes"}, "rope_interleave should be true or false"),
        (
            {"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["sparse", "dense"]},
            "mlp_layer_types should be 2 of dense or sparse, the dense ones first",
        ),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True},
            "norm_topk_prob True is not supported",
        ),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "noaux_tc"},
            "topk_method 'noaux_tc' is not supported",
        ),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM.*sparse indexer"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "DeepseekV4ForCausalLM.*sparse indexer"),
        ({"architectures": ["GlmMoeDsaForCausalLM"]}, "GlmMoeDsaForCausalLM.*sparse indexer"),
    ],
)
def test_what_is_wrong_or_not_computed_is_refused_by_its_name(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = {**SMALL, "architectures": ["DeepseekV3ForCausalLM"]}
    assert read(tmp_path, config).num_layers == 2
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=words):
        read(tmp_path, config | changed)


@pytest.mark.parametrize(
    ("changed", "tensor"),
    [
        ({"kv_lora_rank": 20}, "kv_a_proj_with_mqa"),
        ({"v_head_dim": 8}, "kv_b_proj"),
        ({"qk_nope_head_dim": 10}, "q_b_proj"),
        ({"q_lora_rank": None}, "q_proj"),
    ],
)
def test_sizes_that_the_tensors_do_not_have_name_the_tensor(
    changed: dict[str, Any], tensor: str, tmp_path: Path
) -> None:
    save_model(SMALL, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ModelFormatError, match=tensor):
        logits_of(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rope_type": "default"}, r"rope_type 'default' is not supported, only 'yarn' is"),
        ({"partial_rotary_factor": 0.9}, r"partial_rotary_factor should be 0\.5 \(by qk_rope"),
    ],
)
def test_rope_of_mistral_4_that_is_not_computed_is_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    config = json.loads(config_class("mistral4")().to_json_string(use_diff=False))
    config |= {"architectures": ["Mistral4ForCausalLM"]}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert read_config(file).layers[0].query_scale is not None
    config["rope_parameters"] |= changed
    file.write_text(json.dumps(config))
    with pytest.raises((UnsupportedModelError, ModelFormatError), match=message):
        read_config(file)
