"""Each rank reads its rows from a checkpoint, and only them, in every layout that checkpoints have."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.backends.cpu.kernels import CpuKernels
from quire.checkpoints.safetensors_checkpoint import open_safetensors
from quire.errors import ModelFormatError
from quire.kernels.formats import Format
from quire.kernels.ops import Kernels
from quire.kernels.reference import ReferenceKernels
from quire.kernels.weights import Weight
from quire.models.config_parts import plain_attention
from quire.models.families import family_named
from quire.models.load import _Reading, open_model
from quire.models.names import gguf_pieces, huggingface_pieces
from quire.models.pieces import Piece
from quire.models.spec import ModelSpec, MoeSpec
from quire.models.weight_plan import ModelFiles, plan_weights
from quire.parallel.division import Division
from quire.parallel.files import divide_files
from quire.tools.quantize import quantize_model
from tests.models import test_foreign_quantization as foreign
from tests.parallel.ranks import divided
from tests.random_models import SPECS, WITH_STATES
from tests.test_quantized_exactness import widened

CPU = torch.device("cpu")


def files_of(
    spec: ModelSpec, pieces: list[Piece], folder: Path, dtype: torch.dtype = torch.float32
) -> ModelFiles:
    """A checkpoint with random numbers for these pieces."""
    generator = torch.Generator().manual_seed(1)
    parameters = spec.parameters()
    tensors = {
        one.name: torch.randn(one.shape(parameters[one.parameter]), generator=generator).to(dtype)
        for one in pieces
    }
    for one in pieces:
        if one.is_rate:  # of decays
            tensors[one.name] = -1 - tensors[one.name].abs()
    save_file(tensors, folder / "model.safetensors")
    return ModelFiles(spec, open_safetensors(folder), tuple(pieces))


def read_all(files: ModelFiles, quantization: str, kernels: Kernels) -> dict[str, Weight]:
    plan = plan_weights(files, kernels, torch.float32, CPU, quantization)
    with ThreadPoolExecutor(2) as readers:
        reading = _Reading(plan, readers, lambda done, total: None)
        return {name: reading.pop(name) for name in plan.parameters}


def check(
    files: ModelFiles, size: int, quantization: str = "auto", kernels: Kernels | None = None
) -> None:
    kernels = kernels or CpuKernels()
    whole = read_all(files, quantization, kernels)
    total = sum(files.checkpoint.tensors[piece.name].num_bytes for piece in files.pieces)
    for rank in range(size):
        division = Division(files.spec, rank, size)
        own = divide_files(files, division)
        expected = divided(whole, division)
        for name, weight in read_all(own, quantization, kernels).items():
            assert weight.shape == expected[name].shape, name
            for part, wanted in zip(weight.parts, expected[name].parts, strict=True):
                assert all(map(torch.equal, part.tensors, wanted.tensors)), name
        # of a tensor with inputs before outputs a rank's part is not in one piece: all is read
        if not any(piece.is_turned for piece in files.pieces):
            assert sum(info.num_bytes for info in own.checkpoint.tensors.values()) < 0.8 * total


def layouts(spec: ModelSpec) -> Iterator[list[Piece]]:
    yield list(huggingface_pieces(spec, ()))
    if family_named(spec.family).gguf is not None:
        yield list(gguf_pieces(spec, ()))
    if any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers):  # experts that come stacked
        present = {f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(spec.num_layers)}
        yield list(huggingface_pieces(spec, present))


@pytest.mark.few(6)
@pytest.mark.parametrize("family", SPECS)
def test_a_rank_reads_its_rows_in_every_layout(family: str, tmp_path: Path) -> None:
    for number, pieces in enumerate(layouts(SPECS[family])):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = files_of(SPECS[family], pieces, folder)
        check(files, 2)


@pytest.mark.few(4)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("delta rule", "qwen3_5_text"),
        ("delta rule", "qwen3_next"),  # rows of a head are together, whatever they are
        ("state space", "granitemoehybrid"),
        ("convolution", "lfm2"),
        ("delta rule", "olmo_hybrid"),
        ("side by side", "falcon_h1"),
        ("blocks", "nemotron_h"),
        ("decays of channels", "kimi_linear"),
    ],
)
def test_a_rank_reads_its_rows_of_layers_with_states(
    kind: str, family: str, size: int, tmp_path: Path
) -> None:
    spec = replace(WITH_STATES[kind], family=family)
    ways = [huggingface_pieces(spec, ())]
    if family_named(family).gguf is not None:
        ways.append(gguf_pieces(spec, ()))
    for number, pieces in enumerate(ways):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(files_of(spec, list(pieces), folder), size)


@pytest.mark.few(1)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_is_quantised_while_loading(quantization: str, tmp_path: Path) -> None:
    spec = widened("qwen2_moe")
    check(files_of(spec, list(huggingface_pieces(spec, ())), tmp_path), 4, quantization)


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_what_is_stored_quantised(to: str, tmp_path: Path, random_model: Path) -> None:
    quantize_model(random_model, tmp_path / "quantised", to)
    check(open_model(tmp_path / "quantised"), 2)


class Storing(ReferenceKernels):
    def computes(self, format: Format) -> bool:
        return True


@pytest.mark.parametrize("tool", ["awq", "gptq", "fp8", "pack-quantized"])
def test_what_other_tools_pack_across_rows(tool: str, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    foreign.write_plain(plain)
    settings, change = {
        "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, foreign.awq(64)),
        "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": -1}, foreign.gptq(-1, 1, False)),
        "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, foreign.by_block),
        "pack-quantized": (
            foreign.compressed(
                "pack-quantized",
                num_bits=4,
                type="int",
                symmetric=False,
                strategy="group",
                group_size=64,
            ),
            foreign.pack_quantized(64, False),
        ),
    }[tool]
    foreign.rewrite(plain, tmp_path, settings, change)
    files = open_model(tmp_path)
    check(files, 2, kernels=Storing())
    assert {info.layout is not None for info in files.checkpoint.tensors.values()} == {True, False}


def test_key_heads_that_several_ranks_keep(tmp_path: Path) -> None:
    # one tensor for query, key and value
    spec = SPECS["phi3"].with_layers(mixer=plain_attention(8, 2, 16))
    check(files_of(spec, list(huggingface_pieces(spec, ())), tmp_path), 4)


def test_what_is_wrong_with_files_is_said_of_the_files(tmp_path: Path) -> None:
    spec = SPECS["qwen2"]
    files = files_of(spec, list(huggingface_pieces(spec, ())), tmp_path)
    larger = replace(files, spec=replace(spec, vocab_size=101))
    with pytest.raises(ModelFormatError, match=r"embed_tokens.weight should have shape 101 x 64"):
        divide_files(larger, Division(larger.spec, 0, 2))
