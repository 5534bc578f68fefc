"""Whether the kernels for small batches can be used here: they are written in Triton's lower level, which is young.

They are tried once, on small inputs, against the kernels they stand in for: a Triton that can't compile them, or a GPU
on which they give other bits, does without.
"""

from __future__ import annotations

import logging
from functools import cache

import torch

from quire.kernels.ops import AttentionSpec, HeadShape, LayerCache
from quire.kernels.triton.attention import attention, num_multiprocessors
from quire.kernels.triton.attention_work import attention_work
from quire.kernels.triton.launch import HAS_GLUON
from quire.kernels.triton.linear import linear

logger = logging.getLogger(__name__)

_HEADS = HeadShape(4, 2, 64)
_BLOCK_SIZE = 16


@cache
def are_exact(device: torch.device, dtype: torch.dtype) -> bool:
    """Tries them. Not to be called for the first time while a graph is captured."""
    if not HAS_GLUON or device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    try:
        is_exact = _same_products(device, dtype) and _same_attention(device, dtype)
    except Exception as error:  # whatever a compiler of another version says
        logger.warning("small batches take longer, as some kernels for them don't compile here: %s", error)
        return False
    if not is_exact:
        logger.warning("small batches take longer, as some kernels for them give other bits on this GPU")
    return is_exact


def _same_products(device: torch.device, dtype: torch.dtype) -> bool:
    from quire.kernels.triton.single_row_linear import single_row_linear

    x, weight = _random(1, 512, device=device, dtype=dtype), _random(64, 512, device=device, dtype=dtype)
    for silu_mul in (False, True):
        expected = linear(x, weight, silu_mul=silu_mul)
        found = torch.empty_like(expected)
        single_row_linear(x, weight, None, found, silu_mul)
        if not torch.equal(found, expected):
            return False
    return True


def _same_attention(device: torch.device, dtype: torch.dtype) -> bool:
    from quire.kernels.triton.small_batch_attention import small_batch_attention

    lengths = torch.tensor([1, 100, 700], dtype=torch.int32)
    per_row = -(-int(lengths.max()) // _BLOCK_SIZE)
    sides = _random(
        2, len(lengths) * per_row, _HEADS.num_kv_heads, _BLOCK_SIZE, _HEADS.head_dim, device=device, dtype=dtype
    )
    cache = LayerCache(sides[0], sides[1])
    tables = torch.arange(len(lengths) * per_row, dtype=torch.int32, device=device).view(len(lengths), per_row)
    query = _random(len(lengths), _HEADS.num_heads, _HEADS.head_dim, device=device, dtype=dtype)
    rows = torch.arange(len(lengths), dtype=torch.int32).numpy()
    lists = attention_work(torch.ones_like(lengths).numpy(), lengths.numpy(), rows, _HEADS, 1024)
    work = {name: torch.from_numpy(values).to(device) for name, values in lists.items()}
    spec, found = AttentionSpec(_HEADS, _HEADS.head_dim**-0.5), torch.empty_like(query)
    small_batch_attention(query, found, cache, tables, work["small"], 64, spec, num_multiprocessors(device))
    return torch.equal(found, attention(query, cache, tables, work, 64, spec))


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*shape, device=device, generator=generator).to(dtype)
