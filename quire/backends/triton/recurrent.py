"""The recurrences of layers with a state on a GPU: see `quire.kernels.recurrent` for the formulas.

One kernel computes decoded tokens, drafts and prompts. A chunk has four tiles of 16 tokens, and each
token its row in its tile: a program always multiplies whole tiles, in which the rows of tokens that
are not computed are zeros. So a token has the same sums in the same order, by the same instructions,
whether it comes alone or with a prompt. Of a tile's tokens:

    what the state says of their keys and queries   16 rows of it at a time, in order
    minus what the changes of earlier tiles say     tile by tile, in order
    minus what the changes of its own tile say      token by token, in order
    the outputs                                     likewise, the own tile by one product

A program has a value head and some of its columns, and all chunks of one run, one after the other:
what it hands on goes through the records and the state, in memory that its cache holds. What does
not depend on the state is computed before, for all tiles at once (`recurrent_scores.py`).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import INTERPRETED, LAUNCH, ROUND_ALWAYS, USE_PDL, begin
from quire.backends.triton.recurrent_scores import PIECE, product, scores_kernel, softplus
from quire.backends.triton.sequences import CHUNK, TILE, head_of_state, in_step, rows_of
from quire.backends.triton.shapes import as_rows, cdiv, next_power_of_2, row_stride
from quire.errors import DeviceError
from quire.kernels.ops import PagedBatch
from quire.kernels.recurrent import RecurrentCache, RecurrentSpec, RecurrentWeights

FORMS = {16: (8, 168), 32: (8, 168), 64: (4, 128)}
"""By columns: stages (of 16 rows of the state, or tokens, that are asked for ahead) and registers of
a thread. With 128 four programs run on a multiprocessor, each of which waits much of its time.
"""
_FEW_PROGRAMS = 264
"""Up to so many programs there are twice as many, of half as many columns."""
_FEW_ROWS = 512
"""Up to so many rows each gets a program that looks whether a tile begins there; else 16 get one."""


@triton.jit
def _faded(numbers, now, visible):
    """Products of a tile's tokens, times the decay between them; 0 where one must not see the
    other.
    """
    between = tl.where(visible, now[:, None] - now[None, :], 0.0)
    return tl.where(visible, numbers * tl.exp(between), 0.0)


@triton.jit
def barrier(INTERPRETED: tl.constexpr):
    """What this program's threads have written can be read by all of them."""
    if not INTERPRETED:
        tl.debug_barrier()


@triton.jit
def write_state(
    state,
    next_state,
    has_state,
    last,
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
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """A head's state at its chunk's end, from that at its begin, if it has one, and the records of
    all its tokens, whose tiles lie in `blocks`; `last` is the last one's decay.
    """
    within = column < VALUE_DIM
    in_tile = tl.arange(0, TILE)
    for piece in range(PIECES):
        k = piece * PIECE + tl.arange(0, PIECE)
        inside = (k < KEY_DIM)[:, None] & within[None, :]
        place = k[:, None] * VALUE_DIM + column[None, :]
        total = tl.load(state + place, mask=inside & has_state, other=0.0) * tl.exp(last)
        for tile in tl.range(CHUNK // TILE, num_stages=4):
            block = tl.sum(tl.where(in_tile == tile, blocks, 0))
            offset = (chunk + tile * TILE) % BLOCK_SIZE
            key = keys + block * key_stride + (key_head * BLOCK_SIZE + offset) * KEY_DIM
            mine = changes + block * change_stride + (head * BLOCK_SIZE + offset) * VALUE_DIM
            left = tl.load(
                key + in_tile[:, None] * KEY_DIM + k[None, :],
                mask=(in_tile >= 0)[:, None] & (k < KEY_DIM)[None, :],
                other=0.0,
            )
            change = tl.load(
                mine + in_tile[:, None] * VALUE_DIM + column[None, :],
                mask=(in_tile >= 0)[:, None] & within[None, :],
                other=0.0,
            )
            fading = decays + block * decay_stride + head * BLOCK_SIZE + offset
            decay = tl.load(fading + in_tile)
            change = change * tl.exp(last - decay)[:, None]
            total = product(tl.trans(left), change, total)
        tl.store(next_state + place, total, mask=inside)


@jit(do_not_specialize=["rows"])
def _recur_kernel(
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
    VALUE_DIM: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DELTA: tl.constexpr,
    SKIP: tl.constexpr,
    SINGLE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """All chunks of the run that begins with a sequence of the step, if one does: of COLUMNS columns
    of a value head. SINGLE: each row is a sequence.
    """
    begin(PDL)
    NUMBER: tl.constexpr = mixed.dtype.element_ty
    PARTS_OF_STATE: tl.constexpr = (KEY_DIM + TILE - 1) // TILE
    PARTS: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    head = tl.program_id(1) // PARTS
    column = tl.program_id(1) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    within = column < VALUE_DIM
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    if SINGLE:
        row = tl.program_id(0).to(tl.int64)
        is_empty = row >= rows
    else:
        row = tl.load(starts + tl.program_id(0)).to(tl.int64)
        is_empty = tl.load(starts + tl.program_id(0) + 1) <= row
    table = tl.load(tables + row, mask=row < rows, other=-1)
    position = tl.load(positions + row, mask=row < rows, other=0)
    follows = in_step(tables, positions, rows, row - 1, table, position - 1)
    goes_on = (table >= 0) & (is_empty == 0) & (follows == 0)
    order = tl.arange(0, CHUNK)
    in_tile = tl.arange(0, TILE)
    bias = tl.load(time_bias + head).to(tl.float32)
    while goes_on:
        chunk = position // CHUNK * CHUNK
        new = in_step(
            tables, positions, rows, row + (chunk + order - position), table, chunk + order
        )
        new = new & (chunk + order >= position)
        count = tl.max(tl.where(new, order + 1, 0))
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
        has_state = chunk > 0
        tile_place = chunk + in_tile * TILE
        blocks = tl.load(
            block_tables + table.to(tl.int64) * table_stride + tile_place // BLOCK_SIZE,
            mask=tile_place < chunk + count,
            other=0,
        ).to(tl.int64)
        for tile in range((position - chunk) // TILE, (count + TILE - 1) // TILE):
            at = chunk + tile * TILE + in_tile
            source = row + (at - position)
            own = (at >= position) & (at < chunk + count)
            # a tile lies in one block, so that its tokens are equally far apart everywhere
            block = tl.sum(tl.where(in_tile == tile, blocks, 0))
            offset = (chunk + tile * TILE) % BLOCK_SIZE
            key = keys + block * key_stride + (key_head * BLOCK_SIZE + offset) * KEY_DIM
            mine = changes + block * change_stride + (head * BLOCK_SIZE + offset) * VALUE_DIM
            mine = mine + in_tile[:, None] * VALUE_DIM + column[None, :]
            fading = decays + block * decay_stride + head * BLOCK_SIZE + offset
            first = row + (chunk + tile * TILE - position)
            query = queries + (first * KEY_HEADS + key_head) * KEY_DIM
            score = scores + (first * KEY_HEADS + key_head) * 2 * CHUNK
            scores_of_own = score + in_tile[:, None] * (KEY_HEADS * 2 * CHUNK) + in_tile[None, :]
            value_place = mixed + source * mixed_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
            mask = own[:, None] & within[None, :]
            now = tl.load(fading + in_tile, mask=at < chunk + count, other=0.0)
            known = tl.load(mine, mask=(at < position)[:, None] & within[None, :], other=0.0)
            value = tl.load(value_place[:, None] + column[None, :], mask=mask, other=0.0)
            value = value.to(tl.float32)
            gate = gates + source * gates_stride + head
            if DELTA:
                beta = tl.load(gate + VALUE_HEADS, mask=own, other=0.0).to(tl.float32)
                beta = beta_scale / (1.0 + tl.exp(-beta))
                before_it = (in_tile[:, None] > in_tile[None, :]) & own[:, None]
                taken = tl.load(scores_of_own + CHUNK + tile * TILE, mask=before_it, other=0.0)
            else:
                beta = softplus(tl.load(gate, mask=own, other=0.0).to(tl.float32) + bias)
                beta = tl.where(beta < least_step, least_step, beta)
                beta = tl.where(beta > largest_step, largest_step, beta)
            visible = (in_tile[:, None] >= in_tile[None, :]) & own[:, None]
            given = tl.load(scores_of_own + tile * TILE, mask=visible, other=0.0)
            # What the state says, and the changes of earlier tiles. One loop, so that all of it is
            # asked for at once: rows of the state, 16 at a time, and then the tokens of a tile.
            said = tl.zeros((TILE, COLUMNS), tl.float32)
            asked = tl.zeros((TILE, COLUMNS), tl.float32)
            for part in tl.range(PARTS_OF_STATE + tile, num_stages=STAGES):
                of_state = part < PARTS_OF_STATE
                before = tl.maximum(part - PARTS_OF_STATE, 0)
                block = tl.sum(tl.where(in_tile == before, blocks, 0))
                offset = (chunk + before * TILE) % BLOCK_SIZE
                change = changes + block * change_stride + (head * BLOCK_SIZE + offset) * VALUE_DIM
                right = tl.where(of_state, state + part * TILE * VALUE_DIM, change)
                right = tl.multiple_of(right, ALIGNMENT)
                there = (of_state == 0) | (has_state & (part * TILE + in_tile < KEY_DIM))
                right = tl.load(
                    right + in_tile[:, None] * VALUE_DIM + column[None, :],
                    mask=there[:, None] & within[None, :],
                    other=0.0,
                )
                fading = decays + block * decay_stride + head * BLOCK_SIZE + offset
                then = tl.load(fading + in_tile, mask=(in_tile >= 0) & (of_state == 0), other=0.0)
                fade = tl.exp(tl.where(own[:, None], now[:, None] - then[None, :], 0.0))
                there = own[:, None] & there[None, :]
                left = tl.where(of_state, query + part * TILE, score + before * TILE)
                far = tl.where(of_state, KEY_HEADS * KEY_DIM, KEY_HEADS * 2 * CHUNK)
                left = left + in_tile[:, None] * far + in_tile[None, :]
                left = tl.load(left, mask=there, other=0.0)
                asked = product(left * fade, right, asked)
                if DELTA:
                    left = tl.where(of_state, key + part * TILE, score + CHUNK + before * TILE)
                    far = tl.where(of_state, KEY_DIM, KEY_HEADS * 2 * CHUNK)
                    left = left + in_tile[:, None] * far + in_tile[None, :]
                    left = tl.load(left, mask=there, other=0.0)
                    said = product(left * fade, right, said)
            # its own tile
            change = tl.where(own[:, None], beta[:, None] * (value - said), known)
            if DELTA:
                weights = -beta[:, None] * _faded(taken, now, before_it)
                for j in range(
                    count - tile * TILE - 1 if tile == (count - 1) // TILE else TILE - 1
                ):
                    of_one = tl.sum(tl.where(in_tile[:, None] == j, change, 0.0), 0)
                    factor = tl.sum(tl.where(in_tile[None, :] == j, weights, 0.0), 1)
                    added = tl.fma(
                        factor[:, None] + tl.zeros_like(change),
                        of_one[None, :] + tl.zeros_like(change),
                        change,
                    )
                    change = tl.where((in_tile > j)[:, None] & own[:, None], added, change)
            tl.store(mine, change, mask=mask)
            asked = product(_faded(given, now, visible), change, asked)
            if SKIP:
                asked = tl.fma(value, tl.load(skip + head) + tl.zeros_like(value), asked)
            target = out + (source[:, None] * VALUE_HEADS + head) * VALUE_DIM + column[None, :]
            tl.store(target, asked.to(NUMBER), mask=mask)
            barrier(INTERPRETED)
        if count == CHUNK:
            block = tl.sum(tl.where(in_tile == CHUNK // TILE - 1, blocks, 0))
            offset = (chunk + CHUNK - 1) % BLOCK_SIZE
            last = tl.load(decays + block * decay_stride + head * BLOCK_SIZE + offset)
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
            write_state(
                state,
                next_state,
                has_state,
                last,
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
        row += chunk + CHUNK - position
        position = chunk + CHUNK
        goes_on = in_step(tables, positions, rows, row, table, position)


def recur_(
    mixed: Tensor,
    gates: Tensor,
    weights: RecurrentWeights,
    spec: RecurrentSpec,
    cache: RecurrentCache,
    batch: PagedBatch,
    decay_gates: Tensor | None = None,
) -> Tensor:
    """`Kernels.recur_`; it keeps the last inputs of the convolution, too."""
    assert decay_gates is None, "see `TritonKernels.has_kernels_for`"
    source, gates = as_rows(mixed), as_rows(gates)
    rows = source.shape[0]
    out = torch.empty(rows, spec.value_size, dtype=mixed.dtype, device=mixed.device)
    if rows == 0:
        return out
    tail = cache.convolution.tail
    if batch.state_tables is None or tail is None:
        raise ValueError("A recurrent layer needs the tables of its states.")
    if cache.block_size % int(TILE):
        raise DeviceError(
            f"block_size is {cache.block_size}, but must be a multiple of {int(TILE)} for layers with "
            f"a state on a GPU."
        )
    tables, positions = rows_of(batch)
    convolution, states = cache.convolution, batch.state_tables
    key_heads, value_heads = spec.num_key_heads, spec.num_value_heads
    queries = torch.empty(rows, key_heads, spec.key_dim, device=mixed.device)
    scores = torch.empty(rows, key_heads, 2, int(CHUNK), device=mixed.device)
    least, largest = spec.time_limits
    shared = {
        "tables": tables,
        "positions": positions,
        "block_tables": batch.block_tables,
        "state_tables": states,
        "rows": rows,
        "table_stride": batch.block_tables.stride(0),
        "state_stride": states.stride(0),
        "state_width": states.stride(1),
        "mixed": source,
        "mixed_stride": row_stride(source),
        "gates": gates,
        "gates_stride": row_stride(gates),
        "time_bias": weights.time_bias,
        "queries": queries,
        "scores": scores,
        "keys": cache.keys,
        "key_stride": cache.keys.stride(0),
        "decays": cache.decays,
        "decay_stride": cache.decays.stride(0),
        "least_step": least,
        "largest_step": min(largest, torch.finfo(torch.float32).max),
        "KEY_HEADS": key_heads,
        "VALUE_HEADS": value_heads,
        "KEY_DIM": spec.key_dim,
        "PIECES": cdiv(spec.key_dim, int(PIECE)),
        "BLOCK_SIZE": cache.block_size,
        "DELTA": spec.is_delta,
        "PDL": USE_PDL,
        "num_warps": 4,
        **ROUND_ALWAYS,
        **LAUNCH,
    }
    group = 1 if rows <= _FEW_ROWS else int(TILE)
    scores_kernel[(cdiv(rows, group), key_heads + 1)](
        log_rate=weights.log_rate,
        inputs=convolution.inputs,
        input_stride=convolution.inputs.stride(0),
        tail_places=tail.places,
        HEADS_PAD=next_power_of_2(value_heads),
        CHANNELS=spec.convolution.channels,
        TAPS=spec.taps,
        ROWS=group,
        **shared,
    )
    count = len(batch.context_lens)
    columns = min(64, max(16, next_power_of_2(spec.value_dim)))
    if columns == 64 and count * value_heads * cdiv(spec.value_dim, 64) <= _FEW_PROGRAMS:
        columns = 32
    stages, registers = FORMS[columns]
    # Pipelined loops would read a tile's records before the tile before it has written them.
    _recur_kernel[(count, value_heads * cdiv(spec.value_dim, columns))](
        skip=weights.time_bias if weights.skip is None else weights.skip,
        out=out,
        changes=cache.changes,
        change_stride=cache.changes.stride(0),
        state_places=cache.state.places,
        starts=batch.query_start,
        beta_scale=spec.beta_scale,
        VALUE_DIM=spec.value_dim,
        SKIP=weights.skip is not None,
        SINGLE=count == rows,
        ALIGNMENT=math.gcd(
            cache.state.alignment,
            *(4 * n for n in (cache.changes.stride(0), spec.value_dim)),
            cache.changes.data_ptr(),
        ),
        COLUMNS=columns,
        STAGES=stages,
        INTERPRETED=INTERPRETED,
        num_stages=1,
        maxnreg=registers,
        **shared,
    )
    return out
