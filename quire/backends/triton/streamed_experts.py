"""Products of experts whose weights are MXFP4, which are expanded in the registers of the tensor
cores.

A weight is stored in pieces of 16 outputs and 64 inputs, 544 bytes each, one after the other along
the inputs: 16 bytes of codes for each thread of a warp, in the order in which the tensor cores want
them, and 32 exponents. A thread loads its codes several pieces ahead of the product, or copies them
to shared memory, where only it reads them.

Two codes become two bfloat16 numbers by a shift, a mask and a multiplication. A code is a sign, two
bits of an exponent and one of a fraction. Put at the sign, the lowest bits of the exponent and the
highest one of the fraction of a bfloat16, they are the number times 2 ** -126 (0.5 is a subnormal
number, as it is among the codes); the factor restores that and the block's exponent. Nothing is
rounded, so these are the numbers of the expanded weight. The inner dimension is walked in order
with one accumulator, so products have the bits of those in `tile_product.py`.

Written in Gluon, Triton's lower level, where layouts are explicit.
"""

# ruff: noqa: RUF005  (Triton knows no * within a tuple)
# mypy: disable-error-code=unreachable
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from quire.backends.triton.grouping import GROUPED, Tiles
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL
from quire.backends.triton.mxfp4_layout import PIECE_INPUTS, PIECE_OUTPUTS, PIECE_WORDS
from quire.backends.triton.rowwise import NUMBERS, gated
from quire.backends.triton.shapes import cdiv, row_stride
from quire.kernels.ops import Activation

_ASM = """{
.reg .b32 first, second, third, fourth, moved, factor, none;
mov.b32 none, 0x80008000;
prmt.b32 factor, $9, 0, $10;
mul.lo.u32 factor, factor, 0x00800080;
and.b32 first, $8, 0x81C081C0;
shl.b32 second, $8, 3;
and.b32 second, second, 0x81C081C0;
shl.b32 third, $8, 6;
and.b32 third, third, 0x81C081C0;
shl.b32 fourth, $8, 1;
and.b32 fourth, fourth, 0x80008000;
shr.b32 moved, $8, 4;
lop3.b32 fourth, moved, 0x00C000C0, fourth, 0xEA;
shr.b32 moved, $8, 5;
lop3.b32 fourth, moved, 0x01000100, fourth, 0xEA;
fma.rn.bf16x2 first, first, factor, none;
fma.rn.bf16x2 second, second, factor, none;
fma.rn.bf16x2 third, third, factor, none;
fma.rn.bf16x2 fourth, fourth, factor, none;
mov.b32 {$0, $1}, first;
mov.b32 {$2, $3}, second;
mov.b32 {$4, $5}, third;
mov.b32 {$6, $7}, fourth;
}"""
"""Inputs: $8 a word of eight codes (`mxfp4_layout.py`), $9 four exponents, $10 which one is theirs,
as `prmt` wants it. Outputs: the numbers. (lop3 with 0xEA: first and second, or third.)
"""
_EXPAND = gl.constexpr(_ASM)
_WORDS = gl.constexpr(PIECE_WORDS)
_INPUTS = gl.constexpr(PIECE_INPUTS)


@gluon.jit
def _load_piece(source, piece):
    """A thread's words, and the exponents of its two rows, of one piece."""
    return gl.load(source[0] + piece * _WORDS), gl.load(source[1] + piece * _WORDS)


@gluon.jit
def _expand(codes, exponents, OPERAND: gl.constexpr, WARPS: gl.constexpr):
    """A piece's numbers [16 * WARPS, 64] from its words [32 * WARPS, 4] and exponents [32 * WARPS]."""
    selected = gl.arange(0, 4, gl.SliceLayout(0, codes.type.layout))[None, :] + 0x4440
    # Not pure, so that the compiler leaves it where it is, beside the product of the piece before.
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        _EXPAND,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
        [codes, exponents[:, None], selected],
        dtype=(
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
        ),
        is_pure=False,
        pack=1,
    )
    low = gl.join(gl.join(a, b), gl.join(c, d))
    high = gl.join(gl.join(e, f), gl.join(g, h))
    # Of threads and words: warp, row, t; row + 8, 32 inputs; of the joins: neighbours, 8 inputs, 16
    # inputs.
    numbers = gl.join(low, high).reshape(WARPS, 8, 4, 2, 2, 2, 2, 2).permute(0, 3, 1, 4, 7, 6, 2, 5)
    return gl.convert_layout(numbers.reshape(16 * WARPS, _INPUTS), OPERAND, assert_trivial=True)


@gluon.jit
def _expand_staged(memory, stage, READ: gl.constexpr, OPERAND: gl.constexpr, WARPS: gl.constexpr):
    codes = memory[0].index(stage).load(READ)
    return _expand(codes, memory[1].index(stage).load(gl.SliceLayout(1, READ)), OPERAND, WARPS)


@gluon.jit
def _copy_inputs(x, rows, occupied, staged, first, stage, LAYOUT: gl.constexpr):
    """Starts to copy pieces of 64 columns of some rows of x, from piece `first` on, to a stage of
    each memory in `staged`; what is no row becomes 0.
    """
    column = gl.arange(0, _INPUTS, gl.SliceLayout(0, LAYOUT))[None, :]
    for i in gl.static_range(len(staged)):
        source = x + rows[:, None] + (first + i) * _INPUTS + column
        async_copy.async_copy_global_to_shared(
            staged[i].index(stage), source, mask=occupied[:, None]
        )


@gluon.jit
def _copy_weights(source, staged, first, stage):
    """Starts to copy pieces of weights, from piece `first` on, to a stage of each of the memories
    in `staged`: a thread's own words, and the exponents of its rows.
    """
    for i in gl.static_range(len(staged)):
        async_copy.async_copy_global_to_shared(
            staged[i][0].index(stage), source[0] + (first + i) * _WORDS
        )
        async_copy.async_copy_global_to_shared(
            staged[i][1].index(stage), source[1] + (first + i) * _WORDS
        )


@gluon.jit(do_not_specialize=["bound", "once"])
def _experts_kernel(
    x,
    codes,
    bias,
    tile_experts,
    tile_counts,
    order,
    out,
    x_stride,
    bound,
    once,
    INNER: gl.constexpr,
    OUTER: gl.constexpr,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    LISTED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    EACH: gl.constexpr,
    STAGES: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
    ASYNC: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A tile of one expert's pairs times 16 * WARPS rows of its weight -> out [pairs, OUTER]; with
    GATED half of the rows are gates, half the ups to them, and x has a row for TOP_K pairs.

    Weights and inputs are copied to shared memory by EACH pieces, STAGES - 1 times EACH ahead; with
    IN_REGISTERS weights are loaded to registers instead, EACH pieces ahead. ASYNC: by wgmma instead
    of mma. `once` is 1.
    """
    OUT: gl.constexpr = 16 * WARPS
    HALF: gl.constexpr = OUT // 2 if GATED else OUT
    ROWS: gl.constexpr = 2 * OUTER if GATED else OUTER
    PIECES: gl.constexpr = INNER // _INPUTS
    PARTS: gl.constexpr = PIECES // EACH
    dtype: gl.constexpr = out.dtype.element_ty
    VERSION: gl.constexpr = 3 if ASYNC else 2
    accumulator: gl.constexpr = gl.NVMMADistributedLayout(
        [VERSION, 0], [WARPS, 1], [16, BLOCK_M, 16] if ASYNC else [16, 8]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, accumulator, 2)
    read: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, _INPUTS], dtype)
    tile = gl.program_id(1)
    if PDL:
        if GATED:
            # Waiting first: then the work list, which an earlier kernel writes, is complete when
            # the next one starts.
            cuda.gdc_wait()
            cuda.gdc_launch_dependents()
        else:
            cuda.gdc_launch_dependents()
    # So the list may be read before the wait, but not through the L1 cache, which may hold an
    # earlier step's.
    if LISTED == GROUPED:  # noqa: SIM102  (this one is decided when it is compiled)
        if tile >= gl.load(tile_counts + bound, cache_modifier=".cg"):
            return
    expert = gl.load(tile_experts + tile, cache_modifier=".cg").to(gl.int64)
    thread = gl.arange(0, 32 * WARPS, gl.SliceLayout(1, read))
    # What is after the last output is computed as a copy of the last 16 and not stored.
    warp = thread // 32
    chunk = gl.minimum(gl.program_id(0) * (HALF // 16) + warp % (HALF // 16), OUTER // 16 - 1)
    chunk = expert * (ROWS // 16) + chunk + warp // (HALF // 16) * (OUTER // 16)
    place = chunk * (PIECES * _WORDS)
    words = (
        codes
        + place[:, None]
        + ((thread % 32) * 4)[:, None]
        + gl.arange(0, 4, gl.SliceLayout(0, read))[None, :]
    )
    source = words, codes + place + 128 + thread % 32 // 4
    waiting = ()
    coded = ()
    if IN_REGISTERS:
        for i in gl.static_range(EACH):
            waiting = waiting + (_load_piece(source, i),)  # type: ignore[assignment]
    else:
        plain: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
        for i in gl.static_range(EACH):  # noqa: B007
            words_memory = gl.allocate_shared_memory(gl.int32, [STAGES, 32 * WARPS, 4], plain)
            exponents_memory = gl.allocate_shared_memory(
                gl.int32, [STAGES, 32 * WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0])
            )
            coded = coded + ((words_memory, exponents_memory),)  # type: ignore[assignment]
        for i in gl.static_range(STAGES - 1):
            _copy_weights(source, coded, min(i, PARTS - 1) * EACH, i)
            async_copy.commit_group()

    slot = gl.arange(0, BLOCK_M, gl.SliceLayout(1, copied))
    count = 1
    pair = tile + gl.zeros_like(slot)
    if LISTED == GROUPED:
        count = gl.load(tile_counts + tile, cache_modifier=".cg")
        pair = gl.load(
            order + tile * BLOCK_M + slot, mask=slot < count, other=0, cache_modifier=".cg"
        )
    rows = (pair // TOP_K if GATED else pair).to(gl.int64) * x_stride
    if PDL and not GATED:
        cuda.gdc_wait()
    # One for each piece of a part: the compiler puts barriers between copies to the same.
    staged = ()
    for i in gl.static_range(EACH):  # noqa: B007
        staged = staged + (gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, _INPUTS], shared),)  # type: ignore[assignment]
    for i in gl.static_range(STAGES - 1):
        _copy_inputs(x, rows, slot < count, staged, min(i, PARTS - 1) * EACH, i, copied)
        async_copy.commit_group()
    total = gl.zeros((OUT, BLOCK_M), gl.float32, accumulator)
    if IN_REGISTERS:
        numbers = _expand(waiting[0][0], waiting[0][1], operand, WARPS)  # type: ignore[misc]
        for part in range(PARTS):
            # A loop of one turn, which the compiler does not know. It was there when this was
            # measured: without it, the compiler moves loads within larger parts of the program.
            for turn in range(once):
                # the compiler adds the barriers between copies and products
                async_copy.wait_group(STAGES - 2)
                # The last part's stage is free now. After the end the last inputs are copied again
                # and not used.
                later = gl.minimum(part + STAGES - 1, PARTS - 1) * EACH
                _copy_inputs(
                    x, rows, slot < count, staged, later, (part + STAGES - 1) % STAGES, copied
                )
                async_copy.commit_group()
                for i in gl.static_range(EACH):
                    piece = gl.minimum(part * EACH + i + EACH + turn, PIECES - 1)
                    waiting = waiting[:i] + (_load_piece(source, piece),) + waiting[i + 1 :]
                    inputs = staged[i].index(part % STAGES).permute((1, 0))  # type: ignore[var-annotated]
                    following = waiting[(i + 1) % EACH]
                    if ASYNC:
                        total = warpgroup_mma(numbers, inputs, total, is_async=True)
                        expanded = _expand(following[0], following[1], operand, WARPS)
                        total, numbers = warpgroup_mma_wait(0, deps=(total, numbers))
                        numbers = expanded
                    else:
                        total = mma_v2(numbers, inputs.load(right), total)
                        numbers = _expand(following[0], following[1], operand, WARPS)
    else:
        for part in range(PARTS):
            # the compiler adds the barriers between copies and products
            async_copy.wait_group(STAGES - 2)
            if ASYNC:  # before the second of those barriers
                fence_async_shared()
            # The last part's stage is free now. After the end the last pieces are copied again and
            # not used.
            free = (part + STAGES - 1) % STAGES
            later = gl.minimum(part + STAGES - 1, PARTS - 1) * EACH
            _copy_weights(source, coded, later, free)
            _copy_inputs(x, rows, slot < count, staged, later, free, copied)
            async_copy.commit_group()
            stage = part % STAGES
            numbers = _expand_staged(coded[0], stage, read, operand, WARPS)  # type: ignore[misc]
            for i in gl.static_range(EACH):
                inputs = staged[i].index(stage).permute((1, 0))
                if ASYNC:
                    total = warpgroup_mma(numbers, inputs, total, is_async=True)
                    expanded = numbers
                    if i + 1 < EACH:
                        expanded = _expand_staged(coded[i + 1], stage, read, operand, WARPS)
                    total, numbers = warpgroup_mma_wait(0, deps=(total, numbers))
                    numbers = expanded
                else:
                    total = mma_v2(numbers, inputs.load(right), total)
                    if i + 1 < EACH:
                        numbers = _expand_staged(coded[i + 1], stage, read, operand, WARPS)
    async_copy.wait_group(0)

    if BIAS:
        local = gl.arange(0, OUT, gl.SliceLayout(1, accumulator))
        output = (
            gl.minimum(gl.program_id(0) * HALF + local % HALF, OUTER - 1) + local // HALF * OUTER
        )
        total += gl.load(bias + expert * ROWS + output)[:, None].to(gl.float32)
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [WARPS, 1], [1, 0])
    if GATED:
        pairs_layout: gl.constexpr = gl.BlockedLayout(
            [1, 8, 2], [256 // HALF, HALF // 8, 1], [WARPS, 1, 1], [2, 1, 0]
        )
        both = total.to(dtype).reshape(2, HALF, BLOCK_M).permute(2, 1, 0)
        gate, up = gl.split(gl.convert_layout(both, pairs_layout))
        result = gated(gate.to(gl.float32), up.to(gl.float32), ACTIVATION, dtype).to(dtype)
        result = gl.convert_layout(result, stored)
    else:
        result = gl.convert_layout(total.to(dtype).permute(1, 0), stored)
    column = gl.program_id(0) * HALF + gl.arange(0, HALF, gl.SliceLayout(0, stored))
    own = gl.arange(0, BLOCK_M, gl.SliceLayout(1, stored))
    target = tile + gl.zeros_like(own)
    if LISTED == GROUPED:
        target = gl.load(order + tile * BLOCK_M + own, mask=own < count, other=0)
    place_out = target.to(gl.int64)[:, None] * OUTER + column[None, :]
    gl.store(out + place_out, result, mask=(own < count)[:, None] & (column < OUTER)[None, :])


class Blocks(NamedTuple):
    """How a product is divided; bits don't depend on it."""

    warps: int
    each: int
    """Pieces of inputs, and of weights, that are copied or loaded together."""
    stages: int
    in_registers: bool = False
    """Whether weights are loaded to registers, not copied to shared memory first."""
    is_async: bool = False
    """By wgmma instead of mma."""
    registers: int | None = None
    """At most, of a thread, where that lets one more program run on a multiprocessor."""


BLOCKS = {
    8: Blocks(4, 5, 2),
    16: Blocks(4, 3, 3, is_async=True),
    32: Blocks(8, 3, 2, is_async=True),
    64: Blocks(8, 3, 2, in_registers=True, is_async=True, registers=80),
    128: Blocks(8, 3, 2, in_registers=True, is_async=True, registers=128),
}
"""By the width of tiles: the quickest of 60 tried on an H200 (docs/performance.md, attempt 50)."""


def tile_width(pairs: int, num_experts: int) -> int:
    """How many pairs share a tile: as many as an expert has, or a few more."""
    each = pairs / num_experts
    return next((width for width in (8, 16, 32, 64) if 1.5 * each <= width), 128)


def expert_product(
    x: Tensor,
    codes: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    top_k: int,
    activation: Activation | None,
) -> Tensor:
    """`tile_product` for weights packed by `mxfp4_layout.pack_mxfp4`. Without an activation, the
    kernel before it must not be the one that writes the list of tiles.
    """
    blocks, pieces = BLOCKS[tiles.width], codes.shape[2]
    size, inner = codes.shape[1] * PIECE_OUTPUTS, pieces * PIECE_INPUTS
    outer = size // 2 if activation else size
    out = torch.empty(tiles.pairs, outer, dtype=x.dtype, device=x.device)
    outputs = PIECE_OUTPUTS * blocks.warps // (2 if activation else 1)
    each = next(count for count in (blocks.each, 4, 3, 2, 1) if pieces % count == 0)
    _experts_kernel[(cdiv(outer, outputs), tiles.bound)](
        x=x,
        codes=codes,
        bias=codes if bias is None else bias,
        tile_experts=tiles.experts,
        tile_counts=tiles.counts,
        order=tiles.order,
        out=out,
        x_stride=row_stride(x),
        bound=tiles.bound,
        once=1,
        INNER=inner,
        OUTER=outer,
        TOP_K=top_k,
        GATED=activation is not None,
        ACTIVATION=0 if activation is None else NUMBERS[activation],
        BIAS=bias is not None,
        LISTED=tiles.listed,
        BLOCK_M=tiles.width,
        EACH=each,
        STAGES=blocks.stages,
        IN_REGISTERS=blocks.in_registers,
        ASYNC=blocks.is_async,
        WARPS=blocks.warps,
        PDL=USE_PDL,
        num_warps=blocks.warps,
        maxnreg=blocks.registers,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return out
