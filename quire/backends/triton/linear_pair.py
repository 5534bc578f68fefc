"""Two small products of the same rows in one launch: each takes about as long as its chain of sums,
and neither waits for the other.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin
from quire.backends.triton.linear import MEDIUM_ROWS, MEMORY_BOUND_ROWS, Tile, room_for
from quire.backends.triton.shapes import as_rows, cdiv, row_stride
from quire.kernels.weights import Weight

_MAX_INNER = 4096
"""With longer sums of few rows cuBLAS is quicker."""
_MANY_ROWS = 129
_SOME_OUTPUTS = range(1024, 2049)
"""Of both weights together, for which tiles and many rows were measured (H200; docs/performance.md,
attempt 72).
"""


@jit(do_not_specialize=["rows"])
def _pair_kernel(
    x,
    first,
    first_bias,
    second,
    first_out,
    second_out,
    rows,
    x_stride,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """`linear._linear_kernel` with the first weight's FIRST outputs, then with the second's."""
    begin(PDL)
    FIRST_TILES: tl.constexpr = (FIRST + BLOCK_N - 1) // BLOCK_N
    is_second = tl.program_id(0) >= FIRST_TILES
    tile = tl.program_id(0) - (FIRST_TILES if is_second else 0)
    count = SECOND if is_second else FIRST
    weight = second if is_second else first
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    # rows and outputs past the last are computed as copies of it and not stored
    weights = weight + tl.minimum(output, count - 1)[:, None] * K + inner[None, :]
    inputs = x + tl.minimum(row, rows - 1)[:, None].to(tl.int64) * x_stride + inner[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        within = None if K % BLOCK_K == 0 else inner[None, :] < K - k
        other = None if K % BLOCK_K == 0 else 0.0
        x_tile = tl.trans(tl.load(inputs, mask=within, other=other))
        weight_tile = tl.load(weights, mask=within, other=other)
        total = tl.dot(weight_tile, x_tile, total, input_precision="ieee")
        inputs += BLOCK_K
        weights += BLOCK_K
    if BIAS:
        has_bias = (output < count) & (is_second == 0)
        total += tl.load(first_bias + output, mask=has_bias, other=0.0).to(tl.float32)[:, None]
    out = second_out if is_second else first_out
    target = out + row[None, :].to(tl.int64) * count + output[:, None]
    stored = (row[None, :] < rows) & (output < count)[:, None]
    tl.store(target, total.to(first_out.dtype.element_ty), mask=stored)


def takes(x: Tensor, first: Weight, second: Weight) -> bool:
    """Whether both are plain, and rows are so few that their time is that of one sum, or outputs that
    each product by itself would not fill the device.
    """
    outputs = first.shape[0] + second.shape[0]
    return (
        (
            0 < len(x) <= MEMORY_BOUND_ROWS
            or (_MANY_ROWS <= len(x) <= MEDIUM_ROWS and outputs in _SOME_OUTPUTS)
        )
        and x.dtype != torch.float32
        and x.shape[1] <= _MAX_INNER
        and all(one.is_dense and one.tensor.dtype == x.dtype for one in (first, second))
    )


def _tile(rows: int, outputs: int) -> Tile:
    """Bits don't depend on it. Such products are small, so a program has few outputs."""
    if outputs in _SOME_OUTPUTS and 16 < rows <= MEMORY_BOUND_ROWS:
        return Tile(16, 16, 256, 6, 1)
    if outputs in _SOME_OUTPUTS and rows >= _MANY_ROWS:
        return Tile(32, 64, 128, 4, 4)
    return Tile(16 if rows <= MEMORY_BOUND_ROWS else 32, 16, 256, 4, 4)


def linear_pair(
    x: Tensor, first: Weight, second: Weight, first_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [rows, in] times both weights [out, in] transposed, for any number of rows."""
    x = as_rows(x)
    rows, inner = x.shape
    sizes = first.shape[0], second.shape[0]
    outs = [room_for(x, size) for size in sizes]
    tile = _tile(rows, sum(sizes))
    programs = sum(cdiv(size, tile.outputs) for size in sizes)
    _pair_kernel[(programs, cdiv(rows, tile.rows))](
        x=x,
        first=first.tensor,
        first_bias=first.tensor if first_bias is None else first_bias,
        second=second.tensor,
        first_out=outs[0],
        second_out=outs[1],
        rows=rows,
        x_stride=row_stride(x),
        FIRST=sizes[0],
        SECOND=sizes[1],
        K=inner,
        BIAS=first_bias is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inner,
        PDL=USE_PDL,
        num_stages=tile.stages,
        num_warps=tile.warps,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return outs[0], outs[1]
