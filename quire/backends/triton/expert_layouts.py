"""The layouts of quantised weights of experts in which `streamed_experts.py` reads them.

A weight is stored in pieces of 16 outputs and 64 inputs, one after the other along the inputs. A
piece has 128 words of codes (256 for codes of eight bits), four for each thread of a warp, in the
order in which the tensor cores want them. Behind it, or behind as many pieces as share them, are
their scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.formats import Format

PIECE_OUTPUTS, PIECE_INPUTS = 16, 64
_THREAD_WORDS = 128
"""Of a warp's threads together, in one piece."""
MXFP4, ZEROS, MINIMA, BYTES = range(4)
"""Codes of four bits with exponents, with scales and zero points, with scales and minima; codes of
eight bits with scales, 128 being 0.
"""
_KINDS = {
    **dict.fromkeys(("Q4_0", "INT4", "INT4_G32", "INT4_G64", "INT4_G128"), ZEROS),
    **dict.fromkeys(("Q4_1", "Q4_K"), MINIMA),
    **dict.fromkeys(("Q8_0", "Q6_K"), BYTES),
    "MXFP4": MXFP4,
}
_BLOCK = 32
"""Inputs of MXFP4 with a common exponent."""
_LARGEST_EXPONENT = 128
_SHORTEST = 512
_OFFSET = 126
"""The factor of a block with exponent e is the bfloat16 with the exponent e + 126: see
`expert_codings.py`.
"""
_ZERO_BITS = 255
"""The bits of a scale in which its zero point is."""


class Coding(NamedTuple):
    """How a format's pieces are made."""

    kind: int
    group: int
    """Inputs that share a scale."""

    @property
    def pieces(self) -> int:
        """That share their scales."""
        return max(self.group // PIECE_INPUTS, 1)

    @property
    def words(self) -> int:
        """Of codes and scales, of as many pieces as share these."""
        codes = _THREAD_WORDS * (2 if self.kind == BYTES else 1)
        if self.kind == MXFP4:
            return codes + 8  # four exponents a word
        each = max(PIECE_INPUTS // self.group, 1) * (2 if self.kind == MINIMA else 1)
        return self.pieces * codes + PIECE_OUTPUTS * each


def coding_of(format: Format, inner: int) -> Coding | None:
    """None where the kernel does not take the format."""
    kind = _KINDS.get(format.name)
    if kind is None:
        return None
    if kind == MXFP4:
        return Coding(kind, _BLOCK)
    if format.has_zeros:
        return Coding(kind, format.group or inner)
    return Coding(kind, 16 if format.name == "Q6_K" else 32)


def can_pack(coding: Coding, out: int, inner: int) -> bool:
    """Rows of a few pieces are left to the kernel for all formats."""
    is_even = out % (2 * PIECE_OUTPUTS) == 0 and inner % PIECE_INPUTS == 0
    fits = coding.group in (16, 32) or (coding.group % PIECE_INPUTS == 0)
    return is_even and fits and inner % coding.group == 0 and inner >= _SHORTEST


def packed_shape(coding: Coding, experts: int, out: int, inner: int) -> tuple[int, ...]:
    pieces = inner // PIECE_INPUTS // coding.pieces
    return experts, out // PIECE_OUTPUTS, pieces, coding.words


def pack_experts(format: Format, coding: Coding, *tensors: Tensor) -> Tensor | None:
    """int32 (`packed_shape`) of a part's tensors [experts, out, ...]; None where a scale has no place
    in it, which no known checkpoint has: too large (numbers above 2 in MXFP4, scales from 0.5 on of
    four bits and 1 / 32 of eight), or of more bits than float16 and bfloat16 have.
    """
    if coding.kind == MXFP4:
        return pack_mxfp4(tensors[0])
    packed = [_packed_integers(format, coding, *own) for own in zip(*tensors, strict=True)]
    found = [one for one in packed if one is not None]
    return torch.stack(found) if len(found) == len(packed) else None


def _packed_integers(format: Format, coding: Coding, *tensors: Tensor) -> Tensor | None:
    codes, scales, minima = format.coded(*tensors)
    out = codes.shape[0]
    other = torch.full((), 0)
    is_exact = True
    if format.has_zeros:
        # `coded` has subtracted them
        other = tensors[2].view(out, -1)
        codes = codes.view(*other.shape, -1) + other.view(torch.int8).unsqueeze(-1)
        is_exact = bool((other <= 16).all())
    elif coding.kind == ZEROS:
        codes, other = codes + 8, torch.full_like(scales, 8)
    elif format.name == "Q6_K":
        codes, scales = codes * 4, scales / 4
    if coding.kind == BYTES:
        codes = codes.view(torch.uint8) ^ 128
    scales = scales.double() * 2.0 ** (133 if coding.kind == BYTES else 129)
    words = scales.float().contiguous().view(torch.int32)
    # Of four bits, a product of code and scale must be exact; zero points are put beside.
    spare = _ZERO_BITS if coding.kind == ZEROS else 15 if coding.kind == MINIMA else 63
    is_exact &= bool(words.view(torch.float32).isfinite().all()) and not bool((words & spare).any())
    if not (is_exact or codes.is_meta):
        return None
    if coding.kind == MINIMA:
        assert minima is not None
        words = torch.stack((words, (-minima).contiguous().view(torch.int32)), -1)
    elif coding.kind == ZEROS:
        words = words | other.int()
    groups = max(PIECE_INPUTS // coding.group, 1)
    of_pieces = _THREAD_WORDS * (2 if coding.kind == BYTES else 1)
    found = _words_of(codes.reshape(out, -1).view(torch.uint8), coding.kind == BYTES)
    found = found.view(out // PIECE_OUTPUTS, -1, coding.pieces * of_pieces)
    # row + 8, row; shared pieces, groups, scale and minimum
    factors = words.view(out // 16, 2, 8, found.shape[1], groups, -1).permute(0, 3, 2, 1, 4, 5)
    return torch.cat((found, factors.reshape(*found.shape[:2], -1)), -1)


def _words_of(codes: Tensor, are_bytes: bool) -> Tensor:
    """int32 words, piece by piece, of codes uint8 [out, in]."""
    out = codes.shape[0]
    # row + 8, row; 32 inputs, 16 inputs, 8 inputs, t, neighbours
    codes = codes.view(out // 16, 2, 8, -1, 2, 2, 2, 4, 2)
    if are_bytes:  # first the words of all first 16 inputs of 32
        ordered = codes.permute(0, 3, 5, 2, 7, 1, 4, 6, 8)
    else:
        ordered = codes.permute(0, 3, 2, 7, 1, 4, 5, 6, 8)
        ordered = ordered[..., 0] | ordered[..., 1] << 4
    return ordered.contiguous().view(out // 16, codes.shape[3], -1).view(torch.int32)


def pack_mxfp4(blocks: Tensor) -> Tensor | None:
    """int32 [experts, out / 16, in / 64, 136] of stored blocks [experts, out, bytes of a row]; None
    where a factor would be too large for bfloat16 (numbers above 2), which no known checkpoint has.
    """
    if not blocks.is_meta and int(blocks.view(-1, _BLOCK // 2 + 1)[:, 0].max()) > _LARGEST_EXPONENT:
        return None
    return torch.stack([_packed_mxfp4(expert) for expert in blocks])


def _packed_mxfp4(blocks: Tensor) -> Tensor:
    out = blocks.shape[0]
    blocks = blocks.view(out, -1, _BLOCK // 2 + 1)
    codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1).to(torch.int32)
    # Of 16 outputs and 64 inputs: row + 8, row; 32 inputs, 16 inputs, 8 inputs, t, neighbours.
    codes = codes.view(out // 16, 2, 8, -1, 2, 2, 2, 4, 2)
    # as a bfloat16: sign, two bits of exponent, one of fraction
    numbers = (codes & 8) << 12 | (codes & 7) << 6
    # Four pairs of neighbours, which are the halves of a word, share it; the last one takes the
    # bits that are left.
    first, second, third, fourth = numbers.permute(5, 6, 0, 3, 2, 7, 1, 4, 8).flatten(0, 1)
    fourth = fourth >> 1 & 0x4000 | fourth << 5 & 0x2000 | fourth << 4 & 0x0C00
    halves = first | second >> 3 & 0x1038 | third >> 6 & 0x0207 | fourth
    words = (halves[..., 0] | halves[..., 1] << 16).flatten(2)
    exponents = (blocks[..., 0].int() + _OFFSET).to(torch.uint8)
    exponents = (
        exponents.view(out // 16, 2, 8, -1, 2)
        .permute(0, 3, 2, 1, 4)
        .flatten(2)
        .contiguous()
        .view(torch.int32)
    )
    return torch.cat((words, exponents), -1)
