"""GGUF files of families whose layers keep states, against the folders of safetensors that they were
made of: names, settings, and what llama.cpp's converter does to the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from torch import Tensor

from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.reference import ReferenceKernels
from quire.models.load import open_model
from quire.sampling_params import SamplingParams
from tests.decoding import load_decoder
from tests.models.random_configurations import random_model
from tests.random_models import Bench

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
Tensors = dict[str, Tensor]
Settings = dict[str, Any]


@dataclass
class Written:
    """One family's models and how its GGUF files are written."""

    architecture: str
    config: Any
    settings: Settings
    """By the keys after the architecture's name, besides those of all families."""
    change: Callable[[Any, str, Tensor], dict[str, Tensor]]
    """What becomes of a tensor, by names that the `gguf` package knows."""
    is_exact: bool = True


def kv_heads(config: Any) -> list[int]:
    return [
        config.num_key_value_heads if "attention" in kind and "linear" not in kind else 0
        for kind in config.layer_types
    ]


def lfm2_tensor(config: Any, name: str, value: Tensor) -> Tensors:
    name = name.replace("expert_bias", "expert_bias.bias")
    if name.endswith("experts.gate_up_proj"):
        gate, up = value.chunk(2, 1)
        stem = name.removeprefix("model.").removesuffix("gate_up_proj")
        return {f"{stem}w1.weight": gate, f"{stem}w3.weight": up}
    if name.endswith("experts.down_proj"):
        return {name.removeprefix("model.").replace("down_proj", "w2.weight"): value}
    return {name: value.squeeze(1) if "conv.conv" in name else value}


LFM2_KINDS = ["conv", "full_attention", "conv", "full_attention"]
LFM2 = transformers.Lfm2Config(
    **SIZES, layer_types=LFM2_KINDS, conv_L_cache=4, block_auto_adjust_ff_dim=False
)
LFM2_TIED = transformers.Lfm2Config(
    **SIZES,
    layer_types=LFM2_KINDS,
    block_multiple_of=8,
    norm_eps=1e-3,
    tie_word_embeddings=True,
)
LFM2_MOE = transformers.Lfm2MoeConfig(
    **SIZES,
    layer_types=LFM2_KINDS,
    num_dense_layers=1,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
)


def lfm2_settings(config: Any) -> Settings:
    return {
        "shortconv.l_cache": config.conv_L_cache,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.head_count_kv": kv_heads(config),
    }


MODELS: dict[str, Written] = {
    "lfm2": Written("lfm2", LFM2, lfm2_settings(LFM2), lfm2_tensor),
    "lfm2 tied": Written(
        "lfm2", LFM2_TIED, lfm2_settings(LFM2_TIED) | {"feed_forward_length": 32}, lfm2_tensor
    ),
    "lfm2 with experts": Written(
        "lfm2moe",
        LFM2_MOE,
        lfm2_settings(LFM2_MOE)
        | {
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 12,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
        lfm2_tensor,
    ),
}


def settings_of(written: Written) -> Settings:
    config = written.config
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
        **written.settings,
    }


def tensors_of(written: Written, model: Any) -> Tensors:
    config = model.config
    (number,) = (
        each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == written.architecture
    )
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found: Tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for changed, own in written.change(config, name, value).items():
            stored = names.get_name(changed, try_suffixes=(".weight", ".bias")) or changed
            assert stored.startswith(("blk.", "token_embd", "output")), changed
            found[stored] = own
    return found


def write(path: Path, written: Written, model: Any, settings: Settings, **changes: Any) -> None:
    """`changes` are tensors; None: it is left out."""
    writer = gguf.GGUFWriter(path, written.architecture)
    for name, value in settings.items():
        key = f"{written.architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add[type(value)](key, value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in (tensors_of(written, model) | changes).items():
        if tensor is not None:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(path: Path) -> Tensor:
    """Of what follows a prompt, which is computed in two parts."""
    files = open_model(path)
    decoder = load_decoder(files, ReferenceKernels(), torch.float32, torch.device("cpu"))
    prompt = torch.randint(3, 64, (75,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = Bench(decoder, max_batched_tokens=64, max_num_seqs=2).run([prompt], [params])
    return torch.stack([found.logits["0", position] for position in range(75, 81)])


@pytest.mark.parametrize("name", MODELS)
def test_gguf_of_layers_with_states_is_the_folder_it_was_made_of(name: str, tmp_path: Path) -> None:
    written = MODELS[name]
    model, path = random_model(written.config, seed=3), tmp_path / "model.gguf"
    model.save_pretrained(tmp_path)
    write(path, written, model, settings_of(written))
    from_gguf, from_folder = open_model(path).spec, open_model(tmp_path).spec
    assert rounded(from_gguf) == rounded(from_folder)
    own, expected = logits(path), logits(tmp_path)
    if written.is_exact:
        assert torch.equal(own, expected)
    else:
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


def rounded(spec: Any) -> Any:
    """GGUF files hold settings in float32."""
    return replace(spec, rms_norm_eps=float(torch.tensor(spec.rms_norm_eps)))


def refuse(written: Written, path: Path, says: str, settings: Settings, **changes: Any) -> None:
    model = random_model(written.config, seed=3)
    write(path, written, model, settings_of(written) | settings, **changes)
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=says):
        logits(path)


NEEDED = [
    *(("lfm2", key) for key in ("shortconv.l_cache", "feed_forward_length")),
    *(("lfm2", key) for key in ("attention.head_count_kv", "attention.layer_norm_rms_epsilon")),
    *(("lfm2 with experts", f"expert_{key}count") for key in ("", "used_")),
    ("lfm2 with experts", "leading_dense_block_count"),
]


@pytest.mark.parametrize(("name", "key"), NEEDED)
def test_a_needed_key_that_is_left_out_is_named(name: str, key: str, tmp_path: Path) -> None:
    written = MODELS[name]
    refuse(
        written,
        tmp_path / "model.gguf",
        rf"model\.gguf: {written.architecture}\.{key} is missing",
        {key: None},
    )


REFUSED: list[tuple[str, Settings, str]] = [
    ("lfm2", {"shortconv.l_cache": 3}, r"blk\.0\.shortconv\.conv\.weight .*32 x 3 .*has 32 x 4"),
    ("lfm2", {"attention.head_count_kv": [0, 2, 0]}, r"head_count_kv should be a list of 4"),
    ("lfm2", {"attention.head_count_kv": [0, 2, 0, 4]}, r"head_count_kv should be a list of 4"),
    ("lfm2", {"attention.head_count_kv": [2, 2, 0, 2]}, r"blk\.0\.attn_q.*is missing"),
    ("lfm2", {"attention.sliding_window": 8}, r"lfm2\.attention\.sliding_window 8 is not"),
    ("lfm2 with experts", {"expert_gating_func": 1}, r"lfm2moe\.expert_gating_func 1 is not"),
]


@pytest.mark.parametrize(("name", "settings", "says"), REFUSED)
def test_settings_that_do_not_fit_are_named(
    name: str, settings: Settings, says: str, tmp_path: Path
) -> None:
    refuse(MODELS[name], tmp_path / "model.gguf", says, settings)


def test_a_tensor_of_a_state_that_is_left_out_is_named(tmp_path: Path) -> None:
    says = r"blk\.2\.shortconv\.conv\.weight of shape 32 x 4 is missing"
    refuse(
        MODELS["lfm2"], tmp_path / "model.gguf", says, {}, **{"blk.2.shortconv.conv.weight": None}
    )
