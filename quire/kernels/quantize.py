"""Plain numbers into the quantised formats that any checkpoint can be loaded in.

Each row, or block of a row, is quantised by itself, so a tensor may be taken in pieces of whole
rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.formats import FORMATS, Format

INT8, FP8, Q4_0 = FORMATS["INT8"], FORMATS["FP8"], FORMATS["Q4_0"]
LARGEST_FP8 = 448.0


def quantize(format: Format, numbers: Tensor) -> tuple[Tensor, ...] | None:
    """Numbers [..., in] as a part's tensors in INT8, FP8 or Q4_0; None if some are infinite, NaN or
    too large.
    """
    if format in (INT8, FP8):
        codes, scales = to_codes(format, numbers)
        return (codes, scales) if scales.isfinite().all() else None
    blocks = to_q4_0(numbers)
    return (blocks,) if Q4_0.has_finite_scales(blocks) else None


def to_codes(format: Format, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 (from -127 to 127) or FP8 by the largest magnitude of each row: codes [..., in], float32
    scales [...].
    """
    largest = 127.0 if format == INT8 else LARGEST_FP8
    scales = numbers.float().abs().amax(-1) / largest
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (numbers.float() / scales.unsqueeze(-1)).clamp_(-largest, largest)
    return (codes.round_() if format == INT8 else codes).to(format.codes), scales


def to_q4_0(numbers: Tensor) -> Tensor:
    """Q4_0, as llama.cpp makes it: uint8 [..., bytes of a row]. Of 32 numbers the one of the
    largest magnitude becomes -8 times the scale, the others the nearest multiples from -8 to 7.
    """
    blocks = numbers.float().reshape(-1, Q4_0.num_elements)
    scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -8
    inverse = torch.where(scales.abs() < 1e-38, 0.0, 1 / scales)  # smaller ones have no inverse
    # In float64 the product is exact, so that it makes no difference whether it is fused with the
    # sum.
    codes = blocks.double().mul_(inverse.double()).add_(8.5).clamp_(0, 15).to(torch.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    return torch.cat((scales.half().view(torch.uint8), packed), 1).view(*numbers.shape[:-1], -1)
