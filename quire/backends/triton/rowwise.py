"""Operations on single rows: norms, the gates of an MLP, rows of the embedding.

A program of a norm holds whole rows, so the mean of squares is one reduction, whose order depends
on the row's size only. The other operations compute each number by itself.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin
from quire.backends.triton.shapes import (
    as_rows,
    cdiv,
    like_rows,
    next_power_of_2,
    num_warps,
    row_stride,
)
from quire.kernels.ops import Activation

MAX_SIZE = 16384
"""The longest row of a norm that fits a program's registers."""
_SHORT = 512
"""A norm's program takes several rows if they have at most this many numbers together."""
_BLOCK = 1024
"""Numbers of a row per program, in all operations but norms."""


@jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    bias,
    normed,
    total,
    rows,
    x_stride,
    residual_stride,
    eps,
    offset,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTER: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows of BLOCK >= SIZE columns. CENTER: the mean is subtracted first (LayerNorm). With
    CENTER or OFFSET (to the weight) only the final result is rounded; else also the normed number
    before the product with the weight.
    """
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0)  # a constant: before the wait
    if BIAS:
        added = tl.load(bias + column, mask=column < SIZE, other=0.0)
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    exists = (row < rows) & (column < SIZE)
    value = tl.load(x + row * x_stride + column, mask=exists, other=0.0)
    dtype: tl.constexpr = value.dtype
    if ADD:
        other = tl.load(residual + row * residual_stride + column, mask=exists, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(total + row * SIZE + column, value, mask=exists)
    x32 = value.to(tl.float32)
    if CENTER:
        x32 = tl.where(column < SIZE, x32 - tl.sum(x32, 1, keep_dims=True) / SIZE, 0.0)
    mean = tl.sum(x32 * x32, 1, keep_dims=True) / SIZE
    result = x32 * tl.rsqrt(mean + eps)
    if OFFSET:
        result = result * (scale.to(tl.float32) + offset)
    elif CENTER:
        result = result * scale.to(tl.float32)
    else:
        result = result.to(dtype).to(tl.float32) * scale.to(tl.float32)
    if BIAS:
        result += added.to(tl.float32)
    tl.store(normed + row * SIZE + column, result.to(dtype), mask=exists)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`Kernels.rms_norm`."""
    return _normed(x, weight, eps, offset=offset)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`Kernels.add_rms_norm`."""
    return _normed(x, weight, eps, residual, offset=offset)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`Kernels.layer_norm`."""
    return _normed(x, weight, eps, bias=bias, center=True)[0]


def _normed(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    center: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm, and x + residual; without a residual the norm twice."""
    source = as_rows(x)
    added = source if residual is None else as_rows(residual)
    rows, size = source.shape
    if size > MAX_SIZE:
        raise ValueError(f"The norm's kernel takes rows of up to {MAX_SIZE} numbers, not {size}.")
    normed = like_rows(x, source)
    total = normed if residual is None else torch.empty_like(normed)
    if rows:
        block = next_power_of_2(size)
        group = max(1, _SHORT // block)
        _rms_norm_kernel[(cdiv(rows, group),)](
            x=source,
            residual=added,
            weight=weight,
            bias=weight if bias is None else bias,
            normed=normed,
            total=total,
            rows=rows,
            x_stride=row_stride(source),
            residual_stride=row_stride(added),
            eps=eps,
            offset=offset,
            SIZE=size,
            BLOCK=block,
            ROWS=group,
            ADD=residual is not None,
            OFFSET=offset != 0,
            CENTER=center,
            BIAS=bias is not None,
            PDL=USE_PDL,
            num_warps=num_warps(block * group),
            **LAUNCH,
        )
    return normed, total


def _launch_by_blocks(kernel: Any, rows: int, size: int, **arguments: Any) -> None:
    """Launches a kernel whose programs compute a part of a row of `size` numbers; arguments are the
    kernel's other ones, and launch options.
    """
    if rows:
        block = min(_BLOCK, next_power_of_2(size))
        kernel[(rows, cdiv(size, block))](
            SIZE=size, BLOCK=block, PDL=USE_PDL, num_warps=num_warps(block), **arguments, **LAUNCH
        )


SILU, GELU_TANH, CLAMPED_SWIGLU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
RELU2, GELU, RELU = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
NUMBERS = {
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.CLAMPED_SWIGLU: 2,
    Activation.RELU2: 3,
    Activation.GELU: 4,
    Activation.RELU: 5,
}


@triton.jit
def sigmoid(x):
    """In float32; for other kernels' use too."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x * sigmoid(x) in float32; for other kernels' use too."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation of x in float32."""
    if ACTIVATION == SILU:
        return silu(x)
    if ACTIVATION == GELU_TANH:  # (1 + tanh(y)) / 2 is the sigmoid of 2y
        return x / (1.0 + tl.exp(-1.5957691216 * (x + 0.044715 * x * x * x)))
    if ACTIVATION == RELU:
        return tl.where(x < 0.0, 0.0, x)  # NaN stays
    if ACTIVATION == RELU2:
        positive = tl.where(x < 0.0, 0.0, x)  # NaN stays
        return positive * positive
    if ACTIVATION == GELU:  # by the error function: see `kernels/elementwise.py`
        size = tl.abs(x)
        part = 1.0 / (1.0 + 0.2316418882 * size)
        lacking = 1.061405429 * part
        lacking = (lacking - 1.453152027) * part
        lacking = (lacking + 1.421413741) * part
        lacking = (lacking - 0.284496736) * part
        lacking = (lacking + 0.254829592) * part
        return tl.where(x < 0.0, 0.0, x) - 0.5 * size * lacking * tl.exp(-0.5 * x * x)
    return x / (1.0 + tl.exp(-1.702 * x))


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """activation(gate) * up in float32, of numbers already rounded to the dtype; the result is not
    rounded.
    """
    if ACTIVATION == CLAMPED_SWIGLU:
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = (up + 1.0).to(dtype).to(tl.float32)
    return activated(gate, ACTIVATION).to(dtype).to(tl.float32) * up


@jit
def _gate_kernel(
    gate_up,
    out,
    stride,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < SIZE
    source = gate_up + row * stride + column
    gate = tl.load(source, mask=exists, other=0.0)
    dtype: tl.constexpr = gate.dtype
    if GATED:
        up = tl.load(source + SIZE, mask=exists, other=0.0)
        result = gated(gate.to(tl.float32), up.to(tl.float32), ACTIVATION, dtype)
    else:
        result = activated(gate.to(tl.float32), ACTIVATION)
    tl.store(out + row * SIZE + column, result.to(dtype), mask=exists)


@jit(do_not_specialize_on_alignment=["gate"])
def _sigmoid_mul_kernel(
    gate,
    x,
    other,
    out,
    gate_stride,
    x_stride,
    other_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    ADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """WIDE: each number has a gate of its own; else a row has one. ADDED: to the other's numbers."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < SIZE
    value = tl.load(x + row * x_stride + column, mask=exists, other=0.0)
    dtype: tl.constexpr = value.dtype
    if WIDE:
        found = tl.load(gate + row * gate_stride + column, mask=exists, other=0.0)
    else:
        found = tl.load(gate + row * gate_stride)
    share = sigmoid(found.to(tl.float32))
    result = (share.to(dtype).to(tl.float32) * value.to(tl.float32)).to(dtype)
    if ADDED:
        first = tl.load(other + row * other_stride + column, mask=exists, other=0.0)
        result = (first.to(tl.float32) + result.to(tl.float32)).to(dtype)
    tl.store(out + row * SIZE + column, result, mask=exists)


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up of [rows, 2 * size] -> [rows, size]; gate is the first half, rounded
    before the product.
    """
    return _activated(gate_up, activation, gate_up.shape[-1] // 2)


def activate(x: Tensor, activation: Activation) -> Tensor:
    return _activated(x, activation, x.shape[-1])


def _activated(x: Tensor, activation: Activation, size: int) -> Tensor:
    source = as_rows(x)
    out = torch.empty(source.shape[0], size, dtype=x.dtype, device=x.device)
    out = out if x.dim() == 2 else out.view(*x.shape[:-1], size)
    _launch_by_blocks(
        _gate_kernel,
        source.shape[0],
        size,
        gate_up=source,
        out=out,
        stride=row_stride(source),
        ACTIVATION=NUMBERS[activation],
        GATED=size < x.shape[-1],
        **ROUND_ALWAYS,
    )
    return out


def sigmoid_mul(gate: Tensor, x: Tensor, other: Tensor | None = None) -> Tensor:
    """`Kernels.sigmoid_mul`, added to the other if there is one; the sigmoid is rounded to the dtype
    first, the product before it is added.
    """
    x = as_rows(x)
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    is_wide = gate.shape[1] != 1
    gates, added = as_rows(gate) if is_wide else gate, x if other is None else as_rows(other)
    _launch_by_blocks(
        _sigmoid_mul_kernel,
        rows,
        size,
        gate=gates,
        x=x,
        other=added,
        out=out,
        gate_stride=row_stride(gates) if is_wide else gates.stride(0),
        x_stride=row_stride(x),
        other_stride=row_stride(added),
        WIDE=is_wide,
        ADDED=other is not None,
        **ROUND_ALWAYS,
    )
    return out


def sigmoid_mul_add(gate: Tensor, x: Tensor, other: Tensor) -> Tensor:
    """`Kernels.sigmoid_mul_add`."""
    return sigmoid_mul(gate, x, other)


@triton.jit
def soft_capped(x, cap):
    """cap * tanh(x / cap), in float32; for other kernels' use too."""
    decayed = tl.exp(tl.abs(x) * (-2.0 / cap))
    size = cap * (1.0 - decayed) / (1.0 + decayed)
    return tl.where(x < 0.0, -size, size)


@jit
def _soft_cap_kernel(x, stride, cap, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = x + tl.program_id(0).to(tl.int64) * stride + column
    value = tl.load(place, mask=column < SIZE, other=0.0)
    tl.store(place, soft_capped(value.to(tl.float32), cap).to(value.dtype), mask=column < SIZE)


def soft_cap_(x: Tensor, cap: float) -> None:
    """`Kernels.soft_cap_`."""
    rows, size = x.shape
    if x.stride(1) != 1:
        raise ValueError(f"Rows must lie in one piece: {x.stride()}.")
    _launch_by_blocks(
        _soft_cap_kernel, rows, size, x=x, stride=x.stride(0), cap=cap, **ROUND_ALWAYS
    )


@jit
def _clamp_kernel(x, stride, limit, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = x + tl.program_id(0).to(tl.int64) * stride + column
    value = tl.load(place, mask=column < SIZE, other=0.0).to(tl.float32)
    value = tl.where(value > limit, limit, value)  # NaN is neither above nor below
    value = tl.where(value < -limit, -limit, value)
    tl.store(place, value.to(x.dtype.element_ty), mask=column < SIZE)


def clamp_(x: Tensor, limit: float) -> None:
    """`Kernels.clamp_`."""
    rows, size = x.shape
    if x.stride(1) != 1:
        raise ValueError(f"Rows must lie in one piece: {x.stride()}.")
    _launch_by_blocks(
        _clamp_kernel, rows, size, x=x, stride=x.stride(0), limit=limit, **ROUND_ALWAYS
    )


@jit(do_not_specialize_on_alignment=["token_ids"])
def _embedding_kernel(
    token_ids, weight, out, vocab_size, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token_id = tl.load(token_ids + row).to(tl.int64)
    known = (token_id >= 0) & (token_id < vocab_size)
    found = tl.load(
        weight + token_id * SIZE + column, mask=known & (column < SIZE), other=float("nan")
    )
    tl.store(out + row * SIZE + column, found, mask=column < SIZE)


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of a contiguous weight [vocab, hidden], by int64 or int32 token_ids [rows].

    An id outside the table gives a row of NaN, so that only its own request fails, at sampling
    (`HAS_NAN`).
    """
    rows, size = token_ids.shape[0], weight.shape[1]
    out = torch.empty(rows, size, dtype=weight.dtype, device=weight.device)
    _launch_by_blocks(
        _embedding_kernel,
        rows,
        size,
        token_ids=token_ids,
        weight=weight,
        out=out,
        vocab_size=weight.shape[0],
    )
    return out
