"""Which (row, expert) pairs are computed together: tiles of pairs that share an expert, found on the device.

Pair `row * top_k + i` is the i-th expert of a row. Sorting is counting: how many pairs each expert has gives
where its tiles begin, and how many of its pairs come earlier gives a pair's place. Integers only, so there is
no order of additions to keep, and the result is the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import LAUNCH, USE_PDL, begin
from quire.kernels.triton.shapes import cdiv, next_power_of_2

_UNCOUNTED_PAIRS = 512
"""So many every program counts for itself; of more, kernels before it make a table."""

_SMALL_CHUNK, _CHUNK = 64, 128
"""Pairs of one program, without such a table and with it."""

_TABLE_ROWS, _TABLE_COLUMNS = 128, 16
_LISTED_TILES = 32


SINGLE, GROUPED, IN_ORDER = (tl.constexpr(how) for how in range(3))


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work list of the experts' products."""

    experts: Tensor
    """int32 [bound]: whose tile it is, -1 past the last one."""
    counts: Tensor
    """int32 [bound]: how many pairs it has; read if GROUPED."""
    order: Tensor
    """int32 [bound * width]: the pairs, tile by tile; read if GROUPED."""
    pairs: int
    bound: int
    """There are no more tiles than this."""
    width: int
    listed: int
    """How a tile's pairs are found: each pair is a tile, `order` lists them, or they are rows in order."""


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(expert_ids, table, pairs, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """How many pairs of one chunk each expert has: a row of table [chunks, BLOCK]."""
    begin(PDL)
    chunk = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    tl.store(table + chunk * BLOCK + expert, _count_chunk(expert_ids, chunk, pairs, BLOCK, CHUNK))


@triton.jit
def _count_chunk(expert_ids, chunk, pairs, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    of_pair = tl.load(expert_ids + pair, mask=pair < pairs, other=-1)
    return tl.sum((of_pair[None, :] == tl.arange(0, BLOCK)[:, None]).to(tl.int32), 1)


@triton.jit(do_not_specialize=["chunks"])
def _accumulate_kernel(
    table, chunks, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Turns counts into how many pairs earlier chunks have, for COLUMNS experts; the row past the last chunk gets
    the totals."""
    begin(PDL)
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, chunks, ROWS):
        chunk = first + tl.arange(0, ROWS)[:, None]
        own = table + chunk * BLOCK + expert[None, :]
        counts = tl.load(own, mask=chunk < chunks, other=0)
        tl.store(own, total[None, :] + tl.cumsum(counts, 0) - counts, mask=chunk < chunks)
        total += tl.sum(counts, 0)
    tl.store(table + chunks * BLOCK + expert, total)


@triton.jit(do_not_specialize=["pairs", "chunks", "bound"])
def _place_kernel(
    expert_ids, table, tile_experts, tile_counts, order, pairs, chunks, bound,
    COUNTED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    LISTED: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Puts the pairs of one chunk into their places, and lists some of the tiles."""
    begin(PDL)
    chunk = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    if COUNTED:
        total = tl.load(table + chunks * BLOCK + expert)
        earlier = tl.load(table + chunk * BLOCK + expert)
    else:
        total = tl.zeros((BLOCK,), tl.int32)
        earlier = tl.zeros((BLOCK,), tl.int32)
        for other in range(0, chunks):
            counts = _count_chunk(expert_ids, other, pairs, BLOCK, CHUNK)
            total += counts
            earlier += tl.where(other < chunk, counts, 0)
    tiles = (total + WIDTH - 1) // WIDTH
    end = tl.cumsum(tiles, 0)
    begin_tile = end - tiles

    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    of_pair = tl.load(expert_ids + pair, mask=pair < pairs, other=-1)
    same = of_pair[:, None] == of_pair[None, :]
    rank = tl.sum((same & (pair[None, :] < pair[:, None])).to(tl.int32), 1)
    is_own = of_pair[:, None] == expert[None, :]
    start = tl.sum(tl.where(is_own, (begin_tile * WIDTH + earlier)[None, :], 0), 1)
    tl.store(order + start + rank, pair, mask=pair < pairs)

    for first in range(chunk * LISTED, bound, tl.num_programs(0) * LISTED):
        tile = first + tl.arange(0, LISTED)
        owner = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1)  # experts that end before it; BLOCK past all
        is_owner = owner[:, None] == expert[None, :]
        left = tl.sum(tl.where(is_owner, total[None, :] - (tile[:, None] - begin_tile[None, :]) * WIDTH, 0), 1)
        tl.store(tile_experts + tile, tl.where(owner < BLOCK, owner, -1), mask=tile < bound)
        tl.store(tile_counts + tile, tl.minimum(left, WIDTH), mask=tile < bound)


def rows_in_order(x: Tensor, width: int) -> Tiles:
    """Tiles of `width` rows of x."""
    return Tiles(x, x, x, len(x), cdiv(len(x), width), width, IN_ORDER.value)


def group_pairs(expert_ids: Tensor, num_experts: int, rows: int, width: int) -> Tiles:
    """Tiles of up to `width` pairs for int32 expert_ids [rows * top_k], in ascending order of the experts and, in
    them, of the pairs. A row's experts differ, so a single row needs no grouping."""
    pairs = expert_ids.shape[0]
    if rows == 1:
        return Tiles(expert_ids, expert_ids, expert_ids, pairs, pairs, width, SINGLE.value)
    # Full tiles, and one more for each expert that has any.
    bound = min(pairs, pairs // width + min(num_experts, pairs))
    device = expert_ids.device
    experts, counts = (torch.empty(bound, dtype=torch.int32, device=device) for _ in range(2))
    order = torch.empty(bound * width, dtype=torch.int32, device=device)
    is_counted = pairs > _UNCOUNTED_PAIRS
    chunk = _CHUNK if is_counted else _SMALL_CHUNK
    chunks = cdiv(pairs, chunk)
    block = next_power_of_2(num_experts)
    table = expert_ids  # not read where nothing was counted
    if is_counted:
        table = torch.empty(chunks + 1, block, dtype=torch.int32, device=device)
        columns = min(_TABLE_COLUMNS, block)
        _count_kernel[(chunks,)](expert_ids, table, pairs, block, chunk, USE_PDL, num_warps=8, **LAUNCH)
        _accumulate_kernel[(block // columns,)](
            table, chunks, block, _TABLE_ROWS, columns, USE_PDL, num_warps=4, **LAUNCH
        )
    _place_kernel[(chunks,)](
        expert_ids, table, experts, counts, order, pairs, chunks, bound,
        is_counted, block, chunk, _LISTED_TILES, width, USE_PDL, num_warps=8, **LAUNCH,
    )  # fmt: skip
    return Tiles(experts, counts, order, pairs, bound, width, GROUPED.value)
