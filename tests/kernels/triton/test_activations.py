"""The gates of an MLP by Triton: against float64, and each row alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

# isort: skip  (after the check for Triton)
from quire.backends.triton.rowwise import (
    activate,
    clamp_,
    gate,
    sigmoid_mul,
    sigmoid_mul_add,
    soft_cap_,
)
from quire.kernels.ops import Activation
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

pytestmark = MARKS
SILU = Activation.SILU


@drawn
@given(st.sampled_from(DTYPES), st.integers(1, 9), st.sampled_from([1, 7, 64, 768, 1000, 3072]))
def test_gates_are_those_of_float64(dtype: torch.dtype, rows: int, size: int) -> None:
    gate_up = random(rows, 2 * size, dtype=dtype, seed=rows) * 3
    left, up = gate_up.double().chunk(2, -1)
    assert_close(gate(gate_up, SILU), left * left.sigmoid() * up, roundings=2)
    assert_close(
        gate(gate_up, Activation.GELU_TANH), F.gelu(left, approximate="tanh") * up, roundings=2
    )
    assert_close(
        activate(gate_up, Activation.GELU_TANH),
        F.gelu(gate_up.double(), approximate="tanh"),
        roundings=2,
    )
    positive = gate_up.double().clamp(min=0)
    assert_close(activate(gate_up, Activation.RELU2), positive * positive, roundings=2)
    assert_close(
        activate(gate_up, Activation.GELU),
        F.gelu(gate_up.double()),
        roundings=2,
        size=gate_up.double().abs(),
    )
    wide = gate_up * 4
    left, right = (half.double() for half in wide.chunk(2, -1))
    left = left.clamp(max=7)
    truth = left * (1.702 * left).sigmoid() * (right.clamp(-7, 7) + 1)
    assert_close(gate(wide, Activation.CLAMPED_SWIGLU), truth, roundings=3)
    capped = wide.clone()
    soft_cap_(capped[:, 1:], 5.0)
    assert torch.equal(capped[:, :1], wide[:, :1])
    assert_close(
        capped[:, 1:], 5 * (wide.double()[:, 1:] / 5).tanh(), roundings=2, size=torch.tensor(5.0)
    )
    clamped = wide.clone()
    clamped[0, 1] = float("nan")
    clamp_(clamped[:, 1:], 0.5)
    expected = wide.clamp(-0.5, 0.5)
    expected[0, 1], expected[:, :1] = float("nan"), wide[:, :1]
    torch.testing.assert_close(clamped, expected, rtol=0, atol=0, equal_nan=True)
    share = random(rows, 1, dtype=dtype, seed=5)
    assert_close(sigmoid_mul(share, up.to(dtype)), share.double().sigmoid() * up, roundings=2)
    left, right = gate_up.chunk(2, -1)  # neither begins where a row does, nor are rows together
    product = sigmoid_mul(left, right)
    assert_close(product, left.double().sigmoid() * right.double(), roundings=2)
    assert torch.equal(sigmoid_mul_add(left, right, left), left + product)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_alone(dtype: torch.dtype) -> None:
    for size in (40, 1031):
        gate_up, share = (
            random(max(ROW_COUNTS), width, dtype=dtype, seed=width) for width in (2 * size, 1)
        )
        for activation in Activation:
            assert_rows_alone(partial(gate, activation=activation), [gate_up])
            assert_rows_alone(partial(activate, activation=activation), [gate_up])
        assert_rows_alone(sigmoid_mul, [share, gate_up])
        assert_rows_alone(sigmoid_mul_add, [share, gate_up, -gate_up])
        assert_rows_alone(sigmoid_mul, [gate_up, -gate_up])


def test_gates_far_from_zero() -> None:
    ends = torch.tensor([[-200.0, 200.0, -90.0, 0.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    assert gate(ends, SILU).tolist() == [[0.0, 200.0, pytest.approx(-90 * 8.2e-40, abs=1e-37), 0.0]]
    assert gate(ends[:0], SILU).shape == (0, 4)
