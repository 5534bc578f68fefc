"""The block formats of GGUF tensors: their sizes, and from blocks back to numbers.

Rows are stored as blocks of `num_elements` quantised numbers that share a scale. The plain float types and
the block types most models come in are converted here with torch; the others go through the `gguf` package.
Results are bit for bit those of that package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.errors import QuireError

MAX_GGUF_ELEMENTS = 2**17
"""How many elements the gguf package gets at a time: it holds many arrays of that size meanwhile."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    num_elements: int
    num_bytes: int


BLOCK_LAYOUTS = {
    "F32": BlockLayout(1, 4),
    "F16": BlockLayout(1, 2),
    "BF16": BlockLayout(1, 2),
    "Q8_0": BlockLayout(32, 34),
    "Q4_0": BlockLayout(32, 18),
    "Q4_1": BlockLayout(32, 20),
    "Q5_0": BlockLayout(32, 22),
    "Q5_1": BlockLayout(32, 24),
    "Q2_K": BlockLayout(256, 84),
    "Q3_K": BlockLayout(256, 110),
    "Q4_K": BlockLayout(256, 144),
    "Q5_K": BlockLayout(256, 176),
    "Q6_K": BlockLayout(256, 210),
}
"""The types that can be loaded."""

TYPE_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    30: "BF16",
}
"""The number each of them has in a file."""

OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Types the format has and Quire doesn't load."""


def dequantize(data: bytearray, dtype: str) -> Tensor:
    """The elements of whole blocks, flat, as float32 (plain float types: in their own dtype, not copied)."""
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if dtype in _PLAIN:
        return raw.view(_PLAIN[dtype])
    blocks = raw.view(-1, BLOCK_LAYOUTS[dtype].num_bytes)
    convert = _CONVERTERS.get(dtype)
    return (convert(blocks) if convert else _dequantize_with_gguf(blocks, dtype)).view(-1)


def _scale(blocks: Tensor, first: int) -> Tensor:
    """The float16 in bytes `first` and `first + 1` of each block, as a float32 column."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves of a block's bytes, then the high halves, as float32."""
    half = packed.shape[1]
    numbers = torch.empty(packed.shape[0], 2 * half)
    numbers[:, :half] = packed & 15
    numbers[:, half:] = packed >> 4
    return numbers


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_scale(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_scale(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    # Two operations and not one fused: the product is rounded before the minimum is added, as elsewhere.
    return _nibbles(blocks[:, 4:]).mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CONVERTERS: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}


def _dequantize_with_gguf(blocks: Tensor, dtype: str) -> Tensor:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as gguf_dequantize
    except ImportError as error:
        raise QuireError(f'{dtype} tensors need the gguf package: pip install "quire[gguf]"') from error
    layout = BLOCK_LAYOUTS[dtype]
    result = torch.empty(blocks.shape[0], layout.num_elements)
    step = MAX_GGUF_ELEMENTS // layout.num_elements
    # Broken scales may overflow to infinity; that is the file's affair and no reason for warnings.
    with np.errstate(all="ignore"):
        for first in range(0, blocks.shape[0], step):
            part = blocks[first : first + step]
            numbers = gguf_dequantize(part.numpy().reshape(1, -1), GGMLQuantizationType[dtype])
            result[first : first + step] = torch.from_numpy(numbers).view(-1, layout.num_elements)
    return result
