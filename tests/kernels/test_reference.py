"""The reference kernels against float64, and against themselves bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.ops import Activation, ExpertWeights, LayerCache, MoeSpec
from quire.kernels.reference import ReferenceKernels
from quire.kernels.weights import Weight
from tests.decoding import attend, paged_batch

kernels = ReferenceKernels()
SILU = Activation.SILU
SEEDS = st.integers(0, 10_000)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def attention_float64(
    query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, window: int | None
) -> Tensor:
    """The definition, one query and head at a time; keys and values [context, kv_heads, head_dim]."""
    output = torch.empty(query.shape, dtype=torch.float64)
    group = query.shape[1] // keys.shape[1]
    for row in range(query.shape[0]):
        position = start + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(query.shape[1]):
            k = keys[first : position + 1, head // group].double()
            v = values[first : position + 1, head // group].double()
            weights = ((k @ query[row, head].double()) * scale).softmax(0)
            output[row, head] = weights @ v
    return output


def fill_cache(
    keys: Tensor, values: Tensor, table: list[int], block_size: int, num_blocks: int
) -> LayerCache:
    """A cache of NaN but for this sequence's tokens."""
    shape = (num_blocks, keys.shape[1], block_size, keys.shape[2])
    cache = LayerCache(torch.full(shape, math.nan), torch.full(shape, math.nan))
    slots = torch.tensor(
        [table[t // block_size] * block_size + t % block_size for t in range(len(keys))]
    )
    kernels.write_kv_(keys, values, cache, slots)
    return cache


@settings(max_examples=40)
@given(
    rows=st.integers(1, 70),
    size=st.sampled_from([1, 8, 33]),
    out=st.sampled_from([1, 16, 50]),
    seed=SEEDS,
)
def test_linear_matches_float64(rows: int, size: int, out: int, seed: int) -> None:
    x, weight, bias = (
        random(rows, size, seed=seed),
        random(out, size, seed=seed + 1),
        random(out, seed=seed + 2),
    )
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(
        kernels.linear(x, Weight.dense(weight), bias).double(), expected, atol=1e-5, rtol=1e-5
    )


def test_linear_of_no_rows_is_empty() -> None:
    assert kernels.linear(torch.empty(0, 8), Weight.dense(torch.empty(5, 8))).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "out"), [(576, 960), (1536, 576), (33, 50), (96, 7)])
def test_linear_rows_do_not_depend_on_their_company(
    dtype: torch.dtype, size: int, out: int
) -> None:
    # slow where a CPU has no instructions for it, and the same for any number of columns
    if dtype == torch.bfloat16:
        out = min(out, 40)
    x, weight = random(100, size).to(dtype), Weight.dense(random(out, size, seed=1).to(dtype))
    whole = kernels.linear(x, weight)
    for rows in (1, 3, 16, 17, 33, 70):
        assert torch.equal(kernels.linear(x[:rows], weight), whole[:rows])
        assert torch.equal(kernels.linear(x[100 - rows :], weight), whole[100 - rows :])


@settings(max_examples=30)
@given(
    rows=st.integers(1, 9),
    size=st.sampled_from([2, 64, 577]),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=SEEDS,
)
def test_rms_norm_matches_float64(rows: int, size: int, scale: float, seed: int) -> None:
    x, weight = random(rows, size, seed=seed, scale=scale), random(size, seed=seed + 1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(
        kernels.rms_norm(x, weight, 1e-5).double(), expected, atol=1e-5, rtol=1e-5
    )
    residual = random(rows, size, seed=seed + 2, scale=scale)
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, kernels.rms_norm(x + residual, weight, 1e-5))


def test_rope_at_position_zero_is_the_identity() -> None:
    x = random(1, 3, 8)
    cos_sin = torch.cat((torch.ones(1, 4), torch.zeros(1, 4)), dim=-1)
    assert torch.equal(kernels.rope(x, torch.tensor([0]), cos_sin), x)


def test_rope_turns_by_known_angles() -> None:
    angles = torch.tensor([[0.0, 0.0], [math.pi / 2, math.pi], [math.pi / 6, -math.pi / 4]])
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]).expand(3, 1, 4).contiguous()
    turned = kernels.rope(x, torch.tensor([0, 1, 2]), cos_sin)[:, 0]
    half, root = 0.5, math.sqrt(3) / 2
    r = math.sqrt(0.5)
    expected = torch.tensor(
        [
            [1.0, 2.0, 3.0, 4.0],
            [-3.0, -2.0, 1.0, -4.0],
            [root - 3 * half, 2 * r + 4 * r, 3 * root + half, 4 * r - 2 * r],
        ]
    )
    torch.testing.assert_close(turned, expected, atol=1e-5, rtol=0)


@settings(max_examples=20)
@given(
    rows=st.integers(1, 5), size=st.integers(1, 70), scale=st.sampled_from([1.0, 100.0]), seed=SEEDS
)
def test_silu_mul_matches_float64(rows: int, size: int, scale: float, seed: int) -> None:
    x = random(rows, 2 * size, seed=seed, scale=scale)
    gate, up = x.double().chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(kernels.gate(x, SILU).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_rows_do_not_depend_on_their_company(dtype: torch.dtype) -> None:
    x, gate = random(200, 26, scale=4).to(dtype), random(200, 1, seed=1, scale=4).to(dtype)
    silu, gated = kernels.gate(x, SILU), kernels.sigmoid_mul(gate, x)
    for start in range(0, 200, 3):
        for stop in (start + 1, start + 2, start + 7):
            assert torch.equal(kernels.gate(x[start:stop], SILU), silu[start:stop])
            assert torch.equal(
                kernels.sigmoid_mul(gate[start:stop], x[start:stop]), gated[start:stop]
            )


@settings(max_examples=40)
@given(
    context=st.integers(1, 150),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8, 20]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 5, 64, 65]),
    seed=SEEDS,
    data=st.data(),
)
def test_attention_matches_float64(
    context: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    seed: int,
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, context))
    query = random(count, kv_heads * group, head_dim, seed=seed)
    keys, values = (
        random(context, kv_heads, head_dim, seed=seed + 1),
        random(context, kv_heads, head_dim, seed=seed + 2),
    )
    blocks = -(-context // block_size)
    order = torch.randperm(blocks + 3, generator=torch.Generator().manual_seed(seed))[:blocks]
    table = (order + 1).tolist()
    cache = fill_cache(keys, values, table, block_size, blocks + 5)
    batch = paged_batch([(context - count, count, table)], block_size)
    got = attend(kernels, query, cache, batch, 0.3, window)
    expected = attention_float64(query, keys, values, context - count, 0.3, window)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_softmax_in_attention_is_stable_at_scores_of_ten_thousand(sign: int) -> None:
    query = torch.full((1, 1, 2), 100.0)
    keys = torch.tensor([[100.0, 0.0], [100.0, 0.0], [99.0, 0.0]]).view(3, 1, 2) * sign
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]).view(3, 1, 2)
    cache = fill_cache(keys, values, [1], 16, 2)
    got = attend(kernels, query, cache, paged_batch([(2, 1, [1])], 16), 1.0, None)
    expected = torch.tensor([0.5, 0.5]) if sign == 1 else torch.tensor([5.0, 5.0])
    torch.testing.assert_close(got[0, 0], expected, atol=1e-5, rtol=0)


def test_what_lies_before_a_window_may_be_anything() -> None:
    kernels, context, window = ReferenceKernels(), 300, 40
    sides = torch.randn(
        2, 1 + context // 16 + 1, 2, 16, 32, generator=torch.Generator().manual_seed(0)
    )
    cache, table = LayerCache(sides[0], sides[1]), list(range(1, 1 + -(-context // 16)))
    query = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(1))
    expected = attend(
        kernels, query, cache, paged_batch([(context - 3, 3, table)], 16), 0.3, window
    )
    first = context - 3 - window + 1
    sides[:, table[: first // 16]] = float("nan")  # another's, or nobody's by now
    sides[:, 0] = float("inf")
    table[: first // 32] = [0] * (first // 32)
    again = attend(kernels, query, cache, paged_batch([(context - 3, 3, table)], 16), 0.3, window)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_same_bits_for_decode_chunk_and_whole_prompt(
    dtype: torch.dtype, window: int | None
) -> None:
    context, table = 150, list(range(3, 13))
    query, keys, values = (random(context, 2 * g, 16, seed=g).to(dtype) for g in (3, 1, 1))
    values = values.flip(0)
    cache = LayerCache(*(torch.full((16, 2, 16, 16), math.nan, dtype=dtype) for _ in range(2)))
    slots = torch.tensor([table[t // 16] * 16 + t % 16 for t in range(context)])
    kernels.write_kv_(keys, values, cache, slots)
    whole = attend(kernels, query, cache, paged_batch([(0, context, table)], 16), 0.25, window)
    for start in range(0, context, 7):
        for count in (1, 5, 40):
            stop = min(start + count, context)
            batch = paged_batch([(start, stop - start, table)], 16)
            part = attend(kernels, query[start:stop], cache, batch, 0.25, window)
            assert torch.equal(part, whole[start:stop])


@settings(max_examples=25)
@given(
    rows=st.integers(1, 40),
    experts=st.sampled_from([1, 4, 7]),
    normalize=st.booleans(),
    seed=SEEDS,
    data=st.data(),
)
def test_moe_matches_float64(
    rows: int, experts: int, normalize: bool, seed: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    x, logits = random(rows, 8, seed=seed), random(rows, experts, seed=seed + 1)
    gate_up, down = random(experts, 12, 8, seed=seed + 2), random(experts, 8, 6, seed=seed + 3)
    weights, spec = (
        ExpertWeights(Weight.dense(gate_up), Weight.dense(down)),
        MoeSpec(experts, top_k, 6, normalize),
    )
    expected = torch.zeros(rows, 8, dtype=torch.float64)
    for row in range(rows):
        probabilities = logits[row].double().softmax(0)
        chosen = probabilities.argsort(descending=True)[:top_k]
        total = probabilities[chosen].sum() if normalize else 1.0
        for expert in chosen:
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            hidden = gate / (1 + (-gate).exp()) * up
            expected[row] += probabilities[expert] / total * (down[expert].double() @ hidden)
    got = kernels.moe(x, logits, weights, spec)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)
    for row in range(min(rows, 3)):
        alone = kernels.moe(x[row : row + 1], logits[row : row + 1], weights, spec)
        assert torch.equal(alone[0], got[row])


def test_moe_takes_the_lowest_experts_among_equals() -> None:
    weights = ExpertWeights(Weight.dense(random(3, 4, 2)), Weight.dense(random(3, 2, 2, seed=1)))
    spec = MoeSpec(num_experts=3, top_k=2, intermediate_size=2, normalize_weights=True)
    x, logits = random(1, 2, seed=2), torch.zeros(1, 3)
    same = kernels.moe(x, torch.tensor([[0.0, 0.0, -math.inf]]), weights, spec)
    assert torch.equal(kernels.moe(x, logits, weights, spec), same)
