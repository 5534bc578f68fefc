"""Convolutions over time, each channel by itself: see `Kernels.convolve_`.

Every number is one chain of fused products from the earliest input on, whoever computes it. Inputs
come from the step, from the records of earlier steps, or, where the run began behind a chunk's
begin and the input lies before that, from the chunk's state.
"""

# mypy: disable-error-code="unreachable, var-annotated"
from __future__ import annotations

import torch
import triton
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

_MANY = 1024
"""From so many rows on a program takes stretches of rows that follow each other; but where each is a
sequence by itself, and with fewer rows, each row gets a program for every few channels.
"""
_ROWS = 8
_CHANNELS = 512
_STRETCHES = 2
"""Of a program of many rows, of `_ROWS` rows and twice `_CHANNELS` each: 16 bytes a thread and row."""


@triton.jit
def _factors(weight, channel, within, TAPS: tl.constexpr, IN_WORDS: tl.constexpr):
    """What each tap of some channels is multiplied by, the earliest first, in float32.

    IN_WORDS: a channel's are four numbers of 16 bits, loaded at once. By themselves they lie 8 bytes
    apart, so that a warp's load of one number each takes as long as one of 16 bytes each.
    """
    found = ()
    NUMBER: tl.constexpr = weight.dtype.element_ty
    if IN_WORDS:
        words = weight.to(tl.pointer_type(tl.uint64), bitcast=True)
        word = tl.load(words + channel, mask=within, other=0)
        for tap in tl.static_range(TAPS):
            bits = (word >> 16 * tap).to(tl.uint16)
            found = found + (bits.to(NUMBER, bitcast=True).to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    else:
        for tap in tl.static_range(TAPS):
            factor = tl.load(weight + channel * TAPS + tap, mask=within, other=0.0)
            found = found + (factor.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return found


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
    STRETCHES: tl.constexpr,
    IN_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """STRETCHES times ROWS rows and BLOCK channels; 0 stretches: ROWS rows, each by itself."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = channel < CHANNELS
    factors = _factors(weight, channel, within, TAPS, IN_WORDS)  # constants: before the wait
    added = tl.load(bias + channel, mask=within, other=0.0).to(tl.float32) if BIAS else 0.0
    # The next kernel reads what earlier steps have left before it waits: `recurrent_few.h`.
    begin(PDL, SHARES_INPUT=True)
    for stretch in range(max(STRETCHES, 1)):
        start = (tl.program_id(0).to(tl.int64) * max(STRETCHES, 1) + stretch) * ROWS
        is_run, table, position = False, 0, 0
        if STRETCHES > 0:
            # Whether these rows and those that their taps reach follow each other in one sequence.
            EARLIER: tl.constexpr = TAPS - 1
            near = tl.arange(0, triton.next_power_of_2(ROWS + EARLIER))
            seen = (near < ROWS + EARLIER) & (start >= EARLIER) & (start + ROWS <= rows)
            place = start - EARLIER + near
            table = tl.load(tables + start, mask=start < rows, other=-1)
            position = tl.load(positions + start, mask=start < rows, other=0)
            follows = tl.load(tables + place, mask=seen, other=-1) == table
            follows &= tl.load(positions + place, mask=seen, other=-1) == position - EARLIER + near
            breaks = tl.sum(((near < ROWS + EARLIER) & ~follows).to(tl.int32), 0)
            is_run = (breaks == 0) & (table >= 0)
        if is_run:
            _convolve_run(
                x,
                factors,
                added,
                out,
                inputs,
                block_tables,
                start,
                table,
                position,
                channel,
                within,
                x_stride,
                table_stride,
                block_stride,
                CHANNELS,
                TAPS,
                BLOCK_SIZE,
                BIAS,
                SILU,
                ROWS,
            )
        else:
            for i in range(ROWS):
                _convolve_row(
                    x,
                    factors,
                    added,
                    out,
                    inputs,
                    tail_places,
                    tables,
                    positions,
                    block_tables,
                    state_tables,
                    rows,
                    start + i,
                    channel,
                    within,
                    x_stride,
                    table_stride,
                    block_stride,
                    state_stride,
                    state_width,
                    CHANNELS,
                    TAPS,
                    BLOCK_SIZE,
                    BIAS,
                    SILU,
                    TAIL,
                )


@triton.jit
def _finished(total, added, NUMBER: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr):
    if BIAS:
        total += added
    if SILU:
        total = silu(total)
    return total.to(NUMBER)


@triton.jit
def _convolve_run(
    x,
    factors,
    added,
    out,
    inputs,
    block_tables,
    start,
    table,
    position,
    channel,
    within,
    x_stride,
    table_stride,
    block_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows that follow each other, as do those before them that taps reach: each input is
    loaded once, all of them before the first is used.
    """
    NUMBER: tl.constexpr = x.dtype.element_ty
    source = x + (start - (TAPS - 1)) * x_stride + channel
    loaded = ()
    for i in tl.static_range(ROWS + TAPS - 1):
        loaded = loaded + (tl.load(source + i * x_stride, mask=within, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(ROWS):
        total = tl.zeros(channel.shape, tl.float32)
        for d in tl.static_range(TAPS - 1, -1, -1):  # how long ago
            value = loaded[i + TAPS - 1 - d].to(tl.float32)
            if d > 0:
                value += 0.0  # no negative zero, as where it is added to what was kept
            total = tl.fma(value, factors[TAPS - 1 - d], total)
        block, offset = records_at(
            block_tables, table_stride, table, position + i, True, block_stride, BLOCK_SIZE
        )
        record = inputs + block + offset * CHANNELS + channel
        tl.store(record, loaded[i + TAPS - 1], mask=within)
        target = out + (start + i) * CHANNELS + channel
        tl.store(target, _finished(total, added, NUMBER, BIAS, SILU), mask=within)


@triton.jit
def _convolve_row(
    x,
    factors,
    added,
    out,
    inputs,
    tail_places,
    tables,
    positions,
    block_tables,
    state_tables,
    rows,
    row,
    channel,
    within,
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
):
    """One row, wherever the inputs before it come from."""
    NUMBER: tl.constexpr = x.dtype.element_ty
    # Everything is asked for in turns, each at once: one load must not wait for what another found.
    table = tl.load(tables + row, mask=row < rows, other=-1)
    position = tl.load(positions + row, mask=row < rows, other=0)
    exists = table >= 0
    # How many of the inputs before it are in the step: its run begins so much earlier.
    before = 0
    for back in tl.static_range(1, TAPS):
        is_next = in_step(tables, positions, rows, row - back, table, position - back)
        before += tl.where(is_next & (before == back - 1), 1, 0)
    first = (position - before) // CHUNK * CHUNK if TAIL else 0
    places = ()
    for d in tl.static_range(TAPS - 1, -1, -1):  # how long ago
        at = position - d
        has_record = exists & (at >= 0)
        start, offset = records_at(
            block_tables, table_stride, table, at, has_record, block_stride, BLOCK_SIZE
        )
        places = places + (start + offset * CHANNELS,)  # type: ignore[assignment]  # noqa: RUF005
    of_step = ()
    for d in tl.static_range(TAPS - 1, -1, -1):
        here = within & exists & (d <= before)
        source = x + (row - d) * x_stride + channel
        of_step = of_step + (tl.load(source, mask=here, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    of_records = ()
    of_tail = ()
    for d in tl.static_range(TAPS - 1, 0, -1):
        kept = exists & (position - d >= first) & (position - d >= 0) & (d > before)
        source = inputs + places[TAPS - 1 - d] + channel
        of_records = of_records + (tl.load(source, mask=within & kept, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        of_tail = of_tail + (tl.zeros(channel.shape, NUMBER),)  # type: ignore[assignment]  # noqa: RUF005
    if TAIL:  # noqa: SIM102  (no `and` of a constant and of what a kernel computes)
        if exists & (first > 0) & (position - (TAPS - 1) < first):
            of_tail = ()
            for d in tl.static_range(TAPS - 1, 0, -1):
                carried = (position - d < first) & (d > before)
                last_inputs = head_of_state(
                    tail_places,
                    tl.where(carried, position - d - first + TAPS - 1, 0),
                    state_tables,
                    state_stride,
                    state_width,
                    table,
                    first,
                    NUMBER,
                    NUMBER.primitive_bitwidth // 8,
                )
                found = tl.load(last_inputs + channel, mask=within & carried, other=0.0)
                of_tail = of_tail + (found,)  # type: ignore[assignment]  # noqa: RUF005
    total = tl.zeros(channel.shape, tl.float32)
    for d in tl.static_range(TAPS - 1, -1, -1):
        value = of_step[TAPS - 1 - d]
        if d > 0:
            value += of_records[TAPS - 1 - d]
            if TAIL:
                carried = (position - d < first) & (first > 0) & (d > before)
                value = tl.where(carried, of_tail[TAPS - 1 - d], value)
        total = tl.fma(value.to(tl.float32), factors[TAPS - 1 - d], total)
    record = inputs + places[TAPS - 1] + channel
    tl.store(record, of_step[TAPS - 1], mask=within & exists)
    result = _finished(total, added, NUMBER, BIAS, SILU)
    tl.store(out + row * CHANNELS + channel, result, mask=within & exists)


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
    is_many = rows >= _MANY and len(batch.context_lens) < rows
    block = min(_CHANNELS * (1 + is_many), next_power_of_2(channels))
    group = _ROWS if is_many else 1
    stretches = _STRETCHES if is_many else 0
    _convolve_kernel[(cdiv(rows, group * max(stretches, 1)), cdiv(channels, block))](
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
        STRETCHES=stretches,
        IN_WORDS=spec.taps == 4 and weight.itemsize == 2 and weight.data_ptr() % 8 == 0,
        BLOCK=block,
        PDL=USE_PDL,
        num_warps=4,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return out
