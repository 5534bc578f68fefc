"""`router_linear` of many rows: the same sums, whose last steps take fewer instructions.

There a warp exchanges the sums of its 32 threads in five steps, one output after the other. Here the
sums of several rows are first laid out anew, through shared memory, so that one thread has all 32 of an
output and adds them in the same order.

Written in Gluon, as Triton chooses itself which thread has what.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from quire.backends.triton.direct_launch import gluon_jit
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL
from quire.backends.triton.shapes import cdiv, next_power_of_2, row_stride

_MIN_ROWS = 64
_MIN_INNER, _MAX_INNER = 513, 4096
"""Sizes of rows that are in all warps and fit into registers."""
_NUMBERS = 16384
"""Of the weight, in a program's registers."""
_PROGRAMS = 264
_SUMS = gl.constexpr(32)
"""Sums that are finished together, four threads each."""


@gluon_jit(do_not_specialize=["num_rows", "each"])
def _router_rows_kernel(
    x,
    weight,
    bias,
    out,
    x_stride,
    num_rows,
    each,
    N,
    K: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    OUT: gl.constexpr,
    BLOCK: gl.constexpr,
    PDL: gl.constexpr,
):
    """OUT outputs of `each` rows. A thread has every 128th four inputs of a row, as in
    `router_linear._router_kernel`.
    """
    OWN: gl.constexpr = BLOCK // 128
    ROWS: gl.constexpr = _SUMS // OUT
    as_numbers: gl.constexpr = gl.BlockedLayout([OUT, OWN, 1], [1, 1, 32], [1, 1, 4], [1, 2, 0])
    as_row: gl.constexpr = gl.SliceLayout(0, as_numbers)
    as_sums: gl.constexpr = gl.BlockedLayout([1, 32], [8, 4], [4, 1], [1, 0])
    if PDL:
        cuda.gdc_launch_dependents()
    of_thread = gl.arange(0, OWN, gl.SliceLayout(1, as_row))[:, None]
    thread = gl.arange(0, 128, gl.SliceLayout(0, as_row))[None, :]
    inner = of_thread // 4 * 512 + thread * 4 + of_thread % 4
    output = gl.program_id(0) * OUT + gl.arange(
        0, OUT, gl.SliceLayout(1, gl.SliceLayout(2, as_numbers))
    )
    is_number = (output < N)[:, None, None] & (inner < K)[None, :, :]
    place = output.to(gl.int64)[:, None, None] * K + inner[None, :, :]
    numbers = gl.load(weight + place, mask=is_number, other=0.0)
    first = gl.program_id(1) * each
    left = gl.minimum(each, num_rows - first)
    source = x + first.to(gl.int64) * x_stride + inner
    number = gl.arange(0, _SUMS, gl.SliceLayout(1, as_sums))
    column = gl.program_id(0) * OUT + number % OUT
    is_column = column < N
    added = gl.zeros((_SUMS,), gl.float32, gl.SliceLayout(1, as_sums))
    if HAS_BIAS:
        added = gl.load(bias + column, mask=is_column, other=0.0).to(gl.float32)
    target = out + (first + number // OUT).to(gl.int64) * N + column
    if PDL:
        cuda.gdc_wait()
    row = _load_row(source, inner, left > 0, K, BLOCK)
    next_row = _load_row(source + x_stride, inner, left > 1, K, BLOCK)
    for _ in range(gl.cdiv(left, ROWS)):
        sums = ()
        for i in gl.static_range(ROWS):
            own = row.to(gl.float32)
            row = next_row
            next_row = _load_row(source + (i + 2) * x_stride, inner, i + 2 < left, K, BLOCK)
            sums = sums + (gl.sum(numbers * own[None, :, :], 1),)  # type: ignore[assignment]  # noqa: RUF005
        found = gl.convert_layout(_stacked(sums, OUT), as_sums)
        found = gl.reshape(found, (_SUMS, 4, 32))
        for i in gl.static_range(5):
            found = gl.sum(gl.reshape(found, (_SUMS, 4, 2, 16 >> i)), 2)
        total = gl.sum(gl.reshape(found, (_SUMS, 4)), 1)
        total = gl.convert_layout(total, gl.SliceLayout(1, as_sums)) + added
        gl.store(target, total, mask=is_column & (number // OUT < left))
        source += ROWS * x_stride
        target += ROWS * N
        left -= ROWS


@gluon.jit
def _load_row(place, inner, exists, K: gl.constexpr, BLOCK: gl.constexpr):
    mask = (inner < K) & exists if K < BLOCK else exists & (inner >= 0)
    return gl.load(place, mask=mask, other=0.0)


@gluon.jit
def _stacked(sums, OUT: gl.constexpr):
    """Tensors [OUT, 128] -> [all of them, 128]."""
    ROWS: gl.constexpr = _SUMS // OUT
    if ROWS == 2:
        made = gl.permute(gl.join(sums[0], sums[1]), (2, 0, 1))
    elif ROWS == 4:
        made = gl.permute(_four(sums, 0), (3, 2, 0, 1))
    else:
        made = gl.permute(gl.join(_four(sums, 0), _four(sums, 4)), (4, 3, 2, 0, 1))
    return gl.reshape(made, (_SUMS, 128))


@gluon.jit
def _four(sums, FIRST: gl.constexpr):
    return gl.join(gl.join(sums[FIRST], sums[FIRST + 1]), gl.join(sums[FIRST + 2], sums[FIRST + 3]))


def takes(x: Tensor) -> bool:
    return len(x) >= _MIN_ROWS and _MIN_INNER <= x.shape[1] <= _MAX_INNER


def router_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`router_linear` of rows that `takes` says yes to."""
    (rows, inner), size = x.shape, weight.shape[0]
    out = torch.empty(rows, size, dtype=torch.float32, device=x.device)
    block = next_power_of_2(inner)
    outputs = _NUMBERS // block
    blocks = cdiv(size, outputs)
    at_once = _SUMS.value // outputs
    each = cdiv(cdiv(rows, max(_PROGRAMS // blocks, 1)), at_once) * at_once
    _router_rows_kernel[(blocks, cdiv(rows, each))](
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
