"""Operations on rows that few families have: C++ against the reference and float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.ops import Activation
from quire.kernels.reference import ReferenceKernels

DTYPES = (torch.float32, torch.bfloat16)


def rows(count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a wider matrix: they are apart from each other."""
    generator = torch.Generator().manual_seed(size)
    return (3 * torch.randn(count, size + 8, generator=generator)).to(dtype)[:, 3 : size + 3]


@pytest.mark.parametrize("kernels", [ReferenceKernels, CpuKernels])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_is_multiplied_by_its_factor(kernels: type, dtype: torch.dtype) -> None:
    x, factors = rows(7, 37, dtype), torch.tensor([0.3, 1.7, -2.0])
    which = torch.tensor([2, 0, 0, 1, 2, 1, 0])
    expected = (x.double() * factors.double()[which].unsqueeze(1)).to(dtype)
    torch.testing.assert_close(kernels().scale_rows(x, factors, which), expected)
    only = (x.double() * 0.3).to(dtype)
    torch.testing.assert_close(kernels().scale_rows(x, factors[:1]), only)


@pytest.mark.parametrize("kernels", [ReferenceKernels, CpuKernels])
@pytest.mark.parametrize("dtype", DTYPES)
def test_xielu_is_that_of_its_paper(kernels: type, dtype: torch.dtype) -> None:
    x, positive, negative = rows(5, 300, dtype), torch.tensor([0.4]), torch.tensor([-1.1])
    x64, p, n = x.double(), F.softplus(positive.double()), F.softplus(negative.double()) + 0.5
    expected = torch.where(x64 > 0, p * x64 * x64, n * (torch.expm1(x64) - x64)) + 0.5 * x64
    found = kernels().xielu(x, positive, negative)
    torch.testing.assert_close(
        found, expected.to(dtype), atol=1e-5, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )
    # a row's bits don't depend on the others
    assert torch.equal(kernels().xielu(x[3:4], positive, negative), found[3:4])


@pytest.mark.parametrize("kernels", [ReferenceKernels, CpuKernels])
@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_keeps_what_is_positive_and_nan(kernels: type, dtype: torch.dtype) -> None:
    x = rows(3, 21, dtype).clone()
    x[1, 5] = float("nan")
    found = kernels().activate(x, Activation.RELU)
    torch.testing.assert_close(found, x.relu(), equal_nan=True)
