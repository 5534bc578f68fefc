"""Experts in few bits: the layouts in which they are read, and products with the bits of the expanded
weights.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton.support import DEVICE, MARKS, ON_GPU, assert_rows_alone, in_graph, random

from quire.kernels.formats import FORMATS  # isort: skip  (after the check for Triton)
from quire.kernels.ops import Activation, ExpertWeights, MoeSpec  # isort: skip
from quire.backends.triton.expert_layouts import (  # isort: skip
    BYTES,
    MINIMA,
    ZEROS,
    Coding,
    can_pack,
    coding_of,
    pack_experts,
    pack_mxfp4,
    packed_shape,
)
from quire.backends.triton.moe import moe  # isort: skip
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
    coding = coding_of(MXFP4, 2880)
    assert coding is not None
    assert can_pack(coding, 5760, 2880)
    assert not can_pack(coding, 5760, 2880 + 32)
    assert not can_pack(coding, 2880 + 16, 2880)
    assert not can_pack(coding, 2880, 448)
    assert can_pack(Coding(ZEROS, 128), 64, 768)
    assert not can_pack(Coding(ZEROS, 128), 64, 832)
    assert not can_pack(Coding(ZEROS, 96), 64, 768)
    assert coding_of(FORMATS["Q5_K"], 2048) is None
    assert coding_of(FORMATS["FP8"], 2048) is None


INTEGERS = ("INT4", "INT4_G128", "INT4_G64", "INT4_G32", "Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q6_K")


def integers(name: str, experts: int, out: int, inner: int, seed: int = 0) -> tuple[Tensor, ...]:
    """The tensors of experts with any codes; scales are float16 as those of files, zero and negative
    ones among them.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(below: int, *size: int) -> Tensor:
        return torch.randint(0, below, size, generator=generator)

    def scales(*size: int) -> Tensor:
        found = (1 + drawn(1024, *size) / 1024) * 2.0 ** -(7 + drawn(10, *size))
        return torch.where(drawn(50, *size) == 0, 0.0, found * (1 - 2 * drawn(2, *size))).half()

    format = FORMATS[name]
    tensors = format.empty((experts, out, inner))
    codes = tensors[0].view(-1, format.num_bytes)
    codes.copy_(drawn(256, *codes.shape))
    if format.has_zeros:
        tensors[1].copy_(scales(*tensors[1].shape).float())
        tensors[2].copy_(drawn(17 if name == "INT4_G128" else 16, *tensors[2].shape))
    for at in format.scales:
        codes[:, at : at + 2] = (scales(len(codes)) / 16).unsqueeze(-1).view(torch.uint8)
    return tuple(one.to(DEVICE) for one in tensors)


def expanded(name: str, shape: tuple[int, int, int], tensors: tuple[Tensor, ...]) -> Tensor:
    return FORMATS[name].expand(*tensors).view(shape).bfloat16()


def numbers_of_integers(packed: Tensor, coding: Coding, inner: int) -> Tensor:
    """What the kernel makes of packed weights, by its own steps: words of codes, scale and what is
    added; one fused multiplication and addition, rounded to float32 and then to bfloat16.
    """
    experts, chunks = packed.shape[:2]
    of_codes = 256 if coding.kind == BYTES else 128
    pieces = inner // 64
    codes = packed[..., : coding.pieces * of_codes].reshape(experts, chunks, pieces, of_codes)
    words = packed[..., coding.pieces * of_codes :]
    words = words.repeat_interleave(coding.pieces, 2)
    bytes_ = codes.contiguous().view(torch.uint8).long()
    if coding.kind == BYTES:
        # 16 inputs, row, t, row + 8, 32 inputs, 8 inputs, neighbours
        axes = bytes_.view(experts, chunks, pieces, 2, 8, 4, 2, 2, 2, 2)
        axes = axes.permute(0, 1, 2, 4, 5, 6, 7, 3, 8, 9) << 16
    else:
        halves = torch.stack((bytes_ << 4 & 0xF0, bytes_ & 0xF0), -1)
        # row, t, row + 8, 32 inputs, 16 inputs, 8 inputs, neighbours
        axes = halves.view(experts, chunks, pieces, 8, 4, 2, 2, 2, 2, 2) << 16
    values = axes.int().view(torch.float32).double()
    words = words.view(experts, chunks, pieces, 8, 1, 2, -1)
    if coding.kind == MINIMA:
        words = words.view(*words.shape[:-1], -1, 2)
        scale, other = (words[..., i].contiguous().view(torch.float32).double() for i in (0, 1))
    else:
        masked = words & ~255 if coding.kind == ZEROS else words
        scale = masked.contiguous().view(torch.float32).double()
        zero = (words & 255).double() * 2.0**-129 if coding.kind == ZEROS else 128 * 2.0**-133
        product = -zero * scale
        other = product.float().double()
        assert torch.equal(product, other)
    # groups of 64, 32 or 16 inputs: [..., 32 inputs, 16 inputs]
    groups = scale.shape[-1]
    grid = {1: (1, 1), 2: (2, 1), 4: (2, 2)}[groups]
    scale, other = (one.view(*one.shape[:-1], *grid, 1, 1) for one in (scale, other))
    numbers = (values * scale + other).float().bfloat16()
    # row, t, row + 8, 32 inputs, 16 inputs, 8 inputs, neighbours
    return numbers.permute(0, 1, 5, 3, 2, 6, 7, 8, 4, 9).reshape(experts, chunks * 16, inner)


@pytest.mark.parametrize("name", INTEGERS)
def test_packed_integers_are_the_numbers_of_the_format(name: str) -> None:
    """The bits of the expanded weight, with every code and any scales."""
    shape = 2, 32, 768
    tensors = integers(name, *shape)
    coding = coding_of(FORMATS[name], shape[2])
    assert coding is not None
    packed = pack_experts(FORMATS[name], coding, *tensors)
    assert packed is not None
    assert packed.shape == packed_shape(coding, *shape)
    assert packed.dtype == torch.int32
    assert torch.equal(
        numbers_of_integers(packed, coding, shape[2]), expanded(name, shape, tensors)
    )


def test_what_a_layout_of_integers_has_no_place_for_is_left() -> None:
    """Scales of more bits than float16 has, or as large as no float32 is that much larger; zero
    points above 16.
    """
    for name, index, value in (
        ("INT4_G128", 1, 1 / 3),
        ("INT4_G128", 1, 0.5),
        ("INT4_G128", 1, float("nan")),
        ("INT4_G128", 2, 17),
    ):
        tensors = integers(name, 2, 32, 512)
        coding = coding_of(FORMATS[name], 512)
        assert coding is not None
        assert pack_experts(FORMATS[name], coding, *tensors) is not None
        tensors[index][1, 5, 2] = value
        assert pack_experts(FORMATS[name], coding, *tensors) is None, (name, value)
    for name, value in (("Q8_0", 1 / 16), ("Q4_0", 1.0), ("Q6_K", float("inf"))):
        (blocks,) = integers(name, 2, 32, 512)
        coding = coding_of(FORMATS[name], 512)
        assert coding is not None
        at = FORMATS[name].scales[0]
        blocks[1, 3, at : at + 2] = torch.tensor([value]).half().view(torch.uint8)
        assert pack_experts(FORMATS[name], coding, blocks) is None, name


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


@on_hopper
@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("shape", [(16, 4, 2048, 768), (8, 2, 512, 1280)])
def test_experts_in_integers_have_the_bits_of_expanded_ones(
    name: str, shape: tuple[int, int, int, int]
) -> None:
    """With tiles of every width, in a graph too, and every row alone."""
    experts, top_k, hidden, intermediate = shape
    packed, plain = [], []
    for seed, own in enumerate(
        ((experts, 2 * intermediate, hidden), (experts, hidden, intermediate))
    ):
        tensors = integers(name, *own, seed=seed)
        packed.append(pack(Weight.of(FORMATS[name], own, *tensors), torch.bfloat16))
        plain.append(Weight.dense(expanded(name, own, tensors)))
        assert packed[-1].tensor.dtype == torch.int32
    weights, dense = ExpertWeights(*packed), ExpertWeights(*plain)
    spec = MoeSpec(experts, top_k, intermediate, True)
    each = [times * experts // top_k for times in (3, 8, 16, 32)]
    for rows in (1, 5, *each, 300):
        x = random(rows, hidden, dtype=torch.bfloat16, seed=rows)
        logits = random(rows, experts, dtype=torch.bfloat16, seed=rows + 1)
        assert torch.equal(moe(x, logits, weights, spec), moe(x, logits, dense, spec)), rows
    expected = moe(x[:8], logits[:8], dense, spec)
    assert torch.equal(in_graph(lambda: moe(x[:8], logits[:8], weights, spec)), expected)
    assert_rows_alone(
        lambda x, logits: moe(x, logits, weights, spec), [x, logits], (1, each[0], each[2])
    )
