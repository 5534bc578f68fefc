"""Products in float32 of a model in half precision: routers of experts, whose few outputs decide much.

The tensor cores have no such product, and an accumulator that walks the inner dimension waits for
every addition (74 µs for 2,048 inputs on an H200). So a program holds whole rows of the weight and
adds a row's products in one reduction, whose order depends on the size of the row only. The weight is
on its way before the kernel waits for its input.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import (
    HAS_GLUON,
    LAUNCH,
    ROUND_ALWAYS,
    USE_PDL,
    let_next_start,
    wait_for_previous,
)
from quire.backends.triton.shapes import as_rows, cdiv, next_power_of_2, row_stride
from quire.backends.triton.tested import has_gluon, is_exact, random_numbers

if HAS_GLUON:
    from quire.backends.triton import router_rows

MAX_INNER = 8192
_NUMBERS = 8192
"""Of the weight, in a program's registers."""
_PROGRAMS = 792


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
    PDL: tl.constexpr,
):
    """OUT outputs of `each` rows."""
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
    for _ in range(tl.minimum(each, num_rows - first)):
        own = tl.load(source, mask=is_inner, other=0.0).to(tl.float32)
        tl.store(target, tl.sum(numbers * own[None, :], 1) + added, mask=is_output)
        source += x_stride
        target += N


def router_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float32 [rows, outputs]: x [rows, in] times weight [outputs, in] transposed."""
    x = as_rows(x)
    (rows, inner), size = x.shape, weight.shape[0]
    if HAS_GLUON and router_rows.takes(x) and many_rows_are_exact(x.device, x.dtype):
        return router_rows.router_rows(x, weight, bias)
    out = torch.empty(rows, size, dtype=torch.float32, device=x.device)
    block = next_power_of_2(inner)
    outputs = min(max(_NUMBERS // block, 1), 16)
    blocks = cdiv(size, outputs)
    each = cdiv(rows, cdiv(_PROGRAMS, blocks))
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
            PDL=USE_PDL,
            num_warps=4,
            **ROUND_ALWAYS,
            **LAUNCH,
        )
    return out


@cache
def many_rows_are_exact(device: torch.device, dtype: torch.dtype) -> bool:
    """Tests the kernel for many rows of this dtype, once."""
    return (
        has_gluon(device, torch.bfloat16)
        and torch.cuda.get_device_capability(device)[0] >= 9
        and is_exact("prompts through routers", lambda: _same_sums(device, dtype))
    )


def _same_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it has the bits of the kernel for few."""
    found = []
    for inner in (600, 2048):
        x = random_numbers(50, inner, device=device, dtype=dtype)
        weight = random_numbers(20, inner, device=device, dtype=torch.float32)
        many = router_rows.router_rows(x, weight, None)
        found.append(torch.equal(many, router_linear(x, weight, None)))
    return all(found)
