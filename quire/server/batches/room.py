"""How much of the folder of `--batches` is taken, by whom, and how much each key may take: counted
before it is written, and for as long as it lies there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from quire.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class FolderLimits:
    """Of all keys together, and of each."""

    num_bytes: int
    bytes_per_key: int
    entries_per_key: int
    """Files, and batches."""

    @classmethod
    def of(
        cls, num_bytes: int, num_keys: int, bytes_per_key: int | None = None, entries: int = 10_000
    ) -> FolderLimits:
        """`bytes_per_key`: None divides evenly, so that no key can take what is another's."""
        shares = max(1, num_keys)
        per_key = num_bytes // shares if bytes_per_key is None else min(bytes_per_key, num_bytes)
        return cls(num_bytes, per_key, max(1, entries // shares))


Take = Callable[[str, int], None]
"""Called with an owner and a number of bytes."""


class NoRoomError(ApiError):
    """There is no room for that now; deleting something makes some."""

    def __init__(self, wanted: int, taken: int, most: int, option: str) -> None:
        message = (
            f"there is no room for {wanted} more bytes: {taken} of {most} are taken by files and batches ({option}); "
            "delete some"
        )
        super().__init__(413, message, code="no_room")


class Room:
    """The bytes that are taken. Safe to use from several threads, and never waits for a disk."""

    def __init__(self, limits: FolderLimits) -> None:
        self.limits = limits
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, owner: str, num_bytes: int) -> None:
        """Counts them before they are written; raises NoRoomError if they are too many."""
        with self._lock:
            own = self._taken[owner]
            everyone = self._taken.total()
            if num_bytes > 0:
                if own + num_bytes > self.limits.bytes_per_key:
                    raise NoRoomError(
                        num_bytes,
                        own,
                        self.limits.bytes_per_key,
                        "your key's share of --max-batch-size",
                    )
                if everyone + num_bytes > self.limits.num_bytes:
                    # How much others have is theirs to know.
                    raise NoRoomError(
                        num_bytes, own, self.limits.bytes_per_key, "and the folder is full"
                    )
            self._taken[owner] += num_bytes

    def count(self, owner: str, num_bytes: int) -> None:
        """Bytes that are there already, whatever the limits say."""
        with self._lock:
            self._taken[owner] += num_bytes

    def give_back(self, owner: str, num_bytes: int) -> None:
        with self._lock:
            self._taken[owner] -= num_bytes
            if self._taken[owner] <= 0:
                del self._taken[owner]

    def taken(self, owner: str | None = None) -> int:
        """By one key, or by all."""
        with self._lock:
            return self._taken.total() if owner is None else self._taken[owner]
