"""Rows' sums times their adapters' B, added to a product's outputs: what `adapters._expand_kernel`
does, with the same bits, for numbers of 16 bits where Triton has Gluon.

The few products for each output must not drown in the moving of numbers between threads. So all
come from memory into the registers in which the tensor core wants them, and nothing goes through
shared memory: a warp takes 16 rows of 32 neighbouring outputs (or 64), and a thread 8 neighbouring
ones of a row, of which the instruction's own layout has 2 in each of 4 places. So outputs are
renamed; and ranks, too: a thread takes 4 neighbouring ones of 16 as its own of an instruction,
which adds all 16 products at once.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra import cuda

from quire.backends.triton.direct_launch import gluon_jit
from quire.backends.triton.rowwise import gated

_FIELDS, _PART_FIELDS = gl.constexpr(5), gl.constexpr(7)


@gluon.constexpr_function
def _powers(first, end):
    """Powers of two from `first` to below `end`."""
    return [1 << bit for bit in range(first.bit_length() - 1, end.bit_length() - 1)]


@gluon.constexpr_function
def _sums_layout(warps):
    """[16 rows, 16 ranks], the same in all warps: a thread has 4 neighbouring ranks of two rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0] for _ in _powers(1, warps)],
        block_bases=[],
        shape=[16, 16],
    )


@gluon.constexpr_function
def _outputs_layout(own, warps):
    """[16 rows, own * warps outputs]: a thread has 8 neighbouring ones (of every 32) of two rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, one] for one in _powers(32, own)],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, one] for one in _powers(own, own * warps)],
        block_bases=[],
        shape=[16, own * warps],
    )


@gluon.constexpr_function
def _b_layout(own, warps):
    """[own * warps outputs, 16 ranks]: a thread has 4 neighbouring ranks of every fourth pair's first
    or second output.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [2, 0], [4, 0]] + [[one, 0] for one in _powers(32, own)],
        lane_bases=[[0, 4], [0, 8], [1, 0], [8, 0], [16, 0]],
        warp_bases=[[one, 0] for one in _powers(own, own * warps)],
        block_bases=[],
        shape=[own * warps, 16],
    )


@gluon.jit
def _prefetch_parts(begin_column, num_parts, parts, dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """Asks for numbers of B for the outputs from begin_column on."""
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    asked = begin_column + gl.arange(0, COLUMNS, layout)
    for number in range(num_parts):
        part = parts + number * _PART_FIELDS
        wanted = asked - gl.load(part).to(gl.int32)
        is_its = (wanted >= 0) & (wanted < gl.load(part + 1).to(gl.int32))
        padded = (gl.load(part + 3).to(gl.int32) + 15) // 16 * 16
        b = gl.load(part + 4).to(gl.pointer_type(dtype))
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r",
            [(b + wanted.to(gl.int64) * padded).to(gl.int64), is_its.to(gl.int32)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


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
    OWN: gl.constexpr,
    TOGETHER: gl.constexpr,
    STRIDE: gl.constexpr,
):
    """float32 [16 rows, outputs from begin_column on]: the rows' sums times B; -0.0, which changes no
    number, where no part has the output. Row and exists are by the layout of sums.
    """
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = OWN * WARPS
    MORE: gl.constexpr = OWN // 32
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    by_sum: gl.constexpr = _sums_layout(WARPS)
    by_b: gl.constexpr = _b_layout(OWN, WARPS)
    by_output: gl.constexpr = _outputs_layout(OWN, WARPS)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, by_output))
    b_column = gl.arange(0, COLUMNS, gl.SliceLayout(1, by_b))
    b_rank = gl.arange(0, 16, gl.SliceLayout(0, by_b))
    sum_rank = gl.arange(0, 16, gl.SliceLayout(0, by_sum))
    total = gl.full([16, COLUMNS], -0.0, gl.float32, by_output)
    for number in range(num_parts):
        part = parts + number * _PART_FIELDS
        first = gl.load(part).to(gl.int32) - begin_column
        end = first + gl.load(part + 1).to(gl.int32)
        if (first < COLUMNS) & (end > 0):
            first_rank = gl.multiple_of(gl.load(part + 2).to(gl.int32), 4)
            ranks = gl.load(part + 3).to(gl.int32)
            b = gl.multiple_of(gl.load(part + 4).to(gl.pointer_type(dtype)), 16)
            padded = (ranks + 15) // 16 * 16
            has_b = (b_column >= first) & (b_column < end)
            b_places = b + (b_column - first)[:, None].to(gl.int64) * padded + b_rank[None, :]
            source = sums + ((row * STRIDE + first_rank)[:, None] + sum_rank[None, :])
            part_total = gl.zeros([16, COLUMNS], gl.float32, accumulator)
            for begin_rank in range(0, ranks, 16):
                right = gl.load(b_places + begin_rank, mask=has_b[:, None], other=0.0)
                scale = gl.load(scales + first_rank + begin_rank + sum_rank)
                inner = gl.zeros([16, 16], gl.float32, by_sum)
                for first_program in range(0, num_programs, TOGETHER):
                    for program in gl.static_range(TOGETHER):
                        place = source + (first_program + program) * program_stride
                        is_one = exists & (first_program + program < num_programs)
                        inner += gl.load(place + begin_rank, mask=is_one[:, None], other=0.0)
                # After a part's ranks come another's, or nobody's.
                is_its = (begin_rank + sum_rank < ranks)[None, :]
                inner = gl.where(is_its, inner * scale[None, :], 0.0)
                high = inner.to(dtype)
                low = (inner - high.to(gl.float32)).to(dtype)
                right = (
                    right.reshape(WARPS, MORE, 4, 4, 2, 4, 2, 2)
                    .permute(6, 5, 7, 1, 3, 0, 2, 4)
                    .reshape(16, COLUMNS)
                )
                right = gl.convert_layout(
                    right, gl.DotOperandLayout(1, accumulator, 2), assert_trivial=True
                )
                part_total = mma_v2(_renamed(high, accumulator), right, part_total)
                part_total = mma_v2(_renamed(low, accumulator), right, part_total)
            made = (
                part_total.reshape(16, MORE, 4, WARPS, 4, 2)
                .permute(0, 3, 1, 4, 2, 5)
                .reshape(16, COLUMNS)
            )
            made = gl.convert_layout(made, by_output, assert_trivial=True)
            total = gl.where(((column >= first) & (column < end))[None, :], made, total)
    return total


@gluon.jit
def _renamed(sums, accumulator: gl.constexpr):
    """Of 16 ranks, index (t, h, j) becomes (h, t, j), the instruction's order."""
    sums = sums.reshape(16, 4, 2, 2).permute(0, 2, 1, 3).reshape(16, 16)
    return gl.convert_layout(sums, gl.DotOperandLayout(0, accumulator, 2), assert_trivial=True)


@gluon.jit
def _with_factors(value, begin_column, num_parts, parts, OWN: gl.constexpr):
    """Float32 value times the parts' factors, plus their offsets (DoRA)."""
    WARPS: gl.constexpr = gl.num_warps()
    by_output: gl.constexpr = gl.SliceLayout(0, _outputs_layout(OWN, WARPS))
    column = begin_column + gl.arange(0, OWN * WARPS, by_output)
    for number in range(num_parts):
        part = parts + number * _PART_FIELDS
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
    OWN: gl.constexpr,
    TOGETHER: gl.constexpr,
    STRIDE: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
):
    """`adapters._expand_kernel`; a warp takes OWN outputs of 16 of a tile's rows."""
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = OWN * WARPS
    IS_GATED: gl.constexpr = ACTIVATION >= 0
    SIZE: gl.constexpr = N // 2 if IS_GATED else N
    BLOCKS: gl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    PIECES: gl.constexpr = TILE // 16
    ITEMS: gl.constexpr = BLOCKS * PIECES
    dtype: gl.constexpr = out.dtype.element_ty
    by_sum: gl.constexpr = _sums_layout(WARPS)
    by_output: gl.constexpr = _outputs_layout(OWN, WARPS)
    if PDL:
        cuda.gdc_launch_dependents()
    num_items = ITEMS
    if not IS_SINGLE:
        num_items = gl.load(tile_counts + bound) * ITEMS
    each = (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)
    item = gl.program_id(0) * each
    end = gl.minimum(item + each, num_items)
    if item >= end:
        return
    if PDL:  # numbers of B for its first outputs are on their way while it waits
        tile = item // ITEMS
        slot = gl.load(tile_slots + tile)
        has_one = (slot >= 0) & (slot < NUM_SLOTS)
        entry = table + gl.where(has_one, slot, 0) * _FIELDS
        num_parts = gl.where(has_one, gl.load(entry + 3), 0).to(gl.int32)
        if num_parts > 0:
            parts = gl.load(entry + 4).to(gl.pointer_type(gl.int64))
            begin_column = item % BLOCKS * COLUMNS
            _prefetch_parts(begin_column, num_parts, parts, dtype, COLUMNS)
            if IS_GATED:
                _prefetch_parts(begin_column + SIZE, num_parts, parts, dtype, COLUMNS)
        cuda.gdc_wait()
    while item < end:
        tile = item // ITEMS
        slot = gl.load(tile_slots + tile)
        has_one = (slot >= 0) & (slot < NUM_SLOTS)
        entry = table + gl.where(has_one, slot, 0) * _FIELDS
        num_parts = gl.where(has_one, gl.load(entry + 3), 0).to(gl.int32)
        stop = gl.minimum(end, (item // BLOCKS + 1) * BLOCKS)
        if IS_GATED or num_parts > 0:
            scales = gl.load(entry + 1).to(gl.pointer_type(gl.float32))
            scales = gl.multiple_of(scales, 16)
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
                has_factors = has_factors | (gl.load(parts + number * _PART_FIELDS + 5) != 0)
            for block in range(item % BLOCKS, stop - item // BLOCKS * BLOCKS):
                begin_column = block * COLUMNS
                column = begin_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, by_output))
                mask = exists[:, None] & (column < SIZE)[None, :]
                source = out + row.to(gl.int64)[:, None] * out_stride + column[None, :]
                value = gl.load(source, mask=mask, other=0.0)
                up = value
                if IS_GATED:
                    up = gl.load(source + SIZE, mask=mask, other=0.0)
                added = _added(
                    begin_column, num_parts, parts, scales, sums, sum_row,
                    sum_exists, num_rows * STRIDE, num_programs, dtype, OWN, TOGETHER, STRIDE,
                )  # fmt: skip
                changed = value.to(gl.float32) + added
                if has_factors:
                    changed = _with_factors(changed, begin_column, num_parts, parts, OWN)
                result = changed.to(dtype)
                if IS_GATED:
                    added = _added(
                        begin_column + SIZE, num_parts, parts, scales, sums,
                        sum_row, sum_exists, num_rows * STRIDE,
                        num_programs, dtype, OWN, TOGETHER, STRIDE,
                    )  # fmt: skip
                    changed = up.to(gl.float32) + added
                    if has_factors:
                        changed = _with_factors(changed, begin_column + SIZE, num_parts, parts, OWN)
                    up = changed.to(dtype)
                    product = gated(result.to(tl.float32), up.to(tl.float32), ACTIVATION, dtype)
                    place_of = hidden + row.to(gl.int64)[:, None] * SIZE + column[None, :]
                    gl.store(place_of, product.to(dtype), mask=mask)
                else:
                    gl.store(source, result, mask=mask)
        item = stop
