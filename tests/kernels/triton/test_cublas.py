"""Products by cublasLt: what it is asked, where there is no such library, and what is said when a
call fails. That it gives the bits of our kernel, in graphs too, is held by test_linear.py on a GPU.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.triton.support import DEVICE, MARKS, ON_GPU, random

from quire.backends.triton import cublas  # isort: skip  (after the check for Triton)
from quire.backends.triton import latent as latent_kernels  # isort: skip
from quire.backends.triton import kernels as kernels_module  # isort: skip
from quire.backends.triton.linear import linear  # isort: skip
from quire.kernels.weights import Weight  # isort: skip

pytestmark = MARKS
CACHES = (
    cublas._library,
    cublas._handle,
    cublas._matrix,
    cublas._operation,
    cublas._asked,
    cublas._described,
    cublas._described_heads,
    cublas._stack,
)
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")


@pytest.fixture
def on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has products computed by fake_cublaslt.c, which checks all that it is given."""
    library, source = tmp_path / "cublaslt.so", Path(__file__).with_name("fake_cublaslt.c")
    subprocess.run(
        [str(COMPILER), "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True
    )
    found = ctypes.CDLL(str(library))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(cublas, "stream_of", lambda device: 1234)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.device("cpu"))
    for one in CACHES:
        one.cache_clear()
    yield
    for one in CACHES:
        one.cache_clear()


@pytest.mark.few(2)
@pytest.mark.skipif(ON_GPU or COMPILER is None, reason="needs a C compiler, and no GPU")
@pytest.mark.parametrize(("outputs", "inner"), [(16, 24), (12, 16), (16, 10), (7, 16), (9, 5)])
@pytest.mark.usefixtures("on_the_cpu")
def test_cublas_is_told_where_everything_lies(outputs: int, inner: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, other = (
        # so that all sums are exact
        torch.randint(-4, 5, shape, generator=generator).to(torch.bfloat16)
        for shape in ((40, inner), (outputs, inner), (outputs,), (outputs,))
    )
    for rows in (16, 40, 17, 40):
        for added in (None, bias, other, bias):
            out = torch.full((rows, outputs), 99.0, dtype=torch.bfloat16)
            assert cublas.product(x[:rows], weight, out, added) is out
            assert torch.equal(out, torch.nn.functional.linear(x[:rows], weight, added))


@pytest.mark.skipif(ON_GPU or COMPILER is None, reason="needs a C compiler, and no GPU")
@pytest.mark.parametrize(("outputs", "inner", "beside"), [(16, 24, 8), (16, 24, 0), (12, 7, 3)])
@pytest.mark.usefixtures("on_the_cpu")
def test_cublas_is_told_where_each_head_lies(outputs: int, inner: int, beside: int) -> None:
    heads = 3
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-4, 5, shape, generator=generator).to(torch.bfloat16)
        for shape in ((40, heads, inner + beside), (heads, outputs, inner))
    )
    x = x[..., :inner]
    for rows in (16, 40, 17, 40):
        whole = torch.full((rows, heads, outputs + beside), 99.0, dtype=torch.bfloat16)
        out = whole[..., :outputs]
        assert cublas.heads_product(x[:rows], weight, out) is out
        assert torch.equal(out, torch.einsum("rhi,hoi->rho", x[:rows], weight))
        assert (whole[..., outputs:] == 99).all()


def test_without_the_library_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "_library", lambda: None)
    x, weight = torch.randn(5, 8, device=DEVICE), torch.randn(3, 8, device=DEVICE)
    bias, out = torch.randn(3, device=DEVICE), torch.empty(5, 3, device=DEVICE)
    assert cublas.product(x, weight, out) is out
    assert torch.allclose(out, x @ weight.t(), atol=1e-5)
    assert cublas.product(x, weight, out, bias) is out
    assert torch.allclose(out, x @ weight.t() + bias, atol=1e-5)
    of_heads, stack = torch.randn(5, 2, 8, device=DEVICE), torch.randn(2, 3, 8, device=DEVICE)
    out = torch.empty(5, 2, 3, device=DEVICE)
    assert cublas.heads_product(of_heads, stack, out) is out
    assert torch.allclose(out, torch.einsum("rhi,hoi->rho", of_heads, stack), atol=1e-5)


def test_a_call_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cublas, "_library", lambda: SimpleNamespace(cublasLtCreate=lambda *arguments: 7)
    )
    with pytest.raises(cublas.CublasError, match="cublasLtCreate failed with status 7"):
        cublas._made("")


def test_where_cublas_fails_our_own_kernel_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise cublas.CublasError("cublasLtMatmul failed with status 15")

    monkeypatch.setattr(cublas, "product", fail)
    monkeypatch.setattr(kernels_module, "is_quicker_than_cublas", lambda rows, weight: False)
    x, weight = random(20, 32, dtype=torch.bfloat16), random(24, 32, dtype=torch.bfloat16, seed=1)
    assert torch.equal(
        kernels_module.TritonKernels().linear(x, Weight.dense(weight)), linear(x, weight)
    )
    assert "(24, 32): cublasLtMatmul failed with status 15" in caplog.text
    assert "using our own kernel" in caplog.text


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_cublas_multiplies_heads_only_where_it_has_our_bits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = random(300, 4, 128, dtype=torch.bfloat16)
    weight = Weight.dense(random(4, 256, 128, dtype=torch.bfloat16, seed=1))
    expected = latent_kernels.linear_heads(x, weight)
    calls = []

    def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return out.fill_(1)

    monkeypatch.setattr(cublas, "heads_product", product)
    kernels = kernels_module.TritonKernels()
    kernels.pack(weight)
    assert "no exact product for heads (4, 256, 128)" in caplog.text
    calls.clear()
    assert torch.equal(kernels.linear_heads(x, weight), expected)
    assert not calls
    monkeypatch.undo()
    kernels = kernels_module.TritonKernels()
    kernels.pack(weight)
    monkeypatch.setattr(cublas, "heads_product", product)
    assert not torch.equal(kernels.linear_heads(x, weight), expected)
    assert calls == [300]
    assert torch.equal(kernels.linear_heads(x[:256], weight), expected[:256])
    assert calls == [300]
