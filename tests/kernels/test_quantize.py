"""INT8 and Q4_0 made from plain numbers, against definitions written down in numpy and the gguf
package's own.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize as gguf_quantize
from torch import Tensor

from quire.kernels.formats import FORMATS, Format
from quire.kernels.quantize import INT8, Q4_0, quantize, to_codes, to_q4_0


def awkward_numbers(*shape: int) -> Tensor:
    """Random rows of very different sizes, some all zeros, some with their largest magnitude twice."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    numbers *= torch.logspace(-6, 3, shape[-2]).unsqueeze(-1)
    numbers[..., 3, :] = 0
    numbers[..., 4, :] = -0.0
    numbers[..., 5, 1], numbers[..., 5, 2] = 9, -9
    # a scale of one: every code, without rounding
    numbers[..., 6, :] = torch.arange(shape[-1]) % 255 - 127.0
    numbers[..., 7, :] = torch.arange(shape[-1]) % 254 - 126.5  # halves, to the even neighbour
    numbers[..., 8, :] = 1e-44
    return numbers


def naive_int8(row: np.ndarray) -> tuple[list[int], np.float32]:
    scale = np.float32(np.abs(row).max() / np.float32(127))
    if scale == 0:
        scale = np.float32(1)
    return [int(max(-127, min(127, np.rint(x / scale)))) for x in row], scale


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_absmax_row_by_row(dtype: torch.dtype) -> None:
    numbers = awkward_numbers(2, 12, 96).to(dtype)
    codes, scales = to_codes(INT8, numbers)
    assert (codes.shape, codes.dtype, scales.shape, scales.dtype) == (
        (2, 12, 96),
        torch.int8,
        (2, 12),
        torch.float32,
    )
    rows = (
        numbers.float().view(-1, 96).numpy(),
        codes.view(-1, 96).tolist(),
        scales.flatten().tolist(),
    )
    for row, got, scale in zip(*rows, strict=True):
        assert (got, scale) == naive_int8(row)
    expanded = INT8.expand(codes, scales)
    torch.testing.assert_close(
        expanded, numbers.float(), rtol=0, atol=float(numbers.abs().max()) / 254 * 1.001
    )
    assert INT8.nbytes(tuple(codes.shape)) == codes.nbytes + scales.nbytes


def test_int4_is_what_the_gguf_package_makes() -> None:
    numbers = awkward_numbers(12, 96)
    numbers[8] = 0.25  # that package has no answer for numbers whose inverse is infinite
    got = to_q4_0(numbers)
    expected = gguf_quantize(numbers.numpy(), gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(got.numpy(), expected)
    assert torch.equal(to_q4_0(numbers.view(2, 6, 96)).view(12, -1), got)
    tiny = to_q4_0(torch.full((1, 32), 1e-44))
    assert not Q4_0.expand(tiny).any()


@pytest.mark.parametrize("format", [INT8, Q4_0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_is_noticed(format: Format, bad: float) -> None:
    numbers = torch.ones(3, 64)
    assert quantize(format, numbers) is not None
    numbers[1, 40] = bad
    assert quantize(format, numbers) is None


def test_int4_notices_what_float16_scales_can_not_hold() -> None:
    assert quantize(Q4_0, torch.full((1, 32), 5e5)) is not None
    assert quantize(Q4_0, torch.full((1, 32), 6e5)) is None
    assert quantize(INT8, torch.full((1, 32), 3e38)) is not None


@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if format.scales])
def test_every_scale_of_a_block_is_looked_at(name: str) -> None:
    """A scale that is no number makes numbers that are none, which shows where scales stand."""
    format = FORMATS[name]
    blocks = torch.full((2, 3 * format.num_bytes), 17, dtype=torch.uint8)
    for at in format.scales:
        for bits in (0x7C00, 0xFC00, 0x7E01):
            harmed = blocks.clone()
            place = format.num_bytes + at
            harmed[1, place], harmed[1, place + 1] = bits & 255, bits >> 8
            assert not format.has_finite_scales(harmed)
            assert not format.expand(harmed)[1, format.num_elements :].isfinite().all()
    assert format.has_finite_scales(blocks)
    assert format.expand(blocks).isfinite().all()
