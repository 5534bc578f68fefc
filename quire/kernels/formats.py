"""The formats weights are stored in: how many bytes they take, and from those bytes back to
numbers.

A row is stored as blocks of `num_elements` numbers in `num_bytes` bytes. Plain numbers are blocks
of one; the block formats of GGUF files share scales within a block, and expand to the same bits as
with the `gguf` package. INT8, FP8 and INT4 have their scales in a tensor of their own: one per row,
or per group of a row's inputs. `quantize.py` makes INT8, FP8 and Q4_0 from plain numbers.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_LARGE = 2**16
"""From this many bytes on, memory comes from mmap."""


def _room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Memory to read a tensor into. On a CPU it is freed after packing, so it comes from mmap,
    which returns it to the system at once; torch's allocator would keep it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or num_bytes < _LARGE:
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store numbers."""

    name: str
    """As checkpoints spell it: "BF16", "Q4_1"."""
    num_elements: int
    num_bytes: int
    """Both of a block."""
    dtype: torch.dtype | None = None
    """Of plain numbers; None where blocks must be expanded."""
    scales: tuple[int, ...] = ()
    """Which bytes of a block its float16 scales begin at."""
    codes: torch.dtype | None = None
    """The dtype of the codes, where they are one tensor and float32 scales another (INT8, FP8,
    INT4).
    """
    group: int = 0
    """How many inputs of a row share a scale of that second tensor; 0: the whole row."""
    has_zeros: bool = False
    """Whether there is a third tensor, uint8, of zero points."""

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """The bytes that a tensor of this logical shape takes; its rows must be whole blocks."""
        scales = (
            (5 if self.has_zeros else 4) * math.prod(self._scales_shape(shape))
            if self.codes is not None
            else 0
        )
        return math.prod(shape) // self.num_elements * self.num_bytes + scales

    def _scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // self.group) if self.group else shape[:-1]

    def empty(
        self, shape: tuple[int, ...], device: torch.device | str = "cpu"
    ) -> tuple[Tensor, ...]:
        """Memory for a tensor of this logical shape: the tensors of a `Part`."""
        if self.dtype is not None:
            return (_room(shape, self.dtype, device),)
        if self.codes is not None:
            codes = _room((*shape[:-1], shape[-1] // self.num_elements), self.codes, device)
            scales = torch.empty(self._scales_shape(shape), device=device)
            zeros = (
                (torch.empty(scales.shape, dtype=torch.uint8, device=device),)
                if self.has_zeros
                else ()
            )
            return codes, scales, *zeros
        return (_room((*shape[:-1], self.nbytes(shape[-1:])), torch.uint8, device),)

    def expand(self, stored: Tensor, *others: Tensor) -> Tensor:
        """Numbers [..., elements of a row] from a part's tensors. Plain numbers are returned as
        they are; uint8 blocks [..., bytes of a row], or codes with scales (and zero points), become
        float32.
        """
        if not others and (self.dtype is not None or stored.dtype != torch.uint8):
            return (
                stored.view(self.dtype)
                if self.dtype is not None and stored.dtype == torch.uint8
                else stored
            )
        return self.coded(stored, *others).numbers()

    def coded(
        self, stored: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None
    ) -> Coded:
        """The codes and scales of a part, not multiplied yet."""
        if scales is None:
            codes, scales, minima = _DECODERS[self.name](stored.reshape(-1, self.num_bytes))
            shape = (*stored.shape[:-1], -1)
            return Coded(
                codes.view(shape),
                scales.view(shape),
                None if minima is None else minima.view(shape),
            )
        scales = scales if self.group else scales.unsqueeze(-1)
        if zeros is None:
            return Coded(stored, scales)
        codes = pairs(stored).view(torch.int8).view(*scales.shape, -1) - zeros.view(
            torch.int8
        ).view(*scales.shape, 1)
        return Coded(codes.flatten(-2), scales)

    def has_finite_scales(self, stored: Tensor) -> bool:
        """Whether no scale of stored blocks is infinite or NaN, which would turn every logit into
        NaN.
        """
        halves = stored.reshape(-1, self.num_bytes).view(torch.int16) if self.scales else stored
        return not any(bool((halves[:, at // 2] & 0x7C00 == 0x7C00).any()) for at in self.scales)


class Coded(NamedTuple):
    """Quantised numbers: number = code * scale - minimum."""

    codes: Tensor
    """[..., elements of a row]."""
    scales: Tensor
    """float32 [..., groups of a row]."""
    minima: Tensor | None = None

    def numbers(self) -> Tensor:
        """In float32, rounded after the product and again after the difference, as the `gguf`
        package does.
        """
        groups = self.codes.float().view(*self.scales.shape, -1).mul_(self.scales.unsqueeze(-1))
        return (groups if self.minima is None else groups.sub_(self.minima.unsqueeze(-1))).flatten(
            -2
        )


_PLAIN_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
INT4_GROUPS = {"INT4": 0, "INT4_G32": 32, "INT4_G64": 64, "INT4_G128": 128}
"""Formats whose numbers are (code - zero point) * scale, by group size; two codes in a byte, the
first one lower.
"""

FORMATS = {
    format.name: format
    for format in (
        *(Format(name, 1, dtype.itemsize, dtype) for name, dtype in _PLAIN_DTYPES.items()),
        Format("Q8_0", 32, 34, scales=(0,)),
        Format("Q4_0", 32, 18, scales=(0,)),
        Format("Q4_1", 32, 20, scales=(0, 2)),
        Format("Q5_0", 32, 22, scales=(0,)),
        Format("Q5_1", 32, 24, scales=(0, 2)),
        Format("Q2_K", 256, 84, scales=(80, 82)),
        Format("Q3_K", 256, 110, scales=(108,)),
        Format("Q4_K", 256, 144, scales=(0, 2)),
        Format("Q5_K", 256, 176, scales=(0, 2)),
        Format("Q6_K", 256, 210, scales=(208,)),
        Format("MXFP4", 32, 17),
        Format("INT8", 1, 1, codes=torch.int8),
        Format("FP8", 1, 1, codes=torch.float8_e4m3fn),
        Format("FP8_G128", 1, 1, codes=torch.float8_e4m3fn, group=128),
        *(
            Format(name, 2, 1, codes=torch.uint8, group=group, has_zeros=True)
            for name, group in INT4_GROUPS.items()
        ),
    )
}
"""All formats that can be loaded; the reference kernels compute with all of them."""

PLAIN = {format.dtype: format for format in FORMATS.values() if format.dtype is not None}
"""The format of tensors of plain numbers, by their dtype."""


def gpu_computes(format: Format, capability: tuple[int, int]) -> bool:
    """Whether NVIDIA GPUs of a compute capability compute with weights in a format as they are
    stored: FP8 needs the tensor cores of Hopper, all others those of Ampere.
    """
    return format.dtype is None and capability >= (
        (9, 0) if format.codes == torch.float8_e4m3fn else (8, 0)
    )


def pairs(packed: Tensor) -> Tensor:
    """The codes of INT4: low and high halves of bytes in turn, as uint8."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _scale(blocks: Tensor, first: int) -> Tensor:
    """The float16 in bytes `first` and `first + 1` of each block, as a float32 column."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _codes(packed: Tensor, bits: int, group: int) -> Tensor:
    """Codes of `bits` bits, as int8: of each `group` bytes first the lowest bits of all bytes, then
    the next bits.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1)
    codes = packed.reshape(packed.shape[0], -1, 1, group) >> shifts & ((1 << bits) - 1)
    return codes.flatten(1).view(torch.int8)


# A decoder turns blocks [blocks, bytes] into the fields of `Coded`: [blocks, elements] and [blocks,
# groups].
_Blocks = tuple[Tensor, Tensor, Tensor | None]


def _five_bits(low: Tensor, high: Tensor) -> Tensor:
    """Codes of five bits: the low four are nibbles of 16 bytes, the fifth ones are the bits of a
    32-bit number.
    """
    bits = high.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=high.device) & 1
    return _codes(low, 4, 16) | bits.flatten(1).view(torch.int8) << 4


def _mxfp4(blocks: Tensor) -> _Blocks:
    """Codes for 0, ±0.5, ±1, ±1.5, ±2, ±3, ±4 and ±6, doubled to be integers, with half the scale
    (an exponent).
    """
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, 0x200000 << exponents, exponents - 1 << 23)
    doubled = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12), dtype=torch.int8, device=blocks.device)
    return (
        torch.cat((doubled, -doubled))[_codes(blocks[:, 1:], 4, 16).int()],
        bits.view(torch.float32),
        None,
    )


def _q2_k(blocks: Tensor) -> _Blocks:
    factors = blocks[:, :16]
    scales, minima = _scale(blocks, 80) * (factors & 15), _scale(blocks, 82) * (factors >> 4)
    return _codes(blocks[:, 16:80], 2, 32), scales, minima


def _q3_k(blocks: Tensor) -> _Blocks:
    factors = _codes(blocks[:, 96:104], 4, 8) | _codes(blocks[:, 104:108], 2, 4) << 4
    codes = _codes(blocks[:, 32:96], 2, 32) | _codes(blocks[:, :32], 1, 32) << 2
    return codes.sub_(4), _scale(blocks, 108) * (factors - 32), None


def _q5_k(blocks: Tensor) -> _Blocks:
    return _codes(blocks[:, 48:], 4, 32) | _codes(blocks[:, 16:48], 1, 32) << 4, *_q4_k_scales(
        blocks
    )


def _q6_k(blocks: Tensor) -> _Blocks:
    scales = _scale(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    codes = _codes(blocks[:, :128], 4, 64) | _codes(blocks[:, 128:192], 2, 32) << 4
    return codes.sub_(32), scales, None


def _q4_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of a block's eight groups, by factors of six bits; the last four are stored
    in two parts.
    """
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    factors = torch.cat((first & 63, rest & 15 | first >> 2 & 48), 1)
    offsets = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), 1)
    return _scale(blocks, 0) * factors, _scale(blocks, 2) * offsets


_DECODERS: dict[str, Callable[[Tensor], _Blocks]] = {
    "Q8_0": lambda blocks: (blocks[:, 2:].contiguous().view(torch.int8), _scale(blocks, 0), None),
    "Q4_0": lambda blocks: (_codes(blocks[:, 2:], 4, 16).sub_(8), _scale(blocks, 0), None),
    "Q4_1": lambda blocks: (_codes(blocks[:, 4:], 4, 16), _scale(blocks, 0), -_scale(blocks, 2)),
    "Q5_0": lambda blocks: (
        _five_bits(blocks[:, 6:], blocks[:, 2:6]).sub_(16),
        _scale(blocks, 0),
        None,
    ),
    "Q5_1": lambda blocks: (
        _five_bits(blocks[:, 8:], blocks[:, 4:8]),
        _scale(blocks, 0),
        -_scale(blocks, 2),
    ),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": lambda blocks: (_codes(blocks[:, 16:], 4, 32), *_q4_k_scales(blocks)),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
