"""The norm with a gate behind a recurrence: see `Kernels.gated_norm`.

A program holds whole groups, always as many of a size, so the mean of squares is one reduction,
whose order depends on the group's size only.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin
from quire.backends.triton.rowwise import silu
from quire.backends.triton.shapes import as_rows, cdiv, next_power_of_2, num_warps, row_stride
from quire.kernels.recurrent import GatedNormSpec

_NUMBERS = 1024
"""A program has as many groups as there are in so many numbers."""


@jit
def _gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    x_stride,
    gate_stride,
    eps,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGHT_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """GROUPS groups of a row, of GROUP <= BLOCK numbers each."""
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    inside = tl.arange(0, BLOCK)[None, :]
    column = group * GROUP + inside
    exists = (inside < GROUP) & (column < SIZE)
    if WEIGHT_SIZE:
        factor = tl.load(weight + column % WEIGHT_SIZE, mask=exists, other=0.0).to(tl.float32)
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * x_stride + column, mask=exists, other=0.0)
    NUMBER: tl.constexpr = value.dtype
    value = value.to(tl.float32)
    gated = silu(tl.load(gate + row * gate_stride + column, mask=exists, other=0.0).to(tl.float32))
    if GATE_FIRST:
        value = value * gated
    if NORM:
        mean = tl.sum(value * value, 1, keep_dims=True) / GROUP
        value = (value * tl.rsqrt(mean + eps)).to(NUMBER).to(tl.float32)
    if WEIGHT_SIZE:
        value = value * factor
    if not GATE_FIRST:
        value = value * gated
    tl.store(out + row * SIZE + column, value.to(NUMBER), mask=exists)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, spec: GatedNormSpec
) -> Tensor:
    """`Kernels.gated_norm`."""
    source, gates = as_rows(x), as_rows(gate)
    rows, size = source.shape
    group = spec.group_size or size
    weight_size = 0 if weight is None else weight.shape[0]
    if size % group or (weight_size and (weight_size % group or size % weight_size)):
        raise ValueError(f"rows of {size} in groups of {group} with a weight of {weight_size}")
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    block = next_power_of_2(group)
    groups = max(1, _NUMBERS // block)
    _gated_norm_kernel[(rows, cdiv(size // group, groups))](
        x=source,
        gate=gates,
        weight=source if weight is None else weight,
        out=out,
        x_stride=row_stride(source),
        gate_stride=row_stride(gates),
        eps=eps,
        SIZE=size,
        GROUP=group,
        WEIGHT_SIZE=weight_size,
        GROUPS=groups,
        BLOCK=block,
        NORM=spec.group_size > 0,
        GATE_FIRST=spec.gate_first,
        PDL=USE_PDL,
        num_warps=num_warps(block * groups),
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return out
