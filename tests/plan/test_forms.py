"""In which formats weights are on a device: as the loader chooses them, and as large as its kernels
make them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from quire.backends.select import pick_device
from quire.backends.triton.packed_size import packed_size
from quire.cli.main import app
from quire.config import EngineConfig
from quire.errors import CapacityError
from quire.kernels.formats import FORMATS, gpu_computes
from quire.models.load import open_model
from quire.models.weight_plan import plan_weights
from quire.runner.memory import check_weights_fit
from quire.runner.worker import choose_weights
from quire.tools.bench.shapes import CONFIGS, spec_of
from quire.tools.plan.cards import CardKernels
from quire.tools.plan.devices import PlannedDevice, Shares, named_device
from quire.tools.plan.forms import Form, forms_of
from quire.tools.plan.model import PlannedModel, described_model, open_planned
from quire.tools.plan.work import Rates

H200, A100 = named_device("h200"), named_device("a100")
CPU = PlannedDevice("a CPU", 16 * 2**30, Rates(50e9, 1e12), Shares(), "made up")
BLOCKS = [format for format in FORMATS.values() if format.dtype is None]
FP8_CONFIG = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
AWQ_CONFIG = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "version": "gemm",
    "zero_point": True,
}
INT8_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
    "ignore": ["lm_head", "re:.*down_proj"],
}


def planned(name: str) -> PlannedModel:
    return described_model(name, spec_of(name))


def named(model: PlannedModel, device: PlannedDevice) -> dict[str, Form]:
    return {form.name: form for form in forms_of(model, device)}


def with_quantization(folder: Path, shape: str, quantization: dict[str, Any]) -> PlannedModel:
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIGS[shape] | {"quantization_config": quantization}))
    return open_planned(str(config))


@pytest.mark.parametrize("capability", [(0, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)])
def test_a_card_keeps_what_its_kernels_would(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """The rule is the kernels' own, which ask the GPU that is there."""
    quantized = pytest.importorskip("quire.backends.triton.quantized")
    from quire.backends.triton.kernels import TritonKernels

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(
        "quire.backends.triton.attention_kernels.num_multiprocessors", lambda device: 132
    )
    kernels, real = CardKernels(capability, torch.bfloat16), TritonKernels()
    for format in FORMATS.values():
        assert (
            kernels.computes(format)
            is quantized.computes(format)
            is gpu_computes(format, capability)
        )
        # so the loader refuses what does not fit before it reads it, as `quire plan` says
        if kernels.computes(format):
            parts = [(format, (96, 512)), (FORMATS["BF16"], (32, 512))]
            assert kernels.packed_bytes(parts) == real.packed_bytes(parts)
    kept = {format.name for format in FORMATS.values() if kernels.computes(format)}
    eight = {"FP8", "FP8_G128"}
    everything = {format.name for format in BLOCKS}
    assert kept == (
        everything
        if capability >= (9, 0)
        else everything - eight
        if capability >= (8, 0)
        else set()
    )
    assert not any(CardKernels(capability, torch.float32).computes(format) for format in BLOCKS)


PACK = """
import json, sys, torch
from quire.kernels.formats import FORMATS
from quire.kernels.weights import Weight
try:
    from quire.backends.triton import quantized
    assert quantized.HAS_GLUON
except (ImportError, AssertionError):
    sys.exit(5)
found = []
for name, shape, capability in json.loads(sys.argv[1]):
    torch.cuda.get_device_capability = lambda *_: tuple(capability)
    tensors = tuple(one.zero_() for one in FORMATS[name].empty(tuple(shape)))
    found.append(quantized.pack(Weight.of(FORMATS[name], tuple(shape), *tensors), torch.bfloat16).nbytes)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_packed_weights_are_as_large_as_the_kernels_make_them() -> None:
    """Their `pack` is plain torch and runs here, too, in a process whose Triton does not interpret:
    then it has Gluon.
    """
    shapes = (64, 512), (80, 256), (48, 768), (3, 64, 256), (2, 80, 768)
    cases = [
        (one.name, shape, card) for one in BLOCKS for shape in shapes for card in ((8, 0), (9, 0))
    ]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", PACK, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 5:
        pytest.skip("there is no Triton with Gluon here")
    assert done.returncode == 0, done.stderr
    for (name, shape, card), size in zip(cases, json.loads(done.stdout), strict=True):
        assert packed_size(FORMATS[name], shape, torch.bfloat16, card) == size, (name, shape, card)


def test_formats_are_those_a_card_has_kernels_for() -> None:
    model = planned("qwen3-8b")
    assert list(named(model, H200)) == ["bfloat16", "fp8", "int8", "int4"]
    assert list(named(model, A100)) == ["bfloat16", "int8", "int4"]
    sizes = {name: form.weight_bytes for name, form in named(model, H200).items()}
    # embedding and head stay bfloat16
    ends = 2 * model.spec.vocab_size * model.spec.hidden_size * 2
    assert sizes["fp8"] == sizes["int8"]
    assert sizes["fp8"] == pytest.approx((sizes["bfloat16"] - ends) / 2 + ends, rel=0.01)
    assert sizes["int4"] == pytest.approx((sizes["bfloat16"] - ends) * 5 / 16 + ends, rel=0.01)
    experts = {
        name: form.weight_bytes for name, form in named(planned("qwen3-30b-a3b"), H200).items()
    }
    assert experts["fp8"] < 0.55 * experts["bfloat16"]  # stacks of matrices, too


def test_on_a_cpu_the_usual_dtype_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planned("qwen3-0.6b")
    for has_it, names in ((False, ["float32", "bfloat16"]), (True, ["bfloat16", "float32"])):
        monkeypatch.setattr(
            "quire.backends.cpu.device._multiplies_bfloat16", lambda has_it=has_it: has_it
        )
        forms = list(forms_of(model, CPU))
        assert [form.name for form in forms] == [*names, "int8", "int4"]
        assert [form.option for form in forms[:2]] == ["dtype=auto", f"dtype={names[1]}"]
        # With quantised weights float32 on every machine, so that all give the same answers.
        assert {form.dtype for form in forms[2:]} == {torch.float32}
    forms_by_name = {form.name: form for form in forms}
    assert forms_by_name["int4"].weight_bytes == pytest.approx(
        model.spec.num_parameters * 18 / 32, rel=0.01
    )
    assert forms_by_name["int8"].weight_bytes == pytest.approx(model.spec.num_parameters, rel=0.01)


def test_the_real_files_weights_are_counted_as_they_are(smollm2_gguf: Path) -> None:
    model = open_planned(str(smollm2_gguf))
    forms = list(forms_of(model, CPU))
    assert [form.option for form in forms] == [
        "quantization=auto",
        "quantization=none",
        "quantization=none, dtype=bfloat16",
    ]
    files = open_model(smollm2_gguf)
    for form, quantization in zip(forms[:2], ("auto", "none"), strict=True):
        config = EngineConfig(device="cpu", quantization=quantization, dtype="float32")
        loaded = choose_weights(files, config, pick_device("cpu"))
        assert form.weight_bytes == loaded.nbytes
    files.checkpoint.close()


@pytest.mark.parametrize("device", [H200, A100])
def test_on_a_gpu_a_ggufs_weights_stay_as_stored(smollm2_gguf: Path, device: PlannedDevice) -> None:
    """All but embedding and head, as in `plan_weights` with that GPU's kernels."""
    model = open_planned(str(smollm2_gguf))
    forms = named(model, device)
    assert list(forms) == ["as stored (Q4_1)", "bfloat16 (expanded)"]
    assert [form.option for form in forms.values()] == ["quantization=auto", "quantization=none"]
    ends = model.spec.vocab_size * model.spec.hidden_size * 2
    layers = model.spec.num_parameters - ends // 2
    # Most inputs, 576, are no multiple of 128: codes are padded to it, scales and minima are of 32
    # bits.
    size = forms["as stored (Q4_1)"].weight_bytes - ends
    assert size == pytest.approx(6.2 / 8 * layers, rel=0.03)


def test_the_loader_refuses_what_does_not_fit_once_it_is_packed(smollm2_gguf: Path) -> None:
    files = open_planned(str(smollm2_gguf)).files
    plan = plan_weights(
        files, CardKernels((9, 0), torch.bfloat16), torch.bfloat16, torch.device("cuda"), "auto"
    )
    stored = sum(
        format.nbytes(shape) for name in plan.formats for format, shape in plan.stored(name)
    )
    assert stored < plan.nbytes == check_weights_fit(plan, plan.nbytes)
    with pytest.raises(CapacityError, match="the model does not fit"):
        check_weights_fit(plan, (stored + plan.nbytes) // 2)


def test_a_config_that_says_how_weights_are_quantised(tmp_path: Path) -> None:
    model = with_quantization(tmp_path, "qwen3-8b", FP8_CONFIG)
    assert list(named(model, H200)) == ["as stored (FP8_G128)", "bfloat16 (expanded)"]
    assert list(named(model, A100)) == ["bfloat16 (expanded)"]  # no kernels for FP8 there
    made = named(planned("qwen3-8b"), H200)
    stored = named(model, H200)["as stored (FP8_G128)"].weight_bytes
    assert stored == pytest.approx(made["fp8"].weight_bytes, rel=0.03)  # more scales

    model = with_quantization(tmp_path, "qwen3-8b", AWQ_CONFIG)
    four = named(model, H200)["as stored (INT4_G128)"]
    assert four.weight_bytes < made["int4"].weight_bytes  # fewer scales
    assert next(iter(named(model, CPU))) in ("float32 (expanded)", "bfloat16 (expanded)")

    model = with_quantization(tmp_path, "qwen3-8b", INT8_CONFIG)
    some = named(model, H200)["as stored (INT8)"].weight_bytes
    down = 36 * 4096 * 12288
    assert some == pytest.approx(made["int8"].weight_bytes + down, rel=0.01)  # which it leaves out
    assert next(iter(named(model, CPU))) == "as stored (INT8)"


def test_experts_in_mxfp4_as_gpt_oss_has_them(tmp_path: Path) -> None:
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    model = with_quantization(
        tmp_path, "gpt-oss-20b", {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    )
    forms = named(model, H200)
    assert list(forms) == ["as stored (MXFP4)", "bfloat16 (expanded)"]
    # 19.1 billion numbers in experts at 4.25 bits, 1.8 billion others at 16.
    assert forms["as stored (MXFP4)"].weight_bytes == pytest.approx(
        19.1e9 * 17 / 32 + 1.8e9 * 2, rel=0.03
    )
    assert forms["bfloat16 (expanded)"].weight_bytes == pytest.approx(20.9e9 * 2, rel=0.01)


def test_the_command_with_a_quantised_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["qwen3-8b"] | {"quantization_config": FP8_CONFIG}))
    done = CliRunner().invoke(app, ["plan", str(config), "--gpu", "h200"])
    assert done.exit_code == 0
    assert (
        "It fits: quantization=auto, as stored (FP8_G128), 256 such requests at once."
        in done.stdout
    )
    told = json.loads(
        CliRunner().invoke(app, ["plan", str(config), "--gpu", "h200", "--json"]).stdout
    )
    assert [form["weights"] for form in told["forms"]] == [
        "as stored (FP8_G128)",
        "bfloat16 (expanded)",
    ]
