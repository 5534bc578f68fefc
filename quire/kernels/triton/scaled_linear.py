"""Products of rows quantised on the way with weights of 8 bits: FP8 or INT8, a scale per row or per 128 of its inputs.

Both sides are numbers of 8 bits that the tensor cores multiply as they are. Integers add up exactly; FP8 products are
added to one accumulator while the inner dimension is walked from its beginning to its end, whatever the tile, and
cuBLAS does the same (`kernels.py` decides, after checking). Scales are multiplied with what a whole row, or each 128
of its inputs, adds up to.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin
from quire.kernels.triton.linear import Tile
from quire.kernels.triton.rowwise import silu
from quire.kernels.triton.shapes import as_rows, next_power_of_2, num_warps, row_stride


@triton.jit(do_not_specialize=["stride"])
def _quantize_kernel(
    x, codes, scales, stride, LARGEST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row, in groups of GROUP numbers with a scale each. One that has other than numbers gets NaN for a
    scale."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    groups = tl.reshape(value, (BLOCK // GROUP, GROUP))
    magnitude = tl.where(groups == groups, tl.abs(groups), float("inf"))
    largest = tl.max(magnitude, 1)
    largest = tl.where(largest == 0.0, LARGEST, largest)
    dtype: tl.constexpr = codes.dtype.element_ty
    scaled = groups * tl.div_rn(tl.full(largest.shape, LARGEST, tl.float32), largest)[:, None]
    if dtype == tl.int8:
        scaled = tl.floor(tl.clamp(scaled, -LARGEST, LARGEST) + 0.5)
    code = tl.reshape(scaled.to(dtype), (BLOCK,))
    tl.store(codes + row * SIZE + column, code, mask=column < SIZE)
    group = tl.arange(0, BLOCK // GROUP)
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    scale = tl.where(largest == float("inf"), float("nan"), scale)
    tl.store(scales + row * tl.cdiv(SIZE, GROUP) + group, scale, mask=group * GROUP < SIZE)


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, size] of 8 bits and float32 scales [rows, groups] by the largest magnitude of each group (of the
    whole row where it is 0)."""
    rows, size = x.shape
    source = as_rows(x)
    block = next_power_of_2(size)
    codes = torch.empty(rows, size, dtype=dtype, device=x.device)
    scales = torch.empty(rows, size // group if group else 1, dtype=torch.float32, device=x.device)
    if rows:
        _quantize_kernel[(rows,)](
            source, codes, scales, row_stride(source), 127.0 if dtype == torch.int8 else 448.0, size, block,
            group or block, USE_PDL, num_warps=num_warps(block), **LAUNCH,
        )  # fmt: skip
    return codes, scales


@triton.jit(do_not_specialize=["M"])
def _scaled_kernel(
    x, x_scales, weight, scales, bias, out, M, N, K,
    HAS_BIAS: tl.constexpr, SILU_MUL: tl.constexpr, GROUPED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_N outputs of BLOCK_M rows. With SILU_MUL: silu(these outputs) * (those N further on). GROUPED:
    a scale for each BLOCK_K inputs, on both sides."""
    begin(PDL)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    there = tl.minimum(rows, M - 1).to(tl.int64)
    weights = weight + outputs[:, None].to(tl.int64) * K + inner[None, :]
    inputs = x + there[:, None] * K + inner[None, :]
    number: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    kept: tl.constexpr = tl.float32 if GROUPED else number
    total = tl.zeros((BLOCK_N, BLOCK_M), kept)
    total_up = tl.zeros((BLOCK_N, BLOCK_M), kept)
    zero = tl.zeros((BLOCK_N, BLOCK_M), number)
    for k in range(0, K, BLOCK_K):
        mask = None if EVEN else (outputs[:, None] < N) & (inner[None, :] < K - k)
        within = None if EVEN else inner[None, :] < K - k
        other = None if EVEN else 0.0
        x_tile = tl.trans(tl.load(inputs, mask=within, other=other))
        tile = tl.load(weights, mask=mask, other=other)
        if GROUPED:
            x_scale = tl.load(x_scales + there * (K // BLOCK_K) + k // BLOCK_K)[None, :]
            scale = tl.load(scales + outputs.to(tl.int64) * (K // BLOCK_K) + k // BLOCK_K)[:, None]
            total += tl.dot(tile, x_tile, zero, out_dtype=number).to(tl.float32) * (scale * x_scale)
        else:
            total = tl.dot(tile, x_tile, total, out_dtype=number)
        if SILU_MUL:
            up_tile = tl.load(weights + N.to(tl.int64) * K, mask=mask, other=other)
            if GROUPED:
                scale = tl.load(scales + (outputs + N).to(tl.int64) * (K // BLOCK_K) + k // BLOCK_K)[:, None]
                total_up += tl.dot(up_tile, x_tile, zero, out_dtype=number).to(tl.float32) * (scale * x_scale)
            else:
                total_up = tl.dot(up_tile, x_tile, total_up, out_dtype=number)
        inputs += BLOCK_K
        weights += BLOCK_K
    dtype: tl.constexpr = out.dtype.element_ty
    exists = outputs < N
    if not GROUPED:
        x_scale = tl.load(x_scales + there)[None, :]
        # In this order, which is that of cuBLAS.
        total = total.to(tl.float32) * tl.load(scales + outputs, mask=exists, other=0.0)[:, None] * x_scale
        if SILU_MUL:
            up_scale = tl.load(scales + N + outputs, mask=exists, other=0.0)[:, None]
            total_up = total_up.to(tl.float32) * up_scale * x_scale
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=exists, other=0.0).to(tl.float32)[:, None]
    result = total.to(dtype)
    if SILU_MUL:
        if HAS_BIAS:
            total_up += tl.load(bias + N + outputs, mask=exists, other=0.0).to(tl.float32)[:, None]
        gate = silu(result.to(tl.float32)).to(dtype)
        result = (gate.to(tl.float32) * total_up.to(dtype).to(tl.float32)).to(dtype)
    target = out + rows[None, :].to(tl.int64) * N + outputs[:, None]
    tl.store(target, result, mask=(rows[None, :] < M) & exists[:, None])


def scaled_linear(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, silu_mul: bool,
    tile: Tile,
) -> Tensor:  # fmt: skip
    """x [rows, in] times weight [out, in] transposed, both of 8 bits, with scales of x [rows, groups] and of the weight
    [out] or [out, groups], plus bias, into `out`."""
    rows, inner = x.shape
    size = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    grouped = scales.dim() == 2
    if rows:
        _scaled_kernel[(triton.cdiv(size, tile.outputs), triton.cdiv(rows, tile.rows))](
            x, x_scales, weight, scales, weight if bias is None else bias, out, rows, size, inner,
            bias is not None, silu_mul, grouped, size % tile.outputs == 0 and inner % tile.inner == 0,
            tile.rows, tile.outputs, tile.inner, USE_PDL,
            num_stages=tile.stages, num_warps=tile.warps, **ROUND_ALWAYS, **LAUNCH,
        )  # fmt: skip
    return out
