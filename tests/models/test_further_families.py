"""Published sizes of families that came late, and what of their settings is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.ops import AttentionSpec
from quire.kernels.reference import ReferenceKernels
from quire.models.families import family_named
from quire.models.load import open_model
from quire.models.model_config import read_config
from quire.models.spec import ModelSpec
from quire.models.weight_plan import plan_weights
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
    # what its folder says of the text part; the rest is what the class assumes
    "Gemma 3 4B": (
        "gemma3_text",
        {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34},
        3_880_263_168,
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
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "later tokens"),
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


def test_triton_declines_chunks() -> None:
    kernels = pytest.importorskip("quire.backends.triton.kernels").TritonKernels(torch.float32)
    attention = AttentionSpec(None, 1.0)  # type: ignore[arg-type]
    assert kernels.has_kernels_for(attention)
    assert not kernels.has_kernels_for(replace(attention, chunk=16))
