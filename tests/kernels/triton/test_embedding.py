"""Rows of a table by Triton."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.support import DEVICE, DTYPES, MARKS, random

from quire.backends.triton.rowwise import embedding  # isort: skip  (after the check for Triton)

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("id_type", [torch.int64, torch.int32], ids=str)
def test_rows_are_those_of_the_table(dtype: torch.dtype, id_type: torch.dtype) -> None:
    for size in (1, 64, 1000, 1025):
        weight = random(50, size, dtype=dtype, seed=size)
        token_ids = torch.tensor([0, 49, 7, 7, 31], device=DEVICE)
        assert torch.equal(embedding(token_ids.to(id_type), weight), weight[token_ids])
    assert embedding(token_ids[:0], weight).shape == (0, 1025)


def test_an_unknown_id_spoils_its_own_row_alone() -> None:
    weight = random(50, 72, dtype=torch.float32)
    found = embedding(torch.tensor([3, -1, 50, 4, 2**40], device=DEVICE), weight)
    assert torch.equal(found[[0, 3]], weight[[3, 4]])
    assert found[[1, 2, 4]].isnan().all()
