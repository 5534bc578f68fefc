"""Fixtures of the Triton kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """Fresh memory is full of NaN (or the largest integer), so that what a kernel forgets to write
    is seen.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
