"""Weights that stay quantised when they are loaded, and weights that are quantised meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import quantize as gguf_quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.assemble import build_engine
from quire.backends.select import device_of
from quire.checkpoints.sources import resolve
from quire.config import EngineConfig
from quire.errors import DeviceError, InvalidRequestError, ModelFormatError
from quire.kernels.formats import FORMATS, Format
from quire.kernels.quantize import INT8, to_codes, to_q4_0
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.load import open_model
from quire.models.weight_plan import plan_weights
from quire.runner.worker import choose_weights
from quire.tools.bench.random_checkpoint import write_tokenizer
from tests.decoding import all_logits, load_decoder
from tests.models.random_configurations import random_model
from tests.models.storing_kernels import StoringKernels
from tests.models.test_gguf_models import write_gguf

CPU = torch.device("cpu")
BLOCKS = [name for name, format in FORMATS.items() if format.scales]
LEGACY = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = transformers.LlamaConfig(**SIZES)
TIED = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
EXPERTS = transformers.Qwen3MoeConfig(
    **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True
)
TOKENS = list(range(3, 40))


def in_blocks(name: str, value: Tensor) -> np.ndarray:
    """What a file holds of a tensor: the older formats by the gguf package; the K formats, which it
    doesn't make, of random bits with small scales.
    """
    if name in LEGACY:
        return gguf_quantize(value.numpy(), gguf.GGMLQuantizationType[name])
    format, random = FORMATS[name], np.random.default_rng(value.numel())
    shape = (*value.shape[:-1], value.shape[-1] // format.num_elements, format.num_bytes)
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    for at in format.scales:
        scales = random.uniform(-2e-4, 2e-4, shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*value.shape[:-1], -1)


def write_blocks(
    path: Path,
    config: Any,
    choose: Callable[[str], str | None],
    architecture: str = "llama",
    **changes: Any,
) -> None:
    """A GGUF file of a random model whose matrices are in the formats that `choose` gives by their
    names.
    """

    def stored(name: str, value: Tensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType | None]:
        kind = choose(name) if value.dim() > 1 and "gate_inp" not in name else None
        if kind is None:
            return value.contiguous().numpy(), None
        return in_blocks(kind, value.contiguous()), gguf.GGMLQuantizationType[kind]

    write_gguf(path, architecture, random_model(config, seed=3), stored=stored, **changes)


def load(path: Path, quantization: str = "auto", kernels: StoringKernels | None = None) -> Decoder:
    return load_decoder(
        open_model(path), kernels or StoringKernels(), torch.float32, CPU, quantization=quantization
    )


def numbers(weight: Weight) -> Tensor:
    """All of a weight's parts, expanded."""
    return torch.cat(
        [part.format.expand(*part.tensors) for part in weight.parts], max(len(weight.shape) - 2, 0)
    )


def formats(decoder: Decoder, name: str) -> list[str]:
    return [part.format.name for part in decoder.weights[name].parts]


def assert_same_numbers(one: Decoder, other: Decoder) -> None:
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        assert weight.shape == other.weights[name].shape
        assert torch.equal(numbers(weight), numbers(other.weights[name])), name


@pytest.mark.few(4)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_stay_as_they_are_stored_and_mean_the_same(name: str, tmp_path: Path) -> None:
    """Heads of queries and keys are reordered as rows of blocks."""
    path = tmp_path / "model.gguf"
    write_blocks(path, TIED, lambda _: name)
    plan = plan_weights(open_model(path), StoringKernels(), torch.float32, CPU)
    stored, expanded = load(path), load(path, "none")
    matrices = [weight for weight in stored.weights.values() if len(weight.shape) > 1]
    assert len(matrices) == 5
    assert {(len(weight.parts), weight.format) for weight in matrices} == {(1, FORMATS[name])}
    assert stored.nbytes == plan.nbytes < expanded.nbytes / 3
    assert plan.describe() == f"{name} computed as stored; float32"
    assert_same_numbers(stored, expanded)
    assert torch.equal(all_logits(stored, TOKENS), all_logits(expanded, TOKENS))


MIXED = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "ffn_up": "Q5_1", "ffn_down": "Q8_0"}


def mixed(name: str) -> str | None:
    return MIXED.get(name.split(".")[-2])


def test_parts_of_a_matrix_keep_their_own_formats(tmp_path: Path) -> None:
    """Neighbours in the same format are one part; plain numbers are one in the model's dtype."""
    path = tmp_path / "model.gguf"
    write_blocks(path, LLAMA, mixed)
    stored, expanded = load(path), load(path, "none")
    assert formats(stored, "layers.0.attention.qkv.weight") == ["Q4_K", "Q6_K"]
    assert [part.rows for part in stored.weights["layers.0.attention.qkv.weight"].parts] == [
        384,
        128,
    ]
    assert formats(stored, "layers.0.mlp.gate_up.weight") == ["F32", "Q5_1"]
    assert formats(stored, "layers.0.mlp.down.weight") == ["Q8_0"]
    assert formats(stored, "embedding") == ["F32"]
    assert_same_numbers(stored, expanded)
    torch.testing.assert_close(
        all_logits(stored, TOKENS), all_logits(expanded, TOKENS), atol=1e-4, rtol=1e-4
    )


class SomeKernels(StoringKernels):
    def computes(self, format: Format) -> bool:
        return format.name in ("Q4_K", "Q8_0")


def test_what_kernels_do_not_compute_with_is_expanded_and_said(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_blocks(path, LLAMA, mixed)
    plan = plan_weights(open_model(path), SomeKernels(), torch.float32, CPU)
    assert plan.describe().startswith("Q8_0, Q4_K computed as stored; float32; ")
    assert "; Q6_K, Q5_1 expanded to float32: no kernel for it here" in plan.describe()
    stored = load(path, kernels=SomeKernels())
    assert formats(stored, "layers.0.attention.qkv.weight") == ["Q4_K", "F32"]
    assert formats(stored, "layers.0.mlp.gate_up.weight") == ["F32"]
    assert_same_numbers(stored, load(path, "none"))
    asked = plan_weights(open_model(path), SomeKernels(), torch.float32, CPU, "none")
    assert "Q8_0 expanded to float32: as quantization=none asks" in asked.describe()
    on_gpu = plan_weights(open_model(path), SomeKernels(), torch.bfloat16, torch.device("cuda"))
    assert on_gpu.describe().startswith(
        "Q8_0, Q4_K computed as stored; bfloat16; Q6_K, Q5_1 expanded to bfloat16"
    )
    assert on_gpu.formats["embedding"] == on_gpu.formats["head"] == (FORMATS["BF16"],)


@pytest.mark.parametrize(
    "choose", [lambda name: "Q4_0", lambda name: "Q8_0" if "up_exps" in name else "Q6_K"]
)
def test_experts_stay_as_they_are_stored(
    choose: Callable[[str], str | None], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_blocks(path, EXPERTS, choose, "qwen3moe")
    stored, expanded = load(path), load(path, "none")
    gate_up = ["Q4_0"] if choose("up_exps") == "Q4_0" else ["Q6_K", "Q8_0"]
    assert formats(stored, "layers.0.mlp.gate_up") == gate_up
    assert stored.weights["layers.0.mlp.gate_up"].parts[0].tensors[0].shape[0] == 4
    assert formats(stored, "layers.0.mlp.router.weight") == ["F32"]
    assert_same_numbers(stored, expanded)
    torch.testing.assert_close(
        all_logits(stored, TOKENS), all_logits(expanded, TOKENS), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_a_scale_that_is_no_number_names_its_tensor(tmp_path: Path, quantization: str) -> None:
    path = tmp_path / "model.gguf"
    write_blocks(path, LLAMA, lambda _: "Q4_1")
    info = open_model(path).checkpoint.tensors["blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    # the minimum of a block
    data[info.offset + 20 * 77 + 2 : info.offset + 20 * 77 + 4] = b"\x00\x7e"
    path.write_bytes(data)
    with pytest.raises(
        ModelFormatError,
        match=r"tensor 'blk\.0\.ffn_up\.weight': a scale of its Q4_1 numbers is inf",
    ):
        load(path, quantization)


# Quantised while they are loaded


@pytest.fixture(scope="module", params=["llama", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    model = random_model(LLAMA if request.param == "llama" else EXPERTS, seed=5)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.few(2)
@pytest.mark.parametrize(("quantization", "name"), [("int8", "INT8"), ("int4", "Q4_0")])
def test_plain_matrices_are_quantised_row_by_row(
    folder: Path, quantization: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load(folder, "none")
    # some rows at a time
    monkeypatch.setattr("quire.checkpoints.checkpoint.MAX_CHUNK_ELEMENTS", 7 * 256)
    quantised = load(folder, quantization)
    for parameter, weight in quantised.weights.items():
        before = numbers(plain.weights[parameter])
        if len(weight.shape) == 1 or "router" in parameter:
            assert torch.equal(numbers(weight), before)
            continue
        assert weight.format == FORMATS[name], parameter
        made = to_codes(INT8, before) if name == "INT8" else (to_q4_0(before),)
        assert all(
            torch.equal(*pair) for pair in zip(weight.parts[0].tensors, made, strict=True)
        ), parameter
    plan = plan_weights(open_model(folder), StoringKernels(), torch.float32, CPU, quantization)
    assert plan.describe() == f"{name} made while loading; float32"
    assert quantised.nbytes == plan.nbytes
    got, expected = all_logits(quantised, TOKENS), all_logits(plain, TOKENS)
    assert torch.corrcoef(torch.stack((got.flatten(), expected.flatten())))[0, 1] > (
        0.99 if name == "INT8" else 0.9
    )


def test_a_plain_gguf_file_is_quantised_and_a_quantised_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_blocks(path, LLAMA, lambda _: None)
    random_model(LLAMA, seed=3).save_pretrained(tmp_path / "folder")
    assert_same_numbers(load(path, "int8"), load(tmp_path / "folder", "int8"))
    write_blocks(path, LLAMA, mixed)
    with pytest.raises(
        InvalidRequestError, match=r"quantised already \(Q4_K, Q6_K, Q5_1, Q8_0\): use auto"
    ):
        load(path, "int4")


def test_rows_that_are_not_whole_blocks_stay_plain_and_are_counted(tmp_path: Path) -> None:
    random_model(
        transformers.LlamaConfig(**SIZES | {"intermediate_size": 40}), seed=1
    ).save_pretrained(tmp_path)
    decoder = load(tmp_path, "int4")
    assert formats(decoder, "layers.0.mlp.down.weight") == ["F32"]
    assert formats(decoder, "layers.0.mlp.gate_up.weight") == ["Q4_0"]
    plan = plan_weights(open_model(tmp_path), StoringKernels(), torch.float32, CPU, "int4")
    assert plan.describe().endswith(
        "; 1 matrices in float32: their input size is no multiple of 32"
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_weight_that_is_no_number_can_not_be_quantised(
    tmp_path: Path, bad: float, quantization: str
) -> None:
    random_model(LLAMA, seed=1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 7] = bad
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelFormatError, match=r"model\.layers\.0\.mlp\.up_proj\.weight .*quantization=\"none\""
    ):
        load(tmp_path, quantization)
    load(tmp_path, "none")


def test_kernels_that_can_not_compute_so_say_who_can(folder: Path) -> None:
    class NoInt4(StoringKernels):
        def computes(self, format: Format) -> bool:
            return format.name != "Q4_0"

    with pytest.raises(
        DeviceError, match=r'"int4" does not run on cpu with the .* kernels: int8 and int4 do on a'
    ):
        plan_weights(open_model(folder), NoInt4(), torch.float32, CPU, "int4")


# The engine around them


@pytest.mark.parametrize(("quantization", "dtype"), [("auto", "float32"), ("none", "bfloat16")])
def test_quantised_weights_on_a_cpu_mean_float32(
    tmp_path: Path, quantization: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where bfloat16 would be quicker: other machines compute the same bits."""
    monkeypatch.setattr("quire.backends.cpu.device._multiplies_bfloat16", lambda: True)
    path = tmp_path / "model.gguf"
    write_blocks(path, LLAMA, lambda _: "Q4_0")
    config = EngineConfig(quantization=quantization, kernels="reference", device="cpu")
    plan = choose_weights(open_model(path), config, device_of(CPU))
    assert plan.dtype == getattr(torch, dtype)
    explicit = EngineConfig(
        dtype="bfloat16", quantization=quantization, kernels="reference", device="cpu"
    )
    assert choose_weights(open_model(path), explicit, device_of(CPU)).dtype == torch.bfloat16


def test_the_start_up_message_names_the_formats(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_tokenizer(300, tmp_path)
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "kv_cache_memory": "8MiB"}
    engine = build_engine(resolve(str(tmp_path)), EngineConfig(**options, quantization="int8"))
    plan = plan_weights(open_model(tmp_path), StoringKernels(), torch.float32, CPU, "int8")
    assert ": INT8 made while loading; float32) on cpu" in engine.description
    # panels of 16 outputs are filled up
    assert plan.nbytes <= engine.decoder.nbytes < 1.1 * plan.nbytes


def test_an_unknown_quantisation_lists_the_known_ones() -> None:
    with pytest.raises(
        InvalidRequestError,
        match="quantization: must be one of auto, none, int8, int4, fp8, not 'int3'",
    ):
        EngineConfig(quantization="int3")
