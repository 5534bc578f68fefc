"""The C++ calls of a step, recorded once and repeated without Python.

With one request, a layer's matrix products take about as long as the dozen Python calls around
them. Every call is a plain C function with its arguments in memory, so a list of calls is a
program. `Calls.record` notes the calls while they are made for the first time; the function it
returns repeats them, on the same addresses with new numbers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from itertools import accumulate
from threading import get_ident
from typing import Generic, ParamSpec

import torch
from torch import Tensor

from quire.backends.cpu import functions
from quire.backends.cpu.arguments import Recorded, caller, check_packer, packer
from quire.backends.cpu.functions import Address
from quire.backends.cpu.memory import ResultMemory
from quire.errors import DeviceError

_MAX_BYTES = 512 * 2**20
"""The most bytes of results at a time, of a recording and of other steps. Pages that none uses take
no memory.
"""
_LARGE = 2**20
"""Smaller results are left to `malloc` outside recordings: it keeps their memory, and takes less
time.
"""
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
P = ParamSpec("P")
_pack_call = packer(functions.replayed_call)


class ByDtype(dict[torch.dtype, Callable[P, None]], Generic[P]):
    """A function for each dtype the kernels compute in."""

    def __missing__(self, dtype: torch.dtype) -> Callable[P, None]:
        raise DeviceError(f"The CPU kernels compute in float32 and bfloat16, not {dtype}.")


class Calls:
    """A compiled library's functions, and the memory of what they return."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.recorded: Recorded | None = None
        """The calls since a recording began; None outside of one."""
        self._recording_thread = 0
        """Others may pack weights meanwhile, of adapters that are read: what they call is no part of the
        step, and its memory will not stay.
        """
        self._replay = self.function(functions.replay)
        check_packer(library, functions.replayed_call)
        self._block, self._recorded_block = (
            torch.empty(_MAX_BYTES, dtype=torch.uint8) for _ in range(2)
        )
        """Memory of results. Only one recording is replayed at a time, so all share a block."""
        self._results = ResultMemory(self._block)

    def function(self, declared: Callable[P, None], name: str | None = None) -> Callable[P, None]:
        """A function of `functions.py`, or one of another name that takes the same arguments."""
        return caller(self._library, name or declared.__name__, declared, self)

    def by_dtype(self, declared: Callable[P, None], suffix: str = "") -> ByDtype[P]:
        """A function for each dtype, for example `quire_linear_float32`; a suffix comes before the
        dtype.
        """
        name = f"{declared.__name__}{suffix}"
        return ByDtype(
            {dtype: self.function(declared, f"{name}_{kind}") for dtype, kind in DTYPES.items()}
        )

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory for a result, which may be that of earlier ones."""
        if self.recorded is None:
            is_kept = math.prod(shape) * dtype.itemsize >= _LARGE
        else:
            is_kept = self._recording_thread == get_ident()
        found = self._results.empty(shape, dtype) if is_kept else None
        return torch.empty(shape, dtype=dtype) if found is None else found

    def note(self, function: int, arguments: bytes) -> None:
        """Adds a call to the recording, if it is this thread's."""
        recorded = self.recorded
        if recorded is not None and self._recording_thread == get_ident():
            recorded.append((function, arguments))

    def record(self, compute: Callable[[], None]) -> Callable[[], None] | None:
        """Runs `compute` and returns a function that repeats its calls; None if that takes too much
        memory.
        """
        calls: Recorded = []
        usual, results = self._results, ResultMemory(self._recorded_block)
        self._recording_thread = get_ident()
        self.recorded, self._results = calls, results
        try:
            compute()
        finally:
            self.recorded, self._results = None, usual
        if results.is_too_small:
            return None
        arguments = [one + bytes(-len(one) % 8) for _, one in calls]
        memory, count = ctypes.create_string_buffer(b"".join(arguments)), len(calls)
        begins = accumulate(map(len, arguments), initial=ctypes.addressof(memory))
        # the last one begins behind all
        places = zip((address for address, _ in calls), begins, strict=False)
        program = ctypes.create_string_buffer(
            b"".join(
                _pack_call(function=Address(call), arguments=Address(place))
                for call, place in places
            )
        )
        begin = Address(ctypes.addressof(program))

        def replay(kept: tuple[object, ...] = (program, memory, self._recorded_block)) -> None:
            self._replay(calls=begin, count=count)

        return replay
