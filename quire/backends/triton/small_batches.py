"""Whether the kernels for small batches and prompts in Gluon, Triton's young lower level, can be
used here.

They are tested once, on small inputs, against the kernels that they replace. They are not used with
a Triton that can't compile them, or on a GPU where they give other bits.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from quire.backends.triton.attention import decode_attention, prefill_attention
from quire.backends.triton.attention_work import attention_work
from quire.backends.triton.grouping import group_pairs
from quire.backends.triton.latent_attention import latent_attention
from quire.backends.triton.latent_work import latent_work
from quire.backends.triton.launch import num_multiprocessors
from quire.backends.triton.linear import Tile, linear
from quire.backends.triton.prompt_rules import is_hopper
from quire.backends.triton.tested import has_gluon, is_exact, random_numbers
from quire.backends.triton.tile_product import pack_codes, tile_product
from quire.kernels.formats import Format
from quire.kernels.latent import LatentSpec, latent_heads
from quire.kernels.ops import Activation, AttentionSpec, HeadShape, LayerCache
from quire.kernels.weights import Part, Weight


@cache
def are_exact(device: torch.device, dtype: torch.dtype) -> bool:
    """Tests them, once. The first call must not be during a graph capture, nor while kernels are only
    compiled; so for all that follow.
    """
    return has_gluon(device, dtype) and is_exact(
        "small batches",
        lambda: _same_products(device, dtype) & _same_attention(device, dtype),
    )


@cache
def prompts_are_exact(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Attention of prompts with heads of this size."""
    return (
        has_gluon(device, dtype)
        and is_hopper(device)
        and is_exact(
            f"prompts with heads of {head_dim}", lambda: _same_prompts(device, dtype, head_dim)
        )
    )


@cache
def latents_are_exact(device: torch.device, dtype: torch.dtype) -> bool:
    """Latent attention of single queries."""
    return has_gluon(device, dtype) and is_exact(
        "latent attention of few requests", lambda: _same_latents(device, dtype)
    )


@cache
def single_latents_are_exact(device: torch.device, dtype: torch.dtype) -> bool:
    """Latent attention of single queries of many sequences."""
    return has_gluon(device, dtype) and is_exact(
        "latent attention of many requests", lambda: _same_latents(device, dtype, is_small=False)
    )


@cache
def latent_prompts_are_exact(device: torch.device) -> bool:
    """Latent attention of prompts in bfloat16."""
    return (
        has_gluon(device, torch.bfloat16)
        and is_hopper(device)
        and is_exact("latent attention of prompts", lambda: _same_latent_prompts(device))
    )


@cache
def experts_are_exact(device: torch.device, format: Format, inner: int) -> bool:
    """The kernel for experts in a format that have so many inputs."""
    return has_gluon(device, torch.bfloat16) and is_exact(
        f"experts in {format.name}", lambda: _same_experts(device, format, inner)
    )


def _same_experts(device: torch.device, format: Format, inner: int) -> bool:
    """Whether tiles of several widths have the bits of the kernel for all formats."""
    from quire.backends.triton.expert_layouts import coding_of, pack_experts
    from quire.backends.triton.streamed_experts import expert_product

    experts, rows, size = 3, 40, 256
    stored = _random_experts(format, (experts, size, inner), device)
    coding = coding_of(format, inner)
    assert coding is not None
    pieces = pack_experts(format, coding, *stored)
    assert pieces is not None
    x = random_numbers(rows, inner, device=device, dtype=torch.bfloat16)
    shape = experts, size, inner
    weight = Weight(shape, (pack_codes(format, *stored),))
    packed = Weight(shape, (Part(format, (pieces,), size),))
    expert_ids = torch.arange(rows, dtype=torch.int32, device=device) % experts
    groups = group_pairs(expert_ids, experts, rows, 16)
    # One for each way in which weights come and are multiplied.
    lists = [group_pairs(expert_ids, experts, rows, width) for width in (8, 32, 128)]
    # products without an activation read the list early: one with it comes before them
    torch.cuda.synchronize(device)
    are_same: list[bool] = []
    for activation in (Activation.CLAMPED_SWIGLU, None):
        tile = Tile(16, 32 if activation else 64, 128, 3, 4)
        expected = tile_product(x, weight, None, groups, tile, x.dtype, 1, activation)
        found = [expert_product(x, packed, None, tiles, 1, activation) for tiles in lists]
        are_same += [torch.equal(one, expected) for one in found]
    return all(are_same)


def _random_experts(
    format: Format, shape: tuple[int, int, int], device: torch.device
) -> tuple[Tensor, ...]:
    """The tensors of a part: any codes, with scales of every size that numbers up to 2 need."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(below: int, *size: int) -> Tensor:
        return torch.randint(0, below, size, generator=generator, device=device)

    tensors = format.empty(shape, device)
    codes = tensors[0].view(-1, format.num_bytes)
    codes.copy_(drawn(256, *codes.shape))
    if format.has_zeros:
        scales = (1 + drawn(1024, tensors[1].numel()) / 1024) * 2.0 ** -(
            4 + drawn(9, tensors[1].numel())
        )
        tensors[1].copy_(scales.view(tensors[1].shape))
        tensors[2].copy_(drawn(16, *tensors[2].shape))
    elif format.name == "MXFP4":
        codes[:, 0] = 110 + codes[:, 0] % 19
    for at in format.scales:
        halves = (1 + drawn(1024, len(codes)) / 1024) * 2.0 ** -(13 + drawn(2, len(codes)))
        codes[:, at : at + 2] = halves.half().unsqueeze(-1).view(torch.uint8)
    return tensors


def _same_products(device: torch.device, dtype: torch.dtype) -> bool:
    from quire.backends.triton.single_row_linear import single_row_linear, takes

    x, weight = (
        random_numbers(1, 1024, device=device, dtype=dtype),
        random_numbers(64, 1024, device=device, dtype=dtype),
    )
    return not takes(1, weight, silu_mul=True) or all(
        torch.equal(
            single_row_linear(x, weight, None, None, silu_mul), linear(x, weight, silu_mul=silu_mul)
        )
        for silu_mul in (False, True)
    )


def _same_attention(device: torch.device, dtype: torch.dtype) -> bool:
    from quire.backends.triton.small_batch_attention import small_batch_attention

    programs = num_multiprocessors(device)
    query, cache, tables, work, spec = _sequences(
        "small", [1, 1, 1], [1, 100, 700], HeadShape(4, 2, 64), device, dtype
    )
    found, expected = torch.empty_like(query), torch.empty_like(query)
    small_batch_attention(query, found, cache, tables, work, 64, spec, programs)
    decode_attention(query, expected, cache, tables, work, 64, spec)
    return torch.equal(found, expected)


def _same_prompts(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether it has the bits of the kernel for all, with one split and with three."""
    from quire.backends.triton.prompt_attention import prompt_attention

    query, cache, tables, work, spec = _sequences(
        "prefill", [150, 33], [150, 1100], HeadShape(4, 1, head_dim), device, dtype
    )
    found, expected = torch.zeros_like(query), torch.zeros_like(query)
    prompt_attention(query, found, cache, tables, work, spec, num_multiprocessors(device))
    prefill_attention(query, expected, cache, tables, work, spec)
    return torch.equal(found, expected)


def _same_latents(device: torch.device, dtype: torch.dtype, is_small: bool = True) -> bool:
    """Whether they have the bits of the kernel for all, with one split and with two: those for few
    sequences, or the one for many.
    """
    from quire.backends.triton.single_latent import single_latent
    from quire.backends.triton.small_batch_latent import small_batch_latent

    heads = latent_heads(20, 64, 64)
    spec = LatentSpec(heads, 0.1, nope_dim=64, rope_dim=64, value_dim=64)
    programs = num_multiprocessors(device)
    lengths = np.array([100, 700], np.int32)
    ones, tables = np.ones_like(lengths), np.arange(2, dtype=np.int32)
    keys = random_numbers(96, 1, 16, heads.head_dim, device=device, dtype=dtype)
    cache = LayerCache(keys, keys[..., : spec.rank])
    query = random_numbers(2, heads.num_heads, heads.head_dim, device=device, dtype=dtype)
    blocks = torch.arange(96, dtype=torch.int32, device=device).view(2, 48)
    arguments = ones, lengths, tables, heads, programs
    (single,) = latent_work(*arguments, has_small=is_small, has_single=True).values()
    (decode,) = latent_work(*arguments).values()
    own = small_batch_latent if is_small else single_latent
    found, expected = (
        attend(query, cache, blocks, torch.from_numpy(work).to(device), spec, 700, programs)
        for attend, work in ((own, single), (latent_attention, decode))
    )
    return torch.equal(found, expected)


def _same_latent_prompts(device: torch.device) -> bool:
    """Whether it has the bits of the kernel for all, with one split and with two."""
    from quire.backends.triton.prompt_latent import prompt_latent

    heads = latent_heads(20, 256, 64)
    spec = LatentSpec(heads, 0.1, nope_dim=64, rope_dim=64, value_dim=64)
    queries, lengths = np.array([40, 9], np.int32), np.array([100, 700], np.int32)
    keys = random_numbers(96, 1, 16, heads.head_dim, device=device, dtype=torch.bfloat16)
    cache = LayerCache(keys, keys[..., : spec.rank])
    query = random_numbers(49, heads.num_heads, heads.head_dim, device=device, dtype=torch.bfloat16)
    blocks = torch.arange(96, dtype=torch.int32, device=device).view(2, 48)
    # on one multiprocessor nobody divides an item
    tables = np.arange(2, dtype=np.int32)
    (work,) = latent_work(queries, lengths, tables, heads, 1, False, True).values()
    listed = torch.from_numpy(work).to(device)
    found, expected = (
        attend(query, cache, blocks, listed, spec, 700, num_multiprocessors(device))
        for attend in (prompt_latent, latent_attention)
    )
    return torch.equal(found, expected)


def _sequences(
    name: str,
    counts: list[int],
    lengths: list[int],
    heads: HeadShape,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, LayerCache, Tensor, Tensor, AttentionSpec]:
    """Random queries, `counts` of each sequence of these `lengths`; a cache of random numbers with
    block tables; the list `name` of their attention work; a spec.
    """
    rows, blocks = len(lengths), -(-max(lengths) // 16)
    sides = random_numbers(
        2, rows * blocks, heads.num_kv_heads, 16, heads.head_dim, device=device, dtype=dtype
    )
    tables = torch.arange(rows * blocks, dtype=torch.int32, device=device).view(rows, blocks)
    query = random_numbers(sum(counts), heads.num_heads, heads.head_dim, device=device, dtype=dtype)
    of_all = np.array([counts, lengths, range(rows)], np.int32)
    work = torch.from_numpy(attention_work(of_all[0], of_all[1], of_all[2], heads, 1024)[name]).to(
        device
    )
    return (
        query,
        LayerCache(sides[0], sides[1]),
        tables,
        work,
        AttentionSpec(heads, heads.head_dim**-0.5),
    )
