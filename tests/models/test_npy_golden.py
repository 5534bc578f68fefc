"""The teaching format: a model written as one .npy per weight, with logits that the exporting
script computed by a plain forward pass of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.backends.cpu.kernels import CpuKernels
from quire.backends.select import select_kernels
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
    subprocess.run([sys.executable, SCRIPT, "--out", folder], check=True, capture_output=True)
    return folder


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


def test_a_quantised_folder_of_npy_files_runs_and_says_the_same(
    exported: Path, tmp_path: Path
) -> None:
    """It has no tokenizer, and what is written of it did not run for the want of one."""
    out = tmp_path / "int8"
    done = quire_here("quantize", exported, out, "--to", "int8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(out)
    options = ("--raw", "-n", "8", "--temperature", "0", "--kv-cache-memory", "16MiB")
    answers = {quire_here("run", "abc", *options, "-m", one).stdout for one in (exported, out)}
    assert answers == {"defghijk\n"}


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
