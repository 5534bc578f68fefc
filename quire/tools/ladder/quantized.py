"""Rung 7 in plain torch: numbers become small integers and a scale, and products are computed in
integers.

It gives the bits of the C++ kernel (`quire/backends/cpu/quantized.cpp`), which reads the same
integers packed in bytes and nibbles. The engine's own quantisers are in
`quire/kernels/quantize.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
"""How many numbers of a row share a scale."""


def absmax(numbers: Tensor, top: int = 127) -> tuple[Tensor, Tensor]:
    """Integers from -top to top and a scale for each row: the largest magnitude becomes `top`, all
    else is rounded to the nearest step. Integer times scale is within half a step of the number.
    """
    scales = numbers.abs().amax(-1) / top
    scales = torch.where(scales == 0, 1.0, scales)
    return (numbers / scales.unsqueeze(-1)).round().clamp(-top, top).int(), scales


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A matrix as integers, of which each block of a row has a scale, and in some formats a
    minimum.
    """

    codes: Tensor
    """int32 [outputs, blocks, 32]."""
    scales: Tensor
    """float32 [outputs, blocks]."""
    minima: Tensor | None = None

    def numbers(self) -> Tensor:
        """The matrix it stands for, [outputs, inputs]: scale x code + minimum."""
        products = self.codes * self.scales.unsqueeze(-1)
        return (products if self.minima is None else products + self.minima.unsqueeze(-1)).flatten(
            1
        )


def to_q4_0(weight: Tensor) -> BlockWeight:
    """4 bits in blocks, as llama.cpp makes Q4_0: of 32 numbers the one of the largest magnitude
    becomes -8, the others the nearest of -8 to 7. With its float16 scale a block takes 18 bytes:
    4.5 bits a number.
    """
    blocks = weight.reshape(len(weight), -1, BLOCK)
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    scales = largest / -8
    inverse = torch.where(scales.abs() < 1e-38, 0.0, 1 / scales)
    codes = (blocks.double() * inverse + 8.5).clamp(0, 15).int() - 8
    return BlockWeight(codes, scales.squeeze(2).half().float())


def from_q4_1(stored: Tensor) -> BlockWeight:
    """Q4_1 as it lies in a GGUF file, uint8 [outputs, bytes of a row]. The 20 bytes of a block are
    its scale and its minimum in float16, then 16 bytes with numbers 0 to 15 in their lower halves
    and 16 to 31 in their upper ones.
    """
    blocks = stored.reshape(len(stored), -1, 20)
    halves = blocks[:, :, :4].contiguous().view(torch.float16).float()
    codes = torch.cat((blocks[:, :, 4:] & 15, blocks[:, :, 4:] >> 4), 2)
    return BlockWeight(codes.int(), halves[:, :, 0], halves[:, :, 1])


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """A product's inputs as 8-bit integers [rows, blocks, 32], with a scale for each block [rows,
    blocks].

    It is absmax again, with a multiplication instead of the division. A row is looked at by itself,
    so its integers are the same in any company.
    """
    blocks = x.reshape(len(x), -1, BLOCK)
    highest = blocks.abs().amax(2)
    inverse = torch.where(highest > 1e-36, 127 / highest, 0.0)
    return (blocks * inverse.unsqueeze(2)).round().int(), highest / 127


def quantized_linear(x: Tensor, weight: BlockWeight) -> Tensor:
    """x @ weight.T with both sides in integers: [rows, inputs] to [rows, outputs].

    Sums of integers are exact, so how a machine adds up the 32 products of a block changes nothing.
    Rounding happens only where blocks are merged, and they are merged from the first to the last.
    """
    codes, x_scales = quantize_activations(x)
    out = x.new_zeros(len(x), len(weight.codes))
    for block in range(codes.shape[1]):
        x_scale = x_scales[:, block, None]
        sums = codes[:, block] @ weight.codes[:, block].T
        out = _fused(weight.scales[:, block] * x_scale, sums, out)
        if weight.minima is not None:
            x_sum = codes[:, block].sum(1, keepdim=True).float() * x_scale
            out = _fused(x_sum, weight.minima[:, block], out)
    return out


def int8_linear(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x @ weight.T for a weight whose rows are quantised whole, by `absmax`: the rows' scales come
    last.
    """
    blocks = codes.reshape(len(codes), -1, BLOCK)
    return quantized_linear(x, BlockWeight(blocks, torch.ones(blocks.shape[:2]))) * scales


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c with one rounding, as a fused multiply-add has it: in float64 the product of two
    float32 is exact.
    """
    return (a.double() * b.double() + c.double()).float()
