"""Rows and weights of 8 bits: what rounding does, and that products depend on their own row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.formats import FORMATS
from quire.kernels.quantize import quantize
from quire.kernels.triton.linear import Tile
from quire.kernels.triton.scaled_linear import quantize_rows, scaled_linear
from tests.kernels.triton.support import DEVICE, MARKS, NAN, ON_GPU, ROW_COUNTS, assert_rows_alone, random

pytestmark = MARKS
# The interpreter cuts numbers off where the GPU rounds them to FP8.
CODES = [torch.int8, torch.float8_e4m3fn] if ON_GPU else [torch.int8]
SMALL = Tile(16, 32, 64, 2, 4)


def product(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, silu_mul: bool = False) -> Tensor:
    rounded, row_scales = quantize_rows(x, weight.dtype, 64 if scales.dim() == 2 else 0)
    out = torch.empty(len(x), len(weight) // (2 if silu_mul else 1), dtype=x.dtype, device=x.device)
    return scaled_linear(rounded, row_scales, weight, scales, bias, out, silu_mul, SMALL)


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("dtype", CODES)
def test_rows_are_rounded_by_their_largest_number(dtype: torch.dtype, group: int) -> None:
    x = random(5, 192, dtype=torch.float32)
    x[1] = 0.0
    codes, scales = quantize_rows(x, dtype, group)
    groups = x.view(5, -1, group or 192)
    assert scales.shape == groups.shape[:2]
    got = codes.float().view(groups.shape) * scales.unsqueeze(-1)
    largest = groups.abs().amax(-1, keepdim=True)
    step = largest / 127 if dtype == torch.int8 else groups.abs() / 8 + largest / 448
    assert ((got - groups).abs() <= 0.51 * step).all()
    assert not got[1].any()
    assert codes.float().abs().amax() == (127 if dtype == torch.int8 else 448)


@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("dtype", CODES)
def test_products_are_those_of_the_rounded_numbers(dtype: torch.dtype, silu_mul: bool) -> None:
    name = "INT8" if dtype == torch.int8 else "FP8"
    made = quantize(FORMATS[name], random(72, 128, dtype=torch.float32, seed=1))
    assert made is not None
    x, bias = random(6, 128, dtype=torch.float16, seed=2), random(72, dtype=torch.float16, seed=3)
    rounded, row_scales = quantize_rows(x, dtype, 0)
    exact = (rounded.double() * row_scales.double()) @ (made[0].double() * made[1].double().unsqueeze(1)).t()
    expected = exact + bias.double()
    if silu_mul:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    got = product(x, *made, bias, silu_mul).double()
    assert (got - expected).abs().max() <= 4e-3 * expected.abs().max()


@pytest.mark.parametrize("dtype", CODES)
def test_groups_of_inputs_have_scales_of_their_own(dtype: torch.dtype) -> None:
    weight = random(32, 128, dtype=torch.float32, seed=4).mul_(20).round_().clamp_(-100, 100).to(dtype)
    scales = random(32, 2, dtype=torch.float32, seed=5)
    x = random(3, 128, dtype=torch.float16, seed=6)
    rounded, row_scales = quantize_rows(x, dtype, 64)
    left = (rounded.double().view(3, 2, 64) * row_scales.double().unsqueeze(-1)).view(3, 128)
    right = (weight.double().view(32, 2, 64) * scales.double().unsqueeze(-1)).view(32, 128)
    expected = left @ right.t()
    assert (product(x, weight, scales).double() - expected).abs().max() <= 2e-3 * expected.abs().max()


@pytest.mark.parametrize("dtype", CODES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    weight = random(64, 128, dtype=torch.float32, seed=7).mul_(20).round_().clamp_(-100, 100).to(dtype)
    scales = random(64, dtype=torch.float32, seed=8)
    x = random(max(ROW_COUNTS), 128, dtype=torch.float16, seed=9)
    assert_rows_alone(lambda rows: product(rows, weight, scales), [x])


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", CODES)
def test_what_is_no_number_stays_none(dtype: torch.dtype, bad: float) -> None:
    """A row that went wrong must not look like one that did not."""
    weight, scales = torch.ones(32, 64, device=DEVICE).to(dtype), torch.ones(32, device=DEVICE)
    x = random(2, 64, dtype=torch.float16, seed=1)
    x[1, 5] = bad
    got = product(x, weight, scales)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()
