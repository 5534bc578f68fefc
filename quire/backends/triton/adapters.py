"""What the rows' adapters add to a product (`quire/kernels/low_rank.py`), in two launches: products
with A ("shrink"), and with B ("expand"). A third, once a step, groups the rows by their slots.

A row's products with A are summed in segments of SEGMENT inputs, each from zero, which are added in
order; those with B along the rank, 16 at a time. Tiles hold rows of one adapter, and a row's numbers
don't depend on the others of its tile. So a row has the same bits in any company.

Nothing is read on the host: a product's table lies on the device, and graphs find what was put
there after they were captured.
"""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.grouping import SINGLE, Tiles, group_pairs
from quire.backends.triton.launch import (
    LAUNCH,
    ROUND_ALWAYS,
    USE_PDL,
    let_next_start,
    wait_for_previous,
)
from quire.backends.triton.shapes import as_rows, cdiv, row_stride
from quire.errors import UnsupportedModelError
from quire.kernels.low_rank import LowRank, LowRankPart, PackedLowRank

SEGMENT = 1024
MAX_RANKS = 1024
"""The most ranks of all modules together that are packed in one product."""
_MANY_ROWS = 512
"""With more, there are programs enough without dividing the segments among them."""
_RANK_TILE = 16
_EXPANDING = 192
"""The most programs for the outputs of a tile: where an adapter adds nothing (to a head, mostly) all
of them are in vain.
"""
_FIELDS, _PART_FIELDS = tl.constexpr(5), tl.constexpr(7)


class TritonLowRank:
    """A `LowRank`, packed, in host memory; a table copies it to the device."""

    def __init__(self, low_rank: LowRank) -> None:
        ranks = low_rank.a.shape[0]
        if ranks > MAX_RANKS:
            raise UnsupportedModelError(
                f"an adapter has ranks of {ranks} together for one product; on a GPU there may be {MAX_RANKS}: "
                'use a smaller rank, or device="cpu"'
            )
        dtype = low_rank.a.dtype
        self.a = low_rank.a.cpu().contiguous()
        self.scale = low_rank.scale.float().cpu().contiguous()
        self.ranks = [part.b.shape[1] for part in low_rank.parts]
        self.parts = [self._part(part, dtype) for part in low_rank.parts]

    @staticmethod
    def _part(part: LowRankPart, dtype: torch.dtype) -> LowRankPart:
        b = F.pad(part.b.to("cpu", dtype), (0, -part.b.shape[1] % _RANK_TILE)).contiguous()
        if part.factor is None or part.offset is None:
            return part._replace(b=b)
        factor, offset = part.factor.float().cpu(), part.offset.float().cpu()
        return part._replace(b=b, factor=factor.contiguous(), offset=offset.contiguous())

    @property
    def nbytes(self) -> int:
        return LowRank(self.a, self.scale, tuple(self.parts)).nbytes


class TritonTable:
    """The slots of one product, where kernels read them: of each the addresses of A and of the
    ranks' factors, the number of ranks, the number of parts and their address; of each part its
    first output, their number, its first rank, their number, and addresses.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.slots = torch.zeros(num_slots, _FIELDS.value, dtype=torch.int64, device=device)
        self._kept: dict[int, list[Tensor]] = {}
        self.dtype: torch.dtype | None = None
        """Of the matrices; None before there are any."""

    def put(self, slot: int, packed: PackedLowRank | None) -> None:
        """Copies are made in the order of the stream: steps before this one still read the old."""
        device = self.slots.device
        numbers, kept = [0] * _FIELDS.value, []

        def address(tensor: Tensor | None) -> int:
            if tensor is None:
                return 0
            kept.append(tensor.to(device))
            return kept[-1].data_ptr()

        if packed is not None:
            assert isinstance(packed, TritonLowRank)
            self.dtype = packed.a.dtype
            parts = [
                [part.first, len(part.b), part.first_rank, ranks]
                + [address(one) for one in (part.b, part.factor, part.offset)]
                for part, ranks in zip(packed.parts, packed.ranks, strict=True)
            ]
            listed = torch.tensor(parts, dtype=torch.int64)
            addresses = [address(one) for one in (packed.a, packed.scale, listed)]
            numbers = [addresses[0], addresses[1], len(packed.a), len(parts), addresses[2]]
        self.slots[slot] = torch.tensor(numbers).to(device)
        self._kept[slot] = kept


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
            self._tiles = group_pairs(known, num_slots + 1, rows, 16 if rows <= _MANY_ROWS else 64)
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
    return slot, tl.load(table + slot * _FIELDS + field, mask=has_one, other=0).to(tl.int32)


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
    """sums [programs of a tile, rows, STRIDE]: SEGMENTS segments of a tile's rows times A. IS_BESIDE:
    the kernel before it shares its input (`begin`), so that both run at the same time.
    """
    let_next_start(PDL)
    tile = tl.program_id(0)
    slot, ranks = _slot_of(tile_slots, table, tile, 2, NUM_SLOTS)
    if ranks == 0:
        if tile + tl.program_id(1) == 0:
            wait_for_previous(PDL)
        return
    entry = table + slot * _FIELDS
    dtype: tl.constexpr = x.dtype.element_ty
    a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(dtype)), 16)
    row, exists = _tile_rows(tile, tile_counts, order, IS_SINGLE, TILE)
    if not IS_BESIDE:
        wait_for_previous(PDL)
    inner = tl.arange(0, BLOCK_K)[None, :]
    first_segment = tl.program_id(1) * SEGMENTS
    end_segment = tl.minimum(first_segment + SEGMENTS, tl.cdiv(K, SEGMENT))
    for first_rank in range(0, ranks, RANKS):
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
    num_blocks,
    NUM_SLOTS: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds to a tile's rows their sums (of PARTS programs each) times B, BLOCK_N outputs at a time."""
    let_next_start(PDL)
    tile = tl.program_id(1)
    slot, num_parts = _slot_of(tile_slots, table, tile, 3, NUM_SLOTS)
    if num_parts == 0:
        if tile + tl.program_id(0) == 0:
            wait_for_previous(PDL)
        return
    entry = table + slot * _FIELDS
    dtype: tl.constexpr = out.dtype.element_ty
    scales = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    parts = tl.load(entry + 4).to(tl.pointer_type(tl.int64))
    row, exists = _tile_rows(tile, tile_counts, order, IS_SINGLE, TILE)
    if PDL:  # numbers of B for its first outputs are on their way while it waits
        asked = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        for number in range(num_parts):
            part = parts + number * _PART_FIELDS
            wanted = asked - tl.load(part).to(tl.int32)
            is_its = (wanted >= 0) & (wanted < tl.load(part + 1).to(tl.int32))
            padded = (tl.load(part + 3).to(tl.int32) + RANK_TILE - 1) // RANK_TILE * RANK_TILE
            numbers = tl.load(part + 4).to(tl.pointer_type(dtype))
            _prefetch(numbers + wanted.to(tl.int64) * padded, is_its)
    wait_for_previous(PDL)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        begin_column = block * BLOCK_N
        column = begin_column + tl.arange(0, BLOCK_N)
        for number in range(num_parts):
            part = parts + number * _PART_FIELDS
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
    """float32 [programs, rows, MAX_RANKS]: parts of the rows' products with A, to be added in
    order. What belongs to no row or rank is not written. `is_beside`: the kernel before it shares
    its input x.
    """
    x = as_rows(x)
    rows, inner = x.shape
    segments = cdiv(inner, SEGMENT)
    each = 1 if rows <= _MANY_ROWS else segments
    sums = torch.empty(cdiv(segments, each), rows, MAX_RANKS, dtype=torch.float32, device=x.device)
    is_wide = x.dtype == torch.float32
    _shrink_kernel[(tiles.bound, cdiv(segments, each))](
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
        RANKS=32 if is_wide else 64,
        BLOCK_K=32 if is_wide else 128,
        SEGMENT=SEGMENT,
        SEGMENTS=each,
        STRIDE=MAX_RANKS,
        IS_BESIDE=is_beside,
        PDL=USE_PDL,
        num_warps=4,
        num_stages=2 if is_wide else 4,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return sums


def expand_(out: Tensor, sums: Tensor, tiles: Tiles, table: TritonTable) -> None:
    """Adds to out [rows, outputs] the sums' products with B."""
    if out.stride(1) != 1:
        raise ValueError(f"outputs lie {out.stride(1)} numbers apart, not in whole rows")
    rows, size = out.shape
    block = 64 if size <= 2048 else 128
    blocks = cdiv(size, block)
    _expand_kernel[(min(blocks, _EXPANDING), tiles.bound)](
        out=out,
        table=table.slots,
        tile_slots=tiles.experts,
        tile_counts=tiles.counts,
        order=tiles.order,
        sums=sums,
        out_stride=row_stride(out),
        num_rows=rows,
        num_blocks=blocks,
        NUM_SLOTS=len(table.slots),
        IS_SINGLE=tiles.listed == SINGLE.value,
        TILE=tiles.width,
        BLOCK_N=block,
        RANK_TILE=_RANK_TILE,
        PARTS=len(sums),
        STRIDE=MAX_RANKS,
        PDL=USE_PDL,
        num_warps=4,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
