"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.backends.cpu.kernels import CpuKernels
from quire.errors import DeviceError
from tests.kernels.cpu_support import VARIANTS, is_best_again, variant_kernels
from tests.long_runs import IS_LONG

# `make test` takes the best variant: the others are further builds, of the same code.
_PARAMS = [
    pytest.param(name, marks=[] if name == "best" else [pytest.mark.slow]) for name in VARIANTS
]


@pytest.fixture(scope="module", params=_PARAMS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    """The C++ kernels in every variant this machine runs."""
    try:
        if is_best_again(request.param):
            pytest.skip("no AMX here: plain vectors are the best variant")
        return variant_kernels(request.param)
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture
def is_slow(request: pytest.FixtureRequest) -> bool:
    """Without instructions for a product and a sum in one: thirty times as slow, by the same code."""
    return request.node.callspec.params["kernels"] == "sse" and not IS_LONG


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def threads() -> Iterator[None]:
    """Gives the number of threads back after a test that changes it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
