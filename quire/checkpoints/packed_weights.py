"""Quantised weights as other tools store them, brought into the tensors of our formats FP8 and
INT4.

fp8: `NAME` [out, in] of FP8 with `NAME_scale` or `NAME_scale_inv`: one number, one per output, or
one per block of 128 by 128. awq: `qweight` int32 [in, out / 8], eight outputs in a number, the even
ones first, `qzeros` [groups, out / 8] likewise, `scales` [groups, out]. gptq: `qweight` int32 [in /
8, out], eight inputs in a number; `qzeros` and `scales` as with awq, but outputs in their order.
pack-quantized: `NAME_packed` int32 [out, in / 8], `NAME_scale` [out, groups] and, where it is not
symmetric, `NAME_zero_point` int32 [out / 8, groups].
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.checkpoints.quantization_config import BLOCK, Layout

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a number each of eight outputs is."""


def fp8_scales(scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Of each output [out], or of each output and 128 inputs [out, groups]."""
    out, inner = shape
    if scales.numel() == 1:
        return scales.reshape(1).expand(out)
    if scales.numel() == out:
        return scales.reshape(out)
    return scales.repeat_interleave(BLOCK, 0)[:out, : inner // BLOCK]


def fp8_scale_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Those that `fp8_scales` takes; the last is that of blocks."""
    out, inner = shape
    return [(), (1,), (out,), (out, 1), (-(-out // BLOCK), -(-inner // BLOCK))]


def _unpacked(numbers: Tensor, along: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 of eight codes each, as uint8 codes, eight times as many along one dimension."""
    codes = [(numbers >> 4 * place & 15).to(torch.uint8) for place in order]
    return torch.stack(codes, along + 1).flatten(along, along + 1)


def _paired(codes: Tensor) -> Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4


def int4_tensors(
    layout: Layout, packed: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """A part's codes [out, in / 2], scales and zero points [out, groups] ([out] of whole rows) from
    stored tensors.
    """
    if layout.name == "pack-quantized":
        points = (
            torch.full(scales.shape, 8, dtype=torch.uint8)
            if zeros is None
            else _unpacked(zeros, 0)[: len(scales)]
        )
        paired = packed.view(torch.uint8).view(len(packed), -1)
    else:
        assert zeros is not None
        order = _AWQ_ORDER if layout.name == "awq" else tuple(range(8))
        codes = _unpacked(packed, 1, order) if layout.name == "awq" else _unpacked(packed, 0)
        paired = _paired(codes.t().contiguous())
        points = (_unpacked(zeros, 1, order) + layout.added_to_zeros).t()
        scales = scales.t()
    if not layout.group:
        scales, points = scales.squeeze(1), points.squeeze(1)
    return paired, scales.float().contiguous(), points.contiguous()
