"""Tensors whose rows are in one piece, and may be apart from each other."""

from __future__ import annotations

from torch import Tensor


def with_whole_rows(x: Tensor) -> Tensor:
    """x, or a copy if a row is not contiguous; rows may be apart from each other, as in a slice of
    a projection.
    """
    inner = x.stride()[1:]
    return x if inner == (1,) or inner == (x.shape[-1], 1) else x.contiguous()


def block_stride(keys: Tensor | None, values: Tensor | None) -> int:
    """Numbers from block to block: more than a block has where it holds other layers' numbers too."""
    if keys is None or values is None:
        return 0
    if keys.stride(0) != values.stride(0):
        raise ValueError(f"blocks of keys {keys.stride()} and of values {values.stride()} differ")
    return values.stride(0)
