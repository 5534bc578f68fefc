"""Garbage collection beside a running engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_spared() -> Iterator[None]:
    """Inside, whatever exists now is not looked through for garbage.

    A full collection walks every object of torch and of the model's Python side: a tenth of a second in which no step
    is sent off, every few hundred steps of a large batch. What requests leave behind is collected as always.
    """
    if gc.get_freeze_count():  # somebody has seen to it, and wants it to stay so
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
