"""Rows' sums times their adapters' B, added to a product's outputs: what `adapters._expand_kernel`
does, with the same bits, and the gate behind it, for numbers of 16 bits.

There are few products for each output, so what counts is how many instructions move numbers. Here
all numbers come from memory, 16 bytes at a time (8 of B), into the very registers in which the
tensor core's instruction takes them; nothing goes through shared memory, and no warp waits for
another. A warp takes 16 rows of 32 outputs. The instruction gives a thread 2 neighbouring outputs in
each of 4 places, and memory 8 neighbours in one: so the instruction is told another order of the
outputs, which is undone in the result. So is the order of the 16 ranks that it adds at once.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra import cuda

from quire.backends.triton.adapter_table import FIELDS, PART_FIELDS, SUMS_STRIDE
from quire.backends.triton.direct_launch import gluon_jit
from quire.backends.triton.grouping import SINGLE, Tiles
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, num_multiprocessors
from quire.backends.triton.rowwise import NUMBERS, gated
from quire.backends.triton.shapes import cdiv, row_stride
from quire.kernels.ops import Activation

_WARPS, _REGISTERS = 4, 128
"""Of a program, and of a thread."""
_PROGRAMS = 65_536 // (_WARPS * 32 * _REGISTERS)
"""For each multiprocessor: as many as find room in its 65,536 registers, so all run at once. More
would be begun one after the other, and each reads its tables anew.
"""
_SUMS_AT_ONCE = 4
"""Segments' sums that are asked for before they are added."""


@gluon.constexpr_function
def _powers(end):
    """Powers of two below `end`, itself one."""
    return [1 << bit for bit in range(end.bit_length() - 1)]


@gluon.constexpr_function
def _sums_layout(warps):
    """[16 rows, 16 ranks], the same in all warps: a thread has 4 neighbouring ranks of two rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0] for _ in _powers(warps)],
        block_bases=[],
        shape=[16, 16],
    )


@gluon.constexpr_function
def _outputs_layout(warps):
    """[16 rows, 32 * warps outputs]: a thread has 8 neighbouring ones of two rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 32 * one] for one in _powers(warps)],
        block_bases=[],
        shape=[16, 32 * warps],
    )


@gluon.constexpr_function
def _b_layout(warps):
    """[32 * warps outputs, 16 ranks]: a thread has 4 neighbouring ranks of every other one of 8
    neighbouring outputs.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [2, 0], [4, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [8, 0], [16, 0]],
        warp_bases=[[32 * one, 0] for one in _powers(warps)],
        block_bases=[],
        shape=[32 * warps, 16],
    )


@gluon.jit
def _adapter_of(tile_slots, table, tile, NUM_SLOTS: gl.constexpr):
    """A tile's entry in the table and its number of parts; 0 if the rows have no adapter."""
    slot = gl.load(tile_slots + tile)
    has_one = (slot >= 0) & (slot < NUM_SLOTS)
    entry = table + gl.where(has_one, slot, 0) * FIELDS
    return entry, gl.where(has_one, gl.load(entry + 3), 0).to(gl.int32)


@gluon.jit
def _prefetch_b(begin_column, num_parts, parts, dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """Asks for numbers of B for the outputs from begin_column on."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    column = begin_column + gl.arange(0, COLUMNS, layout)
    for number in range(num_parts):
        part = parts + number * PART_FIELDS
        output = column - gl.load(part).to(gl.int32)
        inside = (output >= 0) & (output < gl.load(part + 1).to(gl.int32))
        b_stride = (gl.load(part + 3).to(gl.int32) + 15) // 16 * 16
        b = gl.load(part + 4).to(gl.pointer_type(dtype))
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r",
            [(b + output.to(gl.int64) * b_stride).to(gl.int64), inside.to(gl.int32)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _for_instruction(sums, accumulator: gl.constexpr):
    """Of 16 ranks, (thread, pair, one) becomes (pair, thread, one), the instruction's order."""
    sums = sums.reshape(16, 4, 2, 2).permute(0, 2, 1, 3).reshape(16, 16)
    return gl.convert_layout(sums, gl.DotOperandLayout(0, accumulator, 2), assert_trivial=True)


@gluon.jit
def _added(
    begin_column,
    num_parts,
    parts,
    scales,
    sums,
    row,
    exists,
    program_stride,
    num_programs,
    dtype: gl.constexpr,
    AT_ONCE: gl.constexpr,
    STRIDE: gl.constexpr,
):
    """float32 [16 rows, outputs from begin_column on]: the rows' sums times B; -0.0, which changes no
    number, where no part has the output. Row and exists are in the layout of sums.
    """
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = 32 * WARPS
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    by_sum: gl.constexpr = _sums_layout(WARPS)
    by_b: gl.constexpr = _b_layout(WARPS)
    by_output: gl.constexpr = _outputs_layout(WARPS)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, by_output))
    b_column = gl.arange(0, COLUMNS, gl.SliceLayout(1, by_b))
    b_rank = gl.arange(0, 16, gl.SliceLayout(0, by_b))
    sum_rank = gl.arange(0, 16, gl.SliceLayout(0, by_sum))
    total = gl.full([16, COLUMNS], -0.0, gl.float32, by_output)
    for number in range(num_parts):
        part = parts + number * PART_FIELDS
        first = gl.load(part).to(gl.int32) - begin_column
        end = first + gl.load(part + 1).to(gl.int32)
        if (first < COLUMNS) & (end > 0):
            first_rank = gl.multiple_of(gl.load(part + 2).to(gl.int32), 4)
            ranks = gl.load(part + 3).to(gl.int32)
            b = gl.multiple_of(gl.load(part + 4).to(gl.pointer_type(dtype)), 16)
            b_stride = (ranks + 15) // 16 * 16  # filled up with zeros
            has_b = (b_column >= first) & (b_column < end)
            b_places = b + (b_column - first)[:, None].to(gl.int64) * b_stride + b_rank[None, :]
            source = sums + ((row * STRIDE + first_rank)[:, None] + sum_rank[None, :])
            part_total = gl.zeros([16, COLUMNS], gl.float32, accumulator)
            for begin_rank in range(0, ranks, 16):
                right = gl.load(b_places + begin_rank, mask=has_b[:, None], other=0.0)
                scale = gl.load(scales + first_rank + begin_rank + sum_rank)
                left = gl.zeros([16, 16], gl.float32, by_sum)
                for first_program in range(0, num_programs, AT_ONCE):
                    for program in gl.static_range(AT_ONCE):
                        place = source + (first_program + program) * program_stride
                        is_one = exists & (first_program + program < num_programs)
                        left += gl.load(place + begin_rank, mask=is_one[:, None], other=0.0)
                # After a part's ranks come another's, or nobody's.
                is_its = (begin_rank + sum_rank < ranks)[None, :]
                left = gl.where(is_its, left * scale[None, :], 0.0)
                high = left.to(dtype)
                low = (left - high.to(gl.float32)).to(dtype)  # what rounding took of the sums
                # Of outputs, (place, thread, two) becomes (two, place, thread): places of 8.
                right = (
                    right.reshape(WARPS, 4, 4, 2, 4, 2, 2)
                    .permute(5, 4, 6, 2, 0, 1, 3)
                    .reshape(16, COLUMNS)
                )
                right = gl.convert_layout(
                    right, gl.DotOperandLayout(1, accumulator, 2), assert_trivial=True
                )
                part_total = mma_v2(_for_instruction(high, accumulator), right, part_total)
                part_total = mma_v2(_for_instruction(low, accumulator), right, part_total)
            made = (
                part_total.reshape(16, 4, WARPS, 4, 2).permute(0, 2, 3, 1, 4).reshape(16, COLUMNS)
            )
            made = gl.convert_layout(made, by_output, assert_trivial=True)
            total = gl.where(((column >= first) & (column < end))[None, :], made, total)
    return total


@gluon.jit
def _with_factors(value, begin_column, num_parts, parts):
    """Float32 value times the parts' factors, plus their offsets (DoRA)."""
    WARPS: gl.constexpr = gl.num_warps()
    by_output: gl.constexpr = gl.SliceLayout(0, _outputs_layout(WARPS))
    column = begin_column + gl.arange(0, 32 * WARPS, by_output)
    for number in range(num_parts):
        part = parts + number * PART_FIELDS
        factors = gl.load(part + 5)
        if factors != 0:
            output = column - gl.load(part).to(gl.int32)
            inside = (output >= 0) & (output < gl.load(part + 1).to(gl.int32))
            offsets = gl.load(part + 6).to(gl.pointer_type(gl.float32))
            factor = gl.load(
                factors.to(gl.pointer_type(gl.float32)) + output, mask=inside, other=1.0
            )
            offset = gl.load(offsets + output, mask=inside, other=0.0)
            value = gl.where(inside[None, :], value * factor[None, :] + offset[None, :], value)
    return value


@gluon_jit(do_not_specialize=["num_rows", "bound", "num_programs"])
def _outputs_kernel(
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
    num_programs,
    N: gl.constexpr,
    NUM_SLOTS: gl.constexpr,
    IS_SINGLE: gl.constexpr,
    TILE: gl.constexpr,
    AT_ONCE: gl.constexpr,
    STRIDE: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
):
    """Adds to the rows' N outputs their sums (of num_programs programs each, AT_ONCE of them asked for
    at once) times B. With an ACTIVATION (not -1) out stays as it is, and hidden gets
    activation(first half of the outputs) * (second half), also of rows without an adapter.

    An item is a block of outputs of 16 of a tile's rows. A program takes neighbouring ones, so that
    it finds out seldom which rows and parts they have.
    """
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = 32 * WARPS
    IS_GATED: gl.constexpr = ACTIVATION >= 0
    SIZE: gl.constexpr = N // 2 if IS_GATED else N
    BLOCKS: gl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    PIECES: gl.constexpr = TILE // 16
    ITEMS: gl.constexpr = BLOCKS * PIECES
    dtype: gl.constexpr = out.dtype.element_ty
    by_sum: gl.constexpr = _sums_layout(WARPS)
    by_output: gl.constexpr = _outputs_layout(WARPS)
    if PDL:
        cuda.gdc_launch_dependents()
    num_items = ITEMS
    if not IS_SINGLE:
        num_items = gl.load(tile_counts + bound) * ITEMS
    each = (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)
    item = gl.program_id(0) * each
    end = gl.minimum(item + each, num_items)
    if item >= end:  # never the first program's: that one waits
        return
    if PDL:  # numbers of B for its first outputs are on their way while it waits
        entry, num_parts = _adapter_of(tile_slots, table, item // ITEMS, NUM_SLOTS)
        if num_parts > 0:
            parts = gl.load(entry + 4).to(gl.pointer_type(gl.int64))
            begin_column = item % BLOCKS * COLUMNS
            _prefetch_b(begin_column, num_parts, parts, dtype, COLUMNS)
            if IS_GATED:
                _prefetch_b(begin_column + SIZE, num_parts, parts, dtype, COLUMNS)
        cuda.gdc_wait()
    while item < end:
        tile = item // ITEMS
        entry, num_parts = _adapter_of(tile_slots, table, tile, NUM_SLOTS)
        stop = gl.minimum(end, (item // BLOCKS + 1) * BLOCKS)
        if IS_GATED or num_parts > 0:
            scales = gl.multiple_of(gl.load(entry + 1).to(gl.pointer_type(gl.float32)), 16)
            parts = gl.load(entry + 4).to(gl.pointer_type(gl.int64))
            place = item // BLOCKS % PIECES * 16
            sum_place = place + gl.arange(0, 16, gl.SliceLayout(1, by_sum))
            out_place = place + gl.arange(0, 16, gl.SliceLayout(1, by_output))
            if IS_SINGLE:
                sum_exists, exists = sum_place == 0, out_place == 0
                sum_row, row = sum_place * 0 + tile, out_place * 0 + tile
            else:
                count = gl.load(tile_counts + tile)
                sum_exists, exists = sum_place < count, out_place < count
                sum_row = gl.load(order + tile * TILE + sum_place, mask=sum_exists, other=0)
                row = gl.load(order + tile * TILE + out_place, mask=exists, other=0)
            has_factors = False
            for number in range(num_parts):
                has_factors = has_factors | (gl.load(parts + number * PART_FIELDS + 5) != 0)
            for block in range(item % BLOCKS, stop - item // BLOCKS * BLOCKS):
                begin_column = block * COLUMNS
                column = begin_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, by_output))
                mask = exists[:, None] & (column < SIZE)[None, :]
                source = out + row.to(gl.int64)[:, None] * out_stride + column[None, :]
                value = gl.load(source, mask=mask, other=0.0)
                up = value
                if IS_GATED:
                    up = gl.load(source + SIZE, mask=mask, other=0.0)
                result = value.to(gl.float32) + _added(
                    begin_column, num_parts, parts, scales, sums, sum_row, sum_exists,
                    num_rows * STRIDE, num_programs, dtype, AT_ONCE, STRIDE,
                )  # fmt: skip
                if has_factors:
                    result = _with_factors(result, begin_column, num_parts, parts)
                result = result.to(dtype)
                if IS_GATED:
                    begin_column += SIZE
                    changed = up.to(gl.float32) + _added(
                        begin_column, num_parts, parts, scales, sums, sum_row, sum_exists,
                        num_rows * STRIDE, num_programs, dtype, AT_ONCE, STRIDE,
                    )  # fmt: skip
                    if has_factors:
                        changed = _with_factors(changed, begin_column, num_parts, parts)
                    up = changed.to(dtype)
                    product = gated(result.to(tl.float32), up.to(tl.float32), ACTIVATION, dtype)
                    target = hidden + row.to(gl.int64)[:, None] * SIZE + column[None, :]
                    gl.store(target, product.to(dtype), mask=mask)
                else:
                    gl.store(source, result, mask=mask)
        item = stop


def add_products(
    out: Tensor,
    sums: Tensor,
    tiles: Tiles,
    table: Tensor,
    activation: Activation | None,
) -> Tensor:
    """Adds to out [rows, outputs] the sums' products with B, and returns it; with an activation,
    returns activation(first half) * (second half) instead, and out stays as it is.
    """
    rows, size = out.shape
    width = size if activation is None else size // 2
    hidden = out if activation is None else out.new_empty(rows, width)
    items = cdiv(width, 32 * _WARPS) * tiles.bound * (tiles.width // 16)
    most = _PROGRAMS * num_multiprocessors(out.device)
    _outputs_kernel[(min(items, most),)](
        out=out,
        hidden=hidden,
        table=table,
        tile_slots=tiles.experts,
        tile_counts=tiles.counts,
        order=tiles.order,
        sums=sums,
        out_stride=row_stride(out),
        num_rows=rows,
        bound=tiles.bound,
        num_programs=len(sums),
        N=size,
        NUM_SLOTS=len(table),
        IS_SINGLE=tiles.listed == SINGLE.value,
        TILE=tiles.width,
        AT_ONCE=min(len(sums), _SUMS_AT_ONCE),
        STRIDE=SUMS_STRIDE,
        ACTIVATION=-1 if activation is None else NUMBERS[activation],
        PDL=USE_PDL,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return hidden
