"""Products of experts whose weights have few bits, which are expanded in the registers of the tensor
cores.

A weight is stored in pieces of 16 outputs and 64 inputs, one after the other along the inputs
(`expert_layouts.py`): 16 bytes of codes for each thread of a warp (of eight bits: 32), in the order
in which the tensor cores want them, and scales. A thread loads its codes several pieces ahead of the
product, or copies them to shared memory, where only it reads them. How they become numbers is
`expert_codings.py`'s: they are those of the expanded weight. The inner dimension is walked in order
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

from quire.backends.triton.direct_launch import gluon_jit
from quire.backends.triton.expert_codings import BYTES, MXFP4, ZEROS, expand, scale_words
from quire.backends.triton.expert_layouts import PIECE_INPUTS, PIECE_OUTPUTS, coding_of
from quire.backends.triton.grouping import GROUPED, Tiles
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL
from quire.backends.triton.rowwise import NUMBERS, gated
from quire.backends.triton.shapes import cdiv, row_stride
from quire.kernels.ops import Activation
from quire.kernels.weights import Weight

_INPUTS = gl.constexpr(PIECE_INPUTS)


@gluon.constexpr_function
def _shared_by(group):
    """How many pieces have the same scales."""
    return max(group // _INPUTS, 1)


@gluon.jit
def _address(source, i: gl.constexpr, piece, CODING: gl.constexpr, GROUP: gl.constexpr):
    """Where a thread's words of one piece lie: its codes, or last its scales, which some pieces have
    in common and which follow their codes.
    """
    SHARED: gl.constexpr = _shared_by(GROUP)
    CODES: gl.constexpr = 256 if CODING == BYTES else 128
    SCALES: gl.constexpr = 8 * scale_words(CODING, GROUP)
    if SHARED == 1:
        return source[i] + piece * (CODES + SCALES)
    if i == len(source) - 1:
        return source[i] + piece // SHARED * (SHARED * CODES + SCALES)
    return source[i] + (piece * CODES + piece // SHARED * SCALES)


@gluon.jit
def _load_piece(source, piece, CODING: gl.constexpr, GROUP: gl.constexpr):
    """A thread's words of codes and of scales of one piece."""
    found = ()
    for i in gl.static_range(len(source)):
        found = found + (gl.load(_address(source, i, piece, CODING, GROUP)),)  # type: ignore[assignment]
    return found


@gluon.jit
def _expand_staged(
    memory,
    stage,
    READ: gl.constexpr,
    SCALES: gl.constexpr,
    CODING: gl.constexpr,
    OPERAND: gl.constexpr,
    WARPS: gl.constexpr,
):
    piece = ()
    for i in gl.static_range(len(memory) - 1):
        piece = piece + (memory[i].index(stage).load(READ),)  # type: ignore[assignment]
    piece = piece + (memory[len(memory) - 1].index(stage).load(SCALES),)  # type: ignore[assignment]
    return expand(piece, CODING, OPERAND, WARPS)


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
def _copy_weights(source, staged, first, stage, CODING: gl.constexpr, GROUP: gl.constexpr):
    """Starts to copy pieces of weights, from piece `first` on, to a stage of each of the memories
    in `staged`: a thread's own words, and the scales of its rows.
    """
    for i in gl.static_range(len(staged)):
        for j in gl.static_range(len(source)):
            async_copy.async_copy_global_to_shared(
                staged[i][j].index(stage), _address(source, j, first + i, CODING, GROUP)
            )


@gluon_jit(do_not_specialize=["bound", "once"])
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
    CODING: gl.constexpr,
    GROUP: gl.constexpr,
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
    WORDS: gl.constexpr = 8 * scale_words(CODING, GROUP)
    """Of scales, after the codes of as many pieces as share them."""
    SHARED: gl.constexpr = _shared_by(GROUP)
    CODES: gl.constexpr = 256 if CODING == BYTES else 128
    place = chunk * (PIECES // SHARED * (SHARED * CODES + WORDS))
    words = (
        codes
        + place[:, None]
        + ((thread % 32) * 4)[:, None]
        + gl.arange(0, 4, gl.SliceLayout(0, read))[None, :]
    )
    if CODING == MXFP4:
        scales: gl.constexpr = gl.SliceLayout(1, read)
        source = words, codes + place + 128 + thread % 32 // 4
    else:
        EACH_WORDS: gl.constexpr = scale_words(CODING, GROUP)
        scales: gl.constexpr = gl.BlockedLayout([1, EACH_WORDS], [32, 1], [WARPS, 1], [1, 0])  # type: ignore[no-redef]
        of_thread = codes + place + SHARED * CODES + thread % 32 // 4 * EACH_WORDS
        numbered = gl.convert_layout(of_thread, gl.SliceLayout(1, scales), assert_trivial=True)
        factors = numbered[:, None] + gl.arange(0, EACH_WORDS, gl.SliceLayout(0, scales))[None, :]
        source = (words, words + 128, factors) if CODING == BYTES else (words, factors)  # type: ignore[assignment]
    waiting = ()
    coded = ()
    if IN_REGISTERS:
        for i in gl.static_range(EACH):
            waiting = waiting + (_load_piece(source, i, CODING, GROUP),)  # type: ignore[assignment]
    else:
        plain: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
        for i in gl.static_range(EACH):  # noqa: B007
            memory = ()
            for j in gl.static_range(len(source) - 1):  # noqa: B007
                memory = memory + (  # type: ignore[assignment]
                    gl.allocate_shared_memory(gl.int32, [STAGES, 32 * WARPS, 4], plain),
                )
            if CODING == MXFP4:
                memory = memory + (  # type: ignore[assignment]
                    gl.allocate_shared_memory(
                        gl.int32, [STAGES, 32 * WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0])
                    ),
                )
            else:
                memory = memory + (  # type: ignore[assignment]
                    gl.allocate_shared_memory(gl.int32, [STAGES, 32 * WARPS, EACH_WORDS], plain),
                )
            coded = coded + (memory,)  # type: ignore[assignment]
        for i in gl.static_range(STAGES - 1):
            _copy_weights(source, coded, min(i, PARTS - 1) * EACH, i, CODING, GROUP)
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
        numbers = expand(waiting[0], CODING, operand, WARPS)  # type: ignore[misc]
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
                    waiting = (
                        waiting[:i]
                        + (_load_piece(source, piece, CODING, GROUP),)
                        + waiting[i + 1 :]
                    )
                    inputs = staged[i].index(part % STAGES).permute((1, 0))  # type: ignore[var-annotated]
                    following = waiting[(i + 1) % EACH]
                    if ASYNC:
                        total = warpgroup_mma(numbers, inputs, total, is_async=True)
                        expanded = expand(following, CODING, operand, WARPS)
                        total, numbers = warpgroup_mma_wait(0, deps=(total, numbers))
                        numbers = expanded
                    else:
                        total = mma_v2(numbers, inputs.load(right), total)
                        numbers = expand(following, CODING, operand, WARPS)
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
            _copy_weights(source, coded, later, free, CODING, GROUP)
            _copy_inputs(x, rows, slot < count, staged, later, free, copied)
            async_copy.commit_group()
            stage = part % STAGES
            numbers = _expand_staged(coded[0], stage, read, scales, CODING, operand, WARPS)  # type: ignore[misc]
            for i in gl.static_range(EACH):
                inputs = staged[i].index(stage).permute((1, 0))
                if ASYNC:
                    total = warpgroup_mma(numbers, inputs, total, is_async=True)
                    expanded = numbers
                    if i + 1 < EACH:
                        expanded = _expand_staged(
                            coded[i + 1], stage, read, scales, CODING, operand, WARPS
                        )
                    total, numbers = warpgroup_mma_wait(0, deps=(total, numbers))
                    numbers = expanded
                else:
                    total = mma_v2(numbers, inputs.load(right), total)
                    if i + 1 < EACH:
                        numbers = _expand_staged(
                            coded[i + 1], stage, read, scales, CODING, operand, WARPS
                        )
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
INTEGER_BLOCKS = {
    8: Blocks(4, 4, 2),
    16: Blocks(4, 4, 2, is_async=True),
    32: Blocks(8, 3, 2, is_async=True),
    64: Blocks(8, 2, 3, in_registers=True, is_async=True, registers=128),
    128: Blocks(8, 2, 3, in_registers=True, is_async=True),
}
"""Of weights with scales. None has been tried on a card yet."""


def tile_width(pairs: int, num_experts: int) -> int:
    """How many pairs share a tile: as many as an expert has, or a few more."""
    each = pairs / num_experts
    return next((width for width in (8, 16, 32, 64) if 1.5 * each <= width), 128)


def blocks_of(kind: int, width: int) -> Blocks:
    """Where a piece has twice the bytes, half as many go together."""
    if kind == MXFP4.value:
        return BLOCKS[width]
    blocks = INTEGER_BLOCKS[width]
    return blocks if kind == ZEROS.value else blocks._replace(each=max(1, blocks.each // 2))


def pieces_together(blocks: Blocks, pieces: int) -> int:
    """As many as `blocks` say, or as divide a row."""
    return next(count for count in (blocks.each, 4, 3, 2, 1) if pieces % count == 0)


def expert_product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    tiles: Tiles,
    top_k: int,
    activation: Activation | None,
) -> Tensor:
    """`tile_product` for weights packed by `expert_layouts.pack_experts`. Without an activation, the
    kernel before it must not be the one that writes the list of tiles.
    """
    (part,), (_, size, inner), codes = weight.parts, weight.shape, weight.tensor
    coding = coding_of(part.format, inner)
    assert coding is not None
    blocks = blocks_of(coding.kind, tiles.width)
    pieces = inner // PIECE_INPUTS
    outer = size // 2 if activation else size
    out = torch.empty(tiles.pairs, outer, dtype=x.dtype, device=x.device)
    outputs = PIECE_OUTPUTS * blocks.warps // (2 if activation else 1)
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
        EACH=pieces_together(blocks, pieces),
        STAGES=blocks.stages,
        IN_REGISTERS=blocks.in_registers,
        ASYNC=blocks.is_async,
        CODING=coding.kind,
        GROUP=coding.group,
        WARPS=blocks.warps,
        PDL=USE_PDL,
        num_warps=blocks.warps,
        maxnreg=blocks.registers,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return out
