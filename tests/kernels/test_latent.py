"""Latent attention: against keys and values that are made from the latents, in float64; and the
same bits in any company.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels.latent import LatentSpec, latent_heads
from quire.kernels.ops import Kernels, LatentNorm, LayerCache
from quire.kernels.reference import ReferenceKernels
from quire.kernels.weights import Weight
from tests.kernels.cpu_support import (
    NAN,
    REFERENCE,
    VARIANTS,
    assert_close,
    is_best_again,
    make_batch,
    make_cache,
    random,
    variant_kernels,
)

SIZES = {
    "true": LatentSpec(
        latent_heads(20, 512, 64), 0.06, nope_dim=192, rope_dim=64, value_dim=256, query_rank=768
    ),
    "small": LatentSpec(latent_heads(3, 24, 8), 0.3, nope_dim=10, rope_dim=8, value_dim=6),
    "many heads": LatentSpec(latent_heads(70, 40, 8), 0.2, nope_dim=16, rope_dim=8, value_dim=16),
    "odd": LatentSpec(latent_heads(2, 30, 10), 0.3, nope_dim=6, rope_dim=10, value_dim=7),
}
STORED = {"plain": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
CONTEXTS, QUERIES = [5, 300, 67], [5, 1, 40]


@pytest.fixture(
    scope="module",
    params=[
        "reference",
        "best",
        *(pytest.param(one, marks=pytest.mark.slow) for one in VARIANTS if one != "best"),
    ],
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "reference":
        return ReferenceKernels()
    if is_best_again(request.param):
        pytest.skip("the same as best here")
    return variant_kernels(request.param)


def latent_cache(
    spec: LatentSpec, latents: list[Tensor], stored: torch.dtype | None
) -> tuple[LayerCache, Tensor]:
    """The latents of some sequences; what belongs to nobody is NaN."""
    cache, tables = make_cache([(one, one) for one in latents], 16, 3, NAN, stored)
    scale = cache.fp8_scales[0]
    return (
        replace(
            cache,
            values=cache.keys[..., : spec.rank],
            value_scales=cache.key_scales,
            fp8_scales=(scale, scale),
        ),
        tables,
    )


def stored_latents(cache: LayerCache, table: Tensor, length: int) -> Tensor:
    """A sequence's latents as the cache has them, in float64."""
    blocks = table[: -(-length // 16)].long()
    bits = cache.keys.view(torch.uint8) if cache.keys.dtype.itemsize == 1 else cache.keys
    numbers = bits[blocks].view(cache.keys.dtype).double() * cache.fp8_scales[0]
    if cache.key_scales is not None:
        numbers = numbers * cache.key_scales[blocks].unsqueeze(-1)
    return numbers.flatten(0, 2)[:length]


def expanded_attention(query: Tensor, latents: Tensor, up: Tensor, spec: LatentSpec) -> Tensor:
    """The other form: of queries [rows, heads, nope + rope] and matrices [heads, nope + value,
    rank], the last rows of a sequence. Keys and values of every head are made first.
    """
    made = torch.einsum("hor,tr->hto", up, latents[:, : spec.rank])
    keys, values = made.split_with_sizes((spec.nope_dim, spec.value_dim), 2)
    rotated = latents[:, spec.rank :].expand(len(up), -1, -1)
    keys = torch.cat((keys, rotated), 2)
    scores = torch.einsum("qhd,htd->hqt", query, keys) * spec.scale
    ends = torch.arange(len(latents) - len(query), len(latents))
    hidden = torch.arange(len(latents)) > ends.unsqueeze(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqt,htv->qhv", weights, values)


def absorbed_attention(
    kernels: Kernels,
    query: Tensor,
    up: Tensor,
    cache: LayerCache,
    tables: Tensor,
    lengths: tuple[list[int], list[int]],
    spec: LatentSpec,
) -> Tensor:
    """What a layer computes between the products for queries and for its output."""
    keys, values = up.split_with_sizes((spec.nope_dim, spec.value_dim), 1)
    key_up, value_up = (kernels.pack(Weight.dense(one.contiguous())) for one in (keys.mT, values))
    plain, rotated = query.split_with_sizes((spec.nope_dim, spec.rope_dim), 2)
    whole = torch.cat((kernels.linear_heads(plain, key_up), rotated), 2)
    attended = kernels.attention(whole, cache, make_batch(tables, *lengths), spec)
    return kernels.linear_heads(attended, value_up)


def parts_of(spec: LatentSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
    heads, size = spec.heads.num_heads, spec.heads.head_dim
    query = random(sum(QUERIES), heads, spec.query_dim, dtype=dtype, seed=1)
    up = random(heads, spec.nope_dim + spec.value_dim, spec.rank, dtype=torch.float32, seed=2)
    up = (up / spec.rank**0.5).to(dtype)
    latents = [random(n, 1, size, dtype=dtype, seed=n) for n in CONTEXTS]
    return query, up, latents


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("size", SIZES)
def test_the_absorbed_form_is_attention_over_keys_and_values(
    size: str, stored: str, dtype: torch.dtype, kernels: Kernels
) -> None:
    spec = SIZES[size]
    query, up, latents = parts_of(spec, dtype)
    cache, tables = latent_cache(spec, latents, STORED[stored])
    lengths = CONTEXTS, QUERIES
    got, reference = (
        absorbed_attention(one, query, up, cache, tables, lengths, spec)
        for one in (kernels, REFERENCE)
    )
    queries = query.double().split_with_sizes(QUERIES)
    truth = torch.cat(
        [
            expanded_attention(own, stored_latents(cache, table, length), up.double(), spec)
            for own, table, length in zip(queries, tables, CONTEXTS, strict=True)
        ]
    )
    assert got.shape == (sum(QUERIES), spec.heads.num_heads, spec.value_dim)
    assert_close(got, truth, reference)


@pytest.mark.few(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("size", ["true", "many heads"])
def test_a_row_has_the_same_bits_in_any_company(
    size: str, stored: str, dtype: torch.dtype, kernels: Kernels
) -> None:
    spec = SIZES[size]
    query, up, latents = parts_of(spec, dtype)
    cache, tables = latent_cache(spec, latents, STORED[stored])
    together = absorbed_attention(kernels, query, up, cache, tables, (CONTEXTS, QUERIES), spec)
    assert not together.isnan().any()
    first = 0
    for table, length, count in zip(tables, CONTEXTS, QUERIES, strict=True):
        for row in range(0, count, 13):
            alone = absorbed_attention(
                kernels,
                query[first + row : first + row + 1],
                up,
                cache,
                table[None],
                ([length - count + row + 1], [1]),
                spec,
            )
            assert torch.equal(alone[0], together[first + row])
        first += count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_head_is_multiplied_with_its_own_matrix_as_linear_does_it(
    dtype: torch.dtype, kernels: Kernels
) -> None:
    packed = kernels.pack(Weight.dense(random(5, 40, 24, dtype=dtype)))
    wide = random(7, 5, 30, dtype=dtype, seed=1)
    x = wide[..., :24]  # a part of longer rows
    found = kernels.linear_heads(x, packed)
    for head, one in enumerate(packed.experts):
        assert torch.equal(found[:, head], kernels.linear(x[:, head], one))
    assert torch.equal(kernels.linear_heads(x[3:4], packed)[0], found[3])


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_rope", [True, False])
def test_a_latent_is_normed_rotated_and_stored_once(
    has_rope: bool, dtype: torch.dtype, stored: str, kernels: Kernels
) -> None:
    rank, rope_dim, heads = 24, 8, 3
    spec = LatentSpec(latent_heads(heads, rank, rope_dim), 1.0, nope_dim=4, rope_dim=8, value_dim=4)
    kind = STORED[stored] or dtype
    state = spec.layer_state(kind, dtype)
    assert state.bytes_per_token == 32 * kind.itemsize + (4 if kind == torch.int8 else 0)
    cache, _ = latent_cache(spec, [torch.zeros(20, 1, 32, dtype=dtype)], STORED[stored])
    wide = random(4, 40, dtype=dtype)
    latent, absorbed = wide[:, :32], random(4, heads, rank, dtype=dtype, seed=1)
    rotated = random(4, heads, 20, dtype=dtype, seed=2)[..., 12:]
    norm = LatentNorm(random(rank, dtype=dtype, seed=3), 1e-6)
    angles = random(50, 4, dtype=torch.float32, seed=4)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions, slots = torch.tensor([3, 49, 0, 7]), torch.tensor([17, 2, -1, 33])
    query = kernels.latent_to_cache_(
        absorbed, rotated, latent, norm, positions, cos_sin if has_rope else None, cache, slots
    )
    assert torch.equal(query[..., :rank], absorbed)

    def turned(x: Tensor) -> Tensor:
        if not has_rope:
            return x.double()
        low, high = x.double().chunk(2, -1)
        cos, sin = cos_sin.double()[positions].unsqueeze(1).chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    assert has_rope or torch.equal(query[..., rank:], rotated)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(
        query[..., rank:].double(), turned(rotated), atol=tolerance, rtol=tolerance
    )
    x = latent[:, :rank].double()
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    expected = torch.cat((normed, turned(latent[:, None, rank:])[:, 0]), 1)
    tolerance = {"plain": tolerance, "int8": 0.05, "fp8": 0.3}[stored]
    for row, slot in ((0, 17), (1, 2), (3, 33)):
        table = torch.tensor([slot // 16])
        found = stored_latents(cache, table, 16)[slot % 16]
        torch.testing.assert_close(found, expected[row], atol=tolerance, rtol=tolerance)
