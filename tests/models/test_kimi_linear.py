"""Kimi Linear: its published settings, files as they are published, and settings that are refused.
Random configurations are in `test_recurrent_families.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from quire.backends.cpu.kernels import CpuKernels
from quire.cli.main import app
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.latent import LatentSpec
from quire.kernels.recurrent import RecurrentSpec
from quire.models.given_weights import given_weights
from quire.models.load import open_model
from quire.models.model_config import read_config
from quire.models.spec import ModelSpec
from quire.models.weight_plan import plan_weights
from quire.runner.layer_groups import LayerGroups
from quire.tools.plan.cards import CardKernels
from tests.decoding import load_decoder
from tests.models.test_recurrent_families import assert_matches, random_model

CPU = torch.device("cpu")
FULL = [4, 8, 12, 16, 20, 24, 27]
PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163_584,
    "eos_token_id": 163_586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": FULL,
        "head_dim": 128,
        "kda_layers": [number for number in range(1, 28) if number not in FULL],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1_048_576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163_840,
}
"""Kimi-Linear-48B-A3B's config.json."""
PROMPT = [3 + 7 * i % 94 for i in range(150)]
SMALL = {
    **PUBLISHED,
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 8,
    "model_max_length": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.15,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "head_dim": 8,
        "kda_layers": [3, 1],
        "num_heads": 2,
        "short_conv_kernel_size": 4,
    },
}


def read(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder / "config.json")


def save_small(folder: Path) -> Any:
    """With config.json as it is published; transformers' model."""
    read(folder, SMALL)
    model = random_model(transformers.AutoConfig.from_pretrained(folder), 1)
    model.save_pretrained(folder)
    read(folder, SMALL)
    file = folder / "model.safetensors"
    stored = load_file(file)
    dense = "layers.0.block_sparse_moe."  # where transformers writes it
    stored = {name.replace(dense, "layers.0.mlp."): one for name, one in stored.items()}
    save_file(stored, file, {"format": "pt"})
    return model


def test_the_published_model_has_its_published_size(tmp_path: Path) -> None:
    spec = read(tmp_path, PUBLISHED)
    assert spec.num_parameters == 49_122_681_728
    assert spec.max_position == 1_048_576
    kinds = [type(mixer) for mixer in spec.mixers]
    assert [i + 1 for i, kind in enumerate(kinds) if kind is LatentSpec] == FULL
    assert kinds.count(RecurrentSpec) == 20
    assert all(layer.rope is None for layer in spec.layers)
    groups = LayerGroups.of(spec, 16, torch.bfloat16, 0, 1024)
    assert groups.state is not None
    planned = CliRunner().invoke(app, ["plan", str(tmp_path / "config.json")])
    assert "49,123M parameters" in planned.output


def test_a_published_folder_has_transformers_logits(tmp_path: Path) -> None:
    """Lists of layers that begin with 1, rates in four dimensions, a convolution for each side."""
    model = save_small(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.0.self_attn.A_log"].shape == (1, 1, 2, 1)
    assert "model.layers.2.self_attn.q_conv1d.weight" in stored
    decoder = load_decoder(open_model(tmp_path), CpuKernels(), torch.float32, CPU)
    assert_matches(model, decoder, PROMPT, 64)


def test_weights_are_replaced_by_tensors_of_published_shapes(tmp_path: Path) -> None:
    model = save_small(tmp_path)
    decoder = load_decoder(open_model(tmp_path), CpuKernels(), torch.float32, CPU)
    stored = load_file(tmp_path / "model.safetensors")
    changed = {
        name: tensor + 0.3
        for name, tensor in stored.items()
        if name.endswith(("A_log", "f_b_proj.weight"))
    }
    assert len(changed) == 4
    decoder.update(given_weights(decoder, "none", changed.items()))
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "A_log"):
                module.A_log += 0.3
                module.f_b_proj.weight += 0.3
    assert_matches(model, decoder, PROMPT, 64)


def linear(**settings: Any) -> dict[str, Any]:
    return {"linear_attn_config": {**PUBLISHED["linear_attn_config"], **settings}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mla_use_nope": False}, "mla_use_nope False"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types should be 27 of dense or sparse"),
        ({"num_expert_group": 3}, "n_group should be a divisor of 256"),
        (linear(gate_lower_bound=-5.0), "gate_lower_bound -5.0"),
        (linear(use_full_rank_gate=True), "use_full_rank_gate True"),
        (linear(kda_layers=[1, 2]), "kda_layers should be each number from 1 to 27 once"),
        (linear(full_attn_layers=[*FULL, 28]), "kda_layers should be each number from 1 to 27"),
        (linear(head_dim=0), "linear_head_dim should be a whole number"),
    ],
)
def test_what_a_setting_changes_and_is_not_known_is_refused_by_its_name(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=words):
        read(tmp_path, {**PUBLISHED, **settings})


def test_a_gpu_refuses_it_before_it_reads_weights(tmp_path: Path) -> None:
    save_small(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"Kimi Delta Attention, which does not run"):
        plan_weights(open_model(tmp_path), CardKernels((9, 0), torch.bfloat16), torch.bfloat16, CPU)
