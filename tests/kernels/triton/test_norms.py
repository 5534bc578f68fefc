"""RMSNorm by Triton: against float64, and each row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

# isort: skip  (after the check for Triton)
from quire.backends.triton.rowwise import MAX_SIZE, add_rms_norm, layer_norm, rms_norm
from tests.kernels.triton.support import (
    DTYPES,
    MARKS,
    ON_GPU,
    ROW_COUNTS,
    assert_close,
    assert_rows_alone,
    drawn,
    random,
)

pytestmark = MARKS
EPS = 1e-6


def truth_of(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@drawn
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 12),
    st.sampled_from([64, 65, 80, 576, 1000, 2560, MAX_SIZE]),
)
def test_norm_and_sum_are_those_of_float64(dtype: torch.dtype, rows: int, size: int) -> None:
    x, residual = (
        random(rows, size, dtype=dtype, seed=size),
        random(rows, size, dtype=dtype, seed=rows),
    )
    weight = random(size, dtype=dtype, seed=2)
    assert_close(rms_norm(x, weight, EPS), truth_of(x, weight), roundings=2)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert_close(normed, truth_of(total, weight), roundings=2)
    assert_close(rms_norm(x, weight, EPS, 1.0), truth_of(x, weight.double() + 1), roundings=2)
    assert torch.equal(
        add_rms_norm(x, residual, weight, EPS, 1.0)[0], rms_norm(total, weight, EPS, 1.0)
    )
    wide, bias = x.double() - x.double().mean(-1, keepdim=True), random(size, dtype=dtype, seed=3)
    assert_close(
        layer_norm(x, weight, None, EPS),
        truth_of(wide, weight),
        roundings=2,
        size=x.double().abs() + 1,
    )
    truth = truth_of(wide, weight) + bias.double()
    assert_close(layer_norm(x, weight, bias, EPS), truth, roundings=2, size=truth.abs() + 4)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [64, 1024, 1027, 4096] if ON_GPU else [64, 131, 1024])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_alone(dtype: torch.dtype, size: int) -> None:
    weight = random(size, dtype=dtype, seed=2)
    x, residual = (
        random(max(ROW_COUNTS), size, dtype=dtype),
        random(max(ROW_COUNTS), size, dtype=dtype, seed=1),
    )
    assert_rows_alone(lambda x: rms_norm(x, weight, EPS), [x])
    assert_rows_alone(lambda x: rms_norm(x, weight, EPS, 1.0), [x])
    assert_rows_alone(lambda x: layer_norm(x, weight, weight, EPS), [x])
    assert_rows_alone(lambda x, residual: add_rms_norm(x, residual, weight, EPS), [x, residual])


def test_heads_of_a_packed_row_are_rows_too() -> None:
    packed, weight = random(5, 12, 64, dtype=torch.float32), random(64, dtype=torch.float32, seed=1)
    assert torch.equal(rms_norm(packed[:, 3:7], weight, EPS), rms_norm(packed, weight, EPS)[:, 3:7])


def test_no_rows_and_rows_that_are_too_long() -> None:
    weight = random(MAX_SIZE + 1, dtype=torch.float32)
    assert rms_norm(weight[:0].view(0, 64), weight[:64], EPS).shape == (0, 64)
    with pytest.raises(ValueError, match="16384"):
        rms_norm(weight.unsqueeze(0), weight, EPS)
