"""What weights take on a GPU once `quantized.pack` has packed them, which makes most of GGUF's
formats larger: the loader asks before it reads any weight, and `quire plan` for cards that are not
here (so it needs no Triton).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from quire.backends.triton.expert_layouts import can_pack, coding_of, packed_shape
from quire.kernels.formats import Format

_FOUR_BITS = 5
"""Formats of at most so many bits, scales included, have codes of 4; the others of 8."""
_TILE_OUTPUTS, _TILE_INPUTS = 64, 128
"""Of the kernel for codes of 4 bits on Hopper."""


def packed_bytes(
    parts: Sequence[tuple[Format, tuple[int, ...]]], dtype: torch.dtype, capability: tuple[int, int]
) -> int:
    """Of a weight whose parts have these formats and shapes."""
    are_numbers = len(parts[0][1]) > 2 and len({format for format, _ in parts}) > 1
    total = 0
    for format, shape in parts:
        if are_numbers and format.dtype is None:  # the parts of a stack of experts must be alike
            total += torch.Size(shape).numel() * dtype.itemsize
        else:
            total += packed_size(format, shape, dtype, capability)
    return total


def packed_size(
    format: Format, shape: tuple[int, ...], dtype: torch.dtype, capability: tuple[int, int]
) -> int:
    """Of one matrix or stack of them. `tests/plan` hold it against what the kernels' own `pack`
    makes.
    """
    *stack, out, inner = (1, *shape) if len(shape) < 2 else shape
    numbers = torch.Size(shape).numel()
    if format.dtype is not None:
        return format.nbytes(shape)
    if format.codes is not None and not format.has_zeros:  # of 8 bits
        return format.nbytes(shape) if inner % 16 == 0 else numbers * dtype.itemsize
    group, has_minima = _groups(format)
    group = group or inner
    is_narrow = format.num_bytes * 8 <= _FOUR_BITS * format.num_elements
    is_four_bits = is_narrow and format.name not in ("Q3_K", "Q2_K", "MXFP4")
    is_even = inner % _TILE_INPUTS == 0 and (group in (32, 64) or group % _TILE_INPUTS == 0)
    if is_four_bits and not stack and capability[0] == 9 and is_even:
        rows = -(-out // _TILE_OUTPUTS) * _TILE_OUTPUTS
        return rows * (inner // 2 + inner // group * 4)
    coding = coding_of(format, inner)
    if stack and capability[0] == 9 and dtype == torch.bfloat16:  # noqa: SIM102
        if coding is not None and can_pack(coding, out, inner):
            return math.prod(packed_shape(coding, stack[0], out, inner)) * 4
    rows = numbers // inner
    padded = -(-inner // _TILE_INPUTS) * _TILE_INPUTS
    codes = padded // 2 if is_narrow else inner
    others = 1 if format.has_zeros else 4 if has_minima else 0
    return rows * (codes + inner // group * (4 + others))


@cache
def _groups(format: Format) -> tuple[int, bool]:
    """How many inputs share a scale (0: all of a row), and whether each has a minimum."""
    if format.has_zeros:
        return format.group, False
    (block,) = format.empty((1, format.num_elements))
    coded = format.coded(block.zero_())
    return format.num_elements // coded.scales.shape[-1], coded.minima is not None
