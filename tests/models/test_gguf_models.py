"""GGUF files of every architecture against transformers: the names, the metadata, and rows of q and
k that such files reorder. The files are written here, by the format's conventions, from random
models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from quire.checkpoints.checkpoint import Checkpoint
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.reference import ReferenceKernels
from quire.models.gguf_spec import read_gguf_spec
from quire.models.load import open_model
from quire.models.rope import cos_sin_table
from quire.models.spec import ModelSpec, RopeSpec
from tests.decoding import all_logits, load_decoder
from tests.models.random_configurations import random_model, reference_logits

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
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75,
    "long_factor": [2.0, 2.5, 3.0],
    "short_factor": [1.0, 1.5, 2.0],
}
PLAIN_SIZES = {name: size for name, size in SIZES.items() if name != "head_dim"}
FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
}

MODELS: dict[str, tuple[str, Any]] = {
    "llama": ("llama", transformers.LlamaConfig(**SIZES)),
    "llama tied": ("llama", transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama 3 rope": ("llama", transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "mixtral": (
        "llama",
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    ),
    "mistral": ("llama", transformers.MistralConfig(**SIZES, sliding_window=12)),
    "smollm3": ("smollm3", transformers.SmolLM3Config(**SIZES)),
    "qwen2": ("qwen2", transformers.Qwen2Config(**SIZES)),
    "qwen2 yarn": ("qwen2", transformers.Qwen2Config(**SIZES, rope_parameters=YARN_ROPE)),
    "qwen2_moe": (
        "qwen2moe",
        transformers.Qwen2MoeConfig(
            **SIZES, **EXPERTS, shared_expert_intermediate_size=20, norm_topk_prob=False
        ),
    ),
    "qwen3": ("qwen3", transformers.Qwen3Config(**SIZES)),
    "qwen3_moe": ("qwen3moe", transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True)),
    "gemma2": (
        "gemma2",
        transformers.Gemma2Config(**SIZES, sliding_window=12, query_pre_attn_scalar=8),
    ),
    "gemma3": (
        "gemma3",
        transformers.Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 7}, sliding_window=12, query_pre_attn_scalar=8
        ),
    ),
    "phi3": ("phi3", transformers.Phi3Config(**PLAIN_SIZES)),
    "phi3 long": (
        "phi3",
        transformers.Phi3Config(
            **PLAIN_SIZES, original_max_position_embeddings=32, rope_parameters=LONG_ROPE
        ),
    ),
    "olmo2": ("olmo2", transformers.Olmo2Config(**SIZES)),
    "olmo3": ("olmo2", transformers.Olmo3Config(**SIZES, sliding_window=12)),
    "granite": ("granite", transformers.GraniteConfig(**SIZES, **MULTIPLIERS)),
    "granitemoe": (
        "granitemoe",
        transformers.GraniteMoeConfig(**SIZES, **MULTIPLIERS, **FEW_EXPERTS),
    ),
    "granitemoeshared": (
        "granitemoe",
        transformers.GraniteMoeSharedConfig(
            **SIZES, **MULTIPLIERS, **FEW_EXPERTS, shared_intermediate_size=12
        ),
    ),
    "glm4": ("glm4", transformers.Glm4Config(**SIZES, attention_bias=True)),
    "glm4_moe": (
        "glm4moe",
        transformers.Glm4MoeConfig(
            **SIZES,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            routed_scaling_factor=1.7,
        ),
    ),
    "cohere2": (
        "cohere2",
        transformers.Cohere2Config(**PLAIN_SIZES, sliding_window=12, logit_scale=0.3),
    ),
    "starcoder2": ("starcoder2", transformers.Starcoder2Config(**PLAIN_SIZES)),
    "seed_oss": ("seed_oss", transformers.SeedOssConfig(**SIZES)),
    "ernie4_5": ("ernie4_5", transformers.Ernie4_5Config(**SIZES)),
    "hunyuan": ("hunyuan-dense", transformers.HunYuanDenseV1Config(**SIZES)),
}
OLDER = ("llama", "smollm3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "mamba")
"""Architectures whose names are written out below; those of others are the `gguf` package's."""
ADDS_ONE = ("gemma2", "gemma3")
"""Their converters add 1 to the weights of norms."""


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from halves (i, i + d/2) to neighbours (2i, 2i + 1)."""
    halves = weight.view(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def packaged_tensors(architecture: str, model: Any) -> dict[str, Tensor]:
    """By the names that the `gguf` package gives them, changed as llama.cpp's converters change
    them.
    """
    config, state = model.config, dict(model.state_dict())
    (number,) = (each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        block = f"blk.{name.split('.')[2]}" if name.startswith("model.layers.") else ""
        if ".shared_mlp." in name:
            gate, up = value.chunk(2)
            shared = {"gate": gate, "up": up} if "input" in name else {"down": value}
            tensors |= {f"{block}.ffn_{part}_shexp.weight": rows for part, rows in shared.items()}
            continue
        if name.endswith((".input_linear.weight", ".experts.gate_up_proj")):
            tensors[f"{block}.ffn_gate_exps.weight"], tensors[f"{block}.ffn_up_exps.weight"] = (
                value.chunk(2, 1)
            )
            continue
        if name.endswith((".output_linear.weight", ".experts.down_proj")):
            tensors[f"{block}.ffn_down_exps.weight"] = value
            continue
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace(".router.weight", ".router.layer.weight")  # as Granite's files have it
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        if architecture in ADDS_ONE and "norm" in found:
            value = value + 1
        if architecture in ("granite", "granitemoe") and found.rsplit(".", 2)[-2] in (
            "attn_q",
            "attn_k",
        ):
            value = interleave(
                value,
                config.num_attention_heads if "attn_q" in found else config.num_key_value_heads,
            )
        tensors[found] = value
    return tensors


def packaged_settings(config: Any) -> dict[str, float | int]:
    """What converters write besides what all models have, by the key after the architecture's name."""
    keys = {
        "sliding_window": "attention.sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
        "logit_scale": "logit_scale",
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "norm_epsilon": "attention.layer_norm_epsilon",
        "n_routed_experts": "expert_count",
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    }
    return {
        key: getattr(config, name)
        for name, key in keys.items()
        if getattr(config, name, None) is not None
    }


def gguf_tensors(architecture: str, model: Any) -> dict[str, Tensor]:
    if architecture not in OLDER:
        return packaged_tensors(architecture, model)
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
        if architecture in ("llama", "smollm3") and stem in (
            "self_attn.q_proj",
            "self_attn.k_proj",
        ):
            heads = (
                config.num_attention_heads
                if stem.endswith("q_proj")
                else config.num_key_value_heads
            )
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
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in packaged_settings(config).items() if architecture not in OLDER else ():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[
            type(value)
        ]
        add(f"{architecture}.{key}", value)
    if isinstance(config, transformers.MistralConfig):
        writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_freq_base(rope["rope_theta"])
    tensors = gguf_tensors(architecture, model)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(rope, config.head_dim)
    if rope["rope_type"] == "longrope":
        factor = config.max_position_embeddings / rope["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(factor) / math.log(rope["original_max_position_embeddings"]))
        )
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for kind in ("long", "short"):
            tensors[f"rope_factors_{kind}.weight"] = torch.tensor(rope[f"{kind}_factor"])
    if hasattr(config, "num_experts_per_tok") and not hasattr(config, "n_routed_experts"):
        writer.add_expert_count(4)
    if hasattr(config, "num_experts_per_tok"):
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
    plain = 1.0 / rope["rope_theta"] ** (
        torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    )
    factors = []
    for wavelength in (2 * torch.pi / plain).tolist():
        low, high, old = (
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", MODELS)
def test_gguf_model_matches_transformers(name: str, tmp_path: Path) -> None:
    architecture, config = MODELS[name]
    model = random_model(config, seed=3)
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, model)
    files = open_model(path)
    decoder = load_decoder(files, ReferenceKernels(), torch.float32, torch.device("cpu"))
    tokens = torch.randint(64, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    torch.testing.assert_close(
        all_logits(decoder, tokens), reference_logits(model, tokens), atol=1e-4, rtol=0
    )
    assert files.spec.eos_token_ids == (2,)


def test_gguf_with_a_missing_tensor_names_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", random_model(MODELS["llama"][1], 0), **{"blk.2.attn_k.weight": None})
    with pytest.raises(
        ModelFormatError, match=r"blk\.2\.attn_k\.weight of shape 16 x 32 is missing"
    ):
        load_decoder(open_model(path), ReferenceKernels(), torch.float32, torch.device("cpu"))


def test_gguf_with_a_wrong_shape_says_expected_and_got(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(
        path,
        "llama",
        random_model(MODELS["llama"][1], 0),
        **{"blk.1.ffn_up.weight": torch.ones(47, 32)},
    )
    with pytest.raises(ModelFormatError, match=r"blk\.1\.ffn_up\.weight .*48 x 32.* has 47 x 32"):
        load_decoder(open_model(path), ReferenceKernels(), torch.float32, torch.device("cpu"))


def test_gguf_with_an_unexpected_tensor_names_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(
        path,
        "llama",
        random_model(MODELS["llama"][1], 0),
        **{"blk.0.attn_sinks.weight": torch.ones(4)},
    )
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
    torch.testing.assert_close(
        cos_sin_table(llama3, 16, 300), cos_sin_table(by_factors, 16, 300), atol=1e-4, rtol=0
    )


def metadata_spec(architecture: str, **settings: Any) -> ModelSpec:
    sizes = {
        "embedding_length": 176, "block_count": 1, "feed_forward_length": 8, "attention.head_count": 4,
        "context_length": 64, "vocab_size": 8, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    named = {f"{architecture}.{key}": value for key, value in (sizes | settings).items()}
    return read_gguf_spec(
        Checkpoint("gguf", {}, {}, {"general.architecture": architecture, **named}), "model.gguf"
    )


def test_a_head_of_unknown_size_is_a_whole_share_of_the_hidden_size() -> None:
    assert metadata_spec("llama").head_shapes[0].head_dim == 44
    with pytest.raises(
        ModelFormatError, match=r"embedding_length should be a multiple of the 4 attention heads"
    ):
        metadata_spec("llama", embedding_length=178)


@pytest.mark.parametrize("rotated", range(2, 45, 2))
def test_so_many_dimensions_are_rotated_as_the_file_says(rotated: int) -> None:
    """30 of 44 came out as 29 by way of a share, and was refused."""
    rope = metadata_spec("glm4", **{"rope.dimension_count": rotated}).layers[0].rope
    assert rope is not None
    assert (rope.rotated or 44) == rotated
