"""Weights of 8 and 4 bits: what rounding does, and products, which are those of the numbers and of
each row alone.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire.backends.triton.grouping import group_pairs, rows_in_order
from quire.backends.triton.linear import Tile
from quire.backends.triton.moe import moe
from quire.backends.triton.quantized import pack
from quire.backends.triton.tile_product import expand_codes, pack_codes, quantize_rows, tile_product
from quire.kernels.formats import FORMATS
from quire.kernels.ops import Activation, ExpertWeights, MoeSpec
from quire.kernels.quantize import quantize
from quire.kernels.weights import Weight
from quire.tools.bench.random_engine import quantized
from tests.kernels.triton.support import (
    DEVICE,
    MARKS,
    NAN,
    ON_GPU,
    ROW_COUNTS,
    assert_rows_alone,
    random,
)

pytestmark = MARKS
# The interpreter cuts numbers off where the GPU rounds them to FP8.
CODES = [torch.int8, torch.float8_e4m3fn] if ON_GPU else [torch.int8]
SMALL = Tile(16, 32, 128, 2, 4)


def product(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, silu_mul: bool = False
) -> Tensor:
    name = ("INT8" if weight.dtype == torch.int8 else "FP8") if scales.dim() == 1 else "FP8_G128"
    rounded, row_scales = quantize_rows(x, weight.dtype, 128 if scales.dim() == 2 else 0)
    packed = Weight.of(FORMATS[name], tuple(weight.shape), weight, scales)
    activation = Activation.SILU if silu_mul else None
    tiles = rows_in_order(x, SMALL.rows)
    return tile_product(
        rounded, packed, bias, tiles, SMALL, x.dtype, activation=activation, x_scales=row_scales
    )


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("dtype", CODES)
def test_rows_are_rounded_by_their_largest_number(dtype: torch.dtype, group: int) -> None:
    x = random(5, 192, dtype=torch.float32)
    x[1] = 0.0
    codes, scales = quantize_rows(x, dtype, group)
    groups = x.view(5, -1, group or 192)
    assert scales.shape == groups.shape[:2]
    got = codes.float().view(groups.shape) * scales.unsqueeze(-1)
    largest = groups.abs().amax(-1, keepdim=True)
    step = largest / 127 if dtype == torch.int8 else groups.abs() / 8 + largest / 448
    assert ((got - groups).abs() <= 0.51 * step).all()
    assert not got[1].any()
    assert codes.float().abs().amax() == (127 if dtype == torch.int8 else 448)


@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("dtype", CODES)
def test_products_are_those_of_the_rounded_numbers(dtype: torch.dtype, silu_mul: bool) -> None:
    name = "INT8" if dtype == torch.int8 else "FP8"
    made = quantize(FORMATS[name], random(72, 128, dtype=torch.float32, seed=1))
    assert made is not None
    x, bias = random(6, 128, dtype=torch.float16, seed=2), random(72, dtype=torch.float16, seed=3)
    rounded, row_scales = quantize_rows(x, dtype, 0)
    exact = (rounded.double() * row_scales.double()) @ (
        made[0].double() * made[1].double().unsqueeze(1)
    ).t()
    expected = exact + bias.double()
    if silu_mul:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    got = product(x, *made, bias, silu_mul).double()
    assert (got - expected).abs().max() <= 4e-3 * expected.abs().max()


@pytest.mark.parametrize("dtype", CODES)
def test_groups_of_inputs_have_scales_of_their_own(dtype: torch.dtype) -> None:
    weight = (
        random(32, 256, dtype=torch.float32, seed=4).mul_(20).round_().clamp_(-100, 100).to(dtype)
    )
    scales = random(32, 2, dtype=torch.float32, seed=5)
    x = random(3, 256, dtype=torch.float16, seed=6)
    rounded, row_scales = quantize_rows(x, dtype, 128)
    left = (rounded.double().view(3, 2, 128) * row_scales.double().unsqueeze(-1)).view(3, 256)
    right = (weight.double().view(32, 2, 128) * scales.double().unsqueeze(-1)).view(32, 256)
    expected = left @ right.t()
    assert (
        product(x, weight, scales).double() - expected
    ).abs().max() <= 2e-3 * expected.abs().max()


@pytest.mark.parametrize("dtype", CODES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    weight = (
        random(64, 128, dtype=torch.float32, seed=7).mul_(20).round_().clamp_(-100, 100).to(dtype)
    )
    scales = random(64, dtype=torch.float32, seed=8)
    x = random(max(ROW_COUNTS), 128, dtype=torch.float16, seed=9)
    assert_rows_alone(lambda rows: product(rows, weight, scales), [x])


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", CODES)
def test_what_is_no_number_stays_none(dtype: torch.dtype, bad: float) -> None:
    """A row that went wrong must not look like one that did not."""
    weight, scales = torch.ones(32, 64, device=DEVICE).to(dtype), torch.ones(32, device=DEVICE)
    x = random(2, 64, dtype=torch.float16, seed=1)
    x[1, 5] = bad
    got = product(x, weight, scales)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("owners", "experts"),
    [
        ([5] * 12, 8),  # one tile, and programs without any
        ([0, 3] * 20, 4),  # several tiles of an expert, the last one not full; experts without rows
        ([i % 5 for i in range(200 if ON_GPU else 60)], 5),
        *([([i * i % 97 for i in range(4000)], 128)] if ON_GPU else []),
    ],
    ids=["one", "two", "few", "many"][: 4 if ON_GPU else 3],
)
@pytest.mark.parametrize("turns", [1, 2, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16])
def test_programs_that_go_on_to_further_tiles(
    dtype: torch.dtype, turns: int, owners: list[int], experts: int
) -> None:
    """To the bit what each expert's rows give alone; also where the last of the inner loop's turns
    is not full.
    """
    # two programs, or one, in the interpreter
    pairs, outer = len(owners), 256 if ON_GPU else 16 if turns % 2 else 24
    ids = torch.tensor(owners, dtype=torch.int32, device=DEVICE)
    # so many stages: always in a loop
    tile = Tile(16, 64, 128, turns, 4) if ON_GPU else Tile(16, 16, 16, turns, 4)
    tiles = group_pairs(ids, experts, pairs, tile.rows)
    for inner in (turns * tile.inner, turns * tile.inner + 8):
        weight = random(experts, outer, inner, dtype=dtype, seed=1)
        x, bias = (
            random(pairs, inner, dtype=dtype, seed=2),
            random(experts, outer, dtype=dtype, seed=3),
        )
        got = tile_product(x, Weight.dense(weight), bias, tiles, tile, dtype)
        for expert in set(owners):
            rows = x[ids == expert]
            alone = Weight.dense(weight[expert])
            expected = tile_product(
                rows, alone, bias[expert], rows_in_order(rows, tile.rows), tile, dtype
            )
            assert torch.equal(got[ids == expert], expected), (inner, expert)


CODED = ["Q6_K", "Q4_1", "MXFP4", "INT4_G32"]
if ON_GPU:
    CODED += [
        "Q8_0",
        "Q5_0",
        "Q5_1",
        "Q5_K",
        "Q4_0",
        "Q4_K",
        "Q3_K",
        "Q2_K",
        "INT4",
        "INT4_G64",
        "INT4_G128",
    ]


def coded(name: str, *shape: int) -> Weight:
    format = FORMATS[name]
    parts = quantized(format, random(math.prod(shape[:-1]), shape[-1], dtype=torch.float32))
    return Weight.of(format, shape, *(part.view(*shape[:-1], *part.shape[1:]) for part in parts))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CODED)
def test_codes_become_the_numbers_of_the_expanded_weight(name: str) -> None:
    """To the bit, and so do products with rows that pick single numbers."""
    weight = coded(name, 40, 512 if name.endswith(("_K", "_G128")) else 320)
    (part,) = weight.parts
    numbers = part.format.expand(*part.tensors).view(weight.shape).to(torch.float16)
    packed = Weight(weight.shape, (pack_codes(part.format, *part.tensors),))
    assert packed.nbytes < 0.75 * numbers.nbytes
    assert torch.equal(expand_codes(packed, torch.float16), numbers)
    picked = torch.eye(weight.shape[1], dtype=torch.float16, device=DEVICE)[::3].contiguous()
    tiles = rows_in_order(picked, 16)
    assert torch.equal(
        tile_product(picked, packed, None, tiles, SMALL, torch.float16), numbers.t()[::3]
    )
    x, bias = (
        random(5, weight.shape[1], dtype=torch.float16, seed=8),
        random(40, dtype=torch.float16, seed=9),
    )
    got = tile_product(x, packed, bias, rows_in_order(x, 16), SMALL, torch.float16).double()
    expected = x.double() @ numbers.double().t() + bias.double()
    assert (got - expected).abs().max() <= 2e-3 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*CODED, "INT8", "FP8", "FP8_G128"] if ON_GPU else ["MXFP4", "INT8"]
)
def test_experts_of_fewer_bits(name: str) -> None:
    """Against the experts of plain numbers, and each row alone."""
    experts, dtype = 6, torch.float16
    hidden = intermediate = 256 if ON_GPU else 64
    whole = [
        coded(name, experts, 2 * intermediate, hidden),
        coded(name, experts, hidden, intermediate),
    ]
    plain = [
        Weight.dense(one.parts[0].format.expand(*one.parts[0].tensors).view(one.shape).to(dtype))
        for one in whole
    ]
    packed = [pack(one, dtype) for one in whole]
    spec = MoeSpec(experts, 2, intermediate, True)
    rows, counts = (max(ROW_COUNTS), ROW_COUNTS) if ON_GPU else (5, (1, 3))
    x, logits = (
        random(rows, hidden, dtype=dtype, seed=1),
        random(rows, experts, dtype=dtype, seed=2),
    )
    x = x / intermediate
    got, expected = (moe(x, logits, ExpertWeights(*weights), spec) for weights in (packed, plain))
    if name in CODED:
        assert torch.equal(got, expected) or not ON_GPU
    assert (got - expected).double().norm() <= (
        2e-3 if name in CODED else 0.06
    ) * expected.double().norm()
    assert_rows_alone(
        lambda x, logits: moe(x, logits, ExpertWeights(*packed), spec), [x, logits], counts
    )
