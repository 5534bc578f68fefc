"""Groups (row, expert) pairs into tiles that share an expert, on the device.

Pair `row * top_k + i` is the i-th expert of a row. This is a counting sort: the number of pairs of
each expert tells where its tiles begin. Of few pairs, each program reads all of them once and lists
those of two experts. Many are divided into chunks: one kernel counts the pairs of each chunk and
expert, the next finds where they go, the last lists each chunk's pairs. All compute with integers only,
so the order of additions does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.launch import LAUNCH, USE_PDL, begin
from quire.backends.triton.shapes import cdiv, next_power_of_2

_LISTED_TILES = 256
"""Tiles that a program lists at a time."""
_FEW_PAIRS, _LEAST_CHUNK = 4096, 256
"""Up to so many pairs are few, and a program has registers for so many at least."""
_OWNED = tl.constexpr(2)
"""Experts of a program of few pairs: counts of two of them are one number of 32 bits."""
_COUNTED, _PLACED_CHUNKS, _COMPARED = 256, 256, 64
"""Of many pairs: how many a program counts and lists, of how many such chunks a program finds the places
at a time, and with how many pairs at a time a pair is compared.
"""

SINGLE, GROUPED, IN_ORDER = (tl.constexpr(how) for how in range(3))


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work list of the experts' products."""

    experts: Tensor
    """int32 [bound]: the expert of each tile, -1 after the last tile."""
    counts: Tensor
    """int32 [bound + 3]: how many pairs it has, how many tiles there are, and two zeros: counters of
    products whose blocks take one tile after the other (`cuda/experts.cu`), which leave zeros; read if
    GROUPED.
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


@jit(do_not_specialize=["pairs", "bound", "width_bits"])
def _group_few_kernel(
    expert_ids,
    tile_experts,
    tile_counts,
    order,
    pairs,
    bound,
    width_bits,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lists the tiles of two neighbouring experts and their pairs, of which CHUNK are not fewer than
    there are. The last program marks unused tiles, too.
    """
    begin(PDL)
    width = 1 << width_bits
    own = tl.program_id(0) * _OWNED
    pair = tl.arange(0, CHUNK)
    expert = tl.load(expert_ids + pair, mask=pair < pairs, other=EXPERTS + _OWNED)
    is_first = expert == own
    is_second = expert == own + 1
    # Counts of both in one number: neither is above 4,096. No program counts the last expert for others.
    ones = is_first.to(tl.int32) + (is_second.to(tl.int32) << 16)
    place = tl.cumsum(ones, 0)
    both = tl.sum(ones, 0)
    totals = tl.histogram(expert, BINS, mask=expert < own)
    first_tile = tl.sum((totals + width - 1) >> width_bits, 0)
    first_pairs = both & 0xFFFF
    second_pairs = both >> 16
    second_tile = first_tile + ((first_pairs + width - 1) >> width_bits)
    end_tile = second_tile + ((second_pairs + width - 1) >> width_bits)
    at = tl.where(
        is_first,
        (first_tile << width_bits) + (place & 0xFFFF),
        (second_tile << width_bits) + (place >> 16),
    )
    tl.store(order + at - 1, pair, mask=is_first | is_second)
    is_last = own + _OWNED >= EXPERTS
    tl.store(tile_counts + bound, end_tile, mask=is_last)
    tl.store(tile_counts + bound + 1, 0, mask=is_last)
    tl.store(tile_counts + bound + 2, 0, mask=is_last)
    for first in range(first_tile, tl.where(is_last, bound, end_tile), LISTED):
        tile = first + tl.arange(0, LISTED)
        of_second = tile >= second_tile
        listed = tl.where(of_second, own + 1, own)
        left = tl.where(of_second, second_pairs, first_pairs)
        left -= (tile - tl.where(of_second, second_tile, first_tile)) << width_bits
        written = (tile < end_tile) | (is_last & (tile < bound))
        tl.store(tile_experts + tile, tl.where(tile < end_tile, listed, -1), mask=written)
        tl.store(tile_counts + tile, tl.minimum(left, width), mask=written)


@jit(do_not_specialize=["pairs"])
def _count_kernel(
    expert_ids, totals, starts, pairs, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """How many pairs of one chunk each expert has: into `starts` [chunks, BLOCK], and added to
    `totals`.
    """
    begin(PDL)
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    of_pair = tl.load(expert_ids + pair, mask=pair < pairs, other=0)
    counts = tl.histogram(of_pair, BLOCK, mask=pair < pairs)
    expert = tl.arange(0, BLOCK)
    tl.store(starts + chunk * BLOCK + expert, counts)
    tl.atomic_add(totals + expert, counts)


@jit(do_not_specialize=["bound", "chunks", "width_bits"])
def _place_chunks_kernel(
    totals,
    starts,
    tile_experts,
    tile_counts,
    bound,
    chunks,
    width_bits,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lists an expert's tiles, and makes each chunk's count of its pairs in `starts` the place of the
    first of them; a last program marks unused tiles.
    """
    begin(PDL)
    width = 1 << width_bits
    own = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    total = tl.load(totals + expert)
    tiles = (total + width - 1) >> width_bits
    first_tile = tl.sum(tl.where(expert < own, tiles, 0), 0)
    own_pairs = tl.sum(tl.where(expert == own, total, 0), 0)
    end_tile = tl.where(own < EXPERTS, first_tile + ((own_pairs + width - 1) >> width_bits), bound)
    tl.store(tile_counts + bound, first_tile, mask=own == EXPERTS)
    tl.store(tile_counts + bound + 1, 0, mask=own == EXPERTS)
    tl.store(tile_counts + bound + 2, 0, mask=own == EXPERTS)
    for first in range(first_tile, end_tile, LISTED):
        tile = first + tl.arange(0, LISTED)
        tl.store(tile_experts + tile, tl.where(own < EXPERTS, own, -1), mask=tile < end_tile)
        count = tl.minimum(own_pairs - ((tile - first_tile) << width_bits), width)
        tl.store(tile_counts + tile, count, mask=tile < end_tile)
    before = first_tile << width_bits
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        exists = (chunk < chunks) & (own < EXPERTS)
        place = starts + chunk * BLOCK + own
        count = tl.load(place, mask=exists, other=0)
        tl.store(place, before + tl.cumsum(count, 0) - count, mask=exists)
        before += tl.sum(count, 0)


@jit(do_not_specialize=["pairs"])
def _list_pairs_kernel(
    expert_ids,
    starts,
    order,
    pairs,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lists a chunk's pairs: each after those before it in the chunk that have its expert."""
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


def _bits_of(width: int) -> int:
    """A kernel that is given a number has one compiled form, whatever the width."""
    assert width.bit_count() == 1
    return width.bit_length() - 1


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
    tiles = Tiles(experts, counts, order, pairs, bound, width, GROUPED.value)
    if pairs > _FEW_PAIRS:
        _group_many(expert_ids, num_experts, tiles)
        return tiles
    _group_few_kernel[(cdiv(num_experts, _OWNED.value),)](
        expert_ids=expert_ids,
        tile_experts=experts,
        tile_counts=counts,
        order=order,
        pairs=pairs,
        bound=bound,
        width_bits=_bits_of(width),
        EXPERTS=num_experts,
        BINS=max(32, next_power_of_2(num_experts - 1)),
        CHUNK=max(_LEAST_CHUNK, next_power_of_2(pairs)),
        LISTED=_LISTED_TILES,
        PDL=USE_PDL,
        num_warps=8,
        **LAUNCH,
    )
    return tiles


def _group_many(expert_ids: Tensor, num_experts: int, tiles: Tiles) -> None:
    """Fills the tiles' tensors."""
    pairs, device = tiles.pairs, expert_ids.device
    block = max(32, next_power_of_2(num_experts))
    chunks = cdiv(pairs, _COUNTED)
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
    _place_chunks_kernel[(num_experts + 1,)](
        totals=totals,
        starts=starts,
        tile_experts=tiles.experts,
        tile_counts=tiles.counts,
        bound=tiles.bound,
        chunks=chunks,
        width_bits=_bits_of(tiles.width),
        EXPERTS=num_experts,
        BLOCK=block,
        CHUNKS=_PLACED_CHUNKS,
        LISTED=_LISTED_TILES,
        PDL=USE_PDL,
        num_warps=8,
        **LAUNCH,
    )
    _list_pairs_kernel[(chunks,)](
        expert_ids=expert_ids,
        starts=starts,
        order=tiles.order,
        pairs=pairs,
        BLOCK=block,
        CHUNK=_COUNTED,
        COMPARED=_COMPARED,
        PDL=USE_PDL,
        num_warps=8,
        **LAUNCH,
    )
