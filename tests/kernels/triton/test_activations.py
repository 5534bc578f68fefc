"""The gates of an MLP by Triton: against float64, and each row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.triton.support import (
    DEVICE,
    DTYPES,
    MARKS,
    ROW_COUNTS,
    assert_close,
    assert_rows_alone,
    drawn,
    random,
)

from quire.kernels.triton.rowwise import sigmoid_mul, silu_mul  # isort: skip  (after the check for Triton)

pytestmark = MARKS


@drawn
@given(st.sampled_from(DTYPES), st.integers(1, 9), st.sampled_from([1, 7, 64, 768, 1000, 3072]))
def test_gates_are_those_of_float64(dtype: torch.dtype, rows: int, size: int) -> None:
    gate_up = random(rows, 2 * size, dtype=dtype, seed=rows) * 3
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(silu_mul(gate_up), gate * gate.sigmoid() * up, roundings=2)
    share = random(rows, 1, dtype=dtype, seed=5)
    assert_close(sigmoid_mul(share, up.to(dtype)), share.double().sigmoid() * up, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_alone(dtype: torch.dtype) -> None:
    for size in (40, 1031):
        gate_up, share = (random(max(ROW_COUNTS), width, dtype=dtype, seed=width) for width in (2 * size, 1))
        assert_rows_alone(silu_mul, [gate_up])
        assert_rows_alone(sigmoid_mul, [share, gate_up])


def test_gates_far_from_zero() -> None:
    ends = torch.tensor([[-200.0, 200.0, -90.0, 0.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    assert silu_mul(ends).tolist() == [[0.0, 200.0, pytest.approx(-90 * 8.2e-40, abs=1e-37), 0.0]]
    assert silu_mul(ends[:0]).shape == (0, 4)
