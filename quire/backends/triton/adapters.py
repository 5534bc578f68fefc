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
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

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
from quire.backends.triton.rowwise import NUMBERS, gated
from quire.backends.triton.shapes import as_rows, cdiv, next_power_of_2, row_stride
from quire.errors import UnsupportedModelError
from quire.kernels.low_rank import LowRank, LowRankPart, PackedLowRank
from quire.kernels.ops import Activation

if HAS_GLUON:
    from quire.backends.triton import adapter_outputs

SEGMENT = 1024
MAX_RANKS = 1024
"""The most ranks of all modules together that are packed in one product."""
_MANY_ROWS = 512
"""With more, there are programs enough without dividing the segments among them."""
_RANK_TILE = 16
_RANKS_AT_ONCE = 4
_STRIDE = 1040
"""Of the sums of a row: a tile of ranks may begin at the last ones."""
AFTER = True
_EXPANDING = 1056
"""The most programs of a product with B."""
USE_GLUON = True
_OWN, _OUT_WARPS, _REGISTERS = 32, 4, 128
_BLOCK_N = 256
_GATED_BLOCK_N = 128
_EXPAND_WARPS = 4
_RANKS = 16
_RANK_PROGRAMS = 4
_BLOCK_K = 128
_STAGES = 4
_SHRINK_WARPS = 2
_TURNED = False
_FIELDS, _PART_FIELDS = tl.constexpr(5), tl.constexpr(7)
_LINE = tl.constexpr(64)


def _with_aligned_ranks(low_rank: LowRank) -> LowRank:
    """With parts whose first rank is a multiple of 4, so that four neighbours' sums are one load."""
    if all(part.first_rank % _RANKS_AT_ONCE == 0 for part in low_rank.parts):
        return low_rank
    a, scale, parts, places = [], [], [], {}
    next_rank = 0
    for part in low_rank.parts:
        ranks = part.b.shape[1]
        taken = slice(part.first_rank, part.first_rank + ranks)
        if (part.first_rank, ranks) not in places:
            places[part.first_rank, ranks] = next_rank
            padding = -ranks % _RANKS_AT_ONCE
            a.append(F.pad(low_rank.a[taken], (0, 0, 0, padding)))
            scale.append(F.pad(low_rank.scale[taken], (0, padding)))
            next_rank += ranks + padding
        parts.append(part._replace(first_rank=places[part.first_rank, ranks]))
    return LowRank(torch.cat(a), torch.cat(scale), tuple(parts))


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
        low_rank = _with_aligned_ranks(low_rank)
        self.a = low_rank.a.cpu().contiguous()
        # A tile of ranks that begins before the last may end behind it.
        self.scale = F.pad(low_rank.scale.float().cpu(), (0, _RANK_TILE)).contiguous()
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
    TURNED: tl.constexpr,
    IS_BESIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """sums [programs of a tile, rows, STRIDE]: SEGMENTS segments of a tile's rows times A, RANKS of
    its rows at a time. TURNED: A is the left side of the product. IS_BESIDE: the kernel before it
    shares its input (`begin`), so that both run at the same time.
    """
    let_next_start(PDL)
    tile = tl.program_id(0)
    slot, ranks = _slot_of(tile_slots, table, tile, 2, NUM_SLOTS)
    begin_rank = tl.program_id(2) * RANKS
    if ranks <= begin_rank:
        if tile + tl.program_id(1) + tl.program_id(2) == 0:
            wait_for_previous(PDL)
        return
    entry = table + slot * _FIELDS
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
        total = tl.zeros((RANKS, TILE) if TURNED else (TILE, RANKS), tl.float32)
        for segment in range(first_segment, end_segment):
            part = tl.zeros((RANKS, TILE) if TURNED else (TILE, RANKS), tl.float32)
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
                if TURNED:
                    part = tl.dot(right, tl.trans(left), part, input_precision="ieee")
                else:
                    part = tl.dot(left, tl.trans(right), part, input_precision="ieee")
            total += part
        if TURNED:
            total = tl.trans(total)
        target = sums + (tl.program_id(1) * num_rows + row)[:, None] * STRIDE + rank[None, :]
        tl.store(target, total, mask=exists[:, None] & (rank < ranks)[None, :])
    if IS_BESIDE:
        wait_for_previous(PDL)


@triton.jit
def _with_added(
    value,
    begin_column,
    row,
    exists,
    num_parts,
    parts,
    scales,
    sums,
    num_rows,
    RANK_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Value [rows, outputs from begin_column on], with what an adapter's parts add to it."""
    TILE: tl.constexpr = value.shape[0]
    BLOCK_N: tl.constexpr = value.shape[1]
    dtype: tl.constexpr = value.dtype
    column = begin_column + tl.arange(0, BLOCK_N)
    total = tl.full((TILE, BLOCK_N), -0.0, tl.float32)  # which changes no number
    has_factors = False
    for number in range(num_parts):
        part = parts + number * _PART_FIELDS
        first, count = tl.load(part).to(tl.int32), tl.load(part + 1).to(tl.int32)
        if (first < begin_column + BLOCK_N) & (first + count > begin_column):
            first_rank, ranks = tl.load(part + 2).to(tl.int32), tl.load(part + 3).to(tl.int32)
            b = tl.multiple_of(tl.load(part + 4).to(tl.pointer_type(dtype)), 16)
            has_factors = has_factors | (tl.load(part + 5) != 0)
            b_stride = (ranks + RANK_TILE - 1) // RANK_TILE * RANK_TILE  # filled up with zeros
            output = column - first
            inside = (output >= 0) & (output < count)
            added = tl.zeros((TILE, BLOCK_N), tl.float32)
            for begin_rank in tl.range(0, ranks, RANK_TILE, num_stages=1):
                rank = begin_rank + tl.arange(0, RANK_TILE)
                right = tl.load(
                    b + output[:, None].to(tl.int64) * b_stride + rank[None, :],
                    mask=inside[:, None],
                    other=0.0,
                )
                inner = tl.zeros((TILE, RANK_TILE), tl.float32)
                if ranks > begin_rank:  # always; so no number is moved before all are asked for
                    within = rank < ranks  # after a part's ranks come another's, or nobody's
                    scale = tl.load(scales + first_rank + rank, mask=within, other=0.0)
                    source = sums + row[:, None] * STRIDE + first_rank + rank[None, :]
                    for program in tl.static_range(PARTS):
                        inner += tl.load(
                            source + program * num_rows.to(tl.int64) * STRIDE,
                            mask=exists[:, None] & within[None, :],
                            other=0.0,
                        )
                    inner = inner * scale[None, :]
                else:
                    right = tl.zeros((BLOCK_N, RANK_TILE), dtype)
                right = tl.trans(right)
                high = inner.to(dtype)
                added = tl.dot(high, right, added, input_precision="ieee")
                if dtype != tl.float32:  # what rounding took of the sums
                    low = (inner - high.to(tl.float32)).to(dtype)
                    added = tl.dot(low, right, added, input_precision="ieee")
            total = tl.where(inside[None, :], added, total)
    changed = value.to(tl.float32) + total
    if has_factors:
        for number in range(num_parts):
            part = parts + number * _PART_FIELDS
            factors = tl.load(part + 5)
            if factors != 0:
                output = column - tl.load(part).to(tl.int32)
                inside = (output >= 0) & (output < tl.load(part + 1).to(tl.int32))
                factor = tl.load(
                    factors.to(tl.pointer_type(tl.float32)) + output, mask=inside, other=1.0
                )
                offset = tl.load(
                    tl.load(part + 6).to(tl.pointer_type(tl.float32)) + output,
                    mask=inside,
                    other=0.0,
                )
                scaled = changed * factor[None, :] + offset[None, :]
                changed = tl.where(inside[None, :], scaled, changed)
    return changed.to(dtype)


@triton.jit
def _prefetch_parts(begin_column, num_parts, parts, dtype: tl.constexpr, BLOCK_N, RANK_TILE):
    """Asks for numbers of B for the outputs from begin_column on."""
    asked = begin_column + tl.arange(0, BLOCK_N)
    for number in range(num_parts):
        part = parts + number * _PART_FIELDS
        wanted = asked - tl.load(part).to(tl.int32)
        is_its = (wanted >= 0) & (wanted < tl.load(part + 1).to(tl.int32))
        padded = (tl.load(part + 3).to(tl.int32) + RANK_TILE - 1) // RANK_TILE * RANK_TILE
        numbers = tl.load(part + 4).to(tl.pointer_type(dtype))
        _prefetch(numbers + wanted.to(tl.int64) * padded, is_its)


@jit(do_not_specialize=["num_rows", "bound"])
def _expand_kernel(
    out,
    hidden,
    table,
    tile_slots,
    tile_counts,
    order,
    sums,
    out_stride,
    num_rows,
    bound,
    N: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds to the rows' N outputs their sums (of PARTS programs each) times B. With an ACTIVATION (not -1) out
    stays as it is, and hidden gets activation(first half of the outputs) * (second half), also of
    rows without an adapter. A program takes neighbouring blocks of outputs, tile after tile.
    """
    let_next_start(PDL)
    IS_GATED: tl.constexpr = ACTIVATION >= 0
    SIZE: tl.constexpr = N // 2 if IS_GATED else N
    BLOCKS: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    dtype: tl.constexpr = out.dtype.element_ty
    num_items = BLOCKS if IS_SINGLE else tl.load(tile_counts + bound) * BLOCKS
    each = (num_items + tl.num_programs(0) - 1) // tl.num_programs(0)
    item = tl.program_id(0) * each
    end = tl.minimum(item + each, num_items)
    if item >= end:
        return
    if PDL:  # numbers of B for its first outputs are on their way while it waits
        tile = item // BLOCKS
        slot, num_parts = _slot_of(tile_slots, table, tile, 3, NUM_SLOTS)
        if num_parts > 0:
            parts = tl.load(table + slot * _FIELDS + 4).to(tl.pointer_type(tl.int64))
            column = (item - tile * BLOCKS) * BLOCK_N
            _prefetch_parts(column, num_parts, parts, dtype, BLOCK_N, RANK_TILE)
            if IS_GATED:
                _prefetch_parts(column + SIZE, num_parts, parts, dtype, BLOCK_N, RANK_TILE)
    wait_for_previous(PDL)
    while item < end:
        tile = item // BLOCKS
        first_item = tile * BLOCKS
        stop = tl.minimum(end, first_item + BLOCKS)
        slot, num_parts = _slot_of(tile_slots, table, tile, 3, NUM_SLOTS)
        if IS_GATED or num_parts > 0:
            has_one = num_parts > 0
            entry = table + slot * _FIELDS
            scales = tl.load(entry + 1, mask=has_one, other=0).to(tl.pointer_type(tl.float32))
            parts = tl.load(entry + 4, mask=has_one, other=0).to(tl.pointer_type(tl.int64))
            row, exists = _tile_rows(tile, tile_counts, order, IS_SINGLE, TILE)
            for block in tl.range(item - first_item, stop - first_item, num_stages=1):
                begin_column = block * BLOCK_N
                column = begin_column + tl.arange(0, BLOCK_N)
                mask = exists[:, None] & (column < SIZE)[None, :]
                source = out + row[:, None] * out_stride + column[None, :]
                value = tl.load(source, mask=mask, other=0.0)
                if IS_GATED:
                    up = tl.load(source + SIZE, mask=mask, other=0.0)
                result = _with_added(
                    value, begin_column, row, exists, num_parts, parts, scales, sums, num_rows,
                    RANK_TILE, PARTS, STRIDE,
                )  # fmt: skip
                if IS_GATED:
                    up = _with_added(
                        up, begin_column + SIZE, row, exists, num_parts, parts, scales, sums,
                        num_rows, RANK_TILE, PARTS, STRIDE,
                    )  # fmt: skip
                    result = gated(result.to(tl.float32), up.to(tl.float32), ACTIVATION, dtype)
                    place = hidden + row[:, None] * SIZE + column[None, :]
                    tl.store(place, result.to(dtype), mask=mask)
                else:
                    tl.store(source, result, mask=mask)
        item = stop


def shrink(x: Tensor, tiles: Tiles, table: TritonTable, is_beside: bool = False) -> Tensor:
    """float32 [programs, rows, _STRIDE]: parts of the rows' products with A, to be added in
    order. What belongs to no row or rank is not written. `is_beside`: the kernel before it shares
    its input x.
    """
    x = as_rows(x)
    rows, inner = x.shape
    segments = cdiv(inner, SEGMENT)
    each = 1 if rows <= _MANY_ROWS else segments
    sums = torch.empty(cdiv(segments, each), rows, _STRIDE, dtype=torch.float32, device=x.device)
    is_wide = x.dtype == torch.float32
    is_few = rows <= _MANY_ROWS and not is_wide
    _shrink_kernel[(tiles.bound, cdiv(segments, each), _RANK_PROGRAMS if is_few else 1)](
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
        RANKS=_RANKS if is_few else 32 if is_wide else 64,
        BLOCK_K=_BLOCK_K if is_few else 32 if is_wide else 128,
        SEGMENT=SEGMENT,
        SEGMENTS=each,
        STRIDE=_STRIDE,
        TURNED=_TURNED and is_few,
        IS_BESIDE=is_beside,
        PDL=USE_PDL,
        num_warps=_SHRINK_WARPS if is_few else 4,
        num_stages=_STAGES if is_few else 2 if is_wide else 4,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return sums


def expand_(
    out: Tensor,
    sums: Tensor,
    tiles: Tiles,
    table: TritonTable,
    activation: Activation | None = None,
) -> Tensor:
    """Adds to out [rows, outputs] the sums' products with B. With an activation, returns
    activation(first half) * (second half) instead, and out stays as it is.
    """
    if out.stride(1) != 1:
        raise ValueError(f"outputs lie {out.stride(1)} numbers apart, not in whole rows")
    rows, size = out.shape
    hidden = out if activation is None else out.new_empty(rows, size // 2)
    width = size if activation is None else size // 2
    has_own = HAS_GLUON and USE_GLUON and out.is_cuda and out.dtype != torch.float32
    arguments: dict[str, Any] = {
        "out": out,
        "hidden": hidden,
        "table": table.slots,
        "tile_slots": tiles.experts,
        "tile_counts": tiles.counts,
        "order": tiles.order,
        "sums": sums,
        "out_stride": row_stride(out),
        "num_rows": rows,
        "bound": tiles.bound,
        "N": size,
        "NUM_SLOTS": len(table.slots),
        "IS_SINGLE": tiles.listed == SINGLE.value,
        "TILE": tiles.width,
        "STRIDE": _STRIDE,
        "ACTIVATION": -1 if activation is None else NUMBERS[activation],
        "PDL": USE_PDL,
        **ROUND_ALWAYS,
        **LAUNCH,
    }
    if has_own:
        programs = cdiv(width, _OWN * _OUT_WARPS) * tiles.bound * tiles.width // 16
        grid = (min(programs, _EXPANDING),)
        adapter_outputs._outputs_kernel[grid](
            **arguments,
            num_programs=len(sums),
            OWN=_OWN,
            TOGETHER=min(len(sums), 4),
            num_warps=_OUT_WARPS,
            maxnreg=_REGISTERS,
        )
        return hidden
    block = _BLOCK_N if tiles.width == 16 else 128
    if activation is not None:
        block = _GATED_BLOCK_N if tiles.width == 16 else 64
    if out.dtype == torch.float32:
        block = 64
    block = min(block, max(16, next_power_of_2(width)))
    _expand_kernel[(min(cdiv(width, block) * tiles.bound, _EXPANDING),)](
        **arguments,
        BLOCK_N=block,
        RANK_TILE=_RANK_TILE,
        PARTS=len(sums),
        num_warps=_EXPAND_WARPS,
    )
    return hidden
