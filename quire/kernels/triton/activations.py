"""The gates of an MLP, number by number: bits depend on nothing but the numbers themselves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin
from quire.kernels.triton.shapes import as_rows, next_power_of_2, num_warps, row_stride

_BLOCK = 1024


@triton.jit
def silu(x):
    """x * sigmoid(x) in float32; for other kernels' use too."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_mul_kernel(gate_up, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < SIZE
    source = gate_up + row * stride + column
    gate = tl.load(source, mask=exists, other=0.0)
    up = tl.load(source + SIZE, mask=exists, other=0.0)
    activated = silu(gate.to(tl.float32)).to(gate.dtype)
    result = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * SIZE + column, result.to(gate.dtype), mask=exists)


@triton.jit(do_not_specialize_on_alignment=["gate"])
def _sigmoid_mul_kernel(
    gate, x, out, gate_stride, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < SIZE
    value = tl.load(x + row * x_stride + column, mask=exists, other=0.0)
    share = 1.0 / (1.0 + tl.exp(-tl.load(gate + row * gate_stride).to(tl.float32)))
    result = share.to(value.dtype).to(tl.float32) * value.to(tl.float32)
    tl.store(out + row * SIZE + column, result.to(value.dtype), mask=exists)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [rows, 2 * size] -> [rows, size]; gate is the first half, rounded before the product."""
    source = as_rows(gate_up)
    rows, size = source.shape[0], source.shape[1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(_BLOCK, next_power_of_2(size))
        _silu_mul_kernel[(rows, triton.cdiv(size, block))](
            source, out, row_stride(source), size, block, USE_PDL, num_warps=num_warps(block), **ROUND_ALWAYS, **LAUNCH
        )
    return out


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """sigmoid(gate) * x of [rows, 1] and [rows, size]; the sigmoid is rounded to the dtype first."""
    x = as_rows(x)
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        block = min(_BLOCK, next_power_of_2(size))
        _sigmoid_mul_kernel[(rows, triton.cdiv(size, block))](
            gate, x, out, gate.stride(0), row_stride(x), size, block, USE_PDL, num_warps=num_warps(block), **LAUNCH
        )
    return out
