"""The product of a single row with a small weight, where all that matters is how soon the weight is there.

A warp computes 8 outputs. Its weights go from memory straight to the registers in which the tensor core wants them,
several chunks ahead of the product, and the first of them are asked for before the kernel before has finished: weights
are constants. Little shared memory is used, so the programs of the next kernel fit beside this one's and do the same.
With a large weight `linear.py` reads more per second.

The inner dimension is walked from its beginning to its end, 16 numbers at a time, with one accumulator, so the bits
are those of all other products (see `linear.py`).

In Gluon, Triton's lower level, because where each number lies must be said: a thread reads 4 neighbours (8 bytes) of a
weight's row and hands them to the tensor core as the 4 numbers of 16 it has to supply. The instruction would rather
have 2 and 2 with 6 between them, but it adds all 16 at once: which of them is which does not matter as long as inputs
and weights agree.
"""

# ruff: noqa: RUF005  (Triton knows no * within a tuple)
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra import cuda

from quire.kernels.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL
from quire.kernels.triton.rowwise import silu

_WARPS = 2
_OUTPUTS = 8 * _WARPS
"""Of one program."""
_CHUNK = 128
"""Numbers of the inner dimension that are asked for together: 16 registers of a thread."""
_AHEAD = 8
"""Chunks on their way at once; half as many of each where there are gate and up."""
_FEWEST_AHEAD = 4
_MAX_OUTPUTS = 1024
_MAX_WEIGHT = 7 << 20


def takes(rows: int, weight: Tensor, silu_mul: bool) -> bool:
    """Whether this kernel is the quickest there is, as measured on an H200 (docs/performance.md, attempt 18): a weight
    with few outputs has too few tiles for all multiprocessors, and a small one is there before a wide tile is full."""
    size, inner = weight.shape
    return (
        rows == 1
        and weight.itemsize == 2
        and weight.numel() <= _MAX_WEIGHT
        and inner % (_FEWEST_AHEAD * _CHUNK) == 0
        and (size % (2 * _OUTPUTS) == 0 if silu_mul else size % _OUTPUTS == 0 and size <= _MAX_OUTPUTS)
    )


def single_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, silu_mul: bool) -> None:
    """x [1, in] times weight [out, in] transposed, into `out`; with `silu_mul`, silu(first half of the outputs) *
    (second half). For weights that `takes` takes."""
    inner, outputs = x.shape[1], out.shape[1]
    chunks = inner // _CHUNK
    ahead = _FEWEST_AHEAD if silu_mul or chunks % _AHEAD else _AHEAD
    _single_row_kernel[(outputs // _OUTPUTS,)](
        x, weight, weight if bias is None else bias, out, outputs,
        inner, bias is not None, silu_mul, _CHUNK, ahead, _WARPS, USE_PDL,
        num_warps=_WARPS, **ROUND_ALWAYS, **LAUNCH,
    )  # fmt: skip


@gluon.constexpr_function
def _weight_layout(chunk, warps):
    """How a chunk's weights [chunk, outputs] lie in the registers: a thread has 4 neighbours of every 16."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0]] + [[1 << bit, 0] for bit in range(4, chunk.bit_length() - 1)],
        lane_bases=[[4, 0], [8, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 8 << bit] for bit in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[chunk, 8 * warps],
    )


@gluon.jit
def _as_weight(loaded, CHUNK: gl.constexpr, OUTPUTS: gl.constexpr, LAYOUT: gl.constexpr):
    """The same registers under the instruction's names: of the 16, number (t, h, j) becomes (h, t, j)."""
    named = loaded.reshape(CHUNK // 16, 4, 2, 2, OUTPUTS).permute(0, 2, 1, 3, 4).reshape(CHUNK, OUTPUTS)
    return gl.convert_layout(named, LAYOUT, assert_trivial=True)


@gluon.jit
def _stage_inputs(x, staged, K: gl.constexpr, SPAN: gl.constexpr, WARPS: gl.constexpr):
    """x [K] to the shared memory `staged` [spans, 1, SPAN], under the names of `_as_weight`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    column = gl.arange(0, SPAN, gl.SliceLayout(0, layout))[None, :]
    parts = ()
    for i in gl.static_range(K // SPAN):  # all on their way before the first is waited for
        parts = parts + (gl.load(x + i * SPAN + column),)  # type: ignore[assignment]
    for i in gl.static_range(K // SPAN):
        staged.index(i).store(parts[i].reshape(1, SPAN // 16, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(1, SPAN))


@gluon.jit
def _single_row_kernel(
    x, weight, bias, out, N,
    K: gl.constexpr, HAS_BIAS: gl.constexpr, SILU_MUL: gl.constexpr,
    CHUNK: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """8 outputs per warp. With SILU_MUL: silu(these outputs) * (those N further on)."""
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    as_input: gl.constexpr = gl.DotOperandLayout(0, accumulator, 2)
    as_weight: gl.constexpr = gl.DotOperandLayout(1, accumulator, 2)
    read_weight: gl.constexpr = _weight_layout(CHUNK, WARPS)
    OUTPUTS: gl.constexpr = 8 * WARPS
    SPAN: gl.constexpr = AHEAD * CHUNK
    if PDL:
        cuda.gdc_launch_dependents()
    outputs = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(0, read_weight))
    weights = weight + outputs[None, :].to(gl.int64) * K + gl.arange(0, CHUNK, gl.SliceLayout(1, read_weight))[:, None]
    ups = weights + N.to(gl.int64) * K
    waiting = ()
    waiting_up = ()
    for i in gl.static_range(AHEAD):
        waiting = waiting + (gl.load(weights + i * CHUNK),)  # type: ignore[assignment]
        if SILU_MUL:
            waiting_up = waiting_up + (gl.load(ups + i * CHUNK),)  # type: ignore[assignment]
    if PDL:
        cuda.gdc_wait()
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    staged = gl.allocate_shared_memory(x.dtype.element_ty, [K // SPAN, 1, SPAN], shared)
    _stage_inputs(x, staged, K, SPAN, WARPS)
    # The instruction has 16 rows: all are this one, and one of the results is kept.
    total = gl.zeros((16, OUTPUTS), gl.float32, accumulator)
    total_up = gl.zeros((16, OUTPUTS), gl.float32, accumulator)
    for span in range(K // SPAN):
        later = gl.minimum((span + 1) * SPAN, K - SPAN)  # past the end the last is read again, which nobody uses
        for i in gl.static_range(AHEAD):
            x_tile = staged.index(span).slice(i * CHUNK, CHUNK, dim=1).load(as_input).broadcast_to(16, CHUNK)
            total = mma_v2(x_tile, _as_weight(waiting[i], CHUNK, OUTPUTS, as_weight), total)
            waiting = waiting[:i] + (gl.load(weights + later + i * CHUNK),) + waiting[i + 1 :]
            if SILU_MUL:
                total_up = mma_v2(x_tile, _as_weight(waiting_up[i], CHUNK, OUTPUTS, as_weight), total_up)
                waiting_up = waiting_up[:i] + (gl.load(ups + later + i * CHUNK),) + waiting_up[i + 1 :]
    dtype: gl.constexpr = out.dtype.element_ty
    row = gl.arange(0, 16, gl.SliceLayout(1, accumulator))[:, None]
    output = (gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(0, accumulator)))[None, :]
    if HAS_BIAS:
        total += gl.load(bias + output).to(gl.float32)
    result = total.to(dtype)
    if SILU_MUL:
        if HAS_BIAS:
            total_up += gl.load(bias + N + output).to(gl.float32)
        gate = silu(result.to(gl.float32)).to(dtype)
        result = (gate.to(gl.float32) * total_up.to(dtype).to(gl.float32)).to(dtype)
    gl.store(out + row * N + output, result, mask=row == 0)
