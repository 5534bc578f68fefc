"""A candidate for `quire.backends.triton.recurrent`: the recurrence of layers with a state token by
token, by plain sums instead of products of tiles. Not used by any model; `recurrence.py` times it
beside the kernels in use, and checks it against them.

A decoded token is one row, and a product of tiles computes sixteen of them. Here a program keeps
some columns of a value head's state in its registers, and of the changes since the chunk's begin, and
each token of its run is a few sums over their rows: a decode step reads every number once and does
little else. So that a token has the same sums in the same order whoever computes it, there is one
compiled program for decode steps and prompts alike: nothing is specialised for a step's numbers, nor
for where its tensors lie.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.triton.kernels import TritonKernels
from quire.backends.triton.launch import INTERPRETED, LAUNCH, USE_PDL, begin
from quire.backends.triton.recurrent import barrier, write_state
from quire.backends.triton.recurrent_scores import (
    PIECE,
    decays_of_chunk,
    keep_last_inputs,
    softplus,
)
from quire.backends.triton.sequences import (
    CHUNK,
    TILE,
    head_of_state,
    in_step,
    records_at,
    rows_of,
)
from quire.backends.triton.shapes import as_rows, cdiv, next_power_of_2, row_stride
from quire.kernels.ops import PagedBatch
from quire.kernels.recurrent import RecurrentCache, RecurrentSpec, RecurrentWeights

COLUMNS = 64
"""Of a state that a program has, and with it WARPS and REGISTERS: one choice for all steps, since it
decides in what order sums are made.
"""
WARPS = 4
REGISTERS: int | None = 168
_GROUP = tl.constexpr(16)
"""Rows of a step that a program looks after, at most."""
_FEW_ROWS = 512
_EPSILON = tl.constexpr(1e-6)
_NUMBERS = [
    "rows",
    "group",
    "single",
    "mixed_stride",
    "gates_stride",
    "table_stride",
    "key_stride",
    "change_stride",
    "decay_stride",
    "input_stride",
    "state_stride",
    "state_width",
]
_POINTERS = [
    *("mixed", "gates", "log_rate", "time_bias", "skip", "out", "queries", "scores", "keys"),
    *("changes", "decays", "inputs", "tail_places", "state_places", "starts", "tables"),
    *("positions", "block_tables", "state_tables"),
]


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(one, other, AXIS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Of both at once, so that threads meet once."""
    if INTERPRETED:
        first = tl.sum(one, AXIS)
        second = tl.sum(other, AXIS)
    else:
        first, second = tl.reduce((one, other), AXIS, _add_both)
    return first, second


@triton.jit
def _first_rows(tables, positions, rows, group, EVERY: tl.constexpr):
    """Of a program's rows: (their index, which of them are tokens, where a run of this program or
    one of EVERY places of its positions begins).
    """
    index = tl.arange(0, _GROUP)
    row = tl.program_id(0).to(tl.int64) * group + index
    mask = (index < group) & (row < rows)
    table = tl.load(tables + row, mask=mask, other=-1)
    position = tl.load(positions + row, mask=mask, other=0)
    follows = in_step(tables, positions, rows, row - 1, table, position - 1)
    known = table >= 0
    return index, known, known & ((index == 0) | (position % EVERY == 0) | (follows == 0))


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _prepare_kernel(
    mixed,
    gates,
    log_rate,
    time_bias,
    queries,
    keys,
    decays,
    inputs,
    tail_places,
    tables,
    positions,
    block_tables,
    state_tables,
    rows,
    group,
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
    KEY_HEADS_PAD: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DELTA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Queries and normed keys, or decays and the convolution's last inputs, of some rows."""
    begin(PDL)
    first = tl.program_id(0).to(tl.int64) * group
    if tl.program_id(1) == 0:
        head = tl.arange(0, KEY_HEADS_PAD)[:, None]
        k = tl.arange(0, KEY_PAD)[None, :]
        inside = (head < KEY_HEADS) & (k < KEY_DIM)
        for row in range(first, tl.minimum(first + group, rows)):
            table = tl.load(tables + row)
            position = tl.load(positions + row)
            source = mixed + row * mixed_stride + head * KEY_DIM + k
            mask = inside & (table >= 0)
            query = tl.load(source, mask=mask, other=0.0).to(tl.float32)
            key = tl.load(source + KEY_HEADS * KEY_DIM, mask=mask, other=0.0).to(tl.float32)
            if DELTA:
                squares, others = _sums(query * query, key * key, 1, INTERPRETED)
                query = query * (tl.rsqrt(squares + _EPSILON) * (KEY_DIM**-0.5))[:, None]
                key = key * tl.rsqrt(others + _EPSILON)[:, None]
            start, offset = records_at(
                block_tables, table_stride, table, position, table >= 0, key_stride, BLOCK_SIZE
            )
            tl.store(queries + (row * KEY_HEADS + head) * KEY_DIM + k, query, mask=mask)
            tl.store(keys + start + (head * BLOCK_SIZE + offset) * KEY_DIM + k, key, mask=mask)
    else:
        index, _, leads = _first_rows(tables, positions, rows, group, TILE)
        left = tl.min(tl.where(leads, index, _GROUP))
        while left < _GROUP:
            row = first + left
            table, position = tl.load(tables + row), tl.load(positions + row)
            # a tile that another program has begun, or this one a row ago, is theirs
            is_own = in_step(tables, positions, rows, row - 1, table, position - 1) == 0
            if is_own | (position % TILE == 0):
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
                    row,
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
                    row,
                    0,
                    1,
                    CHANNELS,
                    TAPS,
                    BLOCK_SIZE,
                )
            left = tl.min(tl.where(leads & (index > left), index, _GROUP))


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _token_scores_kernel(
    queries,
    scores,
    keys,
    tables,
    positions,
    block_tables,
    rows,
    group,
    table_stride,
    key_stride,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DELTA: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Products of some rows' queries and keys with the keys of their chunk, of a key head."""
    begin(PDL)
    head = tl.program_id(1)
    index, known, leads = _first_rows(tables, positions, rows, group, CHUNK)
    first = tl.program_id(0).to(tl.int64) * group
    order = tl.arange(0, CHUNK)
    k = tl.arange(0, KEY_PAD)
    left = tl.min(tl.where(leads, index, _GROUP))
    while left < _GROUP:
        end = tl.min(tl.where((leads | (known == 0)) & (index > left), index, _GROUP))
        table, position = tl.load(tables + first + left), tl.load(positions + first + left)
        chunk = position // CHUNK * CHUNK
        exists = chunk + order < position + (end - left)
        begins, places = records_at(
            block_tables, table_stride, table, chunk + order, exists, key_stride, BLOCK_SIZE
        )
        records = tl.multiple_of(keys + begins + (head * BLOCK_SIZE + places) * KEY_DIM, ALIGNMENT)
        mask = exists[:, None] & (k < KEY_DIM)[None, :]
        of_chunk = tl.load(records[:, None] + k[None, :], mask=mask, other=0.0)
        for row in range(first + left, first + end):
            place = (row * KEY_HEADS + head).to(tl.int64)
            query = tl.load(queries + place * KEY_DIM + k, mask=k < KEY_DIM, other=0.0)
            target = scores + place * 2 * CHUNK + order
            if DELTA:
                at = position + (row - first - left)
                start, offset = records_at(
                    block_tables, table_stride, table, at, True, key_stride, BLOCK_SIZE
                )
                own = keys + start + (head * BLOCK_SIZE + offset) * KEY_DIM + k
                key = tl.load(own, mask=k < KEY_DIM, other=0.0)
                of_query, of_key = _sums(
                    of_chunk * query[None, :], of_chunk * key[None, :], 1, INTERPRETED
                )
                tl.store(target + CHUNK, of_key)
            else:
                of_query = tl.sum(of_chunk * query[None, :], 1)
            tl.store(target, of_query)
        left = tl.min(tl.where(leads & (index > left), index, _GROUP))


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _token_kernel(
    mixed,
    gates,
    time_bias,
    skip,
    out,
    queries,
    scores,
    keys,
    changes,
    decays,
    state_places,
    starts,
    tables,
    positions,
    block_tables,
    state_tables,
    rows,
    single,
    mixed_stride,
    gates_stride,
    table_stride,
    key_stride,
    change_stride,
    decay_stride,
    state_stride,
    state_width,
    least_step,
    largest_step,
    beta_scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DELTA: tl.constexpr,
    SKIP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The run that begins with a sequence of the step, if one does: of COLUMNS columns of a value
    head. `single`: each row is a sequence.
    """
    begin(PDL)
    NUMBER: tl.constexpr = mixed.dtype.element_ty
    PARTS: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    head = tl.program_id(1) // PARTS
    column = tl.program_id(1) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    within = column < VALUE_DIM
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    k = tl.arange(0, KEY_PAD)
    order = tl.arange(0, CHUNK)
    many = single == 0
    row = tl.program_id(0).to(tl.int64)
    end = row + 1
    if many:
        end = tl.load(starts + row + 1).to(tl.int64)
        row = tl.load(starts + row).to(tl.int64)
    exists = (row < end) & (row < rows)
    table = tl.load(tables + row, mask=exists, other=-1)
    position = tl.load(positions + row, mask=exists, other=0)
    follows = in_step(tables, positions, rows, row - 1, table, position - 1)
    goes_on = (table >= 0) & (follows == 0)
    bias = tl.load(time_bias + head).to(tl.float32)
    while goes_on:
        chunk = position // CHUNK * CHUNK
        state = head_of_state(
            state_places,
            head,
            state_tables,
            state_stride,
            state_width,
            table,
            chunk,
            tl.float32,
            ALIGNMENT,
        )
        mask = (k < KEY_DIM)[:, None] & within[None, :] & (chunk > 0)
        of_state = tl.load(state + k[:, None] * VALUE_DIM + column[None, :], mask=mask, other=0.0)
        known = chunk + order < position
        begins, places = records_at(
            block_tables, table_stride, table, chunk + order, known, change_stride, BLOCK_SIZE
        )
        records = changes + begins + (head * BLOCK_SIZE + places) * VALUE_DIM
        records = tl.multiple_of(records, ALIGNMENT)
        mask = known[:, None] & within[None, :]
        changed = tl.load(records[:, None] + column[None, :], mask=mask, other=0.0)
        begins, places = records_at(
            block_tables, table_stride, table, chunk + order, known, decay_stride, BLOCK_SIZE
        )
        then = tl.load(decays + begins + head * BLOCK_SIZE + places, mask=known, other=0.0)
        in_chunk = goes_on
        while in_chunk:
            i = position - chunk
            place = (row * KEY_HEADS + key_head).to(tl.int64)
            start, offset = records_at(
                block_tables, table_stride, table, position, True, decay_stride, BLOCK_SIZE
            )
            now = tl.load(decays + start + head * BLOCK_SIZE + offset)
            query = tl.load(queries + place * KEY_DIM + k, mask=k < KEY_DIM, other=0.0)
            value = mixed + row * mixed_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
            value = tl.load(value + column, mask=within, other=0.0).to(tl.float32)
            gate = gates + row * gates_stride + head
            score = scores + place * 2 * CHUNK + order
            fade = tl.exp(tl.where(order < i, now - then, 0.0))
            own = tl.load(scores + place * 2 * CHUNK + i)
            given = tl.load(score, mask=order < i, other=0.0) * fade
            since = tl.exp(now)
            if DELTA:
                start, offset = records_at(
                    block_tables, table_stride, table, position, True, key_stride, BLOCK_SIZE
                )
                key = keys + start + (key_head * BLOCK_SIZE + offset) * KEY_DIM
                key = tl.load(key + k, mask=k < KEY_DIM, other=0.0)
                beta = tl.load(gate + VALUE_HEADS).to(tl.float32)
                beta = beta_scale / (1.0 + tl.exp(-beta))
                taken = tl.load(score + CHUNK, mask=order < i, other=0.0) * fade
                said, asked = _sums(
                    of_state * key[:, None], of_state * query[:, None], 0, INTERPRETED
                )
                more, other = _sums(
                    changed * taken[:, None], changed * given[:, None], 0, INTERPRETED
                )
                change = beta * (value - (said * since + more))
            else:
                beta = softplus(tl.load(gate).to(tl.float32) + bias)
                beta = tl.where(beta < least_step, least_step, beta)
                beta = tl.where(beta > largest_step, largest_step, beta)
                asked = tl.sum(of_state * query[:, None], 0)
                other = tl.sum(changed * given[:, None], 0)
                change = beta * value
            answer = asked * since + other + own * change
            if SKIP:
                answer += value * tl.load(skip + head)
            start, offset = records_at(
                block_tables, table_stride, table, position, True, change_stride, BLOCK_SIZE
            )
            mine = changes + start + (head * BLOCK_SIZE + offset) * VALUE_DIM
            tl.store(mine + column, change, mask=within)
            target = out + (row * VALUE_HEADS + head) * VALUE_DIM + column
            tl.store(target, answer.to(NUMBER), mask=within)
            changed = tl.where((order == i)[:, None], change[None, :], changed)
            then = tl.where(order == i, now, then)
            row += 1
            position += 1
            goes_on = in_step(tables, positions, rows, row, table, position)
            in_chunk = goes_on & (position < chunk + CHUNK)
        if position == chunk + CHUNK:
            barrier(INTERPRETED)
            next_state = head_of_state(
                state_places,
                head,
                state_tables,
                state_stride,
                state_width,
                table,
                chunk + CHUNK,
                tl.float32,
                ALIGNMENT,
            )
            in_tile = tl.arange(0, TILE)
            place_of_tile = (chunk + in_tile * TILE) // BLOCK_SIZE
            blocks = tl.load(
                block_tables + table.to(tl.int64) * table_stride + place_of_tile,
                mask=in_tile < CHUNK // TILE,
                other=0,
            ).to(tl.int64)
            start, offset = records_at(
                block_tables, table_stride, table, position - 1, True, decay_stride, BLOCK_SIZE
            )
            write_state(
                state,
                next_state,
                chunk > 0,
                tl.load(decays + start + head * BLOCK_SIZE + offset),
                blocks,
                keys,
                changes,
                decays,
                key_stride,
                change_stride,
                decay_stride,
                chunk,
                head,
                key_head,
                column,
                KEY_DIM,
                VALUE_DIM,
                PIECES,
                BLOCK_SIZE,
            )
            barrier(INTERPRETED)


class TokenRecurrence(TritonKernels):
    """The kernels in use, but for the recurrence."""

    def recur_(
        self,
        mixed: Tensor,
        gates: Tensor,
        weights: RecurrentWeights,
        spec: RecurrentSpec,
        cache: RecurrentCache,
        batch: PagedBatch,
        decay_gates: Tensor | None = None,
    ) -> Tensor:
        assert decay_gates is None
        assert not cache.block_size % int(TILE)
        source, gates = as_rows(mixed), as_rows(gates)
        rows = source.shape[0]
        out = torch.empty(rows, spec.value_size, dtype=mixed.dtype, device=mixed.device)
        if rows == 0:
            return out
        convolution, states = cache.convolution, batch.state_tables
        tail = convolution.tail
        assert states is not None
        assert tail is not None
        tables, positions = rows_of(batch)
        key_heads, value_heads = spec.num_key_heads, spec.num_value_heads
        queries = torch.empty(rows, key_heads, spec.key_dim, device=mixed.device)
        scores = torch.empty(rows, key_heads, 2, int(CHUNK), device=mixed.device)
        least, largest = spec.time_limits
        group = 1 if rows <= _FEW_ROWS else int(_GROUP)
        shared: dict[str, Any] = {
            "tables": tables,
            "positions": positions,
            "block_tables": batch.block_tables,
            "rows": rows,
            "table_stride": batch.block_tables.stride(0),
            "queries": queries,
            "keys": cache.keys,
            "key_stride": cache.keys.stride(0),
            "KEY_HEADS": key_heads,
            "KEY_DIM": spec.key_dim,
            "KEY_PAD": next_power_of_2(spec.key_dim),
            "BLOCK_SIZE": cache.block_size,
            "DELTA": spec.is_delta,
            "INTERPRETED": INTERPRETED,
            "PDL": USE_PDL,
            **LAUNCH,
        }
        of_state = {
            "mixed": source,
            "mixed_stride": row_stride(source),
            "gates": gates,
            "gates_stride": row_stride(gates),
            "time_bias": weights.time_bias,
            "decays": cache.decays,
            "decay_stride": cache.decays.stride(0),
            "state_tables": states,
            "state_stride": states.stride(0),
            "state_width": states.stride(1),
            "least_step": least,
            "largest_step": min(largest, torch.finfo(torch.float32).max),
            "VALUE_HEADS": value_heads,
        }
        programs = cdiv(rows, group)
        _prepare_kernel[(programs, 2)](
            log_rate=weights.log_rate,
            inputs=convolution.inputs,
            input_stride=convolution.inputs.stride(0),
            tail_places=tail.places,
            group=group,
            KEY_HEADS_PAD=next_power_of_2(key_heads),
            HEADS_PAD=next_power_of_2(value_heads),
            CHANNELS=spec.convolution.channels,
            TAPS=spec.taps,
            num_warps=4,
            **shared,
            **of_state,
        )
        alignment = math.gcd(*(4 * n for n in (cache.keys.stride(0), spec.key_dim)))
        _token_scores_kernel[(programs, key_heads)](
            scores=scores,
            group=group,
            ALIGNMENT=math.gcd(alignment, cache.keys.data_ptr(), 16),
            num_warps=4,
            **shared,
        )
        columns = min(COLUMNS, next_power_of_2(spec.value_dim))
        count = len(batch.context_lens)
        alignment = math.gcd(cache.state.alignment, 4 * cache.changes.stride(0), 4 * spec.value_dim)
        _token_kernel[(count, value_heads * cdiv(spec.value_dim, columns))](
            skip=weights.time_bias if weights.skip is None else weights.skip,
            out=out,
            scores=scores,
            changes=cache.changes,
            change_stride=cache.changes.stride(0),
            state_places=cache.state.places,
            starts=batch.query_start,
            single=int(count == rows),
            beta_scale=spec.beta_scale,
            VALUE_DIM=spec.value_dim,
            PIECES=cdiv(spec.key_dim, int(PIECE)),
            SKIP=weights.skip is not None,
            ALIGNMENT=math.gcd(alignment, cache.changes.data_ptr(), 16),
            COLUMNS=columns,
            num_warps=WARPS,
            num_stages=1,
            **({} if REGISTERS is None else {"maxnreg": REGISTERS}),
            **shared,
            **of_state,
        )
        return out
