"""Helpers of launch functions: tensors as rows whose memory begins at a multiple of 16 bytes.

For a pointer with another alignment Triton compiles another kernel, which distributes a row
differently over the threads and so adds in another order. So a tensor that is not aligned (a slice
of rows of an odd size) is copied first: a row has the same bits wherever it lies.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes: the widest load of one thread."""

CHUNK = 4096
"""Tokens of the vocabulary that one program handles, or handles at a time."""


def as_rows(x: Tensor) -> Tensor:
    """x as [rows, size] with contiguous rows and an aligned base: a view where possible, else a
    copy.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if (rows.stride(1) != 1 and rows.shape[1] != 1) or rows.data_ptr() % ALIGNMENT:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows


def like_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Memory for as many numbers as x has, by x's shape, contiguous. `rows` is what `as_rows` made of
    x. (Sizes one by one: torch takes twice as long to read a shape.)
    """
    made = torch.empty(rows.shape[0], rows.shape[1], dtype=x.dtype, device=x.device)
    return made if x.dim() == 2 else made.view(x.shape)


def row_stride(rows: Tensor) -> int:
    """The distance from one row to the next. A single row may have any stride; it gets that of
    contiguous rows.
    """
    return rows.shape[1] if rows.is_contiguous() else rows.stride(0)


def is_wide(blocks: Tensor) -> bool:
    """Whether places in it need more than 32 bits. Its blocks may be parts of larger ones, so that
    they lie further apart than they are long.
    """
    return blocks.shape[0] * blocks.stride(0) >= 1 << 31


def cdiv(size: int, by: int) -> int:
    """Division rounded up; Triton's own function takes microseconds on the host."""
    return -(-size // by)


def next_power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def num_warps(elements: int) -> int:
    """Warps for a program that holds this many numbers: 8 per thread, more where 16 warps are not
    enough.
    """
    return min(16, max(1, elements // 256))
