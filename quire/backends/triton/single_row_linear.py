"""The matrix product of a single row, whose time is that of reading the weight.

A program computes 8, 16 or 32 outputs. Tiles of their weights are copied to shared memory, several
ahead of the product; the first copies start before the kernel before this one has finished (PDL),
as weights are constants. The weights are the right operand of the tensor core's product, which may
have any multiple of 8 outputs, so that there are programs for all multiprocessors. The left operand
has 64 rows, all equal to the row of x, and one result is kept. The row is kept in shared memory;
for FP8 weights it is quantised first, as `quantize_rows` does it.

The inner dimension is walked from beginning to end with one accumulator, so the bits are those of
all other products (see `linear.py` and `tile_product.py`). Written in Gluon, Triton's lower level,
where layouts are explicit.
"""

# mypy: disable-error-code=unreachable
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.language.extra import cuda

from quire.backends.triton.direct_launch import gluon_jit
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL
from quire.backends.triton.linear import VOCABULARY_SIZE, room_for
from quire.backends.triton.rowwise import silu
from quire.backends.triton.shapes import next_power_of_2

_MAX_INNER = 16384
_MULTIPROCESSORS = 132


@gluon.jit
def _copy_weights(
    weight,
    staged,
    first,
    column,
    N,
    K: gl.constexpr,
    SILU_MUL: gl.constexpr,
    OUT: gl.constexpr,
    TILE: gl.constexpr,
):
    """Starts to copy TILE columns of OUT rows from `first` on; with SILU_MUL half of the rows are N
    rows further on.
    """
    EACH: gl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth
    WIDE: gl.constexpr = min(32, TILE // EACH)
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // WIDE, WIDE], [4, 1], [1, 0])
    HALF: gl.constexpr = OUT // 2 if SILU_MUL else OUT
    local = gl.arange(0, OUT, gl.SliceLayout(1, layout))
    row = first + local % HALF + local // HALF * N
    place = column + gl.arange(0, TILE, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(
        staged, weight + row[:, None].to(gl.int64) * K + place[None, :]
    )
    async_copy.commit_group()


@gluon.jit
def _stage_row(x, staged, K: gl.constexpr):
    """Copies x [K], and zeros behind it, to the shared memory `staged` [1, a power of two], quantised
    if that is FP8. Returns its scale. In one piece: between several, threads would meet each time.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    column = gl.arange(0, staged.shape[1], gl.SliceLayout(0, layout))[None, :]
    mask = None if staged.shape[1] == K else column < K
    row = gl.load(x + column, mask=mask, other=None if mask is None else 0.0)
    if staged.dtype != gl.float8e4nv:
        staged.store(row.to(staged.dtype))
        return 1.0
    value = row.to(gl.float32)
    magnitude = gl.where(value == value, gl.abs(value), float("inf"))
    largest = gl.max(magnitude, 1)
    largest = gl.where(largest == 0.0, 448.0, largest)
    limit = gl.full((1,), 448.0, gl.float32, gl.SliceLayout(1, layout))
    factor = gl.div_rn(limit, largest)
    staged.store((value * factor[:, None]).to(staged.dtype))
    return gl.max(gl.where(largest == float("inf"), float("nan"), gl.div_rn(largest, limit)), 0)


@gluon_jit
def _single_row_kernel(
    x,
    weight,
    second,
    scales,
    bias,
    out,
    second_out,
    N,
    K: gl.constexpr,
    PADDED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SILU_MUL: gl.constexpr,
    PAIR: gl.constexpr,
    OUT: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    SHARES_INPUT: gl.constexpr,
    PDL: gl.constexpr,
):
    """Computes OUT outputs; with SILU_MUL OUT / 2 of silu(output[i]) * output[i + N]. PAIR: after the
    N outputs of the weight those of the second one. PADDED: K, or the next power of two.
    """
    number: gl.constexpr = weight.dtype.element_ty
    dtype: gl.constexpr = out.dtype.element_ty
    IS_FP8: gl.constexpr = number == gl.float8e4nv
    HALF: gl.constexpr = OUT // 2 if SILU_MUL else OUT
    TILES: gl.constexpr = K // TILE
    accumulator: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, OUT, 32 if IS_FP8 else 16]
    )
    as_row: gl.constexpr = gl.DotOperandLayout(0, accumulator, 4 if IS_FP8 else 2)
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUT, TILE], number)
    if PDL and not SHARES_INPUT:
        cuda.gdc_launch_dependents()
    first = gl.program_id(0) * HALF
    if PAIR:
        is_second = first >= N
        weight = second if is_second else weight
        out = second_out if is_second else out
        first -= N if is_second else 0
    staged = gl.allocate_shared_memory(number, [STAGES, OUT, TILE], shared)
    for i in gl.static_range(STAGES - 1):
        _copy_weights(
            weight, staged.index(i), first, min(i, TILES - 1) * TILE, N, K, SILU_MUL, OUT, TILE
        )
    if PDL:
        cuda.gdc_wait()
        if SHARES_INPUT:
            cuda.gdc_launch_dependents()
    plain: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    row = gl.allocate_shared_memory(number, [PADDED // TILE, 1, TILE], plain)
    x_scale = _stage_row(x, row._reinterpret(number, [1, PADDED], plain), K)
    total = gl.zeros((64, OUT), gl.float32, accumulator)
    running = row.index(0).load(as_row).broadcast_to(64, TILE)
    for tile in range(TILES):
        # the compiler adds the barriers between copies and products
        async_copy.wait_group(STAGES - 2)
        left = row.index(tile).load(as_row).broadcast_to(64, TILE)
        if not IS_FP8:
            # A product follows the one before it without a pause: only that must be over, whose
            # registers and stage are free then. The compiler knows no such wait for FP8.
            total = warpgroup_mma(
                left, staged.index(tile % STAGES).permute((1, 0)), total, is_async=True
            )
            total, running = warpgroup_mma_wait(1, deps=(total, running))
            running = left
        # The last iteration's stage is free now: the tile needed STAGES - 1 iterations later is
        # copied there. After the end the last tile is copied again and not used.
        later = gl.minimum(tile + STAGES - 1, TILES - 1) * TILE
        _copy_weights(
            weight,
            staged.index((tile + STAGES - 1) % STAGES),
            first,
            later,
            N,
            K,
            SILU_MUL,
            OUT,
            TILE,
        )
        if IS_FP8:
            total = warpgroup_mma(
                left, staged.index(tile % STAGES).permute((1, 0)), total, is_async=True
            )
            total = warpgroup_mma_wait(0, deps=(total,))
    if not IS_FP8:
        total, running = warpgroup_mma_wait(0, deps=(total, running))
    async_copy.wait_group(0)
    local = gl.arange(0, OUT, gl.SliceLayout(0, accumulator))
    place = first + local % HALF + local // HALF * N
    if IS_FP8:  # multiplied in this order, which is that of cuBLAS
        total = total * gl.load(scales + place)[None, :] * x_scale
    if HAS_BIAS:
        total += gl.load(bias + place).to(gl.float32)[None, :]
    result = total.to(dtype)
    if SILU_MUL:
        gate, up = gl.split(result.to(gl.float32).reshape(64, 2, HALF).permute(0, 2, 1))
        result = (silu(gate).to(dtype).to(gl.float32) * up).to(dtype)
    kept: gl.constexpr = result.type.layout
    which = gl.arange(0, 64, gl.SliceLayout(1, kept))[:, None]
    gl.store(
        out + first + gl.arange(0, HALF, gl.SliceLayout(0, kept))[None, :] + which,
        result,
        mask=which == 0,
    )


def takes(rows: int, weight: Tensor, silu_mul: bool) -> bool:
    """Whether this kernel can do it and is the quickest, measured on an H200 (docs/performance.md,
    attempt 29).
    """
    size, inner = weight.shape
    each, tile, _ = _tile_of(size, inner, weight.itemsize, silu_mul)
    return (
        rows == 1
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
        and inner % tile == 0
        and inner <= _MAX_INNER
        and size % each == 0
        and size < VOCABULARY_SIZE
        and torch.cuda.get_device_capability(weight.device)[0] == 9
    )


def _tile_of(size: int, inner: int, itemsize: int, silu_mul: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile of the weight, and the number of tiles in shared memory, which is
    larger where a program has a multiprocessor for itself. Bits don't depend on them.
    """
    each = 32 if size >= 4096 else 16 if size >= 2048 or silu_mul else 8
    tile = 512 // itemsize
    stages = 4 if size // each > _MULTIPROCESSORS else 6 if each == 32 and itemsize == 2 else 8
    return each, tile, max(2, min(stages, inner // tile))


def takes_pair(rows: int, first: Tensor, second: Tensor) -> bool:
    """Whether `single_row_pair` can do it: the products that `takes` says are its own, if there were
    one of both weights.
    """
    each, _, _ = _tile_of(first.shape[0] + second.shape[0], first.shape[1], first.itemsize, False)
    return (
        first.itemsize == 2
        and first.shape[0] % each == 0
        and second.shape[0] % each == 0
        and takes(rows, first, silu_mul=False)
        and takes(rows, second, silu_mul=False)
    )


def single_row_pair(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """x [1, in] times two weights [out, in] transposed, in one launch."""
    size, inner = first.shape
    outs = room_for(x, size), room_for(x, second.shape[0])
    each, tile, _ = _tile_of(size + second.shape[0], inner, first.itemsize, False)
    _single_row_kernel[((size + second.shape[0]) // each,)](
        x=x.contiguous(),
        weight=first,
        second=second,
        scales=x,
        bias=x,
        out=outs[0],
        second_out=outs[1],
        N=size,
        K=inner,
        PADDED=next_power_of_2(inner),
        HAS_BIAS=False,
        SILU_MUL=False,
        PAIR=True,
        OUT=each,
        TILE=tile,
        STAGES=max(2, min(8, inner // tile)),
        SHARES_INPUT=False,
        PDL=USE_PDL,
        num_warps=4,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return outs


def single_row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    silu_mul: bool,
    scales: Tensor | None = None,
    shares_input: bool = False,
) -> Tensor:
    """x [1, in] times weight [out, in] transposed, into `out` if given; with `silu_mul`, silu(first
    half of the outputs) * (second half). For weights where `takes` says yes; FP8 ones have scales
    [out]. `shares_input` as in `linear`.
    """
    size, inner = weight.shape
    if out is None:
        out = room_for(x, size // 2 if silu_mul else size)
    each, tile, stages = _tile_of(size, inner, weight.itemsize, silu_mul)
    _single_row_kernel[(size // each,)](
        x=x.contiguous(),
        weight=weight,
        second=weight,
        scales=x if scales is None else scales,
        bias=x if bias is None else bias,
        out=out,
        second_out=out,
        N=out.shape[1],
        K=inner,
        PADDED=next_power_of_2(inner),
        HAS_BIAS=bias is not None,
        SILU_MUL=silu_mul,
        PAIR=False,
        OUT=each,
        TILE=tile,
        STAGES=stages,
        SHARES_INPUT=shares_input,
        PDL=USE_PDL,
        num_warps=4,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return out
