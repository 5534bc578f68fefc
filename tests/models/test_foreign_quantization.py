"""Checkpoints as other tools write them: FP8, AWQ, GPTQ and compressed-tensors, by the rules of
their layouts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelFormatError
from quire.kernels.formats import FORMATS, Format
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from quire.models.load import open_model
from quire.tools.quantize import quantize_model
from tests.decoding import load_decoder

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
BY_64 = {"strategy": "group", "group_size": 64}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ: the nibble i of a number is the output with this offset."""
PRODUCTS = ("_proj.weight",)


class StoringKernels(ReferenceKernels):
    """Keeps every format as it is stored; the reference then expands it at each product."""

    def computes(self, format: Format) -> bool:
        return True


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_plain(folder)
    return folder


def write_plain(folder: Path) -> None:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).save_pretrained(
        folder
    )


def rewrite(plain: Path, out: Path, quantization: dict[str, Any], change: Any) -> dict[str, Tensor]:
    """A folder whose products are stored as `change` makes them; returns the numbers they stand
    for.
    """
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": quantization}
    (out / "config.json").write_text(json.dumps(config))
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        # some layers are left out of the quantisation
        if name.endswith(PRODUCTS) and "o_proj" not in name:
            made, meant[name] = change(name.removesuffix(".weight"), tensor)
            stored |= made
        else:
            stored[name] = meant[name] = tensor
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, out / "model.safetensors"
    )
    return meant


def load(folder: Path, quantization: str = "auto") -> Decoder:
    return load_decoder(
        open_model(folder), StoringKernels(), torch.float32, CPU, quantization=quantization
    )


def numbers(decoder: Decoder, name: str) -> Tensor:
    return torch.cat([part.format.expand(*part.tensors) for part in decoder.weights[name].parts])


def check(folder: Path, meant: dict[str, Tensor], format: str) -> None:
    """All that was stored is there, in its format and expanded, and the rest as it was."""
    layer = "model.layers.0."
    stored, expanded = load(folder), load(folder, "none")
    for decoder in (stored, expanded):
        qkv = numbers(decoder, "layers.0.attention.qkv.weight")
        assert torch.equal(
            qkv, torch.cat([meant[f"{layer}self_attn.{side}_proj.weight"] for side in "qkv"])
        )
        gate_up = numbers(decoder, "layers.0.mlp.gate_up.weight")
        assert torch.equal(
            gate_up, torch.cat([meant[f"{layer}mlp.{side}_proj.weight"] for side in ("gate", "up")])
        )
        assert torch.equal(
            numbers(decoder, "layers.0.mlp.down.weight"), meant[f"{layer}mlp.down_proj.weight"]
        )
        output = decoder.weights["layers.0.attention.output.weight"]
        assert torch.equal(output.tensor, meant[f"{layer}self_attn.o_proj.weight"])
    assert [part.format.name for part in stored.weights["layers.0.mlp.gate_up.weight"].parts] == [
        format
    ]
    assert expanded.weights["layers.0.mlp.gate_up.weight"].is_dense
    assert open_model(folder).block_formats() == [format]


def fp8(numbers: Tensor, scales: Tensor) -> Tensor:
    return (numbers / scales).clamp(-448, 448).to(torch.float8_e4m3fn)


def by_channel(end: str) -> Any:
    def change(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / 448
        codes = fp8(weight, scales)
        return {f"{module}.weight": codes, f"{module}.weight{end}": scales}, codes.float() * scales

    return change


def by_tensor(shape: tuple[int, ...]) -> Any:
    def change(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.abs().amax() / 448
        codes = fp8(weight, scale)
        made = {f"{module}.weight": codes, f"{module}.weight_scale": scale.view(shape)}
        return made | {f"{module}.input_scale": torch.tensor(0.5)}, codes.float() * scale

    return change


def by_block(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks of 128 by 128, the last one cut off: the keys have 64 outputs."""
    scales = torch.rand(-(-weight.shape[0] // 128), weight.shape[1] // 128) / 1000 + 1e-3
    each = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)
    codes = fp8(weight, each)
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales}, codes.float() * each


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
    }


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}


@pytest.mark.parametrize(
    ("quantization", "change", "format"),
    [
        (compressed("float-quantized", **FLOAT, strategy="channel"), by_channel("_scale"), "FP8"),
        (compressed("float-quantized", **FLOAT, strategy="tensor"), by_tensor((1,)), "FP8"),
        (
            compressed("float-quantized", **FLOAT, strategy="block", block_structure=[128, 128]),
            by_block,
            "FP8_G128",
        ),
        (
            {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "activation_scheme": "dynamic",
            },
            by_block,
            "FP8_G128",
        ),
        ({"quant_method": "fp8", "activation_scheme": "static"}, by_tensor(()), "FP8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, by_tensor(()), "FP8"),
    ],
)
def test_fp8(
    plain: Path, tmp_path: Path, quantization: dict[str, Any], change: Any, format: str
) -> None:
    check(tmp_path, rewrite(plain, tmp_path, quantization, change), format)


def four_bits(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [out, in], scales and zero points [out, groups], and the numbers these stand for."""
    out, inner = weight.shape
    groups = weight.view(out, -1, group if group > 0 else inner)
    scales = (groups.abs().amax(-1) / 7).half()
    zeros = torch.full(scales.shape, 8) if symmetric else torch.randint(1, 16, scales.shape)
    codes = (groups / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, 15)
    meant = ((codes - zeros.unsqueeze(-1)) * scales.unsqueeze(-1).float()).view(out, inner)
    return codes.int().view(out, inner), scales, zeros.int(), meant


def packed(codes: Tensor, along: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight codes in each int32, the first in the lowest bits."""
    parts = codes.unflatten(along, (-1, 8)).unbind(along + 1)
    total = torch.zeros_like(parts[0], dtype=torch.int64)
    for place, offset in enumerate(order):
        total |= parts[offset].long() << 4 * place
    return torch.where(total >= 2**31, total - 2**32, total).int()


def awq(group: int) -> Any:
    def change(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros, meant = four_bits(weight, group, symmetric=False)
        stored = {
            f"{module}.qweight": packed(codes.t(), 1, AWQ_ORDER),
            f"{module}.qzeros": packed(zeros.t(), 1, AWQ_ORDER),
            f"{module}.scales": scales.t(),
        }
        return stored, meant

    return change


def gptq(group: int, less: int, symmetric: bool) -> Any:
    def change(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros, meant = four_bits(weight, group, symmetric)
        stored = {
            f"{module}.qweight": packed(codes.t(), 0),
            f"{module}.qzeros": packed(zeros.t() - less, 1),
            f"{module}.scales": scales.t(),
            f"{module}.g_idx": torch.arange(weight.shape[1], dtype=torch.int32)
            // (group if group > 0 else 10**6),
        }
        return stored, meant

    return change


def pack_quantized(group: int, symmetric: bool) -> Any:
    def change(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros, meant = four_bits(weight, group, symmetric)
        stored = {f"{module}.weight_packed": packed(codes, 1), f"{module}.weight_scale": scales}
        stored[f"{module}.weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:
            stored[f"{module}.weight_zero_point"] = packed(zeros, 0)
        return stored, meant

    return change


@pytest.mark.few(8)
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize(
    "tool", ["awq", "gptq", "gptq_v2", "symmetric gptq", "pack-quantized", "asymmetric"]
)
def test_four_bits(plain: Path, tmp_path: Path, tool: str, group: int) -> None:
    torch.manual_seed(group + 2)
    bits = {"bits": 4, "group_size": group}
    if tool == "awq":
        settings, change = (
            {"quant_method": "awq", "version": "gemm", "zero_point": True} | bits,
            awq(group),
        )
    elif "gptq" in tool:
        version = "gptq_v2" if tool == "gptq_v2" else "gptq"
        settings = {"quant_method": "gptq", "desc_act": False, "checkpoint_format": version} | bits
        change = gptq(group, 0 if tool == "gptq_v2" else 1, "symmetric" in tool)
    else:
        symmetric = tool != "asymmetric"
        strategy = (
            {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
        )
        settings = compressed(
            "pack-quantized", num_bits=4, type="int", symmetric=symmetric, **strategy
        )
        change = pack_quantized(group, symmetric)
    meant = rewrite(plain, tmp_path, settings, change)
    is_q4_0 = tool == "pack-quantized" and group == 32
    check(tmp_path, meant, "Q4_0" if is_q4_0 else f"INT4_G{group}" if group > 0 else "INT4")


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64}
UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "harmed", "message"),
    [
        (
            "scales",
            None,
            r"up_proj\.scales': expected scales of shape \[2, 256\] for '.*qweight', got none",
        ),
        ("scales", torch.ones(4, 256), r"up_proj\.scales'.*got F32 of shape \[4, 256\]"),
        (
            "scales",
            torch.full((2, 256), float("inf")),
            r"a scale of its INT4_G64 numbers is infinite",
        ),
        (
            "qzeros",
            torch.zeros(2, 256, dtype=torch.int32),
            r"qzeros': expected zero points, I32 of shape \[2, 32\]",
        ),
        (
            "qweight",
            torch.zeros(128, 32),
            r"up_proj\.qweight': expected I32 in two dimensions, got F32",
        ),
        (
            "qweight",
            torch.zeros(96, 32, dtype=torch.int32),
            "qweight': expected whole groups of 64 inputs, got 96",
        ),
    ],
)
def test_what_is_damaged_is_named(
    plain: Path, tmp_path: Path, name: str, harmed: Tensor | None, message: str
) -> None:
    rewrite(plain, tmp_path, AWQ, awq(64))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if harmed is None:
        del tensors[f"{UP}.{name}"]
    else:
        tensors[f"{UP}.{name}"] = harmed
    save_file(tensors, file)
    with pytest.raises(ModelFormatError, match=message) as error:
        load(tmp_path)
    assert "model.safetensors" in str(error.value)


def test_fp8_scales_of_no_known_shape_are_named(plain: Path, tmp_path: Path) -> None:
    rewrite(plain, tmp_path, {"quant_method": "fp8"}, by_tensor(()))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{UP}.weight_scale"] = torch.ones(3)
    save_file(tensors, file)
    with pytest.raises(
        ModelFormatError, match=r"weight_scale': expected scales of shape \[\] or \[1\] or \[256\]"
    ):
        open_model(tmp_path)


def test_what_quire_writes_in_fp8_it_reads(plain: Path, tmp_path: Path) -> None:
    quantize_model(plain, tmp_path / "out", "fp8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "float-quantized"
    stored, made = load(tmp_path / "out"), load(plain, "fp8")
    for name, weight in made.weights.items():
        got = stored.weights[name]
        assert [part.format for part in got.parts] == [part.format for part in weight.parts]
        assert all(
            torch.equal(mine.float(), theirs.float())
            for one, other in zip(got.parts, weight.parts, strict=True)
            for mine, theirs in zip(one.tensors, other.tensors, strict=True)
        ), name
    assert made.weights["layers.0.mlp.down.weight"].format == FORMATS["FP8"]
