"""Matrix products with a weight, the same bits for any number of rows.

The tensor cores add 16 products at a time to an accumulator, in the same way whichever instruction (mma or wgmma)
and whichever tile is used: what decides the bits is the order in which the inner dimension is walked. Here it is
walked from its beginning to its end with one accumulator, and cuBLAS does the same where it does not divide the
inner dimension between programs, so the two can be mixed (`kernels.py` decides, after checking).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activations import silu
from quire.kernels.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin

FEW_ROWS = 32
"""Up to here a tile holds all the rows, and the weights are read once."""


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    x, weight, bias, out, M, N, K,
    HAS_BIAS: tl.constexpr, SILU_MUL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_N outputs of BLOCK_M rows. With SILU_MUL: silu(these outputs) * (those N further on)."""
    begin(PDL)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    weights = weight + outputs[:, None].to(tl.int64) * K + inner[None, :]
    inputs = x + rows[:, None].to(tl.int64) * K + inner[None, :]
    row_mask = rows[:, None] < M
    output_mask = outputs[:, None] < N
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        within = inner[None, :] < K - k
        x_tile = tl.trans(tl.load(inputs, mask=row_mask & within, other=0.0))
        tile = tl.load(weights, mask=output_mask & within, other=0.0)
        total = tl.dot(tile, x_tile, total, input_precision="ieee")
        if SILU_MUL:
            up_tile = tl.load(weights + N.to(tl.int64) * K, mask=output_mask & within, other=0.0)
            total_up = tl.dot(up_tile, x_tile, total_up, input_precision="ieee")
        inputs += BLOCK_K
        weights += BLOCK_K
    dtype: tl.constexpr = out.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
    result = total.to(dtype)
    if SILU_MUL:
        if HAS_BIAS:
            total_up += tl.load(bias + N + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
        gate = silu(result.to(tl.float32)).to(dtype)
        result = (gate.to(tl.float32) * total_up.to(dtype).to(tl.float32)).to(dtype)
    target = out + rows[None, :].to(tl.int64) * N + outputs[:, None]
    tl.store(target, result, mask=(rows[None, :] < M) & output_mask)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, silu_mul: bool = False
) -> Tensor:
    """x [rows, in] times weight [out, in] transposed by the kernel above, for any number of rows. With `silu_mul`,
    silu(first half of the outputs) * (second half)."""
    rows, inner = x.shape
    size = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    x = x.contiguous()
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device) if out is None else out
    block_m, block_n, block_k, stages, warps = _tile(rows, size, silu_mul)
    if x.dtype == torch.float32:
        block_k, stages = 32, 2  # twice the bytes must fit the same memory
    if rows:
        _linear_kernel[(triton.cdiv(size, block_n), triton.cdiv(rows, block_m))](
            x, weight, weight if bias is None else bias, out, rows, size, inner,
            bias is not None, silu_mul, block_m, block_n, block_k, USE_PDL,
            num_stages=stages, num_warps=warps, **ROUND_ALWAYS, **LAUNCH,
        )  # fmt: skip
    return out


def _tile(rows: int, size: int, silu_mul: bool) -> tuple[int, int, int, int, int]:
    """Rows, outputs and inner numbers of a tile, stages, warps: measured on an H200 (docs/performance.md)."""
    if rows <= FEW_ROWS:
        block_m = 16 if rows <= 16 else 32
        if size >= 65536:
            return block_m, 32, 128, 4, 4
        return (block_m, 64, 128, 4, 4) if silu_mul or rows <= 16 else (block_m, 64, 256, 3, 4)
    return (64, 64, 64, 4, 4) if rows <= 256 else (128, 128, 64, 3, 8)
