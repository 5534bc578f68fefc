"""A step's inputs gathered by Triton: as the reference gathers them."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.support import DEVICE, MARKS

from quire.kernels.reference import ReferenceKernels  # isort: skip  (after the check for Triton)
from quire.backends.triton.inputs import gather_inputs  # isort: skip

pytestmark = MARKS


@pytest.mark.parametrize("count", [0, 1, 255, 257, 1000])
def test_they_are_those_of_the_reference(count: int) -> None:
    source = torch.Generator().manual_seed(count)
    token_ids = torch.randint(0, 1 << 40, (9, 130), generator=source).to(DEVICE)
    tables = torch.randint(0, 1 << 30, (9, 9), generator=source, dtype=torch.int32).to(DEVICE)
    # -1: padding
    rows = torch.randint(-1, 9, (count,), generator=source, dtype=torch.int32).to(DEVICE)
    places = torch.randint(0, 130, (count,), generator=source, dtype=torch.int32).to(DEVICE)
    for got, expected in zip(
        gather_inputs(rows, places, token_ids, tables, 16),
        ReferenceKernels().gather_inputs(rows, places, token_ids, tables, 16),
        strict=True,
    ):
        assert torch.equal(got, expected)
