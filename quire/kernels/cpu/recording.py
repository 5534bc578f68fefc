"""The C++ calls of a step, recorded once and repeated without Python.

With one request, a layer's matrix products take about as long as the dozen Python calls around them. Every call is a
plain C function with its arguments in memory, so a list of calls is a program. `Calls.record` notes the calls while
they are made for the first time; the function it returns repeats them, on the same addresses with new numbers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from struct import Struct

import torch
from torch import Tensor

from quire.errors import DeviceError

_MAX_BYTES = 192 * 2**20
"""The most bytes of intermediate results of a recording; in a larger step the time of Python does not matter."""
_ALIGNMENT = 64
_call = Struct("PP").pack
Function = Callable[..., None]


class Calls:
    """A compiled library's functions, and the memory of what they return."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._replay = self.function("quire_replay", "Pq")
        self._recorded: list[tuple[int, bytes]] | None = None
        self._num_bytes = 0
        """Bytes that `empty` has given out since the recording began."""
        self._memory: dict[torch.dtype, Tensor] = {}
        """One block of memory, viewed as each dtype. Only one recording is replayed at a time, so all share it; pages
        that none uses are never touched, and so take no memory."""

    def function(self, symbol: str, fields: str) -> Function:
        """A C++ function as a Python one. `fields` are those of the function's argument struct: P pointer, q int64, f
        float, i int. Pointers are passed as tensors, None for a null pointer."""
        pack = Struct(fields).pack
        try:
            function = self._library[symbol]
        except AttributeError as error:
            raise DeviceError(
                f"The compiled CPU kernels have no {symbol}: delete them, they are built anew."
            ) from error
        function.argtypes, function.restype = [ctypes.c_char_p], None
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None

        def call(*values: Tensor | float | None) -> None:
            arguments = pack(*[value.data_ptr() if isinstance(value, Tensor) else value or 0 for value in values])
            if self._recorded is not None:
                self._recorded.append((address, arguments))
            function(arguments)

        return call

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory for a result: new, or while recording a part of the recordings' memory."""
        if self._recorded is None:
            return torch.empty(shape, dtype=dtype)
        size = math.prod(shape) * dtype.itemsize
        begin, self._num_bytes = self._num_bytes, self._num_bytes + -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._num_bytes > _MAX_BYTES:  # then nothing is kept
            return torch.empty(shape, dtype=dtype)
        if dtype not in self._memory:
            self._memory[dtype] = self._memory[torch.uint8].view(dtype)
        strides = [math.prod(shape[i:]) for i in range(1, len(shape) + 1)]
        return self._memory[dtype].as_strided(shape, strides, begin // dtype.itemsize)

    def record(self, compute: Callable[[], None]) -> Callable[[], None] | None:
        """Runs `compute` and returns a function that repeats its calls; None if that takes too much memory."""
        if not self._memory:
            self._memory[torch.uint8] = torch.empty(_MAX_BYTES, dtype=torch.uint8)
        calls: list[tuple[int, bytes]] = []
        self._recorded, self._num_bytes = calls, 0
        try:
            compute()
        finally:
            self._recorded = None
        if self._num_bytes > _MAX_BYTES:
            return None
        arguments = [ctypes.create_string_buffer(one) for _, one in calls]
        program = ctypes.create_string_buffer(b"".join(
            _call(address, ctypes.addressof(one)) for (address, _), one in zip(calls, arguments, strict=True)
        ))  # fmt: skip
        begin = ctypes.addressof(program)

        def replay(kept: tuple[object, ...] = (program, arguments, self._memory)) -> None:
            self._replay(begin, len(calls))

        return replay
