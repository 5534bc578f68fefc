"""GGUF files of every architecture against transformers: the names, the metadata, and rows of q and k that
such files reorder. The files are written here, by the format's conventions, from random models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.reference import ReferenceKernels
from quire.models.load import load_decoder, open_model
from quire.models.rope import cos_sin_table
from quire.models.spec import RopeSpec
from tests.decoding import all_logits
from tests.models.test_families import random_model, reference_logits

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

MODELS: dict[str, tuple[str, Any]] = {
    "llama": ("llama", transformers.LlamaConfig(**SIZES)),
    "llama tied": ("llama", transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama 3 rope": ("llama", transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "mixtral": ("llama", transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)),
    "smollm3": ("smollm3", transformers.SmolLM3Config(**SIZES)),
    "qwen2": ("qwen2", transformers.Qwen2Config(**SIZES)),
    "qwen2 yarn": ("qwen2", transformers.Qwen2Config(**SIZES, rope_parameters=YARN_ROPE)),
    "qwen2_moe": (
        "qwen2moe",
        transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=20, norm_topk_prob=False),
    ),
    "qwen3": ("qwen3", transformers.Qwen3Config(**SIZES)),
    "qwen3_moe": ("qwen3moe", transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True)),
}


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from halves (i, i + d/2) to neighbours (2i, 2i + 1)."""
    halves = weight.view(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def gguf_tensors(architecture: str, model: Any) -> dict[str, Tensor]:
    config, state = model.config, model.state_dict()
    renames = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.gate": "ffn_gate_inp",
        "mlp.experts.down_proj": "ffn_down_exps",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    }
    tensors: dict[str, Tensor] = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        tensors["output.weight"] = state["lm_head.weight"]
    for name, value in state.items():
        if not name.startswith("model.layers."):
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest == "mlp.experts.gate_up_proj":
            gate, up = value.chunk(2, dim=1)
            tensors[f"blk.{layer}.ffn_gate_exps.weight"] = gate
            tensors[f"blk.{layer}.ffn_up_exps.weight"] = up
            continue
        stem, kind = (rest, "weight") if rest.startswith("mlp.experts") else rest.rsplit(".", 1)
        if architecture in ("llama", "smollm3") and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            value = interleave(value, heads)
        tensors[f"blk.{layer}.{renames[stem]}.{kind}"] = value
    return tensors


Stored = tuple[np.ndarray, gguf.GGMLQuantizationType | None]
"""A tensor's bytes, and their type where they are not plain numbers."""


def as_it_is(name: str, value: Tensor) -> Stored:
    return value.contiguous().numpy(), None


def write_gguf(
    path: Path,
    architecture: str,
    model: Any,
    stored: Callable[[str, Tensor], Stored] = as_it_is,
    **changes: Tensor | None,
) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    tensors = gguf_tensors(architecture, model)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(rope, config.head_dim)
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    for name, value in (tensors | changes).items():
        if value is not None:
            data, kind = stored(name, value)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """What converters put into the file: by what each plain frequency is divided."""
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    factors = []
    for wavelength in (2 * torch.pi / plain).tolist():
        low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors)


@pytest.mark.parametrize("name", MODELS)
def test_gguf_model_matches_transformers(name: str, tmp_path: Path) -> None:
    architecture, config = MODELS[name]
    model = random_model(config, seed=3)
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, model)
    files = open_model(path)
    decoder = load_decoder(files, ReferenceKernels(), torch.float32, torch.device("cpu"))
    tokens = torch.randint(64, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    torch.testing.assert_close(all_logits(decoder, tokens), reference_logits(model, tokens), atol=1e-4, rtol=0)
    assert files.spec.eos_token_ids == (2,)


def test_gguf_with_a_missing_tensor_names_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", random_model(MODELS["llama"][1], 0), **{"blk.2.attn_k.weight": None})
    with pytest.raises(ModelFormatError, match=r"blk\.2\.attn_k\.weight of shape 16 x 32 is missing"):
        load_decoder(open_model(path), ReferenceKernels(), torch.float32, torch.device("cpu"))


def test_gguf_with_a_wrong_shape_says_expected_and_got(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", random_model(MODELS["llama"][1], 0), **{"blk.1.ffn_up.weight": torch.ones(47, 32)})
    with pytest.raises(ModelFormatError, match=r"blk\.1\.ffn_up\.weight .*48 x 32.* has 47 x 32"):
        load_decoder(open_model(path), ReferenceKernels(), torch.float32, torch.device("cpu"))


def test_gguf_with_an_unexpected_tensor_names_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", random_model(MODELS["llama"][1], 0), **{"blk.0.attn_sinks.weight": torch.ones(4)})
    with pytest.raises(ModelFormatError, match=r"blk\.0\.attn_sinks\.weight .* has no place"):
        load_decoder(open_model(path), ReferenceKernels(), torch.float32, torch.device("cpu"))


def test_gguf_of_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "mamba", random_model(MODELS["llama"][1], 0))
    with pytest.raises(UnsupportedModelError, match=r"mamba.*llama, smollm3, qwen2"):
        open_model(path)


def test_rope_factors_and_llama3_parameters_give_the_same_table() -> None:
    llama3 = RopeSpec(10_000.0, "llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    factors = tuple(llama3_factors(LLAMA3_ROPE, 16).tolist())
    by_factors = RopeSpec(10_000.0, "factors", freq_factors=factors)
    torch.testing.assert_close(cos_sin_table(llama3, 16, 300), cos_sin_table(by_factors, 16, 300), atol=1e-4, rtol=0)
