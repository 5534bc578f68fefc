"""What the kernel for prompts on Hopper (`prompt_attention.py`) takes; `attention._prefill_kernel` takes
the rest, with the same bits. Apart from the kernel, which can't be imported without Gluon.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from quire.kernels.ops import AttentionSpec, LayerCache

HEAD_DIMS = (64, 128, 256)
SMALLEST_WINDOW = 512
"""Keys. At the start and at the end of an item of work nothing overlaps in the kernel for Hopper, which
pays only if there are many tiles between (docs/performance.md, attempt 68).
"""
_BLOCK_SIZES = (16, 32, 64)


def takes(query: Tensor, cache: LayerCache, spec: AttentionSpec, has_slopes: bool) -> bool:
    return (
        query.itemsize == 2
        and cache.keys.dtype == query.dtype
        and query.shape[2] in HEAD_DIMS
        and (spec.sliding_window is None or spec.sliding_window >= SMALLEST_WINDOW)
        and not spec.soft_cap
        and not has_slopes
        and cache.block_size in _BLOCK_SIZES
        and cache.keys.is_contiguous()
        and cache.values.is_contiguous()
        and is_hopper(query.device)
    )


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
