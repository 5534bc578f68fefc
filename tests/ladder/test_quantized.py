"""Rung 7's short version of quantised products: the engine's quantisers and the C++ kernel's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.formats import FORMATS
from quire.kernels.quantize import INT8, to_codes
from quire.kernels.quantize import to_q4_0 as to_stored_q4_0
from quire.kernels.weights import Weight
from quire.tools.bench.ladder.weights import compare_rounding
from quire.tools.ladder.quantized import (
    BlockWeight,
    absmax,
    from_q4_1,
    int8_linear,
    quantize_activations,
    quantized_linear,
    to_q4_0,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Rows of different sizes, one of them zeros, one with a number far above its neighbours."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    numbers *= torch.logspace(-4, 3, shape[0]).unsqueeze(1)
    numbers[1] = 0
    numbers[2, 40] *= 1000
    return numbers


def stored_blocks(name: str, outputs: int, inputs: int) -> Tensor:
    """Random bytes with random float16 scales."""
    generator, format = np.random.default_rng(3), FORMATS[name]
    blocks = generator.integers(0, 256, (outputs, inputs // 32, format.num_bytes), dtype=np.uint8)
    for at in format.scales:
        scales = generator.uniform(-0.02, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[:, :, None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(outputs, -1))


def kernel_product(x: Tensor, name: str, *tensors: Tensor) -> Tensor:
    kernels = CpuKernels()
    weight = kernels.pack(Weight.of(FORMATS[name], (len(tensors[0]), x.shape[1]), *tensors))
    return kernels.linear(x, weight)


def test_absmax_is_the_engines_int8() -> None:
    numbers = random(12, 96)
    codes, scales = absmax(numbers)
    expected, expected_scales = to_codes(INT8, numbers)
    assert torch.equal(codes, expected.int())
    assert torch.equal(scales, expected_scales)
    assert codes[2:].abs().amax(1).eq(127).all()
    assert ((codes * scales[:, None] - numbers).abs() <= scales[:, None] * 0.50001).all()


def test_blocks_of_four_bits_are_the_engines_q4_0() -> None:
    numbers = random(12, 96)
    stored = to_stored_q4_0(numbers)
    assert torch.equal(to_q4_0(numbers).numbers(), FORMATS["Q4_0"].expand(stored))


def test_a_stored_block_is_read_as_the_engine_reads_it() -> None:
    stored = stored_blocks("Q4_1", 5, 96)
    assert torch.equal(from_q4_1(stored).numbers(), FORMATS["Q4_1"].expand(stored))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_have_the_bits_of_the_cpp_kernel(rows: int) -> None:
    x, weight = random(40, 256)[:rows], random(50, 256, seed=1)
    q4_0, q4_1 = to_stored_q4_0(weight), stored_blocks("Q4_1", 50, 256)
    assert torch.equal(quantized_linear(x, to_q4_0(weight)), kernel_product(x, "Q4_0", q4_0))
    assert torch.equal(quantized_linear(x, from_q4_1(q4_1)), kernel_product(x, "Q4_1", q4_1))
    q8_0 = stored_blocks("Q8_0", 50, 256)
    blocks = q8_0.unflatten(1, (-1, 34))
    scales = blocks[:, :, :2].contiguous().view(torch.float16).float().squeeze(2)
    read = BlockWeight(blocks[:, :, 2:].contiguous().view(torch.int8).int(), scales)
    assert torch.equal(quantized_linear(x, read), kernel_product(x, "Q8_0", q8_0))
    codes, row_scales = absmax(weight)
    assert torch.equal(
        int8_linear(x, codes, row_scales),
        kernel_product(x, "INT8", codes.to(torch.int8), row_scales),
    )


def test_a_rows_bits_do_not_depend_on_its_company() -> None:
    x, weight = random(9, 128), to_q4_0(random(20, 128, seed=1))
    whole = quantized_linear(x, weight)
    assert torch.equal(torch.cat([quantized_linear(row[None], weight) for row in x]), whole)


def test_what_rounding_costs_is_what_was_promised() -> None:
    """Of the result only the activations' half steps are lost once the weights are what they are."""
    x, weight = random(9, 128), to_q4_0(random(20, 128, seed=1))
    codes, scales = quantize_activations(x)
    seen = (codes.double() * scales.double().unsqueeze(2)).flatten(1)
    numbers = weight.numbers().double()
    assert ((seen - x).unflatten(1, (-1, 32)).abs() <= scales.unsqueeze(2) * 0.50001).all()
    exact = seen @ numbers.T
    assert (
        (quantized_linear(x, weight) - exact).abs() <= 1e-6 * (seen.abs() @ numbers.abs().T)
    ).all()


def test_the_table_of_roundings_shows_why_there_are_blocks() -> None:
    table = compare_rounding()
    rows = {row[0]: [cell.value for cell in row[1:]] for row in table.rows}  # type: ignore[union-attr]
    assert rows["plain numbers"][:4] == [32, 0, 0, 0]
    whole, blocks = rows["8 bits, a scale per row"], rows["8 bits, a scale per 32"]
    assert blocks[1] < whole[1] < whole[2]
    assert blocks[2] < whole[2] / 2
    whole, blocks = rows["4 bits, a scale per row"], rows["4 bits, a scale per 32 (Q4_0)"]
    assert blocks[2] < whole[2] / 2
    assert whole[2] > 30
    # 8-bit activations cost as much as 8-bit weights, and hardly anything beside those of 4 bits.
    assert 0.3 < rows["plain numbers"][4] < 1
    assert blocks[4] < 1.05 * blocks[3]
