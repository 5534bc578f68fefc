"""How launch functions see their arguments: as rows that begin at multiples of 16 bytes.

Triton compiles a kernel anew for pointers of another alignment, and spreads a row over the threads
differently then, which changes the order of additions. So a base that is not aligned (a slice of rows of an
odd size) is copied first: the same row has the same bits wherever it stood.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; the widest load of one thread."""

CHUNK = 4096
"""Tokens of the vocabulary that one program takes, or takes at a time."""


def as_rows(x: Tensor) -> Tensor:
    """x as [rows, size], a view where it can be one, its numbers side by side and its base aligned."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if (rows.stride(1) != 1 and rows.shape[1] != 1) or rows.data_ptr() % ALIGNMENT:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows


def row_stride(rows: Tensor) -> int:
    """From one row to the next. A single row may have any stride; it gets that of many."""
    return rows.shape[1] if rows.is_contiguous() else rows.stride(0)


def cdiv(size: int, by: int) -> int:
    """Rounded up; Triton's own function takes microseconds on the host."""
    return -(-size // by)


def next_power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def num_warps(elements: int) -> int:
    """Warps for a program that holds so many numbers at once: 8 numbers a thread, more where 16 warps don't do."""
    return min(16, max(1, elements // 256))
