"""The C++ calls of a step, recorded once and repeated without Python.

With one request, a layer's matrix products take about as long as the dozen Python calls around them. Every call is a
plain C function with its arguments in memory, so a list of calls is a program. `Calls.record` notes the calls while
they are made for the first time; the function it returns repeats them, on the same addresses with new numbers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from itertools import accumulate
from struct import Struct

import torch
from torch import Tensor

from quire.errors import DeviceError
from quire.kernels.cpu.memory import ResultMemory

_MAX_BYTES = 512 * 2**20
"""The most bytes of results at a time, of a recording and of other steps. Pages that none uses take no memory."""
_LARGE = 2**20
"""Smaller results are left to `malloc` outside recordings: it keeps their memory, and takes less time."""
_call = Struct("PP").pack
Function = Callable[..., None]


class Calls:
    """A compiled library's functions, and the memory of what they return."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._replay = self.function("quire_replay", "Pq")
        self._recorded: list[tuple[int, bytes]] | None = None
        self._block, self._recorded_block = (torch.empty(_MAX_BYTES, dtype=torch.uint8) for _ in range(2))
        """Memory of results. Only one recording is replayed at a time, so all share a block."""
        self._results = ResultMemory(self._block)

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
        """Memory for a result, which may be that of earlier ones."""
        is_kept = self._recorded is not None or math.prod(shape) * dtype.itemsize >= _LARGE
        found = self._results.empty(shape, dtype) if is_kept else None
        return torch.empty(shape, dtype=dtype) if found is None else found

    def record(self, compute: Callable[[], None]) -> Callable[[], None] | None:
        """Runs `compute` and returns a function that repeats its calls; None if that takes too much memory."""
        calls: list[tuple[int, bytes]] = []
        usual, results = self._results, ResultMemory(self._recorded_block)
        self._recorded, self._results = calls, results
        try:
            compute()
        finally:
            self._recorded, self._results = None, usual
        if results.is_too_small:
            return None
        arguments = [one + bytes(-len(one) % 8) for _, one in calls]
        memory, count = ctypes.create_string_buffer(b"".join(arguments)), len(calls)
        begins = accumulate(map(len, arguments), initial=ctypes.addressof(memory))
        program = ctypes.create_string_buffer(b"".join(_call(call[0], next(begins)) for call in calls))
        begin = ctypes.addressof(program)

        def replay(kept: tuple[object, ...] = (program, memory, self._recorded_block)) -> None:
            self._replay(begin, count)

        return replay
