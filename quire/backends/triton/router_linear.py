"""Products in float32 of a model in half precision: routers of experts, whose few outputs decide much.

The tensor cores have no such product, and an accumulator that walks the inner dimension waits for
every addition (74 µs for 2,048 inputs on an H200). So a program holds whole rows of the weight and
adds a row's products in one reduction, whose order depends on the size of the row only. The weight is
on its way before the kernel waits for its input.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import (
    INTERPRETED,
    LAUNCH,
    ROUND_ALWAYS,
    USE_PDL,
    let_next_start,
    wait_for_previous,
)
from quire.backends.triton.shapes import as_rows, cdiv, next_power_of_2, row_stride

MAX_INNER = 8192
_NUMBERS = 8192
"""Of the weight, in a program's registers."""
_PROGRAMS = 792
_MANY = 1024
"""From so many rows on a program holds more of the weight and computes several rows at a time."""
_MANY_NUMBERS = 16384
_MANY_PROGRAMS = 264
_ROWS = 2
_LONG = 1024


@jit(do_not_specialize=["num_rows", "each"])
def _router_kernel(
    x,
    weight,
    bias,
    out,
    x_stride,
    num_rows,
    each,
    N,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUT outputs of `each` rows, ROWS at a time. A warp's threads have the same inputs of a row for
    any OUT and ROWS, so each sum has one order.
    """
    let_next_start(PDL)
    output = tl.program_id(0) * OUT + tl.arange(0, OUT)
    inner = tl.arange(0, BLOCK)
    is_output, is_inner = output < N, inner < K
    numbers = tl.load(
        weight + output[:, None].to(tl.int64) * K + inner[None, :],
        mask=is_output[:, None] & is_inner[None, :],
        other=0.0,
    )
    added = tl.zeros((OUT,), tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    first = tl.program_id(1) * each
    source = x + first.to(tl.int64) * x_stride + inner
    target = out + first.to(tl.int64) * N + output
    left = tl.minimum(each, num_rows - first)
    if ROWS == 1:
        for _ in range(left):
            own = tl.load(source, mask=is_inner, other=0.0).to(tl.float32)
            tl.store(target, tl.sum(numbers * own[None, :], 1) + added, mask=is_output)
            source += x_stride
            target += N
    else:
        following = _rows(source, x_stride, left, is_inner, ROWS)
        for _ in range(tl.cdiv(left, ROWS)):
            products = ()
            for i in tl.static_range(ROWS):
                own = following[i].to(tl.float32)
                products = products + (numbers * own[None, :],)  # type: ignore[assignment]  # noqa: RUF005
            source += ROWS * x_stride
            following = _rows(
                source, x_stride, left - ROWS, is_inner, ROWS
            )  # while these are added
            sums = _sums(products, ROWS, INTERPRETED)
            for i in tl.static_range(ROWS):
                tl.store(target + i * N, sums[i] + added, mask=is_output & (i < left))
            target += ROWS * N
            left -= ROWS


@triton.jit
def _rows(source, stride, left, is_inner, ROWS: tl.constexpr):
    """The next rows, or 0 behind the last."""
    rows = ()
    for i in tl.static_range(ROWS):
        row = tl.load(source + i * stride, mask=is_inner & (i < left), other=0.0)
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@triton.jit
def _sums(products, ROWS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The sums of each of these products, in one reduction: warps wait for each other once."""
    if ROWS == 2 and not INTERPRETED:
        sums = tl.reduce(products, 1, _add_two)
    elif ROWS == 4 and not INTERPRETED:
        sums = tl.reduce(products, 1, _add_four)
    else:
        sums = ()
        for i in tl.static_range(ROWS):
            sums = sums + (tl.sum(products[i], 1),)  # noqa: RUF005
    return sums


@triton.jit
def _add_two(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _add_four(a, b, c, d, other_a, other_b, other_c, other_d):
    return a + other_a, b + other_b, c + other_c, d + other_d


def router_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float32 [rows, outputs]: x [rows, in] times weight [outputs, in] transposed."""
    x = as_rows(x)
    (rows, inner), size = x.shape, weight.shape[0]
    out = torch.empty(rows, size, dtype=torch.float32, device=x.device)
    block = next_power_of_2(inner)
    # A shorter row is not in all warps, and its numbers lie otherwise where it is multiplied by more.
    is_many = rows >= _MANY and block >= _LONG
    outputs = min(max((_MANY_NUMBERS if is_many else _NUMBERS) // block, 1), 16)
    blocks = cdiv(size, outputs)
    each = cdiv(rows, max((_MANY_PROGRAMS if is_many else _PROGRAMS) // blocks, 1))
    if rows:
        _router_kernel[(blocks, cdiv(rows, each))](
            x=x,
            weight=weight,
            bias=weight if bias is None else bias,
            out=out,
            x_stride=row_stride(x),
            num_rows=rows,
            each=each,
            N=size,
            K=inner,
            HAS_BIAS=bias is not None,
            OUT=outputs,
            BLOCK=block,
            ROWS=_ROWS if is_many else 1,
            INTERPRETED=INTERPRETED,
            PDL=USE_PDL,
            num_warps=4,
            **ROUND_ALWAYS,
            **LAUNCH,
        )
    return out
