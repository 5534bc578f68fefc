"""Products with quantised weights in C++: accurate, the same bits in any company, and on every
instruction set.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.formats import FORMATS
from quire.kernels.ops import Activation
from quire.kernels.weights import Weight
from tests.kernels.cpu_support import NAN, few_examples, random

NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "INT8", "MXFP4")
SCALES_AT = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Where in a block its float16 numbers lie; at its beginning, if it is not said here."""


def quantized(
    name: str, columns: int, depth: int, seed: int = 0, scale: float | None = None
) -> tuple[Weight, Tensor]:
    """A weight of random blocks, and its numbers in float64. Scales are random, or all the same."""
    generator = np.random.default_rng(seed)
    if name == "INT8":
        codes = torch.from_numpy(generator.integers(-127, 128, (columns, depth), dtype=np.int8))
        scales = torch.from_numpy(generator.uniform(0.001, 0.01, columns).astype(np.float32))
        scales = scales if scale is None else torch.full_like(scales, scale)
        return Weight.of(
            FORMATS[name], (columns, depth), codes, scales
        ), codes.double() * scales.double()[:, None]
    format = FORMATS[name]
    blocks = generator.integers(
        0, 256, (columns, depth // format.num_elements, format.num_bytes), dtype=np.uint8
    )
    for at in SCALES_AT.get(name, (0,)):
        numbers = generator.uniform(-0.01, 0.01, (*blocks.shape[:2], 1)) if scale is None else scale
        blocks[:, :, at : at + 2] = (
            np.broadcast_to(numbers, (*blocks.shape[:2], 1)).astype(np.float16).view(np.uint8)
        )
    if name == "MXFP4":  # a power of two, by its exponent
        exponents = generator.integers(118, 122, blocks.shape[:2], dtype=np.uint8)
        blocks[:, :, 0] = exponents if scale is None else 128 + round(np.log2(scale))
    stored = torch.from_numpy(blocks.reshape(columns, -1))
    return Weight.of(format, (columns, depth), stored), format.expand(stored).double()


def as_quantized(x: Tensor) -> Tensor:
    """What the products see of x: 32 numbers of a row at a time, as 8-bit integers times the
    largest / 127.
    """
    units = x.float().unflatten(1, (-1, 32))
    top = units.abs().amax(-1, keepdim=True)
    whole = (units * torch.where(top == 0, 0, torch.tensor(127.0) / top)).round()
    return (whole.double() * (top / 127).double()).view(x.shape)


@given(
    name=st.sampled_from(NAMES),
    rows=st.integers(0, 70),
    columns=st.integers(1, 60),
    blocks=st.integers(1, 4),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@few_examples
def test_products_are_those_of_float64(
    kernels: CpuKernels,
    dtype: torch.dtype,
    name: str,
    rows: int,
    columns: int,
    blocks: int,
    bias: bool,
    seed: int,
) -> None:
    depth = blocks * 256 if FORMATS[name].num_elements == 256 else blocks * 32
    weight, numbers = quantized(name, columns, depth, seed)
    x = random(rows, depth, dtype=dtype, seed=seed + 1)
    added = random(columns, dtype=dtype, seed=seed + 2) if bias else None
    got = kernels.linear(x, kernels.pack(weight), added)
    assert got.shape == (rows, columns)
    assert got.dtype == dtype
    seen = as_quantized(x)
    truth = seen @ numbers.T + (0 if added is None else added.double())
    most = (
        seen.abs() @ numbers.abs().T + 1 + (0 if added is None else added.double().abs())
    )  # no rounding can be larger than a share of this
    if rows:
        assert ((got.double() - truth).abs() / most).max() < (
            1e-6 if dtype == torch.float32 else 2**-8
        )


@pytest.mark.parametrize("name", NAMES)
def test_integers_are_summed_exactly(kernels: CpuKernels, name: str) -> None:
    """Where scales are powers of two and x consists of integers, nothing is rounded: not one bit
    may differ.
    """
    weight, numbers = quantized(name, 50, 512, scale=2.0**-6)
    x = torch.from_numpy(np.random.default_rng(1).integers(-127, 128, (37, 512))).float()
    x[:, ::32] = 127.0  # so that the scale of every unit is 1
    assert torch.equal(as_quantized(x), x.double())
    assert torch.equal(kernels.linear(x, kernels.pack(weight)).double(), x.double() @ numbers.T)


@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_same_bits_in_any_number(
    kernels: CpuKernels, dtype: torch.dtype, name: str, threads: None
) -> None:
    weight = kernels.pack(quantized(name, 100, 768)[0])
    x = random(150, 768, dtype=dtype, seed=2)
    whole = kernels.linear(x, weight)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64, 65, 149):
        assert torch.equal(kernels.linear(x[:rows], weight), whole[:rows])
        assert torch.equal(kernels.linear(x[150 - rows :], weight), whole[150 - rows :])
    torch.set_num_threads(1)
    assert torch.equal(kernels.linear(x, weight), whole)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_an_embedding_are_the_numbers(kernels: CpuKernels, name: str) -> None:
    weight, numbers = quantized(name, 45, 512)
    ids = torch.tensor([44, 0, 17, 44, 15, 16])
    assert torch.equal(kernels.embedding(ids, kernels.pack(weight)), numbers[ids].float())


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_weight_is_hardly_larger(kernels: CpuKernels, name: str) -> None:
    weight, _ = quantized(name, 160, 1536)
    assert kernels.computes(weight.parts[0].format)
    assert weight.nbytes <= kernels.pack(weight).nbytes <= 1.03 * weight.nbytes


@pytest.mark.parametrize("poison", [NAN, float("inf"), -float("inf")])
def test_a_row_that_is_not_all_numbers_harms_no_other(
    kernels: CpuKernels, dtype: torch.dtype, poison: float
) -> None:
    weight = kernels.pack(quantized("Q4_1", 40, 256)[0])
    x = random(9, 256, dtype=dtype)
    clean = kernels.linear(x, weight)
    x[4, 77] = poison
    got = kernels.linear(x, weight)
    assert got[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(got[others], clean[others])


def test_tiny_and_zero_rows(kernels: CpuKernels) -> None:
    weight, numbers = quantized("Q8_0", 20, 64)
    x = torch.zeros(3, 64)
    x[1] = 1e-38
    x[2] = 1e30
    got = kernels.linear(x, kernels.pack(weight))
    assert torch.equal(got[:2], torch.zeros(2, 20))
    assert torch.allclose(got[2].double(), as_quantized(x[2:]) @ numbers.T, rtol=1e-5)


def test_parts_of_many_formats(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """A packed matrix of quantised parts, and one with plain numbers between them."""
    x, bias = random(21, 256, dtype=dtype), random(100, dtype=dtype, seed=5)
    formats = ("Q4_K", "Q6_K", "Q4_K", "INT8", "Q5_0")
    columns = (33, 16, 7, 20, 24)
    parts = [quantized(name, n, 256, seed=n)[0] for name, n in zip(formats, columns, strict=True)]
    weight = kernels.pack(Weight.stacked(parts))
    expected = torch.cat([kernels.linear(x, kernels.pack(part)) for part in parts], 1)
    assert torch.equal(kernels.linear(x, weight), expected)
    assert weight.nbytes == sum(kernels.pack(part).nbytes for part in parts)
    parts[2] = Weight.dense(random(7, 256, dtype=dtype, seed=9))
    mixed = kernels.pack(Weight.stacked(parts))
    biases = bias.split_with_sizes(columns)
    expected = torch.cat(
        [kernels.linear(x, kernels.pack(p), b) for p, b in zip(parts, biases, strict=True)], 1
    )
    assert torch.equal(kernels.linear(x, mixed, bias), expected)
    gated = kernels.linear_gated(x, mixed, bias, Activation.SILU)
    assert torch.equal(gated, kernels.gate(expected, Activation.SILU))


def test_stacks_of_experts(kernels: CpuKernels) -> None:
    parts = [
        quantized(name, 24, 256, seed=seed)[0] for seed in range(3) for name in ("Q4_0", "Q6_K")
    ]
    stacks = [
        Weight.of(
            FORMATS[name], (3, 24, 256), torch.stack([parts[2 * i + j].tensor for i in range(3)])
        )
        for j, name in enumerate(("Q4_0", "Q6_K"))
    ]
    weight = kernels.pack(Weight.stacked(stacks))
    x = random(4, 256, dtype=torch.float32)
    for i in range(3):
        expected = kernels.linear(x, kernels.pack(Weight.stacked(parts[2 * i : 2 * i + 2])))
        assert torch.equal(kernels.linear(x, weight.experts[i]), expected)
