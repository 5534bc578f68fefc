"""A cache with two bounds: how many entries, and how many bytes they stand for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Least recently used goes first. Safe to share between threads."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Something larger than the whole cache is not kept."""
        with self._lock:
            old = self._entries.pop(key, None)
            self._bytes -= old[1] if old is not None else 0
            if num_bytes > self._max_bytes:
                return
            self._entries[key] = (value, num_bytes)
            self._bytes += num_bytes
            while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self._bytes -= freed
