"""What the recurrence of `recurrent.py` needs that does not depend on the state: normed queries and
keys, their products with the keys of the chunk, and the sums of decays. Computed for all tiles of a
step at once; the records of keys and decays are written here.

Norms are sums over a head, and sums are products with ones, whose order does not depend on how
numbers are spread over threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import begin
from quire.backends.triton.sequences import CHUNK, TILE, head_of_state, in_step, records_at

PIECE = tl.constexpr(32)
"""Numbers of a head, of a query or key, that are multiplied at once."""
_EPSILON = tl.constexpr(1e-6)
"""Of the norm of queries and keys in the delta rule."""
_COPIED = tl.constexpr(512)
"""Channels of the convolution's last inputs that are copied at once."""


@triton.jit
def product(left, right, total):
    """left times right plus the total, as exactly as float32 numbers want it: each is divided into
    two numbers of 11 bits.
    """
    return tl.dot(left, right, total, input_precision="tf32x3")


@triton.jit
def softplus(x):
    """log(1 + e^x) as max(x, 0) + log(1 + y) with y = e^-|x|; see `recurrent.cpp`."""
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    square = s * s
    series = tl.fma(square, 1.0 / 15.0, 1.0 / 13.0)
    series = tl.fma(series, square, 1.0 / 11.0)
    series = tl.fma(series, square, 1.0 / 9.0)
    series = tl.fma(series, square, 1.0 / 7.0)
    series = tl.fma(series, square, 1.0 / 5.0)
    series = tl.fma(series, square, 1.0 / 3.0)
    series = tl.fma(series, square, 1.0)
    return tl.where(x > 0.0, x, 0.0) + 2.0 * s * series


@triton.jit
def added_squares(some, total):
    """Adds the squares of each row to a column of the total, whose rows are all the same. Ones are
    on the left, so that there are few enough for `mma`, as in all of these products.
    """
    ones = tl.full((16, some.shape[1]), 1.0, tl.float32)
    return product(ones, tl.trans(some * some), total)


@triton.jit
def inverse_norm(squares):
    return tl.rsqrt(tl.max(squares, 0) + _EPSILON)


@jit(do_not_specialize=["rows"])
def scores_kernel(
    mixed,
    gates,
    log_rate,
    time_bias,
    queries,
    scores,
    keys,
    decays,
    inputs,
    tail_places,
    tables,
    positions,
    block_tables,
    state_tables,
    rows,
    mixed_stride,
    gates_stride,
    table_stride,
    key_stride,
    decay_stride,
    input_stride,
    state_stride,
    state_width,
    least_step,
    largest_step,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PIECES: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DELTA: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The tiles that begin in ROWS rows; of a key head, or, as the last index, their decays."""
    begin(PDL)
    head = tl.program_id(1)
    index = tl.arange(0, ROWS)
    row = tl.program_id(0).to(tl.int64) * ROWS + index
    table = tl.load(tables + row, mask=row < rows, other=-1)
    position = tl.load(positions + row, mask=row < rows, other=0)
    follows = in_step(tables, positions, rows, row - 1, table, position - 1)
    leads = (table >= 0) & ((position % TILE == 0) | (follows == 0))
    left = tl.min(tl.where(leads, index, ROWS))
    while left < ROWS:
        first = tl.program_id(0).to(tl.int64) * ROWS + left
        if head < KEY_HEADS:
            _scores_of_tile(
                mixed,
                queries,
                scores,
                keys,
                tables,
                positions,
                block_tables,
                rows,
                mixed_stride,
                table_stride,
                key_stride,
                first,
                head,
                KEY_HEADS,
                KEY_DIM,
                PIECES,
                BLOCK_SIZE,
                DELTA,
            )
        else:
            decays_of_chunk(
                gates,
                log_rate,
                time_bias,
                decays,
                tables,
                positions,
                block_tables,
                rows,
                gates_stride,
                table_stride,
                decay_stride,
                least_step,
                largest_step,
                first,
                VALUE_HEADS,
                HEADS_PAD,
                BLOCK_SIZE,
                DELTA,
            )
        keep_last_inputs(
            inputs,
            tail_places,
            tables,
            positions,
            block_tables,
            state_tables,
            rows,
            table_stride,
            input_stride,
            state_stride,
            state_width,
            first,
            head,
            KEY_HEADS + 1,
            CHANNELS,
            TAPS,
            BLOCK_SIZE,
        )
        left = tl.min(tl.where(leads & (index > left), index, ROWS))


@triton.jit
def _scores_of_tile(
    mixed,
    queries,
    scores,
    keys,
    tables,
    positions,
    block_tables,
    rows,
    mixed_stride,
    table_stride,
    key_stride,
    first,
    head,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DELTA: tl.constexpr,
):
    """Of the tile whose first row in the step is `first`: queries and keys, and their products with
    those keys of the chunk that are not behind it.
    """
    table, position = tl.load(tables + first), tl.load(positions + first)
    tile, chunk = position // TILE * TILE, position // CHUNK * CHUNK
    at = chunk + tl.arange(0, CHUNK)
    source = first + (at - position)
    new = in_step(tables, positions, rows, source, table, at) & (at < tile + TILE)
    known = (at < position) & (new == 0)
    start, offset = records_at(
        block_tables, table_stride, table, at, known | new, key_stride, BLOCK_SIZE
    )
    record = keys + start + (head * BLOCK_SIZE + offset) * KEY_DIM
    own = tile + tl.arange(0, TILE)
    target = first + (own - position)
    is_own = in_step(tables, positions, rows, target, table, own)
    query = mixed + target * mixed_stride + head * KEY_DIM
    key = mixed + target * mixed_stride + (KEY_HEADS + head) * KEY_DIM
    other_key = mixed + source * mixed_stride + (KEY_HEADS + head) * KEY_DIM
    column = tl.arange(0, PIECE)
    own_start, own_offset = records_at(
        block_tables, table_stride, table, own, is_own, key_stride, BLOCK_SIZE
    )
    own_record = keys + own_start + (head * BLOCK_SIZE + own_offset) * KEY_DIM
    if DELTA:
        query_squares = tl.zeros((16, TILE), tl.float32)
        key_squares = tl.zeros((16, TILE), tl.float32)
        other_squares = tl.zeros((16, CHUNK), tl.float32)
        for piece in tl.range(PIECES, num_stages=PIECES + 1):  # all asked for at once
            k = piece * PIECE + column
            mask = is_own[:, None] & (k < KEY_DIM)[None, :]
            some = tl.load(query[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
            query_squares = added_squares(some, query_squares)
            some = tl.load(key[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
            key_squares = added_squares(some, key_squares)
            mask = new[:, None] & (k < KEY_DIM)[None, :]
            some = tl.load(other_key[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
            other_squares = added_squares(some, other_squares)
        query_scale = inverse_norm(query_squares)[:, None]
        key_scale = inverse_norm(key_squares)[:, None]
        other_scale = inverse_norm(other_squares)[:, None]
    of_queries = tl.zeros((TILE, CHUNK), tl.float32)
    of_keys = tl.zeros((TILE, CHUNK), tl.float32)
    for piece in tl.range(PIECES, num_stages=PIECES + 1):
        k = piece * PIECE + column
        mask = is_own[:, None] & (k < KEY_DIM)[None, :]
        q = tl.load(query[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
        own_key = tl.load(key[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
        other_mask = new[:, None] & (k < KEY_DIM)[None, :]
        other = tl.load(other_key[:, None] + k[None, :], mask=other_mask, other=0.0).to(tl.float32)
        old_mask = known[:, None] & (k < KEY_DIM)[None, :]
        old = tl.load(record[:, None] + k[None, :], mask=old_mask, other=0.0)
        if DELTA:
            q = q * query_scale * (KEY_DIM**-0.5)
            own_key = own_key * key_scale
            other = other * other_scale
        others = tl.trans(tl.where(new[:, None], other, old))
        of_queries = product(q, others, of_queries)
        if DELTA:
            of_keys = product(own_key, others, of_keys)
        tl.store(
            queries + (target[:, None] * KEY_HEADS + head) * KEY_DIM + k[None, :], q, mask=mask
        )
        tl.store(own_record[:, None] + k[None, :], own_key, mask=mask)
    place = scores + (target[:, None] * KEY_HEADS + head) * 2 * CHUNK
    place += tl.arange(0, CHUNK)[None, :]
    tl.store(place, of_queries, mask=is_own[:, None])
    if DELTA:
        tl.store(place + CHUNK, of_keys, mask=is_own[:, None])


@triton.jit
def decays_of_chunk(
    gates,
    log_rate,
    time_bias,
    decays,
    tables,
    positions,
    block_tables,
    rows,
    gates_stride,
    table_stride,
    decay_stride,
    least_step,
    largest_step,
    first,
    VALUE_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DELTA: tl.constexpr,
):
    """The sums of log-decays of a chunk's tokens in this step, one after the other; nothing where
    another tile of the step has begun the chunk.
    """
    table, position = tl.load(tables + first), tl.load(positions + first)
    chunk = position // CHUNK * CHUNK
    begins = in_step(tables, positions, rows, first - 1, table, position - 1) == 0
    if begins | (position == chunk):
        heads = tl.arange(0, HEADS_PAD)
        within = heads < VALUE_HEADS
        rate = -tl.exp(tl.load(log_rate + heads, mask=within, other=0.0).to(tl.float32))
        bias = tl.load(time_bias + heads, mask=within, other=0.0).to(tl.float32)
        start, offset = records_at(
            block_tables,
            table_stride,
            table,
            position - 1,
            position > chunk,
            decay_stride,
            BLOCK_SIZE,
        )
        place = decays + start + offset + heads * BLOCK_SIZE
        total = tl.load(place, mask=within & (position > chunk), other=0.0)
        row, at = first, position
        while (at < chunk + CHUNK) & in_step(tables, positions, rows, row, table, at):
            for _ in tl.static_range(TILE):  # several loads are on their way at a time
                is_new = (at < chunk + CHUNK) & in_step(tables, positions, rows, row, table, at)
                gate = tl.load(gates + row * gates_stride + heads, mask=within & is_new, other=0.0)
                step = softplus(gate.to(tl.float32) + bias)
                if not DELTA:
                    step = tl.where(step < least_step, least_step, step)
                    step = tl.where(step > largest_step, largest_step, step)
                total = tl.fma(rate, step, total)
                start, offset = records_at(
                    block_tables, table_stride, table, at, is_new, decay_stride, BLOCK_SIZE
                )
                place = decays + start + offset + heads * BLOCK_SIZE
                tl.store(place, total, mask=within & is_new)
                row += 1
                at += 1


@triton.jit
def keep_last_inputs(
    inputs,
    tail_places,
    tables,
    positions,
    block_tables,
    state_tables,
    rows,
    table_stride,
    input_stride,
    state_stride,
    state_width,
    first,
    share,
    SHARES: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Copies a share of the convolution's last inputs before the next chunk, whose records are all
    there, into its state: of the last two chunks that end in the run, as others would be replaced.
    """
    table, position = tl.load(tables + first), tl.load(positions + first)
    end = position // CHUNK * CHUNK + CHUNK
    row = first + (end - 1 - position)
    is_last_tile = position >= end - TILE
    ends = in_step(tables, positions, rows, row, table, end - 1)
    is_replaced = in_step(tables, positions, rows, row + 2 * CHUNK, table, end - 1 + 2 * CHUNK)
    if is_last_tile & ends & (is_replaced == 0):
        for tap in range(TAPS - 1):
            start, offset = records_at(
                block_tables,
                table_stride,
                table,
                end - (TAPS - 1) + tap,
                True,
                input_stride,
                BLOCK_SIZE,
            )
            source = inputs + start + offset * CHANNELS
            target = head_of_state(
                tail_places,
                tap,
                state_tables,
                state_stride,
                state_width,
                table,
                end,
                inputs.dtype.element_ty,
                inputs.dtype.element_ty.primitive_bitwidth // 8,
            )
            for block in range(share, (CHANNELS + _COPIED - 1) // _COPIED, SHARES):
                channel = block * _COPIED + tl.arange(0, _COPIED)
                found = tl.load(source + channel, mask=channel < CHANNELS, other=0.0)
                tl.store(target + channel, found, mask=channel < CHANNELS)
