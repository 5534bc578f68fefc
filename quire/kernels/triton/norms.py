"""RMSNorm, alone and with the addition of the residual stream before it.

A program holds whole rows, so the mean of squares is one reduction whose order the row's size fixes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import LAUNCH, USE_PDL, begin
from quire.kernels.triton.shapes import as_rows, next_power_of_2, num_warps, row_stride

MAX_SIZE = 16384
"""The longest row that fits a program's registers."""

_SHORT = 512
"""Shorter rows share a program, until they are so many numbers together."""


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x, residual, weight, normed, total, rows, x_stride, residual_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of BLOCK >= SIZE columns."""
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0)  # a constant: before the wait
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    exists = (row < rows) & (column < SIZE)
    value = tl.load(x + row * x_stride + column, mask=exists, other=0.0)
    dtype: tl.constexpr = value.dtype
    if ADD:
        other = tl.load(residual + row * residual_stride + column, mask=exists, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(total + row * SIZE + column, value, mask=exists)
    wide = value.to(tl.float32)
    mean = tl.sum(wide * wide, 1, keep_dims=True) / SIZE
    rounded = (wide * tl.rsqrt(mean + eps)).to(dtype)
    result = (rounded.to(tl.float32) * scale.to(tl.float32)).to(dtype)
    tl.store(normed + row * SIZE + column, result, mask=exists)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension; rounded before the product with the weight."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = as_rows(x)
    _launch(rows, rows, weight, eps, normed, normed, add=False)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the sum is rounded to the dtype first."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(normed)
    _launch(as_rows(x), as_rows(residual), weight, eps, normed, total, add=True)
    return normed, total


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, normed: Tensor, total: Tensor, add: bool) -> None:
    rows, size = x.shape
    if size > MAX_SIZE:
        raise ValueError(f"The norm's kernel takes rows of up to {MAX_SIZE} numbers, not {size}.")
    if rows == 0:
        return
    block = next_power_of_2(size)
    group = max(1, _SHORT // block)
    grid = (triton.cdiv(rows, group),)
    _rms_norm_kernel[grid](
        x, residual, weight, normed, total, rows, row_stride(x), row_stride(residual), eps,
        size, block, group, add, USE_PDL, num_warps=num_warps(block * group), **LAUNCH,
    )  # fmt: skip
