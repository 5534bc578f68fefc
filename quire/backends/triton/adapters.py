"""What the rows' adapters add to a product (`quire/kernels/low_rank.py`), in two launches: products
with A ("shrink"), and with B ("expand"). A third, once a step, groups the rows by their slots. The
kernel for products with B is Gluon's, in `adapter_outputs.py`, or a plainer one here.

A row's products with A are summed in segments of SEGMENT inputs, each from zero, which are added in
order; those with B along the rank, 16 at a time. Tiles hold rows of one adapter, and a row's numbers
don't depend on the others of its tile. So a row has the same bits in any company.

Nothing is read on the host: a product's table lies on the device, and graphs find what was put
there after they were captured.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.triton.adapter_table import (
    FIELDS,
    PART_FIELDS,
    RANK_TILE,
    SUMS_STRIDE,
    TritonLowRank,
    TritonTable,
)
from quire.backends.triton.direct_launch import jit
from quire.backends.triton.grouping import SINGLE, Tiles, group_pairs
from quire.backends.triton.launch import (
    HAS_GLUON,
    LAUNCH,
    ROUND_ALWAYS,
    USE_PDL,
    let_next_start,
    wait_for_previous,
)
from quire.backends.triton.rowwise import gate
from quire.backends.triton.shapes import as_rows, cdiv, row_stride
from quire.backends.triton.tested import has_gluon, is_exact, random_numbers
from quire.kernels.low_rank import LowRank, LowRankPart
from quire.kernels.ops import Activation

if HAS_GLUON:
    from quire.backends.triton.adapter_outputs import add_products

SEGMENT = 1024
MANY_ROWS = 512
"""With more, there are programs enough without dividing the segments among them."""
_LINE = tl.constexpr(64)
"""Numbers of 16 bits in a line of the cache."""


class _Blocks(NamedTuple):
    """How programs of the product with A divide it. The bits don't depend on it."""

    ranks: int
    """At a time."""
    rank_programs: int
    """Programs among which a tile's ranks are divided."""
    inputs: int
    """At a time."""
    num_warps: int
    num_stages: int


_FEW_ROWS = _Blocks(ranks=16, rank_programs=4, inputs=256, num_warps=2, num_stages=3)
_MORE_ROWS = _Blocks(ranks=64, rank_programs=1, inputs=128, num_warps=4, num_stages=4)
_FLOAT32 = _Blocks(ranks=32, rank_programs=1, inputs=32, num_warps=4, num_stages=2)


class RowTiles:
    """Groups the rows of a step by their slots, once for all products of the step. Each step has a
    tensor of slots of its own: if it changes, nobody looks at it again.
    """

    def __init__(self) -> None:
        self._slots: weakref.ref[Tensor] | None = None
        self._tiles: Tiles | None = None
        self._fence: Tensor | None = None

    def of(self, slots: Tensor, num_slots: int) -> Tiles:
        """Tiles of rows that have the same slot; those without an adapter come last, as slot
        `num_slots`.
        """
        if self._tiles is None or self._slots is None or self._slots() is not slots:
            rows = len(slots)
            known = torch.where(slots < 0, num_slots, slots).int()
            self._tiles = group_pairs(known, num_slots + 1, rows, 16 if rows <= MANY_ROWS else 64)
            # Not launched early, so the tiles are there when it begins: kernels behind it read them
            # before they wait for the one before them.
            self._fence = torch.zeros(1, device=slots.device)
            self._slots = weakref.ref(slots)
        return self._tiles


@triton.jit
def _tile_rows(tile, tile_counts, order, IS_SINGLE: tl.constexpr, TILE: tl.constexpr):
    """The rows of a tile, and which of its places have one."""
    place = tl.arange(0, TILE)
    if IS_SINGLE:
        exists = place < 1
        row = tile + tl.zeros((TILE,), tl.int32)
    else:
        exists = place < tl.load(tile_counts + tile)
        row = tl.load(order + tile * TILE + place, mask=exists, other=0)
    return row.to(tl.int64), exists


@triton.jit
def _slot_of(tile_slots, table, tile, field, NUM_SLOTS: tl.constexpr):
    """A tile's slot and one number of its entry; 0 if the rows have no adapter."""
    slot = tl.load(tile_slots + tile)
    has_one = (slot >= 0) & (slot < NUM_SLOTS)
    return slot, tl.load(table + slot * FIELDS + field, mask=has_one, other=0).to(tl.int32)


@triton.jit
def _prefetch(places, mask):
    """Asks for a cache line of each."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [places.to(tl.int64), mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x,
    table,
    tile_slots,
    tile_counts,
    order,
    sums,
    x_stride,
    num_rows,
    K: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    STRIDE: tl.constexpr,
    IS_BESIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """sums [programs of a tile, rows, STRIDE]: SEGMENTS segments of a tile's rows times A, RANKS of
    its rows at a time. IS_BESIDE: the kernel before it shares its input (`begin`), so that both run
    at the same time.
    """
    let_next_start(PDL)
    tile = tl.program_id(0)
    slot, ranks = _slot_of(tile_slots, table, tile, 2, NUM_SLOTS)
    begin_rank = tl.program_id(2) * RANKS
    if ranks <= begin_rank:
        if tile + tl.program_id(1) + tl.program_id(2) == 0:
            wait_for_previous(PDL)
        return
    entry = table + slot * FIELDS
    dtype: tl.constexpr = x.dtype.element_ty
    a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(dtype)), 16)
    row, exists = _tile_rows(tile, tile_counts, order, IS_SINGLE, TILE)
    inner = tl.arange(0, BLOCK_K)[None, :]
    first_segment = tl.program_id(1) * SEGMENTS
    end_segment = tl.minimum(first_segment + SEGMENTS, tl.cdiv(K, SEGMENT))
    if PDL and not IS_BESIDE and SEGMENTS == 1:  # A is on its way while it waits
        asked = begin_rank + tl.arange(0, RANKS)[:, None]
        at = first_segment * SEGMENT + tl.arange(0, SEGMENT // _LINE)[None, :] * _LINE
        _prefetch(a + asked.to(tl.int64) * K + at, (asked < ranks) & (at < K))
    if not IS_BESIDE:
        wait_for_previous(PDL)
    for first_rank in range(begin_rank, ranks, RANKS * tl.num_programs(2)):
        rank = first_rank + tl.arange(0, RANKS)
        within = (rank < ranks)[:, None]
        total = tl.zeros((TILE, RANKS), tl.float32)
        for segment in range(first_segment, end_segment):
            part = tl.zeros((TILE, RANKS), tl.float32)
            for k in range(segment * SEGMENT, tl.minimum((segment + 1) * SEGMENT, K), BLOCK_K):
                inside = inner < K - k
                left = tl.load(
                    x + row[:, None] * x_stride + k + inner,
                    mask=exists[:, None] & inside,
                    other=0.0,
                    cache_modifier=".cg",  # the first level's cache may be older than x
                )
                right = tl.load(
                    a + rank[:, None].to(tl.int64) * K + k + inner,
                    mask=within & inside,
                    other=0.0,
                )
                part = tl.dot(left, tl.trans(right), part, input_precision="ieee")
            total += part
        target = sums + (tl.program_id(1) * num_rows + row)[:, None] * STRIDE + rank[None, :]
        tl.store(target, total, mask=exists[:, None] & (rank < ranks)[None, :])
    if IS_BESIDE:
        wait_for_previous(PDL)


@jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    out,
    table,
    tile_slots,
    tile_counts,
    order,
    sums,
    out_stride,
    num_rows,
    NUM_SLOTS: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds to BLOCK_N outputs of a tile's rows their sums (of PARTS programs each) times B: the
    definition of what Gluon's kernel does.
    """
    let_next_start(PDL)
    tile = tl.program_id(1)
    slot, num_parts = _slot_of(tile_slots, table, tile, 3, NUM_SLOTS)
    if num_parts == 0:
        if tile + tl.program_id(0) == 0:
            wait_for_previous(PDL)
        return
    entry = table + slot * FIELDS
    dtype: tl.constexpr = out.dtype.element_ty
    scales = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    parts = tl.load(entry + 4).to(tl.pointer_type(tl.int64))
    row, exists = _tile_rows(tile, tile_counts, order, IS_SINGLE, TILE)
    wait_for_previous(PDL)
    begin_column = tl.program_id(0) * BLOCK_N
    column = begin_column + tl.arange(0, BLOCK_N)
    for number in range(num_parts):
        part = parts + number * PART_FIELDS
        first, count = tl.load(part).to(tl.int32), tl.load(part + 1).to(tl.int32)
        if (first < begin_column + BLOCK_N) & (first + count > begin_column):
            first_rank, ranks = tl.load(part + 2).to(tl.int32), tl.load(part + 3).to(tl.int32)
            b = tl.multiple_of(tl.load(part + 4).to(tl.pointer_type(dtype)), 16)
            b_stride = (ranks + RANK_TILE - 1) // RANK_TILE * RANK_TILE  # filled up with zeros
            output = column - first
            inside = (output >= 0) & (output < count)
            target = out + row[:, None] * out_stride + column[None, :]
            mask = exists[:, None] & inside[None, :]
            value = tl.load(target, mask=mask, other=0.0).to(tl.float32)
            total = tl.zeros((TILE, BLOCK_N), tl.float32)
            for begin_rank in range(0, ranks, RANK_TILE):
                rank = begin_rank + tl.arange(0, RANK_TILE)
                within = rank < ranks  # after a part's ranks come another's, or nobody's
                scale = tl.load(scales + first_rank + rank, mask=within, other=0.0)
                source = sums + row[:, None] * STRIDE + first_rank + rank[None, :]
                inner = tl.zeros((TILE, RANK_TILE), tl.float32)
                for program in tl.static_range(PARTS):
                    inner += tl.load(
                        source + program * num_rows.to(tl.int64) * STRIDE,
                        mask=exists[:, None] & within[None, :],
                        other=0.0,
                    )
                inner = inner * scale[None, :]
                right = tl.load(
                    b + output[:, None].to(tl.int64) * b_stride + rank[None, :],
                    mask=inside[:, None],
                    other=0.0,
                )
                right = tl.trans(right)
                high = inner.to(dtype)
                total = tl.dot(high, right, total, input_precision="ieee")
                if dtype != tl.float32:  # what rounding took of the sums
                    low = (inner - high.to(tl.float32)).to(dtype)
                    total = tl.dot(low, right, total, input_precision="ieee")
            value += total
            factors = tl.load(part + 5)
            if factors != 0:
                factor = tl.load(
                    factors.to(tl.pointer_type(tl.float32)) + output, mask=inside, other=0.0
                )
                offset = tl.load(
                    tl.load(part + 6).to(tl.pointer_type(tl.float32)) + output,
                    mask=inside,
                    other=0.0,
                )
                value = value * factor[None, :] + offset[None, :]
            tl.store(target, value.to(dtype), mask=mask)


def shrink(x: Tensor, tiles: Tiles, table: TritonTable, is_beside: bool = False) -> Tensor:
    """float32 [programs, rows, SUMS_STRIDE]: parts of the rows' products with A, to be added in
    order. What belongs to no row or rank is not written. `is_beside`: the kernel before it shares
    its input x.
    """
    x = as_rows(x)
    rows, inner = x.shape
    blocks = _FEW_ROWS if rows <= MANY_ROWS else _MORE_ROWS
    if x.dtype == torch.float32:
        blocks = _FLOAT32
    segments = cdiv(inner, SEGMENT)
    each = 1 if rows <= MANY_ROWS else segments
    programs = cdiv(segments, each)
    sums = torch.empty(programs, rows, SUMS_STRIDE, dtype=torch.float32, device=x.device)
    _shrink_kernel[(tiles.bound, programs, blocks.rank_programs)](
        x=x,
        table=table.slots,
        tile_slots=tiles.experts,
        tile_counts=tiles.counts,
        order=tiles.order,
        sums=sums,
        x_stride=row_stride(x),
        num_rows=rows,
        K=inner,
        NUM_SLOTS=len(table.slots),
        IS_SINGLE=tiles.listed == SINGLE.value,
        TILE=tiles.width,
        RANKS=blocks.ranks,
        BLOCK_K=blocks.inputs,
        SEGMENT=SEGMENT,
        SEGMENTS=each,
        STRIDE=SUMS_STRIDE,
        IS_BESIDE=is_beside,
        PDL=USE_PDL,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return sums


def expand_(out: Tensor, sums: Tensor, tiles: Tiles, table: TritonTable) -> None:
    """Adds to out [rows, outputs] the sums' products with B."""
    if out.stride(1) != 1:
        raise ValueError(f"outputs lie {out.stride(1)} numbers apart, not in whole rows")
    if outputs_are_exact(out.device, out.dtype):
        add_products(out, sums, tiles, table.slots, None)
    else:
        _expand_plainly_(out, sums, tiles, table)


def expand_gated(
    out: Tensor, sums: Tensor, tiles: Tiles, table: TritonTable, activation: Activation
) -> Tensor:
    """`expand_`, then `Kernels.gate`. What out holds afterwards is not defined."""
    if outputs_are_exact(out.device, out.dtype):
        return add_products(out, sums, tiles, table.slots, activation)
    _expand_plainly_(out, sums, tiles, table)
    return gate(out, activation)


def _expand_plainly_(out: Tensor, sums: Tensor, tiles: Tiles, table: TritonTable) -> None:
    """For float32, and where Gluon's kernel can't be used. The same bits."""
    rows, size = out.shape
    block = 64 if size <= 2048 else 128
    _expand_kernel[(cdiv(size, block), tiles.bound)](
        out=out,
        table=table.slots,
        tile_slots=tiles.experts,
        tile_counts=tiles.counts,
        order=tiles.order,
        sums=sums,
        out_stride=row_stride(out),
        num_rows=rows,
        NUM_SLOTS=len(table.slots),
        IS_SINGLE=tiles.listed == SINGLE.value,
        TILE=tiles.width,
        BLOCK_N=block,
        RANK_TILE=RANK_TILE,
        PARTS=len(sums),
        STRIDE=SUMS_STRIDE,
        PDL=USE_PDL,
        num_warps=4,
        **ROUND_ALWAYS,
        **LAUNCH,
    )


@cache
def outputs_are_exact(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Gluon's kernel for products with B may be used. Tests it, once: the first call must not
    be during a graph capture.
    """
    return has_gluon(device, dtype) and is_exact("adapters", lambda: _same_outputs(device, dtype))


def _same_outputs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it has the bits of the kernel for all: rows of several tiles, of a wide one and a single
    one, with a gate and without, of adapters with parts of odd sizes and with factors, and of none.
    """
    size, rows = 200, 40

    def random(*shape: int) -> Tensor:
        return random_numbers(*shape, device=device, dtype=torch.float32)

    table = TritonTable(2, device)
    factor = random(130)
    adapters = (
        (LowRankPart(0, 0, random(61, 5)), LowRankPart(61, 5, random(139, 33))),
        (LowRankPart(70, 0, random(130, 16), factor, factor + 1),),
    )
    for slot, parts in enumerate(adapters):
        ranks = sum(part.b.shape[1] for part in parts)
        low_rank = LowRank(random(ranks, 8).to(dtype), random(ranks), parts)
        table.put(slot, TritonLowRank(low_rank))
    of_rows = torch.arange(rows, dtype=torch.int32, device=device) % 3  # 2: none
    grouped = [group_pairs(of_rows, 3, rows, width) for width in (16, 64)]
    single = group_pairs(of_rows[:1], 3, 1, 16)
    are_same = []
    for tiles, programs, activation in (
        (grouped[0], 3, None),
        (grouped[1], 1, Activation.SILU),
        (single, 6, Activation.SILU),
    ):
        count = 1 if tiles is single else rows
        # Torch's own kernels, between the lists and those that read them before they wait.
        out = random(count, size).to(dtype)
        sums = random(programs, count, SUMS_STRIDE)
        expected = out.clone()
        _expand_plainly_(expected, sums, tiles, table)
        if activation is not None:
            expected = gate(expected, activation)
        found = add_products(out, sums, tiles, table.slots, activation)
        are_same.append(torch.equal(found, expected))
    return all(are_same)
