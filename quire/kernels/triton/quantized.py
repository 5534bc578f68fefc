"""Products with weights in fewer bits than the model's dtype, by the quickest kernel for the format and the rows.

FP8 and INT8 weights meet rows that are quantised on the way, each by itself (`scaled_linear.py`). Weights of 4 bits
become numbers of the model's dtype, in registers (`streamed_linear.py`) or, for many rows, before the product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.formats import Format, int4_parts
from quire.kernels.triton.launch import HAS_GLUON
from quire.kernels.triton.linear import Tile, room_for
from quire.kernels.triton.scaled_linear import quantize_rows, scaled_linear
from quire.kernels.triton.shapes import next_power_of_2
from quire.kernels.weights import Part, Weight

if HAS_GLUON:
    from quire.kernels.triton.streamed_linear import MAX_ROWS, Int4, can_pack, expand_int4, int4_linear, pack_int4

HAS_MINIMA = ("Q4_1", "Q4_K")
INT4_NAMES = ("Q4_0", *HAS_MINIMA, "INT4", "INT4_G32", "INT4_G64", "INT4_G128")
_OWN_ROWS = 128
"""Up to here our kernel is quicker than cuBLAS with FP8, as it overlaps with its neighbours."""
_CHECKED_ROWS = (16, 17, 64, 255, 256, 1000)


def computes(format: Format) -> bool:
    """Whether this GPU computes with weights in a format as they are stored."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if format.codes == torch.float8_e4m3fn:
        return capability >= (9, 0)
    if format.codes == torch.int8:
        return capability >= (8, 0)
    return HAS_GLUON and format.name in INT4_NAMES and capability[0] == 9


def pack(weight: Weight, dtype: torch.dtype) -> Weight:
    """A matrix with its parts of 4 bits in the layout of their kernel, or expanded where that does not take their
    shape."""
    return Weight.stacked(_packed(part, dtype) for part, _ in weight.split())


def _packed(weight: Weight, dtype: torch.dtype) -> Weight:
    (out, inner), (part,) = weight.shape, weight.parts
    if part.format.name in INT4_NAMES:
        codes, scales, zeros, minima = int4_parts(part.format, *part.tensors)
        if can_pack(out, inner, inner // scales.shape[1]):
            packed = pack_int4(codes, scales, zeros, minima, dtype)
            return Weight(weight.shape, (Part(part.format, (packed.codes, packed.scales), out),))
    elif inner % 16 == 0 and out % 16 == 0:
        return weight
    return Weight.dense(part.format.expand(*part.tensors).to(dtype))


class QuantizedProducts:
    """Remembers for which shapes cuBLAS gives our kernel's bits. `dense` is the product with plain numbers."""

    def __init__(self, dense: Callable[[Tensor, Weight, Tensor | None, Tensor | None], Tensor]) -> None:
        self._dense = dense
        self._is_exact: dict[torch.Size, bool] = {}

    def check(self, weight: Weight) -> None:
        """Tries cuBLAS; as this can't be done while a graph is captured, it is when weights are loaded."""
        for part in weight.parts:
            if part.format.codes == torch.float8_e4m3fn and not part.format.group:
                codes, scales = part.tensors
                if codes.shape not in self._is_exact:
                    self._is_exact[codes.shape] = _rows_are_exact(codes, scales)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor | None, silu_mul: bool) -> Tensor:
        """x [rows, in] times a weight of one part that is not plain numbers; with `silu_mul`, silu(first half of the
        outputs) * (second half), where `fuses` says so."""
        (part,), rows = weight.parts, x.shape[0]
        given = out
        if out is None:
            out = room_for(x, weight.shape[0] // 2 if silu_mul else weight.shape[0])
        if part.format.codes is None or part.format.has_zeros:
            packed = Int4(part.tensors[0], part.tensors[1], part.format.name in HAS_MINIMA)
            if rows > MAX_ROWS:
                return self._dense(x, Weight.dense(expand_int4(packed, x.dtype)), bias, given)
            int4_linear(x.contiguous(), packed, bias, out)
            return out
        codes, scales = part.tensors
        rounded, row_scales = quantize_rows(x, codes.dtype, part.format.group)
        is_plain = x.dtype == torch.bfloat16 and bias is None and not part.format.group
        if rows > _OWN_ROWS and is_plain and self._is_exact.get(codes.shape):
            product = _scaled_mm(rounded, row_scales, codes, scales)
            return product if given is None else given.copy_(product)
        tile = tile_of(rows, codes.shape[0], silu_mul, part.format.group)
        return scaled_linear(rounded, row_scales, codes, scales, bias, out, silu_mul, tile)

    def fuses(self, rows: int, weight: Weight) -> bool:
        """Whether `linear` can take gate and up together, and is the quicker for it."""
        format = weight.format
        return format is not None and format.codes in (torch.int8, torch.float8_e4m3fn) and rows <= _OWN_ROWS


def tile_of(rows: int, size: int, silu_mul: bool, group: int) -> Tile:
    """The quickest of those tried on an H200; bits don't depend on it, but for the inner size of groups."""
    if group:
        return Tile(16, 64, group, 5, 4) if rows <= 16 else Tile(min(128, next_power_of_2(rows)), 64, group, 4, 4)
    if rows <= 32:
        return Tile(16 if rows <= 16 else 32, 64, 256, 4 if silu_mul else 8, 4)
    if rows <= _OWN_ROWS:
        return Tile(64, 64, 256, 3, 4) if silu_mul else Tile(64, 64 if size <= 8192 else 128, 256, 3, 4)
    return Tile(128, 128, 128, 3, 8)


def _scaled_mm(rounded: Tensor, row_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    # With fast accumulation it adds as our kernel does: all of the inner dimension in the tensor cores' accumulator.
    return torch._scaled_mm(
        rounded,
        codes.t(),
        scale_a=row_scales,
        scale_b=scales.unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _rows_are_exact(codes: Tensor, scales: Tensor) -> bool:
    size, inner = codes.shape
    generator = torch.Generator(device=codes.device).manual_seed(0)
    x = torch.randn(max(_CHECKED_ROWS), inner, device=codes.device, generator=generator).bfloat16()
    rounded, row_scales = quantize_rows(x, codes.dtype, 0)
    out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
    expected = scaled_linear(rounded, row_scales, codes, scales, None, out, False, tile_of(1, size, False, 0))
    try:
        return all(
            torch.equal(_scaled_mm(rounded[:rows], row_scales[:rows], codes, scales), expected[:rows])
            for rows in _CHECKED_ROWS
        )
    except RuntimeError:  # where there is no such product
        return False
