"""Garbage collection beside a running engine.

Python frees most objects at once; its collector looks for those that hold each other. It looks
through new objects often, which takes a millisecond at most, and now and then through all there
are: torch's, the model's, those of the prefix cache and of all requests, tenths of a second in
which no step is sent off. So full collections wait until nobody does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_PUT_OFF = 5000
"""Collections of the middle generation before a full one comes after all, so that garbage can't
pile up under a load that never ends: some minutes of steps of 256 requests. (Python 3.14 has a
collector that works in small portions, with no full collections of its own accord; it ignores the
number.)
"""
_INTERVAL = 60.0
_M_ARENA_MAX = -8
"""As in malloc.h."""


@contextmanager
def full_collections_put_off() -> Iterator[None]:
    """Inside, new objects are looked through as always, all of them only after a very long time.

    Nothing is frozen (`gc.freeze`): that would also begin the collector's counting anew, and who
    entered here again and again for a short time would never have a full collection.
    """
    young, middle, old = thresholds = gc.get_threshold()
    gc.set_threshold(young, middle, max(old, _PUT_OFF))
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def no_collections() -> Iterator[None]:
    """For a program that starts: inside nothing is collected, and what is there at the end is never
    looked through again. Modules, weights and a tokenizer are several hundred thousand objects,
    none of them garbage.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


class IdleCollector:
    """Makes up for collections put off, in a process that never leaves `full_collections_put_off`.

    Not at every idle moment: the next request may be on its way, so its owner waits for a silence
    first, and once a minute is enough.
    """

    def __init__(self, now: float, interval: float | None = None) -> None:
        self._last = now
        self._interval = _INTERVAL if interval is None else interval

    def is_due(self, now: float) -> bool:
        return now - self._last >= self._interval

    def collect(self, now: float) -> None:
        """A full collection; what is free then goes back to the operating system."""
        self._last = now
        gc.collect()
        return_freed_memory()


def share_heaps() -> None:
    """Has all threads of this process share two of C's heaps. Else there may be eight for each
    core, and what one thread has freed in its own is of no use to others: memory creeps up. For a
    process most of whose threads wait.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(OSError, AttributeError):  # glibc only
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def return_freed_memory() -> None:
    """Hands what was freed back to the operating system. C's allocator keeps it otherwise, in one
    heap for each few threads: after some minutes of large bodies and answers that was a quarter of
    the HTTP process.
    """
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
