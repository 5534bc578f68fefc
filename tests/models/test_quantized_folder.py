"""`quire quantize`: folders that load to the same bits as what is quantised while it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.errors import InvalidRequestError, ModelFormatError, QuireError, UnsupportedModelError
from quire.kernels.quantize import INT8, to_codes, to_q4_0
from quire.models.load import open_model
from quire.models.weight_plan import plan_weights
from quire.tools import quantize
from quire.tools.quantize import quantize_model
from tests.decoding import all_logits, load_decoder
from tests.models.random_configurations import random_model
from tests.models.storing_kernels import StoringKernels
from tests.models.test_gguf_models import MODELS as GGUF_MODELS
from tests.models.test_gguf_models import write_gguf
from tests.models.test_quantized_loading import (
    CPU,
    EXPERTS,
    LLAMA,
    SIZES,
    TIED,
    TOKENS,
    load,
    numbers,
    write_blocks,
)

MODELS = {"llama": LLAMA, "tied": TIED, "experts": EXPERTS}
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module", params=MODELS)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    random_model(MODELS[request.param], seed=5).to(torch.bfloat16).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "weights.bin").write_text("not copied")
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    random_model(LLAMA, seed=6).save_pretrained(folder)
    return folder


@pytest.mark.few(2)
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_the_folder_gives_the_bits_of_quantising_while_loading(
    original: Path, tmp_path: Path, to: str
) -> None:
    progress: list[tuple[int, int]] = []
    out = tmp_path / "deep" / "out"
    written = quantize_model(original, out, to, progress=lambda *counts: progress.append(counts))
    again, before = load(out), load(original, to)
    for name, weight in before.weights.items():
        assert [part.format for part in weight.parts] == [
            part.format for part in again.weights[name].parts
        ], name
        assert torch.equal(numbers(weight), numbers(again.weights[name])), name
    assert torch.equal(all_logits(again, TOKENS), all_logits(before, TOKENS))
    # expanded: the same numbers
    assert torch.equal(all_logits(load(out, "none"), TOKENS), all_logits(before, TOKENS))
    plan = plan_weights(open_model(out), StoringKernels(), torch.float32, CPU)
    assert plan.describe() == f"{'INT8' if to == 'int8' else 'Q4_0'} computed as stored; float32"
    names = {file.name for file in out.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer.json",
    }
    assert "weights.bin" not in names
    assert [name for name in written.plain if "mlp.gate." not in name] == []
    sizes = sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
    assert written.after == sizes < written.before * (0.52 if to == "int8" else 0.3)
    assert progress[0][0] == 0
    assert progress[-1] == (written.before, written.before)
    assert {file.name for file in out.parent.iterdir()} == {"out"}


def test_int8_is_stored_as_compressed_tensors_does(small: Path, tmp_path: Path) -> None:
    quantize_model(small, tmp_path / "out", "int8")
    before, after = (
        load_file(folder / "model.safetensors")[UP] for folder in (small, tmp_path / "out")
    )
    scales = load_file(tmp_path / "out" / "model.safetensors")[f"{UP}_scale"]
    codes, expected = to_codes(INT8, before)
    assert torch.equal(after, codes)
    assert torch.equal(scales, expected.unsqueeze(1))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "int-quantized")
    group = config["config_groups"]["group_0"]
    assert (
        group["weights"].items()
        >= {"num_bits": 8, "strategy": "channel", "symmetric": True}.items()
    )
    assert (
        group["input_activations"].items()
        >= {"num_bits": 8, "strategy": "token", "dynamic": True}.items()
    )


def test_int4_is_packed_as_compressed_tensors_does(small: Path, tmp_path: Path) -> None:
    """Eight codes in an int32, the first in its lowest bits, each eight above the number of scales
    it stands for.
    """
    quantize_model(small, tmp_path / "out", "int4")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(small / "model.safetensors")[UP]
    packed, scales = stored[f"{UP}_packed"], stored[f"{UP}_scale"]
    assert (packed.dtype, scales.dtype) == (torch.int32, torch.float16)
    assert stored[f"{UP}_shape"].tolist() == list(before.shape)
    codes = torch.stack([packed >> 4 * i & 15 for i in range(8)], -1).flatten(1)
    meant = (codes - 8).float() * scales.float().repeat_interleave(32, 1)
    assert torch.equal(meant, quantize.QUANTIZED["int4"].expand(to_q4_0(before)))


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_large_models_become_several_files(
    small: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_model(small, tmp_path / "one", to)
    monkeypatch.setattr(quantize, "MAX_SHARD_BYTES", 100_000)
    quantize_model(small, tmp_path / "many", to)
    files = sorted(file.name for file in (tmp_path / "many").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    many = {
        name: value for file in files for name, value in load_file(tmp_path / "many" / file).items()
    }
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert many.keys() == one.keys()
    assert all(torch.equal(many[name], one[name]) for name in one)
    assert torch.equal(
        all_logits(load(tmp_path / "many"), TOKENS), all_logits(load(tmp_path / "one"), TOKENS)
    )


def test_an_existing_folder_is_replaced_only_if_it_was_written_like_this(
    small: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    quantize_model(small, out, "int8")
    with pytest.raises(
        QuireError, match="is there already; choose another folder, or replace it with --force"
    ):
        quantize_model(small, out, "int4")
    quantize_model(small, out, "int4", force=True)
    assert "pack-quantized" in (out / "config.json").read_text()
    with pytest.raises(QuireError, match="is not a folder that quire quantize wrote"):
        quantize_model(small, small, "int4", force=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "small"]


@pytest.mark.parametrize("force", [False, True])
def test_a_failure_leaves_nothing_behind_and_what_was_there(
    small: Path, tmp_path: Path, force: bool
) -> None:
    out = tmp_path / "out"
    if force:
        quantize_model(small, out, "int8")
    tensors = load_file(small / "model.safetensors")
    tensors[UP][0, 0] = torch.nan
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(ModelFormatError, match=UP.replace(".", r"\.")):
        quantize_model(small, out, "int8", force)
    assert {file.name for file in tmp_path.iterdir()} == ({"out", "small"} if force else {"small"})
    if force:
        load(out)


def test_what_can_not_be_quantised_says_what_to_do(small: Path, tmp_path: Path) -> None:
    quantize_model(small, tmp_path / "out", "int8")
    with pytest.raises(InvalidRequestError, match=r"quantised already \(INT8\)"):
        quantize_model(tmp_path / "out", tmp_path / "twice", "int4")
    with pytest.raises(InvalidRequestError, match=r"quantised already \(INT8\)"):
        load(tmp_path / "out", "int8")
    write_blocks(tmp_path / "model.gguf", LLAMA, lambda _: "Q4_0")
    with pytest.raises(InvalidRequestError, match=r"quantised already \(Q4_0\)"):
        quantize_model(tmp_path / "model.gguf", tmp_path / "twice", "int4")
    assert not (tmp_path / "twice").exists()


NOT_IN_CONFIG_JSON = {
    "llama 3 rope": "a factor for each rope frequency",
    "gemma2": "can't be written as a config.json",  # its norms have 1 added
    "gemma3": "can't be written as a config.json",
    "granitemoe": "no form in Hugging Face layout",  # its gate and up rows are packed there
    "granitemoeshared": "no form in Hugging Face layout",
}


@pytest.mark.few(3)
@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("name", [name for name in GGUF_MODELS if name not in NOT_IN_CONFIG_JSON])
def test_a_plain_gguf_file_becomes_a_folder(name: str, to: str, tmp_path: Path) -> None:
    """With a config.json that means the same, Hugging Face's names, and rows in their order."""
    architecture, config = GGUF_MODELS[name]
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, random_model(config, seed=3))
    seen: list[tuple[str, Path]] = []
    quantize_model(
        path,
        tmp_path / "out",
        to,
        write_tokenizer=lambda checkpoint, folder: seen.append(
            (checkpoint.metadata["general.architecture"], folder)
        ),
    )
    assert [name for name, _ in seen] == [architecture]
    assert torch.equal(
        all_logits(load(tmp_path / "out"), TOKENS), all_logits(load(path, to), TOKENS)
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name", ["gemma2", "phi3 long", "olmo2", "granitemoe", "glm4", "cohere2", "starcoder2"]
)
def test_newer_families_in_folders_keep_the_order_of_their_rows(name: str, tmp_path: Path) -> None:
    random_model(GGUF_MODELS[name][1], seed=3).save_pretrained(tmp_path / "in")
    quantize_model(tmp_path / "in", tmp_path / "out", "int8")
    expected = all_logits(load(tmp_path / "in", "int8"), TOKENS)
    assert torch.equal(all_logits(load(tmp_path / "out"), TOKENS), expected)
    plain = all_logits(load(tmp_path / "in", "none"), TOKENS)
    # with rows in another order it is 1
    assert (expected - plain).abs().mean() < 0.25 * plain.abs().mean()


@pytest.mark.parametrize("name", NOT_IN_CONFIG_JSON)
def test_what_config_json_can_not_say_is_refused(name: str, tmp_path: Path) -> None:
    architecture, config = GGUF_MODELS[name]
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, random_model(config, seed=3))
    with pytest.raises(UnsupportedModelError, match=NOT_IN_CONFIG_JSON[name]):
        quantize_model(path, tmp_path / "out", "int8")
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


def test_uneven_matrices_stay_plain(tmp_path: Path) -> None:
    model = random_model(transformers.LlamaConfig(**SIZES | {"intermediate_size": 40}), seed=1)
    model.save_pretrained(tmp_path / "in")
    written = quantize_model(tmp_path / "in", tmp_path / "out", "int4")
    assert written.plain == ("model.layers.0.mlp.down_proj.weight",)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["model.layers.0.mlp.down_proj"]
    assert torch.equal(
        all_logits(load(tmp_path / "out"), TOKENS),
        all_logits(load(tmp_path / "in", "int4"), TOKENS),
    )


# Folders that others wrote


def harm(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    quantization = config["quantization_config"]
    quantization["config_groups"]["group_0"]["weights"] |= changes.pop("weights", {})
    path.write_text(json.dumps(config | {"quantization_config": quantization | changes}))


@pytest.mark.parametrize(
    ("to", "changes", "message"),
    [
        (
            "int8",
            {"quant_method": "bitsandbytes"},
            r"quantised by 'bitsandbytes', .* reads compressed-tensors \(int-q",
        ),
        ("int8", {"quant_method": "awq", "bits": 8}, "quantised by awq to 8 bits"),
        ("int8", {"quant_method": "awq", "bits": 4, "version": "gemv"}, "by awq of version 'gemv'"),
        ("int8", {"quant_method": "gptq", "bits": 4, "desc_act": True}, "by gptq with desc_act"),
        ("int8", {"quant_method": "gptq", "bits": 4, "group_size": 48}, "by gptq in groups of 48"),
        (
            "int8",
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            r"by fp8 in blocks of \[64, 64\]",
        ),
        ("int8", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "by modelopt as 'NVFP4'"),
        (
            "int8",
            {"format": "nvfp4-pack-quantized"},
            "compressed-tensors as 'nvfp4-pack-quantized'",
        ),
        ("int8", {"weights": {"strategy": "tensor"}}, "int-quantized, with strategy 'tensor'"),
        ("int4", {"weights": {"group_size": 48}}, "as pack-quantized in groups of 48"),
        ("int4", {"weights": {"actorder": "group"}}, "pack-quantized, with actorder 'group'"),
    ],
)
def test_other_ways_of_quantising_are_refused_by_name(
    small: Path, tmp_path: Path, to: str, changes: dict[str, Any], message: str
) -> None:
    quantize_model(small, tmp_path / "out", to)
    harm(tmp_path / "out", **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        open_model(tmp_path / "out")


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_scales_may_be_bfloat16_and_must_be_there_whole_and_finite(
    small: Path, tmp_path: Path, to: str
) -> None:
    quantize_model(small, tmp_path / "out", to)
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{UP}_scale"] = scales = tensors[f"{UP}_scale"].bfloat16()
    save_file(tensors, file)
    rows = slice(512, 1024)  # of gate and up together
    got = numbers(load(tmp_path / "out").weights["layers.0.mlp.gate_up.weight"])[rows]
    codes = tensors[UP].float() if to == "int8" else None
    if codes is not None:
        assert torch.equal(got, codes * scales.float())
    else:
        assert torch.equal(got.view(512, -1, 32).abs().amax(-1), scales.float().abs() * 8)
    save_file(tensors | {f"{UP}_scale": torch.full_like(scales, torch.inf)}, file)
    with pytest.raises(
        ModelFormatError, match=r"a scale of its (INT8|Q4_0) numbers is infinite or NaN"
    ):
        load(tmp_path / "out")
    save_file(tensors | {f"{UP}_scale": scales[:-1]}, file)
    with pytest.raises(ModelFormatError, match=r"up_proj\.weight_scale': expected scales of shape"):
        open_model(tmp_path / "out")
    del tensors[f"{UP}_scale"]
    save_file(tensors, file)
    with pytest.raises(ModelFormatError, match=r"up_proj\.weight_scale'.* got none"):
        open_model(tmp_path / "out")


def test_int4_scales_that_float16_can_not_hold_are_refused(small: Path, tmp_path: Path) -> None:
    quantize_model(small, tmp_path / "out", "int4")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{UP}_scale"] = torch.full_like(tensors[f"{UP}_scale"], 1e-9, dtype=torch.float32)
    save_file(tensors, file)
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight_scale': its int4 scales"):
        load_decoder(open_model(tmp_path / "out"), StoringKernels(), torch.float32, CPU)
