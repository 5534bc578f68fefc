"""Reads adapters beside the engine's loop, for requests that name them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.errors import QuireError
from quire.frontend.adapters import AdapterRegistry, LoadedAdapter, ReadAdapter
from quire.server.link.messages import AdapterFolder


class AdapterReader:
    """One thread reads; the engine's thread takes in what was read."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._last: tuple[AdapterFolder, ReadAdapter] | None = None
        """The last that was read and is not taken in yet: many requests may wait for one."""

    def has(self, adapter: AdapterFolder) -> bool:
        """Whether it is in memory as it is on disk."""
        try:
            return self._registry.is_current(adapter.name, Path(adapter.path))
        except QuireError:
            return False  # reading it says what is wrong

    def read(self, adapter: AdapterFolder) -> ReadAdapter | None:
        """In the reader's thread; None if it is in memory."""
        if self.has(adapter):
            return None
        last = self._last
        if last is not None and last[0] == adapter and last[1].is_current(Path(adapter.path)):
            return last[1]
        found = self._registry.read(Path(adapter.path))
        self._last = adapter, found
        return found

    def add(self, adapter: AdapterFolder, read: ReadAdapter | None) -> LoadedAdapter:
        """Takes in what was read, in the engine's thread."""
        self._last = None
        return self._registry.add(adapter.name, adapter.path, read)

    def digest_of(self, adapter: AdapterFolder, read: ReadAdapter | None) -> str:
        return self.add(adapter, read).digest

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
