"""Products of few rows with 4-bit weights (packed by `streamed_linear.py`), whose time is a chain:
an instruction of the tensor cores for each 16 inputs, that waits for the one before.

Here it is `mma`, whose chain is shorter than that of `wgmma`, and between two of them the warp
expands codes of the next tile. Codes, scales and inputs come through shared memory, copied a chunk
of tiles at a time and some chunks ahead: loads to registers would be put off by the compiler until
the chunk's end.

The inner dimension is walked in order with one accumulator: bits are those of `linear.py`.
"""

# ruff: noqa: RUF005  (Triton knows no * within a tuple)
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra import cuda

from quire.backends.triton.direct_launch import gluon_jit
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL
from quire.backends.triton.shapes import cdiv
from quire.backends.triton.streamed_linear import (
    TILE_INPUTS,
    TILE_OUTPUTS,
    Int4,
    codes_layout,
    expand_tile,
    expanding_asm,
)

FEW_ROWS = 8
"""With more rows `streamed_linear.py` is quicker (docs/performance.md, attempt 51)."""
_WARPS = gl.constexpr(4)


@gluon.constexpr_function
def _scales_layout():
    """[1, 64]: as `codes_layout` has its rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 8]],
        lane_bases=[[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[1, 64],
    )


@gluon.jit
def _copy_codes(
    codes,
    scales,
    staged_codes,
    staged_scales,
    chunk,
    SIZE,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Starts to copy the codes and scales of a chunk of tiles. After the end the last chunk is
    copied again and not used.
    """
    first = gl.minimum(chunk, K // 128 // CHUNK - 1) * CHUNK
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [_WARPS, 1], [1, 0])
    row = first * 64 + gl.arange(0, CHUNK * 64, gl.SliceLayout(1, layout))
    word = gl.arange(0, 16, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(
        staged_codes.index(chunk % STAGES), codes + row[:, None] * 16 + word[None, :]
    )
    SCALES: gl.constexpr = max(128 // GROUP, 1)
    narrow: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [_WARPS // 2, 2], [1, 0])
    number = gl.arange(0, CHUNK * SCALES, gl.SliceLayout(1, narrow))
    group = first * SCALES + number if GROUP <= 128 else (first + number) * 128 // GROUP
    output = gl.arange(0, 64, gl.SliceLayout(0, narrow))
    async_copy.async_copy_global_to_shared(
        staged_scales.index(chunk % STAGES), scales + group[:, None] * SIZE + output[None, :]
    )


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
    REPEATED: gl.constexpr,
):
    """Starts to copy the columns of x for a chunk of tiles, the last part of what is waited for
    together; rows after the last one become 0, or with REPEATED copies of it.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_WARPS, 1], [1, 0])
    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    mask = None if REPEATED else (row < M)[:, None]
    if REPEATED:
        row = gl.minimum(row, M - 1)
    first = gl.minimum(chunk, K // 128 // CHUNK - 1) * CHUNK
    place = first * 128 + gl.arange(0, CHUNK * 128, gl.SliceLayout(0, layout))
    source = x + row[:, None].to(gl.int64) * K + place[None, :]
    async_copy.async_copy_global_to_shared(staged.index(chunk % STAGES), source, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _load_scales(staged_scales, number: gl.constexpr, SCALES: gl.constexpr):
    """The scales of the groups of tile `number` of a chunk."""
    layout: gl.constexpr = gl.SliceLayout(1, codes_layout(_WARPS))
    found = ()
    for i in gl.static_range(SCALES):
        halves = staged_scales.slice(number * SCALES + i, 1, dim=0).load(_scales_layout())
        found = found + (gl.convert_layout(halves.reshape(64), layout, assert_trivial=True),)  # type: ignore[assignment]
    return found


@gluon_jit(do_not_specialize=["M"])
def _few_rows_kernel(
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
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    REPEATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Computes 64 outputs of BLOCK_M rows."""
    SCALES: gl.constexpr = max(128 // GROUP, 1)
    dtype: gl.constexpr = x.dtype.element_ty
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [_WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, accumulator, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, accumulator, 2)
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, CHUNK * 128], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if PDL:
        cuda.gdc_launch_dependents()
    first_row = gl.program_id(1) * BLOCK_M
    own_codes = codes + gl.program_id(0).to(gl.int64) * (K * 8)
    own_scales = scales + gl.program_id(0) * 64
    staged = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, CHUNK * 128], shared)
    staged_codes = gl.allocate_shared_memory(gl.int32, [STAGES, CHUNK * 64, 16], plain)
    staged_scales = gl.allocate_shared_memory(gl.int32, [STAGES, CHUNK * SCALES, 64], plain)
    for i in gl.static_range(STAGES - 1):
        _copy_codes(
            own_codes, own_scales, staged_codes, staged_scales, i, SIZE, K, GROUP, CHUNK, STAGES
        )
    if PDL:
        cuda.gdc_wait()
    for i in gl.static_range(STAGES - 1):
        _copy_inputs(x, staged, i, first_row, M, K, CHUNK, STAGES, BLOCK_M, REPEATED)
    total = gl.zeros((64, BLOCK_M), gl.float32, accumulator)
    async_copy.wait_group(STAGES - 2)
    words = staged_codes.index(0).slice(0, 64, dim=0).load(codes_layout(_WARPS))
    factors = _load_scales(staged_scales.index(0), 0, SCALES)
    tile = expand_tile(words, factors, dtype, LOW, HIGH, 64, left)
    for chunk in range(0, K // 128 // CHUNK):
        for i in gl.static_range(CHUNK):
            if i == CHUNK - 1:
                # The next chunk must be there, and the last one's stage is free: it takes the chunk
                # that is needed STAGES - 1 chunks later. The compiler adds the barriers.
                async_copy.wait_group(STAGES - 3)
                later = chunk + STAGES - 1
                _copy_codes(
                    own_codes,
                    own_scales,
                    staged_codes,
                    staged_scales,
                    later,
                    SIZE,
                    K,
                    GROUP,
                    CHUNK,
                    STAGES,
                )
                _copy_inputs(x, staged, later, first_row, M, K, CHUNK, STAGES, BLOCK_M, REPEATED)
            inputs = staged.index(chunk % STAGES).slice(i * 128, 128, dim=1)
            total = mma_v2(tile, inputs.permute((1, 0)).load(right), total)
            stage = (chunk + (i + 1) // CHUNK) % STAGES
            words = (
                staged_codes.index(stage)
                .slice((i + 1) % CHUNK * 64, 64, dim=0)
                .load(codes_layout(_WARPS))
            )
            factors = _load_scales(staged_scales.index(stage), (i + 1) % CHUNK, SCALES)
            tile = expand_tile(words, factors, dtype, LOW, HIGH, 64, left)
    async_copy.wait_group(0)
    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, accumulator))[None, :]
    place = (gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, accumulator)))[:, None]
    if HAS_BIAS:
        total += gl.load(bias + place, mask=place < N, other=0.0).to(gl.float32)
    gl.store(out + row.to(gl.int64) * N + place, total.to(dtype), mask=(row < M) & (place < N))


class Chunks(NamedTuple):
    """How a product is divided; bits don't depend on it."""

    rows: int
    """Of a program."""
    tiles: int
    """Of a chunk."""
    stages: int
    """Chunks in shared memory."""


def few_rows_linear(
    x: Tensor,
    weight: Int4,
    bias: Tensor | None,
    out: Tensor,
    most_tiles: int = 4,
    is_repeated: bool = False,
) -> None:
    """x [rows, in] times the weight transposed, plus bias, into `out`. Bits depend neither on how
    many tiles a chunk has at most, nor on whether missing rows are copies of the last one.
    """
    rows, inner = x.shape
    size = weight.shape[0]
    chunks = chunks_of(inner // TILE_INPUTS, most_tiles)
    low, high = (expanding_asm(x.dtype, shift, weight.has_minimum) for shift in (0, 4))
    _few_rows_kernel[(size // TILE_OUTPUTS, cdiv(rows, chunks.rows))](
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
        BLOCK_M=chunks.rows,
        CHUNK=chunks.tiles,
        STAGES=chunks.stages,
        REPEATED=is_repeated,
        PDL=USE_PDL,
        num_warps=_WARPS.value,
        **ROUND_ALWAYS,
        **LAUNCH,
    )


def chunks_of(tiles: int, most: int = 4) -> Chunks:
    """The quickest on an H200."""
    each = next(each for each in (8, 4, 2, 1) if each <= most and tiles % each == 0)
    return Chunks(FEW_ROWS, each, 3)
