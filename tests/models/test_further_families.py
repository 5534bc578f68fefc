"""Published sizes of families that came late, and what of their settings is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from typer.testing import CliRunner

from quire.cli.main import app
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.ops import AttentionSpec
from quire.kernels.reference import ReferenceKernels
from quire.models.families import family_named
from quire.models.load import open_model
from quire.models.model_config import read_config
from quire.models.spec import ModelSpec, alibi_slopes
from quire.models.weight_plan import plan_weights
from quire.tools.plan.cards import CardKernels
from tests.models.random_configurations import config_class, random_model


def read(folder: Path, family: str, **values: Any) -> ModelSpec:
    said = {"architectures": [family_named(family).architectures[0]], "eos_token_id": 2, **values}
    (folder / "config.json").write_text(json.dumps(said))
    return read_config(folder / "config.json")


PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "GPT-2": ("gpt2", {"vocab_size": 50_257}, 124_439_808),
    "GPT-J 6B": ("gptj", {"vocab_size": 50_400}, 6_050_882_784),
    "Pythia 70M": (
        "gpt_neox",
        {
            "vocab_size": 50_304,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
        },
        70_426_624,
    ),
    "Falcon 7B": (
        "falcon",
        {
            "vocab_size": 65_024,
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
        },
        6_921_720_704,
    ),
    "Phi-2": (
        "phi",
        {
            "vocab_size": 51_200,
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "partial_rotary_factor": 0.4,
        },
        2_779_683_840,
    ),
    # without two rows of positions that no token has
    "OPT 125M": (
        "opt",
        {
            "vocab_size": 50_272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        },
        125_239_296 - 2 * 768,
    ),
    "BLOOM": (
        "bloom",
        {"vocab_size": 250_880, "n_embed": 14_336, "n_layer": 70, "num_attention_heads": 112},
        176_247_271_424,
    ),
    "MPT 7B": (
        "mpt",
        {
            "vocab_size": 50_432,
            "d_model": 4096,
            "n_heads": 32,
            "n_layers": 32,
            "expansion_ratio": 4,
            "max_seq_len": 2048,
            "learned_pos_emb": True,
            "no_bias": True,
            "norm_type": "low_precision_layernorm",
            "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch"},
        },
        6_649_286_656,
    ),
    # what its folder says of the text part; the rest is what the class assumes
    "Gemma 3 4B": (
        "gemma3_text",
        {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34},
        3_880_263_168,
    ),
}


def sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, key_heads: int, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        **more,
    }


TIED = {"tie_word_embeddings": True}
PUBLISHED |= {
    "Llama 3.2 1B": ("llama", sizes(128_256, 2048, 8192, 16, 32, 8, **TIED), 1_235_814_400),
    "Llama 3.1 8B": ("llama", sizes(128_256, 4096, 14_336, 32, 32, 8), 8_030_261_248),
    "Mistral 7B": ("mistral", sizes(32_000, 4096, 14_336, 32, 32, 8), 7_241_732_096),
    "Mixtral 8x7B": ("mixtral", sizes(32_000, 4096, 14_336, 32, 32, 8), 46_702_792_704),
    "SmolLM3 3B": ("smollm3", sizes(128_256, 2048, 11_008, 36, 16, 4), 3_075_098_624),
    "Qwen2.5 0.5B": ("qwen2", sizes(151_936, 896, 4864, 24, 14, 2, **TIED), 494_032_768),
    "Qwen1.5-MoE A2.7B": ("qwen2_moe", sizes(151_936, 2048, 5632, 24, 16, 16), 14_315_784_192),
    "Qwen3 0.6B": ("qwen3", sizes(151_936, 1024, 3072, 28, 16, 8, **TIED), 596_049_920),
    "Qwen3 30B A3B": (
        "qwen3_moe",
        sizes(151_936, 2048, 6144, 48, 32, 4, head_dim=128),
        30_532_122_624,
    ),
    "Qwen3-Next 80B A3B": ("qwen3_next", sizes(151_936, 2048, 5120, 48, 16, 2), 79_674_391_296),
    "Gemma 2B": ("gemma", sizes(256_000, 2048, 16_384, 18, 8, 1), 2_506_172_416),
    "Gemma 2 2B": ("gemma2", sizes(256_000, 2304, 9216, 26, 8, 4), 2_614_341_888),
    "Phi-3 mini": ("phi3", sizes(32_064, 3072, 8192, 32, 32, 32), 3_821_079_552),
    "Phi-1.5": (
        "phi",
        sizes(51_200, 2048, 8192, 24, 32, 32, partial_rotary_factor=0.5),
        1_418_270_720,
    ),
    "OLMo 2 7B": ("olmo2", sizes(100_352, 4096, 11_008, 32, 32, 32), 7_298_617_344),
    "OLMoE": ("olmoe", sizes(50_304, 2048, 1024, 16, 16, 16), 6_919_161_856),
    "gpt-oss 20B": (
        "gpt_oss",
        sizes(201_088, 2880, 2880, 24, 64, 8, num_local_experts=32),
        20_914_757_184,
    ),
    "StarCoder 2 3B": ("starcoder2", sizes(49_152, 3072, 12_288, 30, 24, 2), 3_030_371_328),
    "Command R": ("cohere", sizes(256_000, 8192, 22_528, 40, 64, 64), 34_980_831_232),
    "StableLM 2 1.6B": (
        "stablelm",
        sizes(100_352, 2048, 5632, 24, 32, 32, use_qkv_bias=True, partial_rotary_factor=0.25),
        1_644_515_328,
    ),
    "GLM-4-9B-0414": (
        "glm4",
        sizes(151_552, 4096, 13_696, 40, 32, 2, head_dim=128, attention_bias=True),
        9_400_279_040,
    ),
    "ERNIE 4.5 0.3B": (
        "ernie4_5",
        sizes(103_424, 1024, 3072, 18, 16, 2, head_dim=128, **TIED),
        360_748_032,
    ),
    "ERNIE 4.5 21B A3B": (
        "ernie4_5_moe",
        sizes(103_424, 2560, 12_288, 28, 20, 4, **TIED),
        21_825_437_888,
    ),
    "Seed-OSS 36B": (
        "seed_oss",
        sizes(155_136, 5120, 27_648, 64, 80, 8, head_dim=128),
        36_151_104_512,
    ),
    "dots.llm1": (
        "dots1",
        sizes(152_064, 4096, 10_944, 62, 32, 32)
        | {"n_routed_experts": 128, "n_shared_experts": 2, "moe_intermediate_size": 1408}
        | {"first_k_dense_replace": 1, "num_experts_per_tok": 6},
        142_774_381_696,
    ),
    "Apertus 8B": ("apertus", sizes(131_072, 4096, 21_504, 32, 32, 8), 8_053_338_176),
    "Granite 3.0 2B": ("granite", sizes(49_155, 2048, 8192, 40, 32, 8, **TIED), 2_533_531_648),
    "BLOOM 560M": (
        "bloom",
        {"vocab_size": 250_880, "hidden_size": 1024, "n_layer": 24, "n_head": 16},
        559_214_592,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_size(name: str, tmp_path: Path) -> None:
    family, values, count = PUBLISHED[name]
    assert read(tmp_path, family, **values).num_parameters == count


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("falcon", {"alibi": True}, "alibi True is not supported"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2"),
        (
            "falcon",
            {"new_decoder_architecture": True, "parallel_attn": False},
            "parallel_attn False is not",
        ),
        ("phi", {"qk_layernorm": True}, "qk_layernorm True"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before False"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim 16"),
        ("gpt2", {"n_embd": 32, "n_head": 4, "add_cross_attention": True}, "add_cross_attention"),
        ("gptj", {"n_embd": 32, "n_head": 4, "rotary_dim": 10}, "rotary_dim"),
        ("apertus", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm True",
        ),
        ("mpt", {"expansion_ratio": 2}, "expansion_ratio 2"),
        ("mpt", {"no_bias": False}, "no_bias False"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale 'inv_sqrt_d_model'"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type 'rmsnorm'"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config: alibi False"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config: qk_ln True"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "attn_config: prefix_lm True"),
        ("mpt", {"attn_config": {"kv_n_heads": 2}}, "attn_config: kv_n_heads 2"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type 'multiquery"),
        ("mpt", {"attn_config": {"alibi_bias_max": 0}}, "alibi_bias_max should be"),
        ("mpt", {"attn_config": {"clip_qkv": -1}}, "clip_qkv should be"),
        ("mpt", {"ffn_config": {"ffn_type": "mptglu"}}, "ffn_type 'mptglu'"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "later tokens"),
        (
            "gemma4_text",
            {"use_bidirectional_attention": "some"},
            "use_bidirectional_attention 'som",
        ),
        ("ernie4_5_moe", {"moe_norm_min": 0.2}, r"moe_norm_min should be at most 0\.09375"),
        (
            "gemma4_text",
            {"num_kv_shared_layers": 3, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "num_kv_shared_layers",
        ),
        ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("ministral3", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((UnsupportedModelError, ModelFormatError), match=message):
        read(tmp_path, family, **(SMALL | changes))


def test_a_number_in_the_files_that_the_kernels_have_built_in_must_be_that_one(
    tmp_path: Path,
) -> None:
    random_model(config_class("apertus")(**SMALL), 0).save_pretrained(tmp_path)
    open_model(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(one for one in tensors if one.endswith(".act_fn.beta"))
    save_file(tensors | {name: torch.tensor(0.25).to(tensors[name])}, file, {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"act_fn\.beta is not 0\.5"):
        open_model(tmp_path)


@pytest.mark.parametrize("heads", range(1, 21))
def test_slopes_are_those_of_both_papers_models(heads: int) -> None:
    bloom = _get_alibi_slopes(heads, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads, 8.0)), bloom, rtol=1e-6, atol=0)
    for most in (4, 8, 16):
        mpt = -build_mpt_alibi_tensor(heads, 2, most)[:, 0, 0]
        own = torch.tensor(alibi_slopes(heads, float(most)))
        torch.testing.assert_close(own, mpt, rtol=1e-6, atol=0)


class WithoutChunks(ReferenceKernels):
    """As the kernels for GPUs are."""

    def has_kernels_for(self, mixer: object) -> bool:
        return isinstance(mixer, AttentionSpec) and mixer.chunk is None


def test_attention_in_chunks_is_refused_where_no_kernel_computes_it(tmp_path: Path) -> None:
    values = SMALL | {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32}
    random_model(config_class("llama4_text")(**values), 0).save_pretrained(tmp_path)
    files, cpu = open_model(tmp_path), torch.device("cpu")
    with pytest.raises(UnsupportedModelError, match="attention_chunk_size 8192"):
        plan_weights(files, WithoutChunks(), torch.float32, cpu)
    spec = files.spec.with_attention(chunk=None)
    plan_weights(replace(files, spec=spec), WithoutChunks(), torch.float32, cpu)
    planned = CliRunner().invoke(app, ["plan", str(tmp_path / "config.json"), "--gpu", "h200"])
    assert isinstance(planned.exception, UnsupportedModelError)


def test_triton_declines_chunks() -> None:
    kernels = pytest.importorskip("quire.backends.triton.kernels").TritonKernels(torch.float32)
    attention = AttentionSpec(None, 1.0)  # type: ignore[arg-type]
    assert kernels.has_kernels_for(attention)
    assert not kernels.has_kernels_for(replace(attention, chunk=16))
    assert kernels.has_kernels_for(replace(attention, slopes=(0.5,)))
    planned = CardKernels((9, 0), torch.bfloat16)  # what a plan says of it is the same
    assert planned.has_kernels_for(attention)
    assert planned.has_kernels_for(replace(attention, slopes=(0.5,)))
    assert not planned.has_kernels_for(replace(attention, chunk=16))
