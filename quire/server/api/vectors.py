"""Embeddings as numbers of fewer bits, by the names of vLLM's `embed_dtype`. numpy knows no
bfloat16 and no fp8; torch does, but nothing else here needs it.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Numbers = NDArray[np.float32]

_E4M3_BIAS, _E5M2_BIAS = 7, 15


def unit(numbers: Numbers) -> Numbers:
    """The vector of length 1 with the same direction; one of zeros stays as it is."""
    exact = numbers.astype(np.float64)
    norm = np.linalg.norm(exact)
    return (exact / norm if norm > 0 else exact).astype(np.float32)


def rounded(numbers: Numbers, dtype: EmbedDtype) -> Numbers:
    """The nearest numbers that `dtype` has."""
    if dtype == "float32":
        return numbers
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (_bfloat16_codes(numbers).astype(np.uint32) << 16).view(np.float32)
    return _fp8_values(dtype)[_fp8_codes(numbers, dtype)]


def stored(numbers: Numbers, dtype: EmbedDtype, is_big_endian: bool) -> bytes:
    """The bytes of numbers, rounded or not."""
    codes: NDArray[Any]
    if dtype == "bfloat16":
        codes = _bfloat16_codes(numbers)
    elif dtype in ("fp8_e4m3", "fp8_e5m2"):
        codes = _fp8_codes(numbers, dtype)
    else:
        with np.errstate(over="ignore"):
            codes = numbers.astype(dtype)
    return codes.astype(codes.dtype.newbyteorder(">" if is_big_endian else "<")).tobytes()


def _bfloat16_codes(numbers: Numbers) -> NDArray[np.uint16]:
    """The upper half of float32, rounded to even."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _fp8_values(dtype: EmbedDtype) -> Numbers:
    """What each of the 256 codes means. e4m3 has no infinities: its largest code is no number."""
    mantissa_bits, bias = (3, _E4M3_BIAS) if dtype == "fp8_e4m3" else (2, _E5M2_BIAS)
    codes = np.arange(128)
    exponent = codes >> mantissa_bits
    mantissa = (codes & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    normal = np.ldexp(1 + mantissa, exponent - bias)
    values = np.where(exponent == 0, np.ldexp(mantissa, 1 - bias), normal)
    if dtype == "fp8_e4m3":
        values[0x7F] = np.nan
    else:
        values[0x7C:] = [np.inf, np.nan, np.nan, np.nan]
    return np.concatenate([values, -values]).astype(np.float32)


def _fp8_codes(numbers: Numbers, dtype: EmbedDtype) -> NDArray[np.uint8]:
    """Of the nearest values, the even code of two that are as near. What is too large becomes
    infinite, or the largest number where there is no infinity, as in torch.
    """
    last = 0x7E if dtype == "fp8_e4m3" else 0x7B
    values = _fp8_values(dtype)[: last + 1].astype(np.float64)
    # Half a step above the largest number is as near to the next one, which is none.
    between = np.append((values[:-1] + values[1:]) / 2, values[-1] + (values[-1] - values[-2]) / 2)
    sizes = np.abs(numbers.astype(np.float64))
    below = np.searchsorted(between, sizes, "left")
    above = np.searchsorted(between, sizes, "right")
    codes = np.where(below % 2 == 0, below, above)
    if dtype == "fp8_e4m3":
        codes = np.minimum(codes, last)
    signs = np.where(np.signbit(numbers), 128, 0)
    return (codes + signs).astype(np.uint8)
