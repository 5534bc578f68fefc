"""Matrix products by tiles of rows: of experts with the rows routed to them, and of quantised
weights.

A row's bits do not depend on the other rows of its tile: weights are the left operand of every
product, rows the right one, and the inner dimension is walked in order with one accumulator. A
weight consists of
- plain numbers;
- numbers of 8 bits (FP8 or INT8), multiplied with rows quantised to the same format
  (`quantize_rows`). Integers add up exactly, FP8 numbers as in cuBLAS. Sums over a row, or over
  each 128 of its inputs, are multiplied by the scales;
- or codes of 4 or 8 bits, which are expanded inside the product: it has the bits of one with the
  expanded weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from quire.backends.triton.direct_launch import jit
from quire.backends.triton.grouping import GROUPED, IN_ORDER, SINGLE, Tiles
from quire.backends.triton.launch import LAUNCH, ROUND_ALWAYS, USE_PDL, begin, num_multiprocessors
from quire.backends.triton.linear import Tile
from quire.backends.triton.rowwise import NUMBERS, gated
from quire.backends.triton.shapes import as_rows, cdiv, next_power_of_2, num_warps, row_stride
from quire.kernels.formats import Format, pairs
from quire.kernels.ops import Activation
from quire.kernels.weights import Part, Weight

_PREFETCHED_LINES = 16
"""Cache lines of 128 bytes of each weight row that are prefetched by the programs of a product that
waits for the one before it only.
"""
_PLAIN, _SCALED, _IN_GROUPS, _CODED = (tl.constexpr(kind) for kind in range(4))
_HALF = tl.constexpr(64)
"""The two 4-bit codes of a byte belong to inputs that are this far apart; the first is in the lower
half.
"""


@jit
def _quantize_kernel(
    x,
    codes,
    scales,
    stride,
    LARGEST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantises one row, in groups of GROUP numbers with a scale each, which is NaN if a number is
    NaN or infinite.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    groups = tl.reshape(value, (BLOCK // GROUP, GROUP))
    magnitude = tl.where(groups == groups, tl.abs(groups), float("inf"))
    largest = tl.max(magnitude, 1)
    largest = tl.where(largest == 0.0, LARGEST, largest)
    dtype: tl.constexpr = codes.dtype.element_ty
    scaled = groups * tl.div_rn(tl.full(largest.shape, LARGEST, tl.float32), largest)[:, None]
    if dtype == tl.int8:
        scaled = tl.floor(tl.clamp(scaled, -LARGEST, LARGEST) + 0.5)
    code = tl.reshape(scaled.to(dtype), (BLOCK,))
    tl.store(codes + row * SIZE + column, code, mask=column < SIZE)
    group = tl.arange(0, BLOCK // GROUP)
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    scale = tl.where(largest == float("inf"), float("nan"), scale)
    tl.store(scales + row * tl.cdiv(SIZE, GROUP) + group, scale, mask=group * GROUP < SIZE)


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """8-bit codes [rows, size] and float32 scales [rows, groups] of `group` numbers each (0: the
    whole row).
    """
    source = as_rows(x)
    rows, size = source.shape
    block = next_power_of_2(size)
    codes = torch.empty(rows, size, dtype=dtype, device=x.device)
    scales = torch.empty(rows, size // group if group else 1, dtype=torch.float32, device=x.device)
    if rows:
        _quantize_kernel[(rows,)](
            x=source,
            codes=codes,
            scales=scales,
            stride=row_stride(source),
            LARGEST=127.0 if dtype == torch.int8 else 448.0,
            SIZE=size,
            BLOCK=block,
            GROUP=group or block,
            PDL=USE_PDL,
            num_warps=min(8, num_warps(block)),
            **LAUNCH,
        )
    return codes, scales


_MINIMA, _ZEROS = tl.constexpr(1), tl.constexpr(2)


class Coding(NamedTuple):
    """How codes are expanded to numbers."""

    nibbles: bool = False
    zero: int = 0
    """Subtracted from every code."""
    fp4: bool = False
    """Codes are floating point numbers of 4 bits, doubled, instead of integers."""
    other: int = 0
    """What a group has besides its scale: _MINIMA (subtracted last), _ZEROS (zero points,
    subtracted first) or 0.
    """


def coding_of(format: Format) -> Coding:
    if format.name == "MXFP4":
        return Coding(True, fp4=True)
    if format.has_zeros:
        return Coding(True, other=_ZEROS.value)
    has_minima = format.name in ("Q4_1", "Q4_K", "Q5_1", "Q5_K", "Q2_K")
    is_narrow = format.name.startswith(("Q4", "Q3", "Q2"))
    return Coding(
        is_narrow, {"Q4_0": 8, "Q3_K": 4}.get(format.name, 0), other=has_minima * _MINIMA.value
    )


def pack_codes(format: Format, *tensors: Tensor) -> Part:
    """A matrix, or a stack of them, as codes, scales and perhaps minima or zero points."""
    coding = coding_of(format)
    others: tuple[Tensor, ...]
    if format.has_zeros:
        codes, others = pairs(tensors[0]), tensors[1:]
        others = others if format.group else tuple(one.unsqueeze(-1) for one in others)
    else:
        codes, scales, minima = format.coded(*tensors)
        others = (scales,) if minima is None else (scales, minima)
    rows = codes.shape[-2]
    if coding.fp4:  # `coded` gave the numbers that the codes stand for: back to the codes
        size = codes.abs()
        codes = torch.where(
            size < 5, size, 4 + (size > 5).to(size) + (size > 6) + (size > 8)
        ) + 8 * (codes < 0)
    if coding.nibbles:
        codes = torch.nn.functional.pad(
            codes + coding.zero, (0, -codes.shape[-1] % (2 * _HALF.value))
        )
        low, high = codes.to(torch.uint8).view(*codes.shape[:-1], -1, 2, _HALF.value).unbind(-2)
        codes = (low | high << 4).flatten(-2)
    return Part(format, (codes.contiguous(), *(one.contiguous() for one in others)), rows)


@triton.jit
def prefetch(weight, rows, within, SIZE: tl.constexpr, LINES: tl.constexpr):
    """Prefetches the first LINES cache lines of some weight rows into the L2 cache."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    column = tl.arange(0, LINES)[None, :] * LINE
    addresses = (weight + rows[:, None] * SIZE + column).to(tl.int64)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, (within[:, None] & (column < SIZE)).to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _numbers(
    codes,
    packed,
    scales,
    others,
    k,
    exists,
    HALF: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    NIBBLES: tl.constexpr,
    ZERO: tl.constexpr,
    FP4: tl.constexpr,
    OTHER: tl.constexpr,
):
    """Numbers [rows, 64]: one half of the inputs from k to k + 128. `codes` points to the rows'
    first codes; with NIBBLES, `packed` has the codes of both halves. `scales` and `others` point to
    the rows' first ones.
    """
    PARTS: tl.constexpr = max(1, _HALF // GROUP)
    BLOCK: tl.constexpr = exists.shape[0]
    place = k + HALF * _HALF
    if NIBBLES:
        code = packed.to(tl.int32) >> 4 * HALF & 15
    else:
        inner = tl.arange(0, _HALF)[None, :]
        code = tl.load(codes + place, mask=exists[:, None] & (inner < INNER - place), other=0).to(
            tl.int32
        )
    if FP4:
        size = code & 7
        size = tl.where(size < 2, size, (2 | (size & 1)) << tl.maximum((size >> 1) - 1, 0))
        code = tl.where(code > 7, -size, size)
    group = place // GROUP + tl.arange(0, PARTS)[None, :]
    within = exists[:, None] & (group < GROUPS)
    number = tl.reshape((code - ZERO).to(tl.float32), (BLOCK, PARTS, _HALF // PARTS))
    if OTHER:
        other = tl.load(others[:, None] + group, mask=within, other=0).to(tl.float32)[:, :, None]
    if OTHER == _ZEROS:
        number -= other
    number *= tl.load(scales[:, None] + group, mask=within, other=0.0)[:, :, None]
    if OTHER == _MINIMA:
        number -= other
    return tl.reshape(number, (BLOCK, _HALF))


@jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    weight,
    scales,
    others,
    out,
    num_rows,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    NIBBLES: tl.constexpr,
    ZERO: tl.constexpr,
    FP4: tl.constexpr,
    OTHER: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Expands 128 inputs of BLOCK outputs."""
    begin(PDL)
    GROUPS: tl.constexpr = (INNER + GROUP - 1) // GROUP
    SIZE: tl.constexpr = (INNER + 127) // 128 * 64 if NIBBLES else INNER
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    k = tl.program_id(1) * 2 * _HALF
    inner = tl.arange(0, _HALF)[None, :]
    codes = weight + row[:, None] * SIZE + inner
    packed = tl.load(codes + k // 2, mask=exists[:, None], other=0) if NIBBLES else 0
    for half in tl.static_range(2):
        number = _numbers(
            codes,
            packed,
            scales + row * GROUPS,
            others + row * GROUPS,
            k,
            exists,
            half,
            INNER,
            GROUP,
            GROUPS,
            NIBBLES,
            ZERO,
            FP4,
            OTHER,
        )
        place = k + half * _HALF + inner
        target = out + row[:, None] * INNER + place
        tl.store(target, number.to(out.dtype.element_ty), mask=exists[:, None] & (place < INNER))


def expand_codes(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The numbers [out, in] of a matrix packed by `pack_codes`."""
    (part,), (size, inner) = weight.parts, weight.shape
    codes, *others = part.tensors
    numbers = torch.empty(size, inner, dtype=dtype, device=codes.device)
    coding = coding_of(part.format)
    block = 32
    _expand_kernel[(cdiv(size, block), cdiv(inner, 2 * _HALF.value))](
        weight=codes,
        scales=others[0],
        others=others[-1],
        out=numbers,
        num_rows=size,
        INNER=inner,
        GROUP=inner // others[0].shape[-1],
        NIBBLES=coding.nibbles,
        ZERO=coding.zero,
        FP4=coding.fp4,
        OTHER=coding.other,
        BLOCK=block,
        PDL=USE_PDL,
        num_warps=4,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return numbers


@triton.jit
def _matrices_of(expert, weight, shared, EXPERTS: tl.constexpr, SHARED: tl.constexpr):
    """A pointer to some matrices, and which of them is the expert's: the shared one, which has the
    number after the others, lies elsewhere.
    """
    if SHARED:
        is_shared = expert == EXPERTS
        return tl.where(is_shared, shared, weight), tl.where(is_shared, 0, expert)
    return weight, expert


@jit(do_not_specialize=["num_rows", "bound"])
def _product_kernel(
    x,
    x_scales,
    weight,
    shared,
    scales,
    others,
    bias,
    tile_experts,
    tile_counts,
    order,
    out,
    x_stride,
    num_rows,
    bound,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    NIBBLES: tl.constexpr,
    ZERO: tl.constexpr,
    FP4: tl.constexpr,
    OTHER: tl.constexpr,
    LOOPED: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of one expert's pairs times BLOCK rows of its weight [EXPERTS, rows, INNER] -> out
    [pairs, OUTER].

    GATED: the weight has 2 * OUTER rows, gate and up, and a program takes BLOCK / 2 of each; x has
    one row for TOP_K pairs. Otherwise x has a row for each pair. LISTED says where a tile's pairs
    are found (`Tiles`). LOOPED: there may be more tiles than programs, which go on to further ones.
    Scales of groups are loaded one group before they are needed (the compiler does so with
    what a product reads, not with these; it stops to do so where they come from further back).
    SHARED: expert EXPERTS has the plain matrix `shared`; of a single row it is the last pair, so that
    the first product can ask for it before anything was chosen. Its programs are the first to start.
    """
    HALF: tl.constexpr = BLOCK // 2 if GATED else BLOCK
    ROWS: tl.constexpr = 2 * OUTER if GATED else OUTER
    SIZE: tl.constexpr = (INNER + 127) // 128 * 64 if NIBBLES else INNER
    KNOWN: tl.constexpr = SHARED and GATED and LISTED == SINGLE
    first_tile = tl.program_id(1)
    if KNOWN:
        first_tile = tl.num_programs(1) - 1 - first_tile
    local = tl.arange(0, BLOCK)
    output = tl.program_id(0) * HALF + local % HALF
    weight_row = output + (local // HALF) * OUTER
    exists = output < OUTER
    if PDL:
        if GATED or LISTED == IN_ORDER:
            # Waiting first: then the work list, which an earlier kernel writes, is complete when
            # the next one starts.
            if KNOWN:
                is_shared = first_tile == tl.num_programs(1) - 1
                prefetch(shared, weight_row.to(tl.int64), exists & is_shared, SIZE, LINES)
            cuda.gdc_wait()
            cuda.gdc_launch_dependents()
        else:
            cuda.gdc_launch_dependents()
            # So the list may be read before the wait, not through the L1 cache; it is only a hint
            # for prefetching.
            likely = tl.load(tile_experts + first_tile, volatile=True)
            matrices, likely = _matrices_of(likely, weight, shared, EXPERTS, SHARED)
            valid = (likely >= 0) & (likely < EXPERTS)
            rows = tl.where(valid, likely, 0).to(tl.int64) * ROWS + weight_row
            prefetch(matrices, rows, exists & valid, SIZE, LINES)
            cuda.gdc_wait()

    slot = tl.arange(0, TILE)
    turns = 1
    if LISTED == GROUPED:
        tiles_left = tl.load(tile_counts + bound) - first_tile
        if tiles_left <= 0:
            return
        turns = tl.cdiv(tiles_left, tl.num_programs(1)) if LOOPED else 1
    for turn in range(turns):
        tile = first_tile + turn * tl.num_programs(1)
        expert = tl.zeros((), tl.int64)
        matrices = weight
        # rows after the last one are computed as copies of it and not stored
        if LISTED == IN_ORDER:
            pair = tl.minimum(tile * TILE + slot, num_rows - 1)
            occupied = tile * TILE + slot < num_rows
        else:
            expert = tl.load(tile_experts + tile).to(tl.int64)
            matrices, expert = _matrices_of(expert, weight, shared, EXPERTS, SHARED)
            if LISTED == GROUPED:
                occupied = slot < tl.load(tile_counts + tile)
                pair = tl.load(order + tile * TILE + slot, mask=occupied, other=0)
            else:
                occupied = slot < 1
                pair = tile + tl.zeros((TILE,), tl.int32)
        x_row = (pair // TOP_K if GATED else pair).to(tl.int64)
        row_of_weights = expert * ROWS + weight_row
        dtype: tl.constexpr = out.dtype.element_ty
        number: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
        total = tl.zeros((BLOCK, TILE), tl.float32 if KIND == _IN_GROUPS else number)
        if KIND == _CODED:
            inner = tl.arange(0, _HALF)[None, :]
            GROUPS: tl.constexpr = (INNER + GROUP - 1) // GROUP
            codes = weight + row_of_weights[:, None] * SIZE + inner
            inputs = x + x_row[:, None] * x_stride + inner
            for k in range(0, INNER, 2 * _HALF):
                packed = tl.load(codes + k // 2, mask=exists[:, None], other=0) if NIBBLES else 0
                for half in tl.static_range(2):
                    numbers = _numbers(
                        codes,
                        packed,
                        scales + row_of_weights * GROUPS,
                        others + row_of_weights * GROUPS,
                        k,
                        exists,
                        half,
                        INNER,
                        GROUP,
                        GROUPS,
                        NIBBLES,
                        ZERO,
                        FP4,
                        OTHER,
                    )
                    place = k + half * _HALF
                    input_tile = tl.load(
                        inputs + place, mask=occupied[:, None] & (inner < INNER - place), other=0.0
                    )
                    total = tl.dot(
                        numbers.to(dtype), tl.trans(input_tile), total, input_precision="ieee"
                    )
        else:
            inner = tl.arange(0, BLOCK_K)[None, :]
            weights = matrices + row_of_weights[:, None] * INNER + inner
            inputs = x + x_row[:, None] * x_stride + inner
            LAST: tl.constexpr = INNER // BLOCK_K - 1
            row_scales = scales + row_of_weights * (LAST + 1)
            input_scales = x_scales + x_row * (LAST + 1)
            if KIND == _IN_GROUPS:
                scale = tl.load(row_scales, mask=exists, other=0.0)
                x_scale = tl.load(input_scales)
            for k in range(0, INNER, BLOCK_K):
                if INNER % BLOCK_K == 0:
                    # No masks where they are not needed: they cost time.
                    weight_tile = tl.load(
                        weights, mask=None if OUTER % HALF == 0 else exists[:, None]
                    )
                    input_tile = tl.load(
                        inputs, mask=None if LISTED == IN_ORDER else occupied[:, None]
                    )
                else:
                    within = inner < INNER - k
                    weight_tile = tl.load(weights, mask=exists[:, None] & within, other=0.0)
                    input_tile = tl.load(inputs, mask=occupied[:, None] & within, other=0.0)
                if KIND == _IN_GROUPS:
                    group = k // BLOCK_K
                    later = tl.minimum(group + 1, LAST)
                    next_scale = tl.load(row_scales + later, mask=exists, other=0.0)
                    next_x_scale = tl.load(input_scales + later)
                    product = tl.dot(weight_tile, tl.trans(input_tile), out_dtype=number).to(
                        tl.float32
                    )
                    total += product * (scale[:, None] * x_scale[None, :])
                    scale, x_scale = next_scale, next_x_scale
                else:
                    total = tl.dot(
                        weight_tile,
                        tl.trans(input_tile),
                        total,
                        input_precision="ieee",
                        out_dtype=number,
                    )
                weights += BLOCK_K
                inputs += BLOCK_K
        if KIND == _SCALED:  # multiplied in this order, which is that of cuBLAS
            scale = tl.load(scales + row_of_weights, mask=exists, other=0.0)
            total = total.to(tl.float32) * scale[:, None] * tl.load(x_scales + x_row)[None, :]
        if BIAS:
            total += tl.load(bias + row_of_weights, mask=exists, other=0.0)[:, None].to(tl.float32)
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(total, (2, HALF, TILE)), (1, 2, 0)))
            total = gated(
                gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype
            )
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        target = out + pair.to(tl.int64)[None, :] * OUTER + column[:, None]
        tl.store(target, total.to(dtype), mask=occupied[None, :] & (column < OUTER)[:, None])


def tile_product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    tiles: Tiles,
    tile: Tile,
    dtype: torch.dtype,
    top_k: int = 1,
    activation: Activation | None = None,
    x_scales: Tensor | None = None,
    out: Tensor | None = None,
    shared: Tensor | None = None,
) -> Tensor:
    """[pairs, outputs]: the rows of x of each tile times the weight of its expert, plus bias. With
    an activation: activation(first half of the outputs) * second half, and x has one row for
    `top_k` pairs. With 8-bit weights, x and x_scales are what `quantize_rows` returns. `shared`
    is the matrix of the expert after the last one, where weights are plain.
    """
    (part,) = weight.parts
    *stack, size, inner = weight.shape
    first, *others = part.tensors
    outer = size // 2 if activation else size
    coding, group, kind = Coding(), 0, _PLAIN.value
    if part.format.codes is not None and not part.format.has_zeros:
        kind = _IN_GROUPS.value if part.format.group else _SCALED.value
    elif others:
        coding, group, kind = coding_of(part.format), inner // others[0].shape[-1], _CODED.value
    if out is None:
        out = torch.empty(tiles.pairs, outer, dtype=dtype, device=x.device)
    blocks = cdiv(outer, tile.outputs)
    is_looped = (
        tiles.listed == GROUPED.value
        and kind == _PLAIN.value
        and activation is None
        and dtype.itemsize == 2
    )
    lines = _PREFETCHED_LINES
    if activation is not None and shared is not None:  # whole rows: there is time
        lines = next_power_of_2(cdiv(inner * first.itemsize, 128))
    programs = (
        min(tiles.bound, max(1, 2 * num_multiprocessors(x.device) // blocks))
        if is_looped
        else tiles.bound
    )
    _product_kernel[(blocks, programs)](
        x=x,
        x_scales=x if x_scales is None else x_scales,
        weight=first,
        shared=first if shared is None else shared,
        scales=others[0] if others else first,
        others=others[-1] if others else first,
        bias=first if bias is None else bias,
        tile_experts=tiles.experts,
        tile_counts=tiles.counts,
        order=tiles.order,
        out=out,
        x_stride=row_stride(x),
        num_rows=tiles.pairs,
        bound=tiles.bound,
        EXPERTS=stack[0] if stack else 1,
        INNER=inner,
        OUTER=outer,
        TOP_K=top_k,
        KIND=kind,
        GATED=activation is not None,
        ACTIVATION=0 if activation is None else NUMBERS[activation],
        BIAS=bias is not None,
        LISTED=tiles.listed,
        GROUP=group,
        NIBBLES=coding.nibbles,
        ZERO=coding.zero,
        FP4=coding.fp4,
        OTHER=coding.other,
        LOOPED=is_looped,
        SHARED=shared is not None,
        BLOCK=2 * tile.outputs if activation else tile.outputs,
        TILE=tiles.width,
        BLOCK_K=tile.inner,
        LINES=lines,
        PDL=USE_PDL,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **ROUND_ALWAYS,
        **LAUNCH,
    )
    return out
