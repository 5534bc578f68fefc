"""Products with 4-bit weights, which go from memory straight to registers and are expanded there
for the tensor cores.

A weight is stored in tiles of 64 outputs and 128 inputs, 4 KiB each, in which each thread's codes
are two pieces of 16 bytes. They are loaded several tiles ahead of the product. A code becomes a
number of the model's dtype in two steps. First its bits are put into the low bits of the float 128
(float16: 1024), which gives 128 + code; 128 and the zero point are subtracted. Then the result is
multiplied by the scale and rounded. So the numbers are those of the expanded weight; the inner
dimension is walked in order with one accumulator, so products have the same bits as in `linear.py`.

Written in Gluon, Triton's lower level, where layouts are explicit.
"""

# ruff: noqa: RUF005  (Triton knows no * within a tuple)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.language.extra import cuda

from quire.backends.triton.direct_launch import gluon_jit, jit
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin
from quire.backends.triton.shapes import cdiv

TILE_OUTPUTS, TILE_INPUTS = 64, 128
MAX_ROWS = 384
"""With more rows it is quicker to expand the weight first."""

_ASM = """{
.reg .b32 codes, first, second, exponent, one, offset, none;
mov.b32 exponent, EXPONENT;
mov.b32 one, ONE;
mov.b32 offset, OFFSET;
mov.b32 none, 0x80008000;
shr.b32 codes, $4, SHIFT;
and.b32 codes, codes, 0x0F0F0F0F;
prmt.b32 first, codes, exponent, 0x4140;
prmt.b32 second, codes, exponent, 0x4342;
fma.rn.TYPE first, first, one, SUBTRACTED;
fma.rn.TYPE second, second, one, SUBTRACTED;
fma.rn.TYPE first, first, $5, ADDED;
fma.rn.TYPE second, second, $5, ADDED;
mov.b32 {$0, $1}, first;
mov.b32 {$2, $3}, second;
}"""
"""Inputs: $4 eight codes; $5 the scale, twice; $6 minus (zero point + 128), or the minimum, twice.
Outputs: $0 to $3 the numbers of the low (or the high) halves of the four bytes.
"""
_CONSTANTS = {
    torch.bfloat16: {
        "EXPONENT": "0x43434343",
        "ONE": "0x3F803F80",
        "OFFSET": "0xC300C300",
        "TYPE": "bf16x2",
    },
    torch.float16: {
        "EXPONENT": "0x64646464",
        "ONE": "0x3C003C00",
        "OFFSET": "0xE400E400",
        "TYPE": "f16x2",
    },
}
FIRST = {torch.bfloat16: 128.0, torch.float16: 1024.0}
"""The float whose lowest bits take a code."""


def expanding_asm(dtype: torch.dtype, shift: int, has_minimum: bool) -> str:
    words = _CONSTANTS[dtype] | {"SHIFT": str(shift)}
    words |= (
        {"SUBTRACTED": "offset", "ADDED": "$6"}
        if has_minimum
        else {"SUBTRACTED": "$6", "ADDED": "none"}
    )
    text = _ASM
    for name in sorted(words, key=len, reverse=True):
        text = text.replace(name, words[name])
    return text


class Int4(NamedTuple):
    """A packed weight."""

    codes: Tensor
    """int32 [out / 64, in / 128, 64, 16], with outputs padded to a multiple of 64: the bits must
    not depend on how many outputs a device has.
    """
    scales: Tensor
    """int32 [in / group, out]: in the lower half the scale, in the upper minus (zero point +
    `FIRST`) or the minimum.
    """
    has_minimum: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0] * TILE_OUTPUTS, self.codes.shape[1] * TILE_INPUTS

    @property
    def group(self) -> int:
        return self.shape[1] // self.scales.shape[0]


def can_pack(inner: int, group: int) -> bool:
    is_even = inner % TILE_INPUTS == 0 and inner % group == 0
    return is_even and (group in (32, 64) or group % TILE_INPUTS == 0)


def pack_int4(
    codes: Tensor, scales: Tensor, zeros: Tensor, minima: Tensor | None, dtype: torch.dtype
) -> Int4:
    """Packs uint8 codes [out, in] from 0 to 15, with scales [out, in / group] and a zero point or
    minimum for each scale: a number is (code - zero) * scale or code * scale - minimum, scale and
    minimum rounded to the dtype.
    """
    other = -(zeros.float() + FIRST[dtype] if minima is None else minima)
    padding = (0, 0, 0, -len(codes) % TILE_OUTPUTS)
    codes, scales, other = (torch.nn.functional.pad(one, padding) for one in (codes, scales, other))
    out, inner = codes.shape
    # Of the 128 inputs: half, j, i, t, e; in a row's 64 bytes: t, j, i, e, with the halves in a
    # byte's halves.
    shape = (out // TILE_OUTPUTS, TILE_OUTPUTS, inner // TILE_INPUTS, 2, 4, 2, 4, 2)
    low, high = (
        codes.view(shape)
        .permute(3, 0, 2, 1, 6, 4, 5, 7)
        .reshape(2, *shape[:1], shape[2], TILE_OUTPUTS, 64)
    )
    packed = (low | high << 4).view(torch.int32)
    halves = [part.to(dtype).contiguous().view(torch.int16).int() for part in (scales, other)]
    return Int4(packed, (halves[0] & 0xFFFF | halves[1] << 16).t().contiguous(), minima is not None)


@gluon.constexpr_function
def codes_layout(warps):
    """[outputs, 16 words]: a thread has 4 neighbouring words of two rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << bit, 0] for bit in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[16 * warps, 16],
    )


@gluon.jit
def _twice(halves, SELECT: gl.constexpr):
    return gl.inline_asm_elementwise(SELECT, "=r,r", [halves], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _numbers(codes, first, second, dtype: gl.constexpr, ASM: gl.constexpr, OUT: gl.constexpr):
    """Numbers [OUT, 64] of half of a tile's inputs; `first` are the scales of 32 of them, `second`
    of the others.
    """
    scale = _twice(first, "prmt.b32 $0, $1, 0, 0x1010;")[:, None].broadcast_to(OUT, 16)
    other = _twice(first, "prmt.b32 $0, $1, 0, 0x3232;")[:, None].broadcast_to(OUT, 16)
    if first is not second:
        word = gl.arange(0, 16, gl.SliceLayout(0, codes.type.layout))[None, :].broadcast_to(OUT, 16)
        scale = gl.where(
            word % 4 < 2, scale, _twice(second, "prmt.b32 $0, $1, 0, 0x1010;")[:, None]
        )
        other = gl.where(
            word % 4 < 2, other, _twice(second, "prmt.b32 $0, $1, 0, 0x3232;")[:, None]
        )
    a, b, c, d = gl.inline_asm_elementwise(
        ASM,
        "=h,=h,=h,=h,r,r,r",
        [codes, scale, other],
        dtype=(dtype.value,) * 4,
        is_pure=True,
        pack=1,
    )
    return gl.join(gl.join(a, b), gl.join(c, d)).reshape(OUT, 4, 4, 2, 2)  # t, j, e, i


@gluon.jit
def expand_tile(
    codes,
    scales,
    dtype: gl.constexpr,
    LOW: gl.constexpr,
    HIGH: gl.constexpr,
    OUT: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """A tile's numbers [OUT, 128] from its words and the scales of its 1, 2 or 4 groups."""
    step: gl.constexpr = len(scales) // 2
    low = _numbers(codes, scales[0], scales[step // 2], dtype, LOW, OUT)
    high = _numbers(codes, scales[step], scales[step + step // 2], dtype, HIGH, OUT)
    tile = gl.join(low, high).permute(0, 5, 2, 4, 1, 3).reshape(OUT, 128)  # half, j, i, t, e
    return gl.convert_layout(tile, OPERAND, assert_trivial=True)


@gluon.jit
def _load_scales(scales, tile, SIZE, GROUP: gl.constexpr):
    """The scales of the groups in a tile, or of the one group that the tile is part of."""
    found = ()
    for i in gl.static_range(max(128 // GROUP, 1)):
        found = found + (gl.load(scales + (tile * 128 // GROUP + i) * SIZE),)  # type: ignore[assignment]
    return found


@gluon.jit
def _copy_inputs(
    x,
    staged,
    chunk,
    first_row,
    M,
    K: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Starts to copy the columns of x that a chunk of tiles needs to shared memory; rows after the
    last one become 0. After the end the last chunk is copied again and not used.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    column = gl.minimum(chunk * (CHUNK * 128), K - CHUNK * 128)
    place = column + gl.arange(0, CHUNK * 128, gl.SliceLayout(0, layout))
    source = x + row[:, None].to(gl.int64) * K + place[None, :]
    async_copy.async_copy_global_to_shared(
        staged.index(chunk % STAGES), source, mask=(row < M)[:, None]
    )
    async_copy.commit_group()


@gluon_jit(do_not_specialize=["M"])
def _int4_kernel(
    x,
    codes,
    scales,
    bias,
    out,
    M,
    N,
    SIZE,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    LOW: gl.constexpr,
    HIGH: gl.constexpr,
    BLOCK_M: gl.constexpr,
    AHEAD: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Computes 16 outputs per warp, of BLOCK_M rows. Codes are loaded AHEAD tiles before they are
    used. Inputs are copied for CHUNK tiles at once: threads wait for each other, and for the tensor
    cores, once in a chunk. Within a chunk a tile's product begins while the one before still runs.
    """
    OUT: gl.constexpr = 16 * WARPS
    TILES: gl.constexpr = K // 128
    dtype: gl.constexpr = x.dtype.element_ty
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator, 2)
    read: gl.constexpr = codes_layout(WARPS)
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, CHUNK * 128], dtype)
    if PDL:
        cuda.gdc_launch_dependents()
    first_row = gl.program_id(1) * BLOCK_M
    output = gl.program_id(0) * OUT + gl.arange(0, OUT, gl.SliceLayout(1, read))
    places = (output // 64).to(gl.int64) * (K * 8) + output % 64 * 16
    source = codes + places[:, None] + gl.arange(0, 16, gl.SliceLayout(0, read))[None, :]
    factors = scales + output
    waiting = ()
    waiting_scales = ()
    for i in gl.static_range(AHEAD):
        waiting = waiting + (gl.load(source + i * 1024),)  # type: ignore[assignment]
        waiting_scales = waiting_scales + (_load_scales(factors, i, SIZE, GROUP),)  # type: ignore[assignment]
    if PDL:
        cuda.gdc_wait()
    staged = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, CHUNK * 128], shared)
    for i in gl.static_range(STAGES - 1):
        _copy_inputs(x, staged, i, first_row, M, K, CHUNK, STAGES, BLOCK_M, WARPS)
    total = gl.zeros((OUT, BLOCK_M), gl.float32, accumulator)
    tile = expand_tile(waiting[0], waiting_scales[0], dtype, LOW, HIGH, OUT, operand)  # type: ignore[misc]
    running = tile
    for start in range(0, TILES, AHEAD):
        for i in gl.static_range(AHEAD):
            now = start + i
            # after the end the last tile is loaded again and not used
            later = gl.minimum(now + AHEAD, TILES - 1)
            waiting = waiting[:i] + (gl.load(source + later * 1024),) + waiting[i + 1 :]
            waiting_scales = (
                waiting_scales[:i]
                + (_load_scales(factors, later, SIZE, GROUP),)
                + waiting_scales[i + 1 :]
            )
            chunk = now // CHUNK
            if i % CHUNK == 0:
                # the compiler adds the barriers between copies and products
                async_copy.wait_group(STAGES - 2)
                # The last chunk's stage is free now: it takes the inputs needed STAGES - 1 chunks
                # later.
                _copy_inputs(
                    x,
                    staged,
                    chunk + STAGES - 1,
                    first_row,
                    M,
                    K,
                    CHUNK,
                    STAGES,
                    BLOCK_M,
                    WARPS,
                )
            inputs = staged.index(chunk % STAGES).slice(i % CHUNK * 128, 128, dim=1)
            total = warpgroup_mma(tile, inputs.permute((1, 0)), total, is_async=True)
            next_tile = expand_tile(
                waiting[(i + 1) % AHEAD],
                waiting_scales[(i + 1) % AHEAD],
                dtype,
                LOW,
                HIGH,
                OUT,
                operand,
            )
            # The registers of a tile are needed until its product is done, which in a chunk is
            # one product later.
            if (i + 1) % CHUNK == 0:
                total, tile, running = warpgroup_mma_wait(0, deps=(total, tile, running))
            else:
                total, running = warpgroup_mma_wait(1, deps=(total, running))
            running = tile
            tile = next_tile
    async_copy.wait_group(0)
    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, accumulator))[None, :]
    place = (gl.program_id(0) * OUT + gl.arange(0, OUT, gl.SliceLayout(1, accumulator)))[:, None]
    if HAS_BIAS:
        total += gl.load(bias + place, mask=place < N, other=0.0).to(gl.float32)
    gl.store(out + row.to(gl.int64) * N + place, total.to(dtype), mask=(row < M) & (place < N))


def int4_linear(x: Tensor, weight: Int4, bias: Tensor | None, out: Tensor) -> None:
    """x [rows, in] times the weight transposed, plus bias, into `out`."""
    rows, inner = x.shape
    size = weight.shape[0]
    block, ahead, chunk, stages, warps = _tile_of(rows, size, inner // TILE_INPUTS)
    low, high = (expanding_asm(x.dtype, shift, weight.has_minimum) for shift in (0, 4))
    _int4_kernel[(size // (16 * warps), cdiv(rows, block))](
        x=x,
        codes=weight.codes,
        scales=weight.scales,
        bias=x if bias is None else bias,
        out=out,
        M=rows,
        N=out.shape[1],
        SIZE=size,
        K=inner,
        GROUP=weight.group,
        HAS_BIAS=bias is not None,
        LOW=low,
        HIGH=high,
        BLOCK_M=block,
        AHEAD=ahead,
        CHUNK=chunk,
        STAGES=stages,
        WARPS=warps,
        PDL=USE_PDL,
        num_warps=warps,
        **ROUND_ALWAYS,
        **LAUNCH,
    )


class _Int4Tile(NamedTuple):
    """How a product is divided; bits don't depend on it."""

    rows: int
    ahead: int
    """Tiles whose codes are loaded ahead."""
    chunk: int
    """Tiles whose inputs are copied together."""
    stages: int
    """Chunks of inputs in shared memory."""
    warps: int


def _tile_of(rows: int, size: int, tiles: int) -> _Int4Tile:
    """The quickest on an H200."""
    block = next((block for block in (8, 16, 32) if rows <= block), 64)
    ahead, chunk, stages, warps = 8 if block < 64 else 4, 1, 4, 4
    if (32 < rows <= 64 and size <= 8192) or (64 < rows <= 128 and size <= 4096):
        # few programs, with much shared memory each
        chunk, stages = 4, 2
    elif 128 < rows <= 256 and size % 128 == 0:
        block, ahead, warps = (128, 4, 8) if size >= 6144 else (64, 8, 8)
    ahead = next(each for each in (8, 4, 2, 1) if each <= ahead and tiles % each == 0)
    return _Int4Tile(block, ahead, min(chunk, ahead), stages, warps)


@jit
def _expand_kernel(
    codes,
    scales,
    out,
    N,
    K,
    GROUP: tl.constexpr,
    MINIMUM: tl.constexpr,
    FIRST: tl.constexpr,
    FMA: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Expands BLOCK numbers of a row."""
    begin(PDL)
    output = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = k % 64
    byte = within // 2 % 4 * 16 + within // 16 * 4 + within // 8 % 2 * 2 + within % 2
    tile = (output // 64) * (K // 128) + k // 128
    exists = k < K
    code = tl.load(codes + (tile * 64 + output % 64) * 64 + byte, mask=exists, other=0).to(tl.int32)
    code = (code >> (k % 128 // 64 * 4)) & 15
    halves = tl.load(scales + (k // GROUP).to(tl.int64) * N + output, mask=exists, other=0)
    dtype: tl.constexpr = out.dtype.element_ty
    scale = halves.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    other = (halves >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    number = ((code.to(tl.float32) + FIRST + other) * scale).to(dtype)
    if MINIMUM:  # a fused multiply-add, which rounds once, as in `_ASM`
        parts = code.to(dtype), scale.to(dtype), other.to(dtype)
        number = tl.inline_asm_elementwise(
            FMA, "=h,h,h,h", parts, dtype=dtype.value, is_pure=True, pack=1
        )
    tl.store(out + output * K + k, number, mask=exists)


def expand_int4(weight: Int4, dtype: torch.dtype) -> Tensor:
    """The numbers [out, in] of a packed weight."""
    out, inner = weight.shape
    numbers = torch.empty(out, inner, dtype=dtype, device=weight.codes.device)
    block = 1024
    _expand_kernel[(out, cdiv(inner, block))](
        codes=weight.codes.view(torch.uint8),
        scales=weight.scales,
        out=numbers,
        N=out,
        K=inner,
        GROUP=weight.group,
        MINIMUM=weight.has_minimum,
        FIRST=FIRST[dtype],
        FMA=f"fma.rn.{_CONSTANTS[dtype]['TYPE'].removesuffix('x2')} $0, $1, $2, $3;",
        BLOCK=block,
        PDL=USE_PDL,
        num_warps=4,
        **LAUNCH,
    )
    return numbers
