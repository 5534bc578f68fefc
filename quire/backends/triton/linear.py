"""Matrix products with a weight, the same bits for any number of rows.

The tensor cores add 16 products at a time to an accumulator, in the same way for any instruction
(mma or wgmma) and any tile size: only the order of walking the inner dimension decides the bits.
Here it is walked from beginning to end with one accumulator. cuBLAS does the same where it does not
split the inner dimension between programs, so both can be used side by side (`kernels.py` checks
this and decides).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin
from quire.backends.triton.rowwise import silu
from quire.backends.triton.shapes import cdiv

MEMORY_BOUND_ROWS = 32
"""Up to this many rows the time is that of reading the weights."""
MEDIUM_ROWS = 256
SMALLEST_BATCH = 16
"""With fewer rows cuBLAS uses other algorithms, which add in another order. So smaller batches are
padded to this size, and outputs of our kernels have memory for the padding.
"""
_SMALL_WEIGHT = 7 << 20
_LARGE_WEIGHT = 16 << 20
VOCABULARY_SIZE = 65536
"""A weight with at least this many outputs is taken to be the head, which is applied to few rows:
those that sample.
"""


@jit(do_not_specialize=["M"])
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    SILU_MUL: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARES_INPUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M rows; with SILU_MUL silu(output[i]) * output[i + N]. EVEN: no tile
    needs a mask.
    """
    begin(PDL, SHARES_INPUT)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    weights = weight + outputs[:, None].to(tl.int64) * K + inner[None, :]
    # Rows past the last are computed as copies of it and not stored, so that they need no mask.
    inputs = x + tl.minimum(rows, M - 1)[:, None].to(tl.int64) * K + inner[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        within = None if EVEN else inner[None, :] < K - k
        mask = None if EVEN else (outputs[:, None] < N) & within
        other = None if EVEN else 0.0
        x_tile = tl.trans(tl.load(inputs, mask=within, other=other))
        total = tl.dot(
            tl.load(weights, mask=mask, other=other), x_tile, total, input_precision="ieee"
        )
        if SILU_MUL:
            up_tile = tl.load(weights + N.to(tl.int64) * K, mask=mask, other=other)
            total_up = tl.dot(up_tile, x_tile, total_up, input_precision="ieee")
        inputs += BLOCK_K
        weights += BLOCK_K
    dtype: tl.constexpr = out.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
    result = total.to(dtype)
    if SILU_MUL:
        if HAS_BIAS:
            total_up += tl.load(bias + N + outputs, mask=outputs < N, other=0.0).to(tl.float32)[
                :, None
            ]
        gate = silu(result.to(tl.float32)).to(dtype)
        result = (gate.to(tl.float32) * total_up.to(dtype).to(tl.float32)).to(dtype)
    target = out + rows[None, :].to(tl.int64) * N + outputs[:, None]
    tl.store(target, result, mask=(rows[None, :] < M) & (outputs < N)[:, None])


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    silu_mul: bool = False,
    shares_input: bool = False,
) -> Tensor:
    """x [rows, in] times weight [out, in] transposed by the kernel above, for any number of rows.
    With `silu_mul`, silu(first half of the outputs) * (second half). `shares_input`: the kernel after
    it may read x before it waits for this one.
    """
    rows, inner = x.shape
    size = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    x = x.contiguous()
    if out is None:
        out = room_for(x, size)
    block_m, block_n, block_k, stages, warps = tile_of(rows, weight, silu_mul)
    if x.dtype == torch.float32:
        block_k, stages = 32, 2  # twice the bytes must fit the same memory
    if rows:
        _linear_kernel[(cdiv(size, block_n), cdiv(rows, block_m))](
            x=x,
            weight=weight,
            bias=weight if bias is None else bias,
            out=out,
            M=rows,
            N=size,
            K=inner,
            HAS_BIAS=bias is not None,
            SILU_MUL=silu_mul,
            EVEN=size % block_n == 0 and inner % block_k == 0,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            SHARES_INPUT=shares_input,
            PDL=USE_PDL,
            num_stages=stages,
            num_warps=warps,
            **ROUND_ALWAYS,
            **LAUNCH,
        )
    return out


def room_for(x: Tensor, size: int) -> Tensor:
    """Memory for `size` outputs of each row of x, with room after them for the rows of a padded
    batch.
    """
    rows = x.shape[0]
    if rows >= SMALLEST_BATCH:
        return x.new_empty((rows, size))
    return x.new_empty((SMALLEST_BATCH, size))[:rows]


class Tile(NamedTuple):
    """The tile sizes of a matrix product; bits don't depend on them."""

    rows: int
    outputs: int
    inner: int
    stages: int
    warps: int


def tile_of(rows: int, weight: Tensor, silu_mul: bool) -> Tile:
    """The quickest of those tried on an H200 (docs/performance.md, attempt 11)."""
    size = weight.shape[0]
    if rows <= MEMORY_BOUND_ROWS:
        # A large weight should be read only once (all rows in one tile); a small one by many
        # programs.
        is_large = weight.numel() >= _LARGE_WEIGHT
        block = next((block for block in (8, 16) if rows <= block), 32) if is_large else 16
        if size >= VOCABULARY_SIZE:
            return Tile(max(block, 16), 32, 128, 4, 4)
        if size <= 512:  # a router
            return Tile(block, 16, 256, 4, 4)
        if silu_mul:
            block = block if rows <= 16 else 32
            return Tile(block, 64, 128, 4, 4) if size < 24576 else Tile(block, 128, 128, 3, 4)
        if rows > 16 and size >= 5120 and weight.shape[1] <= 1024:
            # short sums of so many outputs that they keep most multiprocessors busy (attempt 72)
            return Tile(32, 64, 128, 6, 8)
        return Tile(block, 64, 128, 6, 4)
    if rows <= MEDIUM_ROWS:
        if silu_mul and rows > 128:
            return Tile(128, 64, 64, 4, 4)
        if silu_mul or size > 1024:
            return Tile(64, 64, 128, 4 if rows <= 128 else 3, 4)
        return Tile(32, 64, 256, 3, 4)
    return Tile(128, 128, 64, 3, 8)


def is_quicker_than_cublas(rows: int, weight: Tensor) -> bool:
    """Our kernel overlaps with the kernels before and after it (PDL), cuBLAS doesn't; cuBLAS is
    quicker with long inner dimensions and many rows. Measured on an H200 (docs/performance.md,
    attempts 7 and 11).
    """
    if rows <= MEMORY_BOUND_ROWS:
        return weight.shape[1] <= 4096
    return rows <= MEDIUM_ROWS and weight.numel() <= _SMALL_WEIGHT
