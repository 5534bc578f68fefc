"""The layout of MXFP4 weights of experts in which `streamed_experts.py` reads them."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_OUTPUTS, PIECE_INPUTS = 16, 64
PIECE_WORDS = 136
"""128 words of codes, four for each thread of a warp, and 8 of exponents."""
_BLOCK = 32
"""Inputs with a common exponent."""
_LARGEST_EXPONENT = 128
_SHORTEST = 512
_OFFSET = 126
"""The factor of a block with exponent e is the bfloat16 with the exponent e + 126: see
`streamed_experts.py`.
"""


def can_pack(out: int, inner: int) -> bool:
    """Rows of a few pieces are left to the kernel for all formats."""
    return out % (2 * PIECE_OUTPUTS) == 0 and inner % PIECE_INPUTS == 0 and inner >= _SHORTEST


def pack_mxfp4(blocks: Tensor) -> Tensor | None:
    """int32 [experts, out / 16, in / 64, 136] of stored blocks [experts, out, bytes of a row]; None
    where a factor would be too large for bfloat16 (numbers above 2), which no known checkpoint has.
    """
    if not blocks.is_meta and int(blocks.view(-1, _BLOCK // 2 + 1)[:, 0].max()) > _LARGEST_EXPONENT:
        return None
    return torch.stack([_packed(expert) for expert in blocks])


def _packed(blocks: Tensor) -> Tensor:
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
