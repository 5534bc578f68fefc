"""Descriptions of tensors for copies by boxes (TMA, the tensor memory accelerator), through CUDA's driver
API.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from functools import lru_cache

import torch

from quire.backends.cuda import driver

_WORDS, _ALIGNMENT = 16, 64
TensorMap = c_uint64 * _WORDS
COLUMN = 64
"""Numbers in a box's row: 128 bytes, swizzled as products read them."""
_NUMBERS = {torch.float16: 6, torch.bfloat16: 9}
_NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _ZEROS = 0, 3, 3, 0


@lru_cache(maxsize=1024)
def tensor_map(
    address: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
) -> ctypes.Array[c_uint64]:
    """Of numbers of 16 bits. `sizes` and `box` begin with the dimension whose numbers are neighbours,
    of which a box has COLUMN; `strides`, in numbers, are those of the others. The numbers may change
    afterwards.
    """
    rank = len(sizes)
    room = ctypes.create_string_buffer(_WORDS * 8 + _ALIGNMENT)
    place = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT
    driver.call(
        "cuTensorMapEncodeTiled",
        c_void_p(place),
        c_int(_NUMBERS[dtype]),
        c_uint32(rank),
        c_void_p(address),
        (c_uint64 * rank)(*sizes),
        (c_uint64 * (rank - 1))(*(stride * dtype.itemsize for stride in strides)),
        (c_uint32 * rank)(*box),
        (c_uint32 * rank)(*(1 for _ in box)),
        c_int(_NO_INTERLEAVE),
        c_int(_SWIZZLE_128),
        c_int(_PROMOTE_256),
        c_int(_ZEROS),
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(place, _WORDS * 8))
