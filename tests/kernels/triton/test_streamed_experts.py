"""Experts in MXFP4: the layout in which they are read, and products with the bits of the expanded
weights.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton.support import DEVICE, MARKS, ON_GPU, assert_rows_alone, in_graph, random

from quire.kernels.formats import FORMATS  # isort: skip  (after the check for Triton)
from quire.kernels.ops import Activation, ExpertWeights, MoeSpec  # isort: skip
from quire.backends.triton.moe import moe  # isort: skip
from quire.backends.triton.mxfp4_layout import can_pack, pack_mxfp4  # isort: skip
from quire.backends.triton.quantized import pack  # isort: skip
from quire.kernels.weights import Weight  # isort: skip

pytestmark = MARKS
MXFP4 = FORMATS["MXFP4"]
is_hopper = ON_GPU and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not is_hopper, reason="the kernel is for Hopper")


def stored(experts: int, out: int, inner: int, seed: int = 0, largest: int = 128) -> Tensor:
    """Blocks with any codes and exponents from 0 to `largest`."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, out, inner // 32, 17), generator=generator)
    blocks[..., 0] = torch.randint(
        max(0, largest - 40), largest + 1, blocks.shape[:-1], generator=generator
    )
    return blocks.to(torch.uint8).flatten(2).to(DEVICE)


def numbers_of(pieces: Tensor) -> Tensor:
    """What the kernel makes of packed weights, by its own steps, in float64 [experts, out, in]."""
    experts, chunks, count, _ = pieces.shape
    words = pieces[..., :128].view(experts, chunks, count, 32, 4).long() & 0xFFFFFFFF
    # the four threads of a row have the same exponents
    of_threads = pieces[..., 128:].repeat_interleave(4, -1)
    exponents = of_threads[..., None] >> torch.arange(0, 32, 8, device=pieces.device) & 0xFF
    factor = (exponents << 7).to(torch.int16).view(torch.bfloat16).double()
    shifted = (words << 1 & 0x80008000) | (words >> 4 & 0x00C000C0) | (words >> 5 & 0x01000100)
    taken = (words & 0x81C081C0, words << 3 & 0x81C081C0, words << 6 & 0x81C081C0, shifted)
    halves = torch.stack([each >> shift & 0xFFFF for each in taken for shift in (0, 16)], -1)
    numbers = (
        halves.to(torch.int32).to(torch.int16).view(torch.bfloat16).double() * factor[..., None]
    )
    # row, t; row + 8, 32 inputs; 16 inputs, 8 inputs, neighbours
    axes = numbers.view(experts, chunks, count, 8, 4, 2, 2, 2, 2, 2)
    return axes.permute(0, 1, 5, 3, 2, 6, 7, 8, 4, 9).reshape(experts, chunks * 16, count * 64)


def test_packed_weights_are_those_of_the_format() -> None:
    """For every exponent that bfloat16 has a factor for, subnormal numbers included."""
    for seed, largest in enumerate((128, 100, 40)):
        blocks = stored(2, 32, 192, seed, largest)
        pieces = pack_mxfp4(blocks)
        assert pieces is not None
        assert pieces.shape == (2, 2, 3, 136)
        assert pieces.nbytes == blocks.nbytes
        assert torch.equal(numbers_of(pieces), MXFP4.expand(blocks).view(2, 32, 192).double())


def test_what_the_layout_has_no_place_for_is_left() -> None:
    assert (
        pack_mxfp4(
            stored(1, 32, 64, largest=129).index_fill_(2, torch.tensor([0], device=DEVICE), 129)
        )
        is None
    )
    assert can_pack(5760, 2880)
    assert not can_pack(5760, 2880 + 32)
    assert not can_pack(2880 + 16, 2880)
    assert not can_pack(2880, 448)


def layer(experts: int, hidden: int, intermediate: int) -> tuple[ExpertWeights, ExpertWeights]:
    """Packed, and as plain numbers."""
    shapes = (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)
    blocks = [stored(*shape, seed=i, largest=124) for i, shape in enumerate(shapes)]
    for one in blocks:
        one.view(-1, 17)[:, 0].clamp_(min=118)
    biases = [
        random(experts, shape[1], dtype=torch.bfloat16, seed=i) for i, shape in enumerate(shapes)
    ]
    whole = [Weight.of(MXFP4, shape, one) for shape, one in zip(shapes, blocks, strict=True)]
    plain = [
        Weight.dense(MXFP4.expand(one).view(shape).bfloat16())
        for one, shape in zip(blocks, shapes, strict=True)
    ]
    packed = [pack(one, torch.bfloat16) for one in whole]
    assert all(one.tensor.dtype == torch.int32 for one in packed)
    return ExpertWeights(*packed, *biases), ExpertWeights(*plain, *biases)


@on_hopper
@pytest.mark.parametrize(
    ("shape", "activation"),
    [((32, 4, 2880, 2880), Activation.CLAMPED_SWIGLU), ((8, 2, 576, 1088), Activation.SILU)],
)
def test_experts_have_the_bits_of_expanded_ones(
    shape: tuple[int, int, int, int], activation: Activation
) -> None:
    """With tiles of every width, in a graph too, and every row alone. Each width is compiled once."""
    experts, top_k, hidden, intermediate = shape
    packed, plain = layer(experts, hidden, intermediate)
    spec = MoeSpec(experts, top_k, intermediate, True, activation=activation)
    each = [
        3 * experts // top_k,
        6 * experts // top_k,
        12 * experts // top_k,
        24 * experts // top_k,
    ]
    for rows in (1, 8, *each, 700):
        x = random(rows, hidden, dtype=torch.bfloat16, seed=rows)
        logits = random(rows, experts, dtype=torch.bfloat16, seed=rows + 1)
        assert torch.equal(moe(x, logits, packed, spec), moe(x, logits, plain, spec)), rows
    expected = moe(x[:8], logits[:8], plain, spec)
    assert torch.equal(in_graph(lambda: moe(x[:8], logits[:8], packed, spec)), expected)
    assert_rows_alone(
        lambda x, logits: moe(x, logits, packed, spec), [x, logits], (1, each[1], each[3])
    )
