"""Whether the kernels written in Triton's lower level, which is young, can be used here: for small batches and prompts.

They are tried once, on small inputs, against the kernels they stand in for: a Triton that can't compile them, or a GPU
on which they give other bits, does without.
"""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
import torch
from torch import Tensor

from quire.kernels.ops import AttentionSpec, HeadShape, Int32Array, LayerCache
from quire.kernels.triton.attention import attention, num_multiprocessors
from quire.kernels.triton.attention_work import attention_work
from quire.kernels.triton.launch import HAS_GLUON
from quire.kernels.triton.linear import linear

logger = logging.getLogger(__name__)

_HEADS = HeadShape(4, 2, 64)
_PROMPT_HEADS = HeadShape(4, 1, 128)
_BLOCK_SIZE = 16


@cache
def are_exact(device: torch.device, dtype: torch.dtype) -> bool:
    """Tries them. Not to be called for the first time while a graph is captured."""
    if not HAS_GLUON or device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    try:
        is_exact = _same_products(device, dtype) and _same_attention(device, dtype) and _same_prompts(device, dtype)
    except Exception as error:  # whatever a compiler of another version says
        logger.warning("small batches and prompts take longer, as some kernels for them don't compile here: %s", error)
        return False
    if not is_exact:
        logger.warning("small batches and prompts take longer, as some kernels for them give other bits on this GPU")
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

    lengths = np.array([1, 100, 700], np.int32)
    query, cache, tables = _sequences(np.ones_like(lengths), lengths, _HEADS, device, dtype)
    lists = attention_work(np.ones_like(lengths), lengths, np.arange(3, dtype=np.int32), _HEADS, 1024)
    work = {name: torch.from_numpy(values).to(device) for name, values in lists.items()}
    spec, found = AttentionSpec(_HEADS, _HEADS.head_dim**-0.5), torch.empty_like(query)
    small_batch_attention(query, found, cache, tables, work["small"], 64, spec, num_multiprocessors(device))
    return torch.equal(found, attention(query, cache, tables, work, 64, spec))


def _same_prompts(device: torch.device, dtype: torch.dtype) -> bool:
    from quire.kernels.triton.prompt_attention import prompt_attention, takes

    counts, lengths = np.array([150, 33], np.int32), np.array([150, 700], np.int32)
    query, cache, tables = _sequences(counts, lengths, _PROMPT_HEADS, device, dtype)
    if not takes(query, cache):
        return True
    lists = attention_work(counts, lengths, np.arange(2, dtype=np.int32), _PROMPT_HEADS, 1024)
    work = {name: torch.from_numpy(values).to(device) for name, values in lists.items()}
    spec, found = AttentionSpec(_PROMPT_HEADS, _PROMPT_HEADS.head_dim**-0.5), torch.empty_like(query)
    prompt_attention(query, found, cache, tables, work["prefill"], spec, num_multiprocessors(device))
    return torch.equal(found, attention(query, cache, tables, work, 0, spec))


def _sequences(
    counts: Int32Array, lengths: Int32Array, heads: HeadShape, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, LayerCache, Tensor]:
    """So many queries of sequences of these lengths, a cache and block tables, of random numbers."""
    per_row = -(-int(lengths.max()) // _BLOCK_SIZE)
    shape = len(lengths) * per_row, heads.num_kv_heads, _BLOCK_SIZE, heads.head_dim
    sides = _random(2, *shape, device=device, dtype=dtype)
    tables = torch.arange(len(lengths) * per_row, dtype=torch.int32, device=device).view(len(lengths), per_row)
    query = _random(int(counts.sum()), heads.num_heads, heads.head_dim, device=device, dtype=dtype)
    return query, LayerCache(sides[0], sides[1]), tables


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*shape, device=device, generator=generator).to(dtype)
