"""The C++ kernels but attention: as accurate as the reference, and the same bits whatever the batch
looks like.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from quire.backends.cpu.kernels import CpuKernels
from quire.errors import DeviceError, UnsupportedModelError
from quire.kernels.ops import Activation, ExpertWeights, Kernels, LayerCache, MoeSpec
from quire.kernels.weights import Weight
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

SILU = Activation.SILU
SMOLLM2_LINEARS = ((960, 576), (576, 576), (3072, 576), (576, 1536))
ODD_LINEARS = ((1, 2), (33, 70), (47, 98), (100, 514))


def packed_weight(kernels: Kernels, weight: torch.Tensor) -> Weight:
    return kernels.pack(Weight.dense(weight))


# linear


@given(
    rows=st.integers(0, 70),
    columns=st.integers(1, 100),
    half_depth=st.integers(1, 300),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@few_examples
def test_linear_is_close_to_float64(
    kernels: CpuKernels,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    half_depth: int,
    bias: bool,
    seed: int,
) -> None:
    depth = 2 * half_depth
    x, weight = (
        random(rows, depth, dtype=dtype, seed=seed),
        random(columns, depth, dtype=dtype, seed=seed + 1),
    )
    added = random(columns, dtype=dtype, seed=seed + 2) if bias else None
    got = kernels.linear(x, packed_weight(kernels, weight), added)
    assert got.shape == (rows, columns)
    assert got.dtype == dtype
    if rows:
        truth = F.linear(x.double(), weight.double(), None if added is None else added.double())
        assert_close(got, truth, REFERENCE.linear(x, Weight.dense(weight), added))


@pytest.mark.few(4)
@pytest.mark.parametrize("shape", SMOLLM2_LINEARS + ODD_LINEARS, ids=str)
def test_linear_rows_have_the_same_bits_in_any_number(
    kernels: CpuKernels, dtype: torch.dtype, shape: tuple[int, int], is_slow: bool
) -> None:
    weight, bias = (
        packed_weight(kernels, random(*shape, dtype=dtype)),
        random(shape[0], dtype=dtype, seed=1),
    )
    count = 133 if is_slow else 512
    x = random(count, shape[1], dtype=dtype, seed=2)
    whole = kernels.linear(x, weight, bias)
    for rows in (1, 2, 3, 16, 33) if is_slow else (1, 2, 3, 8, 16, 17, 31, 32, 33, 64, 255):
        assert torch.equal(kernels.linear(x[:rows], weight, bias), whole[:rows])
        assert torch.equal(kernels.linear(x[count - rows :], weight, bias), whole[count - rows :])


def test_linear_rows_do_not_meet(kernels: CpuKernels, dtype: torch.dtype) -> None:
    weight, x = (
        packed_weight(kernels, random(70, 98, dtype=dtype)),
        random(50, 98, dtype=dtype, seed=1),
    )
    clean = kernels.linear(x, weight)
    x[::2] = NAN
    assert torch.equal(kernels.linear(x, weight)[1::2], clean[1::2])


def test_linear_takes_strided_rows(kernels: CpuKernels, dtype: torch.dtype) -> None:
    weight, wide = (
        packed_weight(kernels, random(70, 96, dtype=dtype)),
        random(20, 300, dtype=dtype, seed=1),
    )
    wide[:, 196:] = NAN
    view = wide[:, 100:196]
    assert torch.equal(kernels.linear(view, weight), kernels.linear(view.contiguous(), weight))


def test_linear_refuses_a_weight_that_was_not_packed(kernels: CpuKernels) -> None:
    with pytest.raises(ValueError, match="not packed"):
        kernels.linear(torch.ones(2, 6), Weight.dense(torch.ones(4, 6)))
    with pytest.raises(ValueError, match="not packed"):
        kernels.linear(torch.ones(2, 6), packed_weight(kernels, torch.ones(4, 8)))
    with pytest.raises(UnsupportedModelError, match="even"):
        packed_weight(kernels, torch.ones(4, 7, dtype=torch.bfloat16))


@given(columns=st.integers(1, 100), half_depth=st.integers(1, 50), data=st.data())
@few_examples
def test_embedding_reads_plain_and_packed_tables(
    kernels: CpuKernels, dtype: torch.dtype, columns: int, half_depth: int, data: st.DataObject
) -> None:
    table = random(columns, 2 * half_depth, dtype=dtype)
    ids = torch.tensor(
        data.draw(st.lists(st.integers(0, columns - 1), max_size=20)), dtype=torch.int64
    )
    assert torch.equal(kernels.embedding(ids, Weight.dense(table)), table[ids])
    assert torch.equal(kernels.embedding(ids, packed_weight(kernels, table)), table[ids])


def test_embedding_refuses_ids_outside_the_table(kernels: CpuKernels) -> None:
    packed = packed_weight(kernels, torch.ones(10, 4))
    for wrong in (-1, 10):
        with pytest.raises(IndexError, match="vocabulary of 10"):
            kernels.embedding(torch.tensor([0, wrong]), packed)


# rows by themselves


@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 300),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
@few_examples
def test_norms_are_close_to_float64_and_rows_do_not_meet(
    kernels: CpuKernels, dtype: torch.dtype, rows: int, size: int, scale: float, seed: int
) -> None:
    x = random(rows, size, dtype=dtype, seed=seed) * scale
    residual, weight = (
        random(rows, size, dtype=dtype, seed=seed + 1),
        random(size, dtype=dtype, seed=seed + 2),
    )
    total = x + residual
    wide = total.double()
    truth = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normed, got_total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(got_total, total)
    assert_close(normed, truth, REFERENCE.rms_norm(total, weight, 1e-5))
    assert torch.equal(kernels.rms_norm(total, weight, 1e-5), normed)
    assert torch.equal(kernels.rms_norm(total[-1:], weight, 1e-5), normed[-1:])


def test_rms_norm_of_heads_in_a_packed_projection(kernels: CpuKernels, dtype: torch.dtype) -> None:
    packed, weight = random(7, 5 * 24, dtype=dtype), random(24, dtype=dtype, seed=1)
    heads = packed[:, 24:96].view(7, 3, 24)
    got = kernels.rms_norm(heads, weight, 1e-6)
    assert got.shape == heads.shape
    assert torch.equal(got.view(21, 24), kernels.rms_norm(heads.reshape(21, 24), weight, 1e-6))


@given(
    rows=st.integers(0, 40),
    heads=st.integers(1, 5),
    half=st.integers(1, 64),
    seed=st.integers(0, 99),
)
@few_examples
def test_rope_has_the_reference_bits(
    kernels: CpuKernels, dtype: torch.dtype, rows: int, heads: int, half: int, seed: int
) -> None:
    packed = random(rows, (heads + 2) * 2 * half, dtype=dtype, seed=seed)
    x = packed[:, 2 * half : (heads + 1) * 2 * half].view(rows, heads, 2 * half)
    angles = random(50, half, dtype=torch.float32, seed=seed + 1)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(seed))
    expected = REFERENCE.rope(x, positions, cos_sin)
    for index in (positions, positions.int()):
        torch.testing.assert_close(kernels.rope(x, index, cos_sin), expected, rtol=0, atol=0)


@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 200),
    spread=st.sampled_from([1.0, 30.0, 200.0]),
    seed=st.integers(0, 99),
)
@few_examples
def test_silu_mul_is_close_to_float64(
    kernels: CpuKernels, dtype: torch.dtype, rows: int, size: int, spread: float, seed: int
) -> None:
    gate_up = random(rows, 2 * size, dtype=dtype, seed=seed) * spread
    gate, up = gate_up.double().chunk(2, -1)
    got = kernels.gate(gate_up, SILU)
    assert_close(got, F.silu(gate) * up, REFERENCE.gate(gate_up, SILU))
    assert torch.equal(kernels.gate(gate_up[-1:], SILU), got[-1:])


def test_the_square_of_what_is_positive_has_the_references_bits(
    kernels: CpuKernels, dtype: torch.dtype
) -> None:
    x = random(37, 50, dtype=dtype) * 20
    x[0, :4] = torch.tensor([NAN, float("inf"), -float("inf"), -0.0])
    got = kernels.activate(x, Activation.RELU2)
    assert torch.equal(got.nan_to_num(-1), REFERENCE.activate(x, Activation.RELU2).nan_to_num(-1))
    assert got[0, 0].isnan()
    assert torch.equal(got[1:], x[1:].double().relu().square().to(dtype))
    assert torch.equal(kernels.activate(x[-1:], Activation.RELU2), got[-1:])


def test_sigmoid_mul_is_close_to_float64_and_rows_do_not_meet(
    kernels: CpuKernels, dtype: torch.dtype
) -> None:
    gate, x = random(37, 1, dtype=dtype) * 20, random(37, 50, dtype=dtype, seed=1)
    got = kernels.sigmoid_mul(gate, x)
    assert_close(got, gate.double().sigmoid() * x.double(), REFERENCE.sigmoid_mul(gate, x))
    for row in range(37):
        assert torch.equal(
            kernels.sigmoid_mul(gate[row : row + 1], x[row : row + 1]), got[row : row + 1]
        )


def test_silu_is_within_a_few_units_in_the_last_place(kernels: CpuKernels) -> None:
    gate = torch.linspace(-80, 80, 20001)
    got = kernels.gate(torch.cat((gate, torch.ones_like(gate))).view(1, -1), SILU)[0].double()
    truth = F.silu(gate.double())
    assert ((got - truth).abs() / truth.abs().clamp_min(1e-30)).max() < 6e-7
    ends = torch.tensor([[float("inf"), -1000.0, NAN, 1.0, 1.0, 1.0]])
    silu = kernels.gate(ends, SILU)[0]
    assert silu[0] == float("inf")
    assert silu[1] == 0
    assert silu[2].isnan()


@pytest.mark.parametrize("turned", [False, True])
def test_write_kv_takes_slices_of_a_packed_projection(
    kernels: CpuKernels, dtype: torch.dtype, turned: bool
) -> None:
    packed = random(9, 3 * 2 * 24, dtype=dtype)
    keys, values = packed[:, 48:96].view(9, 2, 24), packed[:, 96:].view(9, 2, 24)
    slots = torch.randperm(35, generator=torch.Generator().manual_seed(0))[:9]
    caches = [
        LayerCache(torch.zeros(5, 2, 7, 24, dtype=dtype), torch.zeros(5, 2, 7, 24, dtype=dtype))
        for _ in "ab"
    ]
    caches[0] = by_dimension(caches[0]) if turned else caches[0]
    writers: list[Kernels] = [kernels, REFERENCE]
    for writer, cache in zip(writers, caches, strict=True):
        writer.write_kv_(keys, values, cache, slots)
    assert torch.equal(caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].values, caches[1].values)


@pytest.mark.parametrize("turned", [False, True])
def test_write_kv_in_int8_stores_what_the_reference_stores(
    kernels: CpuKernels, dtype: torch.dtype, turned: bool
) -> None:
    keys, values = random(40, 2, 24, dtype=dtype), random(40, 2, 24, dtype=dtype, seed=1) * 1e-3
    keys[0], keys[1, 0, 5], keys[2, 1, 23], keys[3, 0, 0] = 0, NAN, float("inf"), float("-inf")
    values[4], values[5, 0, :3] = 1e-44, 1e30  # denormal scales are coarse, large ones are not
    slots = torch.randperm(70, generator=torch.Generator().manual_seed(0))[:40]
    slots[7] = -1
    caches = []
    for writer in (kernels, REFERENCE):
        sides = (torch.zeros(11, 2, 7, 24, dtype=torch.int8) for _ in "kv")
        cache = LayerCache(*sides, *(torch.zeros(11, 2, 7) for _ in "kv"))
        caches.append(by_dimension(cache) if turned and writer is kernels else cache)
        writer.write_kv_(keys, values, caches[-1], slots + 7 * (slots >= 0))
    got, expected = caches
    for mine, theirs in ((got.keys, expected.keys), (got.values, expected.values)):
        assert torch.equal(mine[1:], theirs[1:])  # block 0 takes the padding, or nothing
    for scales, theirs in zip(got.scales, expected.scales, strict=True):
        assert scales is not None
        assert theirs is not None
        torch.testing.assert_close(scales[1:], theirs[1:], rtol=0, atol=0, equal_nan=True)
    assert got.key_scales is not None
    assert got.key_scales.isnan().sum() == 3


def test_write_kv_in_fp8_stores_what_the_reference_stores(
    kernels: CpuKernels, dtype: torch.dtype
) -> None:
    """Every number of FP8 and what lies between two of them, large and small ones, and what is no
    number.
    """
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ends = torch.tensor([0.0, 2**-11, 460.0, 1e30, float("inf"), NAN])
    numbers = torch.cat(
        (codes, (codes[1:] + codes[:-1]) / 2, ends, random(113, dtype=torch.float32) * 0.1)
    )
    keys = torch.cat((numbers, -numbers)).view(31, 1, 24).to(dtype)
    slots = torch.randperm(70, generator=torch.Generator().manual_seed(0))[:31]
    slots[7] = -1
    caches = []
    for writer in (kernels, REFERENCE):
        sides = (torch.zeros(11, 1, 7, 24).to(torch.float8_e4m3fn) for _ in "kv")
        caches.append(LayerCache(*sides, fp8_scales=(1.0, 0.37)))
        writer.write_kv_(keys, keys, caches[-1], slots + 7 * (slots >= 0))
    for mine, theirs in zip(
        *((cache.keys[1:].float(), cache.values[1:].float()) for cache in caches), strict=True
    ):
        assert mine.isnan().sum() == 2
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


# mixture of experts, threads


@given(
    rows=st.integers(1, 20), num_experts=st.integers(1, 8), normalize=st.booleans(), data=st.data()
)
@few_examples
def test_moe_is_close_to_the_reference_and_rows_do_not_meet(
    kernels: CpuKernels,
    dtype: torch.dtype,
    rows: int,
    num_experts: int,
    normalize: bool,
    data: st.DataObject,
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    hidden, inner = 34, 46
    x, router = random(rows, hidden, dtype=dtype), random(rows, num_experts, dtype=dtype, seed=1)
    router[0] = 0.5  # equal scores: the lowest experts
    spec = MoeSpec(num_experts, top_k, inner, normalize)
    gate_up = random(num_experts, 2 * inner, hidden, dtype=dtype, seed=2) / 6
    down = random(num_experts, hidden, inner, dtype=dtype, seed=3) / 6
    packed = ExpertWeights(packed_weight(kernels, gate_up), packed_weight(kernels, down))
    got = kernels.moe(x, router, packed, spec)
    plain = ExpertWeights(Weight.dense(gate_up), Weight.dense(down))
    wide = ExpertWeights(Weight.dense(gate_up.double()), Weight.dense(down.double()))
    truth = REFERENCE.moe(x.double(), router, wide, spec).double()
    assert_close(got, truth, REFERENCE.moe(x, router, plain, spec))
    for row in range(rows):
        alone = kernels.moe(x[row : row + 1], router[row : row + 1], packed, spec)
        assert torch.equal(alone[0], got[row])


@pytest.mark.few(1)
def test_one_thread_and_two_give_the_same_bits(
    kernels: CpuKernels, dtype: torch.dtype, threads: None
) -> None:
    x, gate_up = random(200, 576, dtype=dtype), random(200, 1152, dtype=dtype, seed=1)
    weight, norm = (
        packed_weight(kernels, random(960, 576, dtype=dtype, seed=2)),
        random(576, dtype=dtype, seed=3),
    )
    cos_sin = random(200, 64, dtype=torch.float32, seed=4)
    side = random(200, 3, 64, dtype=dtype, seed=5)
    cache, table = make_cache([(side, side)], 16, seed=0)
    batch = make_batch(table, [200], [200])
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append(
            [
                kernels.linear(x, weight),
                kernels.rms_norm(x, norm, 1e-5),
                *kernels.add_rms_norm(x, x, norm, 1e-5),
                kernels.rope(x.view(200, 9, 64), torch.arange(200), cos_sin),
                kernels.gate(gate_up, SILU),
                attend(kernels, x.view(200, 9, 64), cache, batch, 0.125, None),
            ]
        )
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_other_dtypes_are_refused(kernels: CpuKernels) -> None:
    with pytest.raises(DeviceError, match="float16"):
        kernels.gate(torch.ones(2, 4, dtype=torch.float16), SILU)
