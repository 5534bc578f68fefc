"""The teaching format: a model written as one .npy per weight, with logits that the exporting
script computed by a plain forward pass of its own.
"""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.backends.cpu.kernels import CpuKernels
from quire.backends.select import select_kernels
from quire.config import EngineLimits
from quire.kernels.ops import Kernels
from quire.kernels.reference import ReferenceKernels
from quire.models.load import open_model
from quire.tools.quantize import quantize_model
from tests.cli.in_process import quire_here
from tests.decoding import all_logits, load_decoder

SCRIPT = Path(__file__).parents[2] / "scripts" / "export_npy.py"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("npy")
    runpy.run_path(str(SCRIPT))["export"](folder, 0)
    return folder


@pytest.mark.few(1)
@pytest.mark.parametrize("kernels", [ReferenceKernels, CpuKernels], ids=["reference", "cpu"])
def test_the_decoder_matches_the_scripts_own_logits(
    exported: Path, kernels: Callable[[], Kernels]
) -> None:
    """The C++ kernels, which users get, at the same bound as the definition."""
    files = open_model(exported)
    decoder = load_decoder(files, kernels(), torch.float32, torch.device("cpu"))
    tokens = np.load(exported / "test_tokens.npy").tolist()
    expected = torch.from_numpy(np.load(exported / "test_logits.npy"))
    torch.testing.assert_close(all_logits(decoder, tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.gpu
def test_a_gpu_matches_them_at_the_same_bound(exported: Path) -> None:
    device = torch.device("cuda")
    decoder = load_decoder(
        open_model(exported), select_kernels(device, torch.float32), torch.float32, device
    )
    tokens = np.load(exported / "test_tokens.npy").tolist()
    expected = torch.from_numpy(np.load(exported / "test_logits.npy"))
    torch.testing.assert_close(all_logits(decoder, tokens).cpu(), expected, atol=1e-4, rtol=0)


def test_the_exported_model_has_the_promised_sizes(exported: Path) -> None:
    spec = open_model(exported).spec
    mlp = spec.layers[0].mlp
    sizes = (
        spec.num_layers,
        spec.head_shapes[0].num_heads,
        spec.hidden_size,
        mlp.intermediate_size,
        spec.vocab_size,
    )
    assert sizes == (2, 4, 256, 1024, 16384)


@pytest.mark.slow
def test_the_same_seed_exports_the_same_bytes(exported: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, SCRIPT, "--out", tmp_path], check=True, capture_output=True)
    names = sorted(path.name for path in exported.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        assert (tmp_path / name).read_bytes() == (exported / name).read_bytes()


def test_the_commands_of_the_chapter_on_ones_own_model_run(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them one that quantises the folder. It has no tokenizer, and what was written of it
    used not to run for the want of one.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exported, tmp_path / "tiny-llama")
    monkeypatch.setattr("quire.config._CPU_LIMITS", EngineLimits(8, 512, "64MiB"))
    chapter = (SCRIPT.parents[1] / "docs" / "your_model.md").read_text()
    commands = re.findall(r"^quire ((?:run|inspect|quantize) .*)$", chapter, re.MULTILINE)
    shown = {}
    for command in commands:
        done = quire_here(*shlex.split(command))
        assert done.returncode == 0, f"{command}: {done.stderr}"
        shown[command] = done.stdout
    answers = [text for command, text in shown.items() if command.startswith("run")]
    assert answers == ["defghijk\n"] * 2  # before and after
    (traced,) = (text for command, text in shown.items() if "--values" in command)
    assert "layers.1.attention.value" in traced


def test_int8_weights_change_logits_by_a_part_in_a_hundred(exported: Path, tmp_path: Path) -> None:
    """The bound on quality: weights of 8 bits with a scale per row are off by 0.8% of their size
    (docs/ladder/07_quantised_weights.md), which adds up over layers.
    """
    quantize_model(exported, tmp_path / "int8", "int8")
    tokens = np.load(exported / "test_tokens.npy").tolist()
    expected = torch.from_numpy(np.load(exported / "test_logits.npy"))
    files = open_model(tmp_path / "int8")
    decoder = load_decoder(files, CpuKernels(), torch.float32, torch.device("cpu"))
    found = all_logits(decoder, tokens)
    error = float((found - expected).norm() / expected.norm())

    assert 0 < error < 0.02
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95
