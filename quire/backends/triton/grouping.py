"""Groups (row, expert) pairs into tiles that share an expert, on the device.

Pair `row * top_k + i` is the i-th expert of a row. This is a counting sort: the number of pairs of
each expert tells where its tiles begin, and one program per expert goes through all pairs and lists
its own. It computes with integers only, so the order of additions does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import LAUNCH, USE_PDL, begin
from quire.backends.triton.shapes import cdiv, next_power_of_2

_SMALL_CHUNK, _CHUNK, _LISTED_TILES = 512, 4096, 256
"""Pairs, or tiles, that a program handles at a time. If all pairs fit into one chunk, every program
counts them.
"""
_COUNTED, _LISTED_CHUNKS, _COMPARED = 256, 256, 64
"""Else a chunk has so many pairs, and of so many chunks a program knows where their pairs go; a pair is
compared with so many at a time.
"""

SINGLE, GROUPED, IN_ORDER = (tl.constexpr(how) for how in range(3))


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work list of the experts' products."""

    experts: Tensor
    """int32 [bound]: the expert of each tile, -1 after the last tile."""
    counts: Tensor
    """int32 [bound + 3]: how many pairs it has, how many tiles there are, and two zeros, which a product
    may count with if it leaves zeros; read if GROUPED.
    """
    order: Tensor
    """int32 [bound * width]: the pairs, tile by tile; read if GROUPED."""
    pairs: int
    bound: int
    """There are no more tiles than this."""
    width: int
    listed: int
    """How a tile's pairs are found: SINGLE (a pair is a tile), GROUPED (in `order`), IN_ORDER
    (`width` rows in turn).
    """


@jit(do_not_specialize=["pairs"])
def _count_kernel(
    expert_ids, totals, starts, pairs, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """How many pairs of one chunk each expert has, and adds them up."""
    begin(PDL)
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    of_pair = tl.load(expert_ids + pair, mask=pair < pairs, other=0)
    counts = tl.histogram(of_pair, BLOCK, mask=pair < pairs)
    expert = tl.arange(0, BLOCK)
    tl.store(starts + chunk * BLOCK + expert, counts)
    tl.atomic_add(totals + expert, counts)


@jit(do_not_specialize=["pairs", "bound", "chunks"])
def _group_kernel(
    expert_ids,
    totals,
    starts,
    tile_experts,
    tile_counts,
    order,
    pairs,
    bound,
    chunks,
    COUNTED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lists an expert's tiles and their pairs, after those of the experts before; a last program
    marks unused tiles. COUNTED: instead of the pairs, where those of each chunk go.
    """
    begin(PDL)
    own = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    chunk = tl.arange(0, CHUNK)
    if COUNTED:
        total = tl.load(totals + expert)
    else:
        of_pair = tl.load(expert_ids + chunk, mask=chunk < pairs, other=-1)
        total = tl.histogram(of_pair, BLOCK, mask=chunk < pairs)
    tiles = (total + WIDTH - 1) // WIDTH
    first_tile = tl.sum(tl.where(expert < own, tiles, 0), 0)
    end_tile = tl.where(
        own < EXPERTS, first_tile + tl.sum(tl.where(expert == own, tiles, 0), 0), bound
    )
    tl.store(tile_counts + bound, first_tile, mask=own == EXPERTS)
    tl.store(tile_counts + bound + 1, 0, mask=own == EXPERTS)
    tl.store(tile_counts + bound + 2, 0, mask=own == EXPERTS)
    own_pairs = tl.sum(tl.where(expert == own, total, 0), 0)
    for first in range(first_tile, end_tile, LISTED):
        tile = first + tl.arange(0, LISTED)
        tl.store(tile_experts + tile, tl.where(own < EXPERTS, own, -1), mask=tile < end_tile)
        count = tl.minimum(own_pairs - (tile - first_tile) * WIDTH, WIDTH)
        tl.store(tile_counts + tile, count, mask=tile < end_tile)
    before = first_tile * WIDTH
    if COUNTED:
        for first in range(0, chunks, CHUNK):
            exists = (first + chunk < chunks) & (own < EXPERTS)
            place = starts + (first + chunk) * BLOCK + own
            count = tl.load(place, mask=exists, other=0)
            tl.store(place, before + tl.cumsum(count, 0) - count, mask=exists)
            before += tl.sum(count, 0)
    else:
        is_own = (of_pair == own).to(tl.int32)
        tl.store(order + before + tl.cumsum(is_own, 0) - 1, chunk, mask=is_own > 0)


@jit(do_not_specialize=["pairs"])
def _place_kernel(
    expert_ids,
    starts,
    order,
    pairs,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lists a chunk's pairs."""
    begin(PDL)
    first = tl.program_id(0) * CHUNK
    own = tl.arange(0, CHUNK)
    exists = first + own < pairs
    expert = tl.load(expert_ids + first + own, mask=exists, other=0)
    place = tl.load(starts + tl.program_id(0) * BLOCK + expert, mask=exists, other=0)
    for i in tl.static_range(CHUNK // COMPARED):
        other = i * COMPARED + tl.arange(0, COMPARED)
        of_other = tl.load(expert_ids + first + other, mask=first + other < pairs, other=-1)
        is_before = (of_other[None, :] == expert[:, None]) & (other[None, :] < own[:, None])
        place += tl.sum(is_before.to(tl.int32), 1)
    tl.store(order + place, first + own, mask=exists)


def rows_in_order(x: Tensor, width: int) -> Tiles:
    """Tiles of `width` rows of x."""
    return Tiles(x, x, x, len(x), cdiv(len(x), width), width, IN_ORDER.value)


def group_pairs(expert_ids: Tensor, num_experts: int, rows: int, width: int) -> Tiles:
    """Tiles of up to `width` pairs for int32 expert_ids [rows * top_k], in ascending order of the
    experts and, in them, of the pairs. A row's experts differ, so a single row needs no grouping.
    """
    pairs = expert_ids.shape[0]
    if rows == 1:
        return Tiles(expert_ids, expert_ids, expert_ids, pairs, pairs, width, SINGLE.value)
    # The most tiles there can be: full ones, and for each expert one that is not full.
    bound = min(pairs, pairs // width + min(num_experts, pairs))
    device = expert_ids.device
    experts, counts = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (bound, bound + 3)
    )
    order = torch.empty(bound * width, dtype=torch.int32, device=device)
    block = max(32, next_power_of_2(num_experts))
    is_counted = pairs > _CHUNK
    totals = starts = expert_ids  # not read where nothing was counted
    chunks = cdiv(pairs, _COUNTED)
    if is_counted:
        totals = torch.zeros(block, dtype=torch.int32, device=device)
        starts = torch.empty(chunks * block, dtype=torch.int32, device=device)
        _count_kernel[(chunks,)](
            expert_ids=expert_ids,
            totals=totals,
            starts=starts,
            pairs=pairs,
            BLOCK=block,
            CHUNK=_COUNTED,
            PDL=USE_PDL,
            num_warps=8,
            **LAUNCH,
        )
    chunk = _CHUNK if pairs > _SMALL_CHUNK else _SMALL_CHUNK
    _group_kernel[(num_experts + 1,)](
        expert_ids=expert_ids,
        totals=totals,
        starts=starts,
        tile_experts=experts,
        tile_counts=counts,
        order=order,
        pairs=pairs,
        bound=bound,
        chunks=chunks,
        COUNTED=is_counted,
        EXPERTS=num_experts,
        BLOCK=block,
        CHUNK=_LISTED_CHUNKS if is_counted else chunk,
        LISTED=_LISTED_TILES,
        WIDTH=width,
        PDL=USE_PDL,
        num_warps=8,
        **LAUNCH,
    )
    if is_counted:
        _place_kernel[(chunks,)](
            expert_ids=expert_ids,
            starts=starts,
            order=order,
            pairs=pairs,
            BLOCK=block,
            CHUNK=_COUNTED,
            COMPARED=_COMPARED,
            PDL=USE_PDL,
            num_warps=8,
            **LAUNCH,
        )
    return Tiles(experts, counts, order, pairs, bound, width, GROUPED.value)
