"""Which tensors the C++ code takes: rows in one piece, which may be apart from each other."""

from __future__ import annotations

from torch import Tensor

MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 1024


def takes_head_dim(head_dim: int) -> bool:
    """Whether attention is computed with heads of this size."""
    return head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM


def takes_latents(head_dim: int, value_dim: int) -> bool:
    """Whether attention is computed with keys of this size, of which values are a part."""
    return head_dim % 8 == 0 and value_dim % 8 == 0 and head_dim <= MAX_LATENT_DIM


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
