"""Convolutions over time, each channel by itself: see `Kernels.convolve_`.

Every number is one chain of fused products from the earliest input on, whoever computes it. Inputs
come from the step, from the records of earlier steps, or, where the run began behind a chunk's
begin and the input lies before that, from the chunk's state.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin
from quire.backends.triton.rowwise import silu
from quire.backends.triton.sequences import (
    CHUNK,
    head_of_state,
    in_step,
    records_at,
    rows_of,
)
from quire.backends.triton.shapes import as_rows, cdiv, next_power_of_2, row_stride
from quire.kernels.ops import PagedBatch
from quire.kernels.recurrent import ConvolutionCache, ConvolutionSpec

_FEW = 64
"""Up to so many rows get a program each for every few channels."""
_ROWS = 8
_CHANNELS = 512


@jit(do_not_specialize=["rows"])
def _convolve_kernel(
    x,
    weight,
    bias,
    out,
    inputs,
    tail_places,
    tables,
    positions,
    block_tables,
    state_tables,
    rows,
    x_stride,
    table_stride,
    block_stride,
    state_stride,
    state_width,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows and BLOCK channels."""
    NUMBER: tl.constexpr = x.dtype.element_ty
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = channel < CHANNELS
    begin(PDL)
    for i in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + i
        table = tl.load(tables + row, mask=row < rows, other=-1)
        if table >= 0:
            position = tl.load(positions + row)
            # How many of the inputs before it are in the step: its run begins so much earlier.
            before = 0
            for back in tl.static_range(1, TAPS):
                is_next = in_step(tables, positions, rows, row - back, table, position - back)
                before += tl.where(is_next & (before == back - 1), 1, 0)
            first = (position - before) // CHUNK * CHUNK if TAIL else 0
            total = tl.zeros((BLOCK,), tl.float32)
            for d in tl.static_range(TAPS - 1, -1, -1):  # how long ago
                at = position - d
                new = d <= before
                value = tl.load(x + (row - d) * x_stride + channel, mask=within & new, other=0.0)
                if d > 0:
                    kept = (at >= first) & (at >= 0) & (d > before)
                    start, offset = records_at(
                        block_tables, table_stride, table, at, kept, block_stride, BLOCK_SIZE
                    )
                    place = inputs + start + offset * CHANNELS + channel
                    value += tl.load(place, mask=within & kept, other=0.0)
                    if TAIL:
                        carried = (at < first) & (first > 0) & (d > before)
                        if carried:
                            last_inputs = head_of_state(
                                tail_places,
                                at - first + TAPS - 1,
                                state_tables,
                                state_stride,
                                state_width,
                                table,
                                first,
                                NUMBER,
                                NUMBER.primitive_bitwidth // 8,
                            )
                            value = tl.load(last_inputs + channel, mask=within, other=0.0)
                factor = tl.load(weight + channel * TAPS + (TAPS - 1 - d), mask=within, other=0.0)
                total = tl.fma(value.to(tl.float32), factor.to(tl.float32), total)
                if d == 0:
                    start, offset = records_at(
                        block_tables, table_stride, table, at, True, block_stride, BLOCK_SIZE
                    )
                    tl.store(inputs + start + offset * CHANNELS + channel, value, mask=within)
            if BIAS:
                total += tl.load(bias + channel, mask=within, other=0.0).to(tl.float32)
            if SILU:
                total = silu(total)
            tl.store(out + row * CHANNELS + channel, total.to(NUMBER), mask=within)


def convolve_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: ConvolutionSpec,
    cache: ConvolutionCache,
    batch: PagedBatch,
) -> Tensor:
    """`Kernels.convolve_`, but for the last inputs of chunks: `recur_` keeps them, since another
    program may still have to read those that they replace.
    """
    source = as_rows(x)
    rows, channels = source.shape
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    tables, positions = rows_of(batch)
    states = batch.block_tables[None] if batch.state_tables is None else batch.state_tables
    block = min(_CHANNELS, next_power_of_2(channels))
    group = 1 if rows <= _FEW else _ROWS
    _convolve_kernel[(cdiv(rows, group), cdiv(channels, block))](
        x=source,
        weight=weight,
        bias=weight if bias is None else bias,
        out=out,
        inputs=cache.inputs,
        tail_places=tables if cache.tail is None else cache.tail.places,
        tables=tables,
        positions=positions,
        block_tables=batch.block_tables,
        state_tables=states,
        rows=rows,
        x_stride=row_stride(source),
        table_stride=batch.block_tables.stride(0),
        block_stride=cache.inputs.stride(0),
        state_stride=states.stride(0),
        state_width=states.stride(1),
        CHANNELS=channels,
        TAPS=spec.taps,
        BLOCK_SIZE=cache.block_size,
        BIAS=bias is not None,
        SILU=spec.silu,
        TAIL=cache.tail is not None,
        ROWS=group,
        BLOCK=block,
        PDL=USE_PDL,
        num_warps=4,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return out
