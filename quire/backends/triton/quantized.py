"""Matrix products with quantised weights, by the quickest kernel for the format and the number of
rows.

With FP8 and INT8 weights, the rows of x are quantised to the same format, each row by itself.
Weights of 4 bits and in GGUF's formats are expanded to the model's dtype: inside the product
(`streamed_linear.py` where possible, for few rows `few_rows_int4.py`, else `tile_product.py`), or
before it if there are many rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.backends.triton.expert_layouts import can_pack as can_stream
from quire.backends.triton.expert_layouts import coding_of, pack_experts
from quire.backends.triton.grouping import rows_in_order
from quire.backends.triton.launch import HAS_GLUON
from quire.backends.triton.linear import Tile, room_for
from quire.backends.triton.shapes import next_power_of_2
from quire.backends.triton.small_batches import are_exact, experts_are_exact
from quire.backends.triton.tile_product import expand_codes, pack_codes, quantize_rows, tile_product
from quire.kernels.formats import FORMATS, Format, gpu_computes, pairs
from quire.kernels.ops import Activation
from quire.kernels.weights import Part, Weight

if HAS_GLUON:
    from quire.backends.triton import single_row_linear
    from quire.backends.triton.few_rows_int4 import FEW_ROWS, few_rows_linear
    from quire.backends.triton.streamed_linear import (
        MAX_ROWS,
        Int4,
        can_pack,
        expand_int4,
        int4_linear,
        pack_int4,
    )

HAS_MINIMA = ("Q4_1", "Q4_K")
INT4_NAMES = ("Q4_0", *HAS_MINIMA, "INT4", "INT4_G32", "INT4_G64", "INT4_G128")
_NAMES = (*INT4_NAMES, "Q8_0", "Q6_K", "Q5_0", "Q5_1", "Q5_K", "Q3_K", "Q2_K", "MXFP4")
"""Formats that are expanded inside the product."""
_OWN_ROWS = 64
"""Up to this many rows our FP8 kernel is quicker than cuBLAS, as it overlaps with the kernels
around it (PDL).
"""
_TILED_ROWS = 128
"""Up to this many rows codes are expanded inside the product, and gate and up are computed
together.
"""
_CHECKED_ROWS = (16, 17, 64, 72, 96, 128, 255, 256, 1000)


def computes(format: Format) -> bool:
    """Whether this GPU computes with weights stored in a format, without expanding them at loading."""
    return gpu_computes(format, capability())


def capability() -> tuple[int, int]:
    """The GPU's compute capability; (0, 0) if there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def pack(weight: Weight, dtype: torch.dtype) -> Weight:
    """A matrix, or a stack of them, with each part in the layout of its kernel. Expanded where no
    kernel takes the shape, or a stack has parts in different formats.
    """
    parts = [_packed(part, dtype) for part, _ in weight.split()]
    if len(weight.shape) > 2 and len(parts) > 1:
        numbers = [
            part.format.expand(*part.tensors).view(*weight.shape[:1], part.rows, -1)
            for part in weight.parts
        ]
        return Weight.dense(torch.cat([one.to(dtype) for one in numbers], 1))
    return Weight.stacked(parts)


def _packed(weight: Weight, dtype: torch.dtype) -> Weight:
    (*stack, out, inner), (part,) = weight.shape, weight.parts
    format = part.format
    if format.dtype is not None:
        return weight
    if format.name not in _NAMES:  # of 8 bits
        return (
            weight
            if inner % 16 == 0
            else Weight.dense(format.expand(*part.tensors).view(weight.shape).to(dtype))
        )
    if (
        format.name in INT4_NAMES
        and HAS_GLUON
        and not stack
        and torch.cuda.get_device_capability()[0] == 9
    ):
        packed = _streamed(part, out, inner, dtype)
        if packed is not None:
            return Weight(weight.shape, (Part(format, packed[:2], out),))
    coding = coding_of(format, inner)
    if coding is not None and can_stream(coding, out, inner) and _streams_experts(weight, dtype):
        pieces = pack_experts(format, coding, *part.tensors)
        if pieces is not None:
            return Weight(weight.shape, (Part(format, (pieces,), out),))
    return Weight(weight.shape, (pack_codes(format, *part.tensors),))


def _streams_experts(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether `streamed_experts.py` has a kernel for experts in this format, which is tested on a
    GPU.
    """
    if len(weight.shape) != 3 or dtype != torch.bfloat16:
        return False
    if not HAS_GLUON or torch.cuda.get_device_capability()[0] != 9:
        return False
    format = weight.parts[0].format
    return weight.device.type != "cuda" or experts_are_exact(
        weight.device, format, weight.shape[-1]
    )


def _streamed(part: Part, out: int, inner: int, dtype: torch.dtype) -> Int4 | None:
    """The weight packed for `streamed_linear.py`, or None if that does not take the shape."""
    if part.format.has_zeros:
        codes, scales, zeros = (
            pairs(part.tensors[0]),
            part.tensors[1].view(out, -1),
            part.tensors[2].view(out, -1),
        )
        minima = None
    else:
        codes, scales, minima = part.format.coded(*part.tensors)
        zero = 8 if minima is None else 0
        codes, zeros = codes + zero, torch.full_like(scales, zero)
    if not can_pack(inner, inner // scales.shape[1]):
        return None
    return pack_int4(codes.to(torch.uint8), scales, zeros, minima, dtype)


class QuantizedProducts:
    """Products with quantised weights. Remembers for which shapes cuBLAS and the single-row kernel
    give the same bits as ours. `dense` is the product with plain numbers.
    """

    def __init__(
        self, dense: Callable[[Tensor, Weight, Tensor | None, Tensor | None], Tensor]
    ) -> None:
        self._dense = dense
        self._checked: dict[tuple[str, torch.Size], tuple[bool, bool]] = {}

    def check(self, weight: Weight, dtype: torch.dtype) -> None:
        """Tests cuBLAS and the single-row kernel for a weight's shape. Done when weights are
        loaded, as it can't be done during a graph capture.
        """
        for part in weight.parts:
            if (
                part.format.codes == torch.float8_e4m3fn
                and not part.format.group
                and len(weight.shape) == 2
            ):
                codes, scales = part.tensors
                if (part.format.name, codes.shape) not in self._checked:
                    self._checked[part.format.name, codes.shape] = _rows_are_exact(
                        codes, scales, dtype
                    )

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor | None, silu_mul: bool
    ) -> Tensor:
        """x [rows, in] times a weight of one part that is not plain numbers; with `silu_mul`,
        silu(first half of the outputs) * (second half), where `fuses` says so.
        """
        (part,), rows = weight.parts, x.shape[0]
        given = out
        if out is None:
            out = room_for(x, weight.shape[0] // 2 if silu_mul else weight.shape[0])
        if part.tensors[0].dtype == torch.int32:
            packed = Int4(part.tensors[0], part.tensors[1], part.format.name in HAS_MINIMA)
            if rows > MAX_ROWS:
                return self._dense(
                    x, Weight.dense(expand_int4(packed, x.dtype)[: part.rows]), bias, given
                )
            compute = few_rows_linear if rows <= FEW_ROWS else int4_linear
            compute(x.contiguous(), packed, bias, out)
            return out
        activation, codes = Activation.SILU if silu_mul else None, part.tensors[0]
        tile = tile_of(rows, codes.shape[0], silu_mul, part.format.group)
        if part.format.name in _NAMES:
            if rows > _TILED_ROWS:
                return self._dense(x, Weight.dense(expand_codes(weight, x.dtype)), bias, given)
            tile = Tile(min(64, max(16, next_power_of_2(rows))), 64, 128, 3, 4)
            return tile_product(
                x.contiguous(), weight, bias, rows_in_order(x, tile.rows), tile, x.dtype, out=out
            )
        cublas, single = self._checked.get((part.format.name, codes.shape), (False, False))
        if rows == 1 and single and single_row_linear.takes(1, codes, silu_mul):
            return single_row_linear.single_row_linear(
                x, codes, bias, out, silu_mul, part.tensors[1]
            )
        rounded, row_scales = quantize_rows(x, codes.dtype, part.format.group)
        if rows > _OWN_ROWS and cublas and bias is None:
            product = _scaled_mm(rounded, row_scales, codes, part.tensors[1])
            return product if given is None else given.copy_(product)
        tiles = rows_in_order(rounded, tile.rows)
        return tile_product(
            rounded, weight, bias, tiles, tile, x.dtype, 1, activation, row_scales, out
        )

    def fuses(self, rows: int, weight: Weight) -> bool:
        """Whether `linear` can compute gate and up together, and is quicker that way."""
        format = weight.format
        if format is None or format.has_zeros or format.codes is None:
            return False
        return rows <= (_TILED_ROWS if format.group or format.codes == torch.int8 else _OWN_ROWS)


def tile_of(rows: int, size: int, silu_mul: bool, group: int) -> Tile:
    """The quickest tile of those tried on an H200; with groups its inner size must be the group
    size.
    """
    if group:
        return (
            Tile(16, 64, group, 5, 4)
            if rows <= 16
            else Tile(min(128, next_power_of_2(rows)), 64, group, 4, 4)
        )
    if rows <= 32:
        return Tile(16 if rows <= 16 else 32, 64, 256, 4 if silu_mul else 8, 4)
    if rows <= _TILED_ROWS:
        return (
            Tile(64, 64, 256, 3, 4)
            if silu_mul
            else Tile(64, 64 if size <= 8192 else 128, 256, 3, 4)
        )
    return Tile(128, 128, 128, 3, 8)


def _scaled_mm(rounded: Tensor, row_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    # use_fast_accum: it then adds as our kernel does, the whole inner dimension in the tensor
    # cores' accumulator.
    return torch._scaled_mm(
        rounded,
        codes.t(),
        row_scales,
        scales.unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _rows_are_exact(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether cuBLAS, and whether the single-row kernel, give the same bits as `tile_product`."""
    size, inner = codes.shape
    generator = torch.Generator(device=codes.device).manual_seed(0)
    x = torch.randn(max(_CHECKED_ROWS), inner, device=codes.device, generator=generator).to(dtype)
    rounded, row_scales = quantize_rows(x, codes.dtype, 0)
    weight = Weight.of(FORMATS["FP8"], (size, inner), codes, scales)
    tile = tile_of(1, size, False, 0)
    expected = tile_product(
        rounded, weight, None, rows_in_order(x, tile.rows), tile, dtype, x_scales=row_scales
    )
    has_single = are_exact(codes.device, dtype) and single_row_linear.takes(1, codes, False)
    single = (
        single_row_linear.single_row_linear(x[:1], codes, None, None, False, scales)
        if has_single
        else x[:0]
    )
    try:
        return dtype == torch.bfloat16 and all(
            torch.equal(
                _scaled_mm(rounded[:rows], row_scales[:rows], codes, scales), expected[:rows]
            )
            for rows in _CHECKED_ROWS
        ), torch.equal(single, expected[:1])
    except RuntimeError:  # torch has no such product for this device or shape
        return False, torch.equal(single, expected[:1])
