"""A small model that several tests share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers

from tests.server.random_model import write_model

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def kimi_model(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kimi Delta Attention before latent attention."""
    folder = tmp_path_factory.mktemp("kimi")
    shutil.copytree(random_model, folder, dirs_exist_ok=True)
    known = transformers.AutoConfig.from_pretrained(folder)
    config = transformers.KimiLinearConfig(
        vocab_size=known.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
        linear_num_heads=4,
        linear_head_dim=8,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=known.eos_token_id,
        pad_token_id=None,
        initializer_range=0.1,
    )
    transformers.set_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_with_states(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with the delta rule before one of attention."""
    folder = tmp_path_factory.mktemp("states")
    shutil.copytree(random_model, folder, dirs_exist_ok=True)
    known = transformers.AutoConfig.from_pretrained(folder)
    config = transformers.Qwen3NextConfig(
        vocab_size=known.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=1024,
        eos_token_id=known.eos_token_id,
        initializer_range=0.1,
    )
    transformers.set_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
