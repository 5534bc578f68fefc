"""Scales of an FP8 cache in checkpoints, by the rules of each tool that writes them; and what is
wrong with some.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.backends.select import device_of
from quire.checkpoints.checkpoint import StoredCache
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.models.load import open_model
from quire.models.spec import ModelSpec
from quire.runner.dtypes import pick_cache_dtype
from quire.runner.kv_cache import KVCache
from quire.tools.quantize import quantize_model
from tests.decoding import load_decoder
from tests.models.storing_kernels import StoringKernels

CPU = torch.device("cpu")
HIDDEN = 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": HIDDEN,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
SCHEME = FLOAT | {"strategy": "tensor", "dynamic": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "kv_cache_scheme": SCHEME,
}
COMPRESSED["config_groups"] = {
    "group_0": {"targets": ["Linear"], "weights": FLOAT | {"strategy": "channel"}}
}
ONLY_CACHE = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "kv_cache_scheme": SCHEME,
}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_scheme": FLOAT | {"dynamic": False},
}
WANTED = ((0.25, 1.5), (0.0078125, 3.0))


def write(folder: Path, quantization: dict[str, Any] | None, scales: dict[str, Tensor]) -> None:
    """A model of plain numbers (layers may be left out of the quantisation), and these tensors."""
    torch.manual_seed(0)
    named = {
        name: torch.randn(64, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    named["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in ("model.layers.0.", "model.layers.1."):
        for name in ("q", "k", "v", "o"):
            named[f"{layer}self_attn.{name}_proj.weight"] = torch.randn(HIDDEN, HIDDEN)
        for name in ("gate", "up", "down"):
            named[f"{layer}mlp.{name}_proj.weight"] = torch.randn(HIDDEN, HIDDEN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            named[f"{layer}{name}.weight"] = torch.ones(HIDDEN)
    config = CONFIG if quantization is None else CONFIG | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(named | scales, folder / "model.safetensors")


def read(folder: Path) -> ModelSpec:
    """Its spec; that it can be loaded means that no tensor was left over."""
    return load_decoder(open_model(folder), StoringKernels(), torch.float32, CPU).spec


def scales_of(spec: ModelSpec) -> tuple[tuple[float, float], ...]:
    """As the cache has them, which has none but for FP8."""
    plain, fp8 = (
        KVCache(spec, 1, 0, 16, dtype, CPU).layers for dtype in (torch.float32, torch.float8_e4m3fn)
    )
    assert all(layer.fp8_scales == (1.0, 1.0) for layer in plain)
    return tuple(layer.fp8_scales for layer in fp8)


def named(
    key: str, value: str, shape: tuple[int, ...] = (1,), dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    return {
        f"model.layers.{i}.self_attn.{name}": torch.tensor(scale, dtype=dtype).reshape(shape)
        for i, pair in enumerate(WANTED)
        for name, scale in zip((key, value), pair, strict=True)
    }


LAYOUTS = {
    "compressed-tensors": (COMPRESSED, named("k_scale", "v_scale", dtype=torch.bfloat16), "fp8"),
    "compressed-tensors, the cache alone": (ONLY_CACHE, named("k_scale", "v_scale"), "fp8"),
    "earlier compressed-tensors": (
        COMPRESSED,
        named("k_proj.output_scale", "v_proj.output_scale"),
        "fp8",
    ),
    "modelopt": (MODELOPT, named("k_proj.k_scale", "v_proj.v_scale", ()), "fp8"),
    "modelopt, one projection": (
        MODELOPT,
        named("qkv_proj.k_scale", "qkv_proj.v_scale", ()),
        "fp8",
    ),
    "vllm": ({"quant_method": "fp8"}, named("attn.k_scale", "attn.v_scale", ()), ""),
    "autofp8": (
        {"quant_method": "fp8", "kv_cache_scheme": "static"},
        named("k_scale", "v_scale"),
        "",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_scales_of_each_layout_are_read(tmp_path: Path, name: str) -> None:
    """And what is for engines that round queries to FP8 too is left out."""
    quantization, scales, format = LAYOUTS[name]
    unused = {
        f"model.layers.0.self_attn.{end}": torch.ones(1) for end in ("q_scale", "attn.prob_scale")
    }
    write(
        tmp_path,
        quantization,
        scales | unused | {"model.layers.0.mlp.up_proj.input_scale": torch.ones(1)},
    )
    spec = read(tmp_path)
    assert scales_of(spec) == WANTED
    assert spec.cache.format == format


def test_one_scale_for_both_and_none_at_all(tmp_path: Path) -> None:
    write(
        tmp_path, {"quant_method": "fp8"}, {"model.layers.1.self_attn.kv_scale": torch.tensor(0.5)}
    )
    spec = read(tmp_path)
    assert scales_of(spec) == ((1.0, 1.0), (0.5, 0.5))
    write(tmp_path, COMPRESSED, {})
    spec = read(tmp_path)
    assert spec.cache.format == "fp8"
    assert scales_of(spec) == ((1.0, 1.0), (1.0, 1.0))


def test_what_earlier_versions_of_modelopt_wrote_in_a_file_beside(tmp_path: Path) -> None:
    write(tmp_path, None, named("k_proj.k_scale", "v_proj.v_scale", ()))
    beside = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    spec = read(tmp_path)
    assert spec.cache.format == "fp8"
    assert scales_of(spec) == WANTED


@pytest.mark.parametrize(
    ("quantization", "scales", "says"),
    [
        (
            COMPRESSED | {"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}},
            torch.ones(2, 1, 1),
            "strategy 'attn_head'",
        ),
        (COMPRESSED | {"kv_cache_scheme": SCHEME | {"type": "int"}}, torch.ones(1), "type 'int'"),
        (
            MODELOPT | {"kv_cache_scheme": None, "kv_cache_quant_algo": "NVFP4"},
            torch.ones(1),
            "'NVFP4'",
        ),
    ],
)
def test_scales_of_other_caches_are_left_out_and_said_where_fp8_is_wanted(
    tmp_path: Path, quantization: dict[str, Any], scales: Tensor, says: str
) -> None:
    write(
        tmp_path,
        quantization,
        {f"model.layers.0.self_attn.{side}_scale": scales.clone() for side in "kv"},
    )
    spec = read(tmp_path)
    assert scales_of(spec) == ((1.0, 1.0), (1.0, 1.0))
    assert pick_cache_dtype("auto", torch.float32, device_of(CPU), spec.cache) == torch.float32
    with pytest.raises(UnsupportedModelError, match=f"the checkpoint's scales are for {says}"):
        pick_cache_dtype("fp8", torch.float32, device_of(CPU), spec.cache)


def test_scales_are_not_lost_by_quantising(tmp_path: Path) -> None:
    write(tmp_path, ONLY_CACHE, named("k_scale", "v_scale"))
    with pytest.raises(UnsupportedModelError, match="scales for the keys and values of its cache"):
        quantize_model(tmp_path, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


K, V = "model.layers.1.self_attn.k_scale", "model.layers.1.self_attn.v_scale"


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({K: torch.tensor(float("nan"))}, rf"{K}': expected a scale above zero, got nan"),
        ({K: torch.tensor(float("inf"))}, rf"{K}': expected a scale above zero, got inf"),
        ({K: torch.tensor(0.0)}, rf"{K}': expected a scale above zero, got 0.0"),
        ({V: torch.tensor(-1.0)}, rf"{V}': expected a scale above zero, got -1.0"),
        (
            {V: torch.ones(2)},
            rf"{V}': expected one number .* for all heads of its layer, got F32 of shape \[2\]",
        ),
        (
            {V: torch.ones(1, dtype=torch.int32)},
            rf"{V}': expected one number .*, got I32 of shape \[1\]",
        ),
        ({V: None}, rf"{K}': expected a scale of the values beside it, got none"),
        ({K: None}, rf"{V}': expected a scale of the keys beside it, got none"),
        (
            {"model.layers.1.self_attn.k_proj.k_scale": torch.ones(1)},
            "expected one scale for each layer's keys",
        ),
        ({"model.k_scale": torch.ones(1)}, "'model.k_scale': expected a scale of some layer's"),
    ],
    ids=str,
)
def test_damaged_scales_are_named(
    tmp_path: Path, scales: dict[str, Tensor | None], message: str
) -> None:
    all_of_them = named("k_scale", "v_scale") | scales
    write(
        tmp_path,
        COMPRESSED,
        {name: scale for name, scale in all_of_them.items() if scale is not None},
    )
    with pytest.raises(ModelFormatError, match=message) as error:
        open_model(tmp_path)
    assert "model.safetensors" in str(error.value)


def test_auto_follows_the_checkpoint_where_the_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = device_of(torch.device("cuda"))
    for capability, expected in (((9, 0), torch.float8_e4m3fn), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        assert pick_cache_dtype("auto", torch.bfloat16, gpu, StoredCache("fp8")) == expected
    assert pick_cache_dtype("model", torch.bfloat16, gpu, StoredCache("fp8")) == torch.bfloat16
    assert (
        pick_cache_dtype("auto", torch.bfloat16, device_of(CPU), StoredCache("fp8"))
        == torch.bfloat16
    )
