"""Compiling CUDA sources, and keeping what was compiled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from quire.errors import DeviceError
from quire.kernels.recurrent import RecurrentSpec

pytest.importorskip("triton", reason="Triton is not installed")

from quire.backends.cuda import build, experts, recurrent  # isort: skip  (after the check for Triton)

SPEC = RecurrentSpec(2, 4, 20, 6, taps=4)
CONSTANTS = recurrent.constants(SPEC, 16, torch.bfloat16, has_skip=False, aligned=False, pdl=True)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, by a compiler that is not one."""
    sources: list[str] = []

    def compile_source(source: str, options: list[str]) -> bytes:
        sources.append(source)
        return f"{source} {options}".encode()

    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(build, "compile_source", compile_source)
    return sources


@pytest.mark.slow
@pytest.mark.skipif(not build.compiler_version(), reason="needs NVRTC or nvcc")
def test_kernels_are_compiled_for_an_h200() -> None:
    options = [*build.FLAGS, "-arch=sm_90", *build.definitions(CONSTANTS)]
    code = build.compile_source("recurrent.cu", options)
    assert code.startswith(b"\x7fELF")
    assert all(name.encode() in code for name in ("few_scores", "few_tokens_1", "many_tokens"))


@pytest.mark.slow
@pytest.mark.skipif(not build.compiler_version(), reason="needs NVRTC or nvcc")
@pytest.mark.parametrize(
    ("width", "dtype"), list(zip(experts.WIDTHS, (torch.bfloat16, torch.float16), strict=True))
)
def test_kernels_of_experts_are_compiled_for_an_h200(width: int, dtype: torch.dtype) -> None:
    """The source itself checks the size of its arguments and of the shared memory it is given."""
    options = build.definitions(experts.constants(dtype, width, pdl=True))
    code = build.compile_source("experts.cu", [*build.FLAGS, "-arch=sm_90a", *options])
    assert code.startswith(b"\x7fELF")
    assert all(name.encode() in code for name in ("gated_product", "plain_product"))


@pytest.mark.skipif(not build.compiler_version(), reason="needs NVRTC or nvcc")
def test_what_is_wrong_is_said() -> None:
    with pytest.raises(DeviceError, match=r"recurrent\.cu can't be compiled by .*error"):
        build.compile_source("recurrent.cu", [*build.FLAGS, "-arch=sm_90"])


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvrtc", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DeviceError, match="install nvidia-cuda-nvrtc"):
        build.compile_source("recurrent.cu", [])


def test_it_is_compiled_once_for_each_shape_and_architecture(compiled: list[str]) -> None:
    first = build.build("recurrent.cu", CONSTANTS, "sm_90")
    assert build.build("recurrent.cu", CONSTANTS, "sm_90") == first
    assert len(compiled) == 1
    assert build.build("recurrent.cu", CONSTANTS, "sm_100") != first
    assert build.build("recurrent.cu", CONSTANTS | {"TAPS": 3}, "sm_90") != first
    assert len(compiled) == 3


def test_half_of_a_file_is_not_used(compiled: list[str], tmp_path: Path) -> None:
    first = build.build("recurrent.cu", CONSTANTS, "sm_90")
    (kept,) = (tmp_path / "kernels").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert build.build("recurrent.cu", CONSTANTS, "sm_90") == first
    assert len(compiled) == 2


def test_a_folder_that_can_t_be_written_is_no_obstacle(
    compiled: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels").write_text("a file")
    assert build.build("recurrent.cu", CONSTANTS, "sm_90")
    assert "can't be kept" in caplog.text
