"""Signs of life of long one-time work at a start: compiling, loading, downloading.

Whoever watches a start counts silence. Such work may take minutes on a busy machine, so it says
that it goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

listeners: list[Callable[[], None]] = []
"""Whoever watches; called from the thread that works."""


def sign_of_life() -> None:
    for listener in tuple(listeners):
        listener()


class Heartbeat:
    """Passes signs of life on, one at a time and not more often than every `seconds`."""

    def __init__(self, tell: Callable[[], None], seconds: float = 1.0) -> None:
        self._tell = tell
        self._seconds = seconds
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._last < self._seconds:
                return
            self._last = now
            self._tell()
