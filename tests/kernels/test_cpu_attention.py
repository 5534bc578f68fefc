"""Paged attention in C++: close to float64, and the same bits whole, in chunks, one by one, alone
or among many.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.ops import AttentionSpec, HeadShape, LayerCache
from tests.decoding import attend
from tests.kernels.cpu_support import (
    NAN,
    REFERENCE,
    assert_close,
    by_dimension,
    few_examples,
    make_batch,
    make_cache,
    random,
)


def dequantized(x: Tensor, stored: torch.dtype, fp8_scale: float) -> Tensor:
    """What a cache of 8 bits makes of it."""
    if stored == torch.float8_e4m3fn:
        return (x.float() / fp8_scale).clamp(-448, 448).to(stored).double() * fp8_scale
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round().clamp(-127, 127).double() * scale.double()


def float64_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
) -> Tensor:
    """The last queries of one sequence over its keys and values, with nothing clever."""
    rows, num_heads, _ = query.shape
    context, kv_heads, _ = keys.shape
    spread = num_heads // kv_heads
    wide_keys = keys.double().repeat_interleave(spread, 1)
    wide_values = values.double().repeat_interleave(spread, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), wide_keys) * scale
    query_position = torch.arange(context - rows, context).view(-1, 1)
    key_position = torch.arange(context)
    hidden = key_position > query_position
    if window is not None:
        hidden = hidden | (key_position <= query_position - window)
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), wide_values
    )


@given(
    lengths=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 40)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 5, 20]),
    head_dim=st.sampled_from([8, 24, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([1, 5, 16, 32, 48]),
    window=st.sampled_from([None, 1, 7, 64, 100]),
    spread=st.sampled_from([1.0, 100.0]),
    stored=st.sampled_from([None, torch.int8, torch.float8_e4m3fn]),
    turned=st.booleans(),
    seed=st.integers(0, 99),
)
@few_examples
def test_attention_is_close_to_float64(
    kernels: CpuKernels,
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    spread: float,
    stored: torch.dtype | None,
    turned: bool,
    seed: int,
) -> None:
    context_lens = [max(length) for length in lengths]
    query_lens = [min(length) for length in lengths]
    contexts = [
        (
            random(n, kv_heads, head_dim, dtype=dtype, seed=seed + i),
            random(n, kv_heads, head_dim, dtype=dtype, seed=i),
        )
        for i, n in enumerate(context_lens)
    ]
    cache, tables = make_cache(contexts, block_size, seed, stored=stored)
    if turned and block_size % 16 == 0 and stored != torch.float8_e4m3fn:
        cache = by_dimension(cache)
    if stored is not None:  # what is stored is what is attended to
        key_scale, value_scale = cache.fp8_scales
        contexts = [
            (dequantized(keys, stored, key_scale), dequantized(values, stored, value_scale))
            for keys, values in contexts
        ]
    batch = make_batch(tables, context_lens, query_lens)
    query = (
        random(sum(query_lens), kv_heads * group, head_dim, dtype=dtype, seed=seed + 50) * spread
    )
    scale = head_dim**-0.5
    got = attend(kernels, query, cache, batch, scale, window)
    reference = attend(REFERENCE, query, cache, batch, scale, window)
    truth = torch.cat(
        [
            float64_attention(part, keys, values, scale, window)
            for part, (keys, values) in zip(torch.split(query, query_lens), contexts, strict=True)
        ]
    )
    if dtype == torch.float32 and spread > 1:  # scores of hundreds: float32 itself is that far off
        torch.testing.assert_close(got.double(), truth, rtol=0, atol=2e-3)
    else:
        assert_close(got, truth, reference)


@pytest.mark.few(4)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "stored"),
    [
        (64, 3, 16, None),
        (40, 2, 7, None),
        (64, 3, 48, torch.int8),
        (64, 3, 16, torch.float8_e4m3fn),
    ],
)
def test_attention_has_the_same_bits_whole_in_chunks_and_one_by_one(
    kernels: CpuKernels,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    window: int | None,
    stored: torch.dtype | None,
    is_slow: bool,
) -> None:
    """Every position of a sequence of 600 tokens (300), in three settings: the whole prompt at
    once; chunks among other sequences, other blocks; and single steps, sixty at a time in one batch
    as if they were so many requests. Where keys may lie in the other order, they sometimes do.
    """
    length, kv_heads, scale = 300 if is_slow else 600, 2, head_dim**-0.5
    keys, values = (
        random(length, kv_heads, head_dim, dtype=dtype),
        random(length, kv_heads, head_dim, dtype=dtype, seed=1),
    )
    query = random(length, kv_heads * group, head_dim, dtype=dtype, seed=2)
    cache, table = make_cache([(keys, values)], block_size, seed=0, stored=stored)
    whole = attend(kernels, query, cache, make_batch(table, [length], [length]), scale, window)
    assert not whole.isnan().any()

    other = (
        random(90, kv_heads, head_dim, dtype=dtype, seed=3),
        random(90, kv_heads, head_dim, dtype=dtype, seed=4),
    )
    done = 0
    for chunk in itertools.cycle((1, 7, 64, 130, 16)):
        end = min(done + chunk, length)
        # What the sequence has not reached yet is nobody's: NaN.
        sequences = [other, (keys[:end], values[:end]), other]
        cache, tables = make_cache(sequences, block_size, seed=end, stored=stored)
        neighbours = random(20, kv_heads * group, head_dim, dtype=dtype, seed=5)
        rows = torch.cat((neighbours[:9], query[done:end], neighbours[9:]))
        if chunk > 10 and kernels.keys_by_dimension(cache.keys.dtype, block_size):
            cache = by_dimension(cache)
        batch = make_batch(tables, [90, end, 90], [9, end - done, 11])
        got = attend(kernels, rows, cache, batch, scale, window)[9 : 9 + end - done]
        assert torch.equal(got, whole[done:end])
        done = end
        if done == length:
            break

    cache, table = make_cache([(keys, values)], block_size, seed=9, stored=stored)
    if kernels.keys_by_dimension(cache.keys.dtype, block_size):
        cache = by_dimension(cache)
    for first in range(0, length, 60):
        context_lens = [position + 1 for position in range(first, first + 60)]
        batch = make_batch(table.expand(60, -1), context_lens, [1] * 60)
        assert torch.equal(
            attend(kernels, query[first : first + 60], cache, batch, scale, window),
            whole[first : first + 60],
        )


@pytest.mark.parametrize(("kv_heads", "group"), [(3, 3), (20, 2)])
def test_attention_of_one_long_sequence_equals_the_same_among_many(
    kernels: CpuKernels, dtype: torch.dtype, kv_heads: int, group: int, threads: None
) -> None:
    """Alone, its splits are shared among threads, and the heads of those that are left over; among
    many, one thread walks them all, with all heads at once (up to 16) where they lie by dimension.
    """
    length, head_dim = 1700, 32
    keys, values = (
        random(length, kv_heads, head_dim, dtype=dtype),
        random(length, kv_heads, head_dim, dtype=dtype, seed=1),
    )
    cache, table = make_cache([(keys, values)], 16, seed=0)
    query = random(1, kv_heads * group, head_dim, dtype=dtype, seed=2)
    caches = [cache, by_dimension(cache)] if kernels.keys_by_dimension(dtype, 16) else [cache]
    for window in (None, 1100):
        results = []
        for one, (num_threads, copies) in itertools.product(
            caches, ((2, 1), (3, 1), (2, 9), (1, 1))
        ):
            torch.set_num_threads(num_threads)
            batch = make_batch(table.expand(copies, -1), [length] * copies, [1] * copies)
            got = attend(kernels, query.expand(copies, -1, -1), one, batch, head_dim**-0.5, window)
            results += list(got)
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_blocks_that_hold_other_layers_numbers_too_give_the_same_bits(
    kernels: CpuKernels, dtype: torch.dtype, stored: torch.dtype | None, turned: bool
) -> None:
    """Where a model's layers keep different things, a layer's part of a block is followed by others'."""
    kv_heads, head_dim, lengths = 2, 24, [300, 37]
    contexts = [
        (
            random(n, kv_heads, head_dim, dtype=dtype, seed=i),
            random(n, kv_heads, head_dim, dtype=dtype, seed=i + 9),
        )
        for i, n in enumerate(lengths)
    ]
    plain, tables = make_cache(contexts, 16, seed=3, stored=stored)
    if turned and stored != torch.float8_e4m3fn:
        plain = by_dimension(plain)
    apart = apart_from_each_other(plain)
    assert not apart.values.is_contiguous()
    batch = make_batch(tables, lengths, [3, 1])
    query = random(4, 6, head_dim, dtype=dtype, seed=5)
    expected = attend(kernels, query, plain, batch, 0.2, None)
    assert torch.equal(attend(kernels, query, apart, batch, 0.2, None), expected)
    new = [random(5, kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (7, 8)]
    slots = torch.tensor([0, 17, 40, -1, 96])
    for cache in (plain, apart):
        kernels.write_kv_(*new, cache, slots)
    for one, other in zip(
        (plain.keys, plain.values, *plain.scales),
        (apart.keys, apart.values, *apart.scales),
        strict=True,
    ):
        if one is not None and other is not None:
            assert torch.equal(bits(other), bits(one))


def bits(x: Tensor) -> Tensor:
    """Also of NaN, which equals nothing."""
    return x.contiguous().view(torch.uint8)


def apart_from_each_other(cache: LayerCache) -> LayerCache:
    """The same numbers, in blocks that are longer than these."""

    def wider(side: Tensor) -> Tensor:
        by_token = side.mT if side.dim() == 4 and side.stride(3) != 1 else side
        kept = by_token[0].numel()
        raw = torch.zeros(len(side), kept + 20, dtype=side.dtype)
        part = raw[:, :kept].view(by_token.shape)
        part.view(torch.uint8).copy_(by_token.view(torch.uint8))
        return part if by_token is side else part.mT

    scales = (None if one is None else wider(one) for one in cache.scales)
    return replace(
        cache,
        **dict(zip(("keys", "values"), map(wider, (cache.keys, cache.values)), strict=True)),
        **dict(zip(("key_scales", "value_scales"), scales, strict=True)),
    )


def test_scales_and_sinks_meet_as_in_the_reference(kernels: CpuKernels, dtype: torch.dtype) -> None:
    keys, values = (random(90, 2, 32, dtype=dtype, seed=seed) for seed in (0, 1))
    cache, table = make_cache([(keys, values)], 16, seed=0, stored=torch.float8_e4m3fn)
    query, batch = random(9, 4, 32, dtype=dtype, seed=2), make_batch(table, [90], [9])
    spec = AttentionSpec(HeadShape(4, 2, 32), 0.2, None, soft_cap=2.0)
    sinks = torch.tensor([-50.0, 0.5, 3.0, 60.0])
    got, expected = (
        one.attention(query, cache, batch, spec, sinks) for one in (kernels, REFERENCE)
    )
    torch.testing.assert_close(
        got, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-5
    )


SLOPES = torch.tensor([2.0**-1, 2.0**-4, 0.3, 0.0])


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("window", [None, 70])
def test_slopes_lower_scores_by_distance_with_the_same_bits_in_any_chunk(
    kernels: CpuKernels,
    dtype: torch.dtype,
    stored: torch.dtype | None,
    turned: bool,
    window: int | None,
) -> None:
    if turned and stored == torch.float8_e4m3fn:
        pytest.skip("keys of FP8 never lie by dimension")
    length, count = 600, 70
    keys, values = (random(length, 2, 32, dtype=dtype, seed=seed) for seed in (0, 1))
    cache, tables = make_cache([(keys, values)], 16, seed=0, stored=stored)
    cache = by_dimension(cache) if turned else cache
    query = random(count, 4, 32, dtype=dtype, seed=2)
    spec = AttentionSpec(HeadShape(4, 2, 32), 0.2, window, slopes=tuple(SLOPES.tolist()))

    def attended(one: CpuKernels, first: int, end: int) -> Tensor:
        batch = make_batch(tables, [length - count + end], [end - first])
        return one.attention(query[first:end], cache, batch, spec, None, SLOPES)

    whole = attended(kernels, 0, count)
    for chunk in (1, 7, 33):
        parts = [attended(kernels, i, min(i + chunk, count)) for i in range(0, count, chunk)]
        assert torch.equal(torch.cat(parts), whole)
    flat = replace(spec, slopes=())
    batch = make_batch(tables, [length], [count])
    without = kernels.attention(query, cache, batch, flat)
    assert torch.equal(without[:, 3], whole[:, 3])  # a slope of 0 is none
    assert not torch.allclose(without[:, 0], whole[:, 0], atol=1e-2)
    if stored is not None:  # what the reference reads is the same, what this one rounds is not
        torch.testing.assert_close(whole, attended(REFERENCE, 0, count), rtol=2e-2, atol=2e-3)
        return
    heads = torch.arange(4) // 2
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys.double()[:, heads]) * 0.2
    distance = torch.arange(length) - torch.arange(length - count, length).unsqueeze(1)
    hidden = (distance > 0) | (distance <= -(window or length))
    scores = (scores + SLOPES.double().view(-1, 1, 1) * distance).masked_fill(hidden, -math.inf)
    truth = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.double()[:, heads])
    assert_close(whole, truth, attended(REFERENCE, 0, count))


def test_numbers_are_clamped_and_nan_stays(kernels: CpuKernels, dtype: torch.dtype) -> None:
    x = random(5, 37, dtype=dtype) * 3
    x[1, 4], x[2, 5], x[2, 6] = NAN, math.inf, -math.inf
    expected = x.clamp(-1.5, 1.5)
    wide = torch.zeros(5, 40, dtype=dtype)
    wide[:, :37] = x
    kernels.clamp_(wide[:, :37], 1.5)
    torch.testing.assert_close(wide[:, :37], expected, rtol=0, atol=0, equal_nan=True)
    assert not wide[:, 37:].any()


def test_attention_is_stable_at_huge_scores(kernels: CpuKernels) -> None:
    keys, values = (
        random(70, 1, 16, dtype=torch.float32) * 1e4,
        random(70, 1, 16, dtype=torch.float32, seed=1),
    )
    cache, table = make_cache([(keys, values)], 16, seed=0)
    query = random(70, 1, 16, dtype=torch.float32, seed=2)
    got = attend(kernels, query, cache, make_batch(table, [70], [70]), 1.0, None)
    truth = float64_attention(query, keys, values, 1.0, None)
    torch.testing.assert_close(got.double(), truth, rtol=0, atol=0.05)


def test_attention_with_a_window_needs_no_blocks_before_it(
    kernels: CpuKernels, dtype: torch.dtype
) -> None:
    keys, values = random(200, 1, 32, dtype=dtype), random(200, 1, 32, dtype=dtype, seed=1)
    cache, table = make_cache([(keys, values)], 16, seed=0)
    query = random(3, 2, 32, dtype=dtype, seed=2)
    batch = make_batch(table, [200], [3])
    expected = attend(kernels, query, cache, batch, 0.2, 40)
    table[0, :9] = table[0, -1] + 10_000_000  # a look there would be far outside the cache
    assert torch.equal(attend(kernels, query, cache, batch, 0.2, 40), expected)


@pytest.mark.parametrize(
    ("stored", "bad"), [(torch.int8, NAN), (torch.int8, math.inf), (torch.float8_e4m3fn, NAN)]
)
@pytest.mark.parametrize("is_key", [True, False])
def test_numbers_of_8_bits_that_are_not_finite_reach_those_who_see_them_and_nobody_else(
    kernels: CpuKernels, dtype: torch.dtype, is_key: bool, stored: torch.dtype, bad: float
) -> None:
    sequences = [
        (random(80, 1, 32, dtype=dtype, seed=i), random(80, 1, 32, dtype=dtype, seed=9 + i))
        for i in range(2)
    ]
    query = random(160, 2, 32, dtype=dtype, seed=5)
    cache, tables = make_cache(sequences, 16, seed=0, stored=stored)
    expected = attend(kernels, query, cache, make_batch(tables, [80, 80], [80, 80]), 0.2, None)
    sequences[0][0 if is_key else 1][50, 0, 3] = bad
    cache, tables = make_cache(sequences, 16, seed=0, stored=stored)
    got = attend(kernels, query, cache, make_batch(tables, [80, 80], [80, 80]), 0.2, None)
    is_alone = stored == torch.float8_e4m3fn and not is_key  # it spoils no scale
    assert (got[50:80, :, 3] if is_alone else got[50:80]).isnan().all()
    assert torch.equal(got[:50], expected[:50])
    assert torch.equal(got[80:], expected[80:])
