"""Descriptions of weights for copies by boxes (TMA), through CUDA's driver API."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from functools import lru_cache

from quire.backends.cuda import driver

MAP_WORDS = 16
_ITEMSIZE = 2
_ALIGNMENT = 64
_BFLOAT16, _NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _ZEROS = 9, 0, 3, 3, 0
COLUMN = 64
"""Inputs in a box's row: 128 bytes."""


@lru_cache(maxsize=1024)
def weight_map(
    address: int, size: int, inner: int, *, halves: int, rows: int, columns: int
) -> ctypes.Array[c_uint64]:
    """Of a contiguous weight [size, inner] of 2 bytes a number, for boxes of `columns` times 64 inputs
    of `rows` outputs of each of its `halves` (1: the whole weight). A box lies in shared memory as
    [columns, halves, rows, 64], swizzled. The numbers may change afterwards.
    """
    row = inner * _ITEMSIZE
    sizes = (c_uint64 * 4)(COLUMN, size // halves, halves, inner // COLUMN)
    strides = (c_uint64 * 3)(row, size // halves * row, COLUMN * _ITEMSIZE)
    box = (c_uint32 * 4)(COLUMN, rows, halves, columns)
    steps = (c_uint32 * 4)(1, 1, 1, 1)
    room = ctypes.create_string_buffer(MAP_WORDS * 8 + _ALIGNMENT)
    place = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT
    driver.call(
        "cuTensorMapEncodeTiled",
        c_void_p(place),
        c_int(_BFLOAT16),
        c_uint32(4),
        c_void_p(address),
        sizes,
        strides,
        box,
        steps,
        c_int(_NO_INTERLEAVE),
        c_int(_SWIZZLE_128),
        c_int(_PROMOTE_256),
        c_int(_ZEROS),
    )
    return (c_uint64 * MAP_WORDS).from_buffer_copy(ctypes.string_at(place, MAP_WORDS * 8))
