"""Products through our own cuBLAS handle where there is no such library, and what it says when a call fails. That it
gives the bits of our kernel, in graphs too, is held by test_linear.py on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.support import DEVICE, MARKS

from quire.kernels.triton import cublas  # isort: skip  (after the check for Triton)

pytestmark = MARKS


def test_without_the_library_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "_library", lambda: None)
    x, weight = torch.randn(5, 8, device=DEVICE), torch.randn(3, 8, device=DEVICE)
    out = torch.empty(5, 3, device=DEVICE)
    assert cublas.product(x, weight, out) is out
    assert torch.allclose(out, x @ weight.t(), atol=1e-5)


def test_a_call_that_fails_is_an_error() -> None:
    cublas._check(0)
    with pytest.raises(RuntimeError, match="status 7"):
        cublas._check(7)
