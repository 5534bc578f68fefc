"""The part of the prefix cache in host memory: takes blocks that the device evicts, drops the least
recently used.
"""

from __future__ import annotations

from collections import OrderedDict

from quire.engine.block_key import BlockKey, same_prefix


class HostTier:
    """Which host slot holds a prefix. Only bookkeeping: the copies themselves are part of the
    steps.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = dict.fromkeys(range(num_slots - 1, -1, -1))
        """Free slots; the one added last is taken first."""
        self._slots: OrderedDict[bytes, tuple[BlockKey, int]] = OrderedDict()
        """By digest, the least recently used first."""
        self._names: list[bytes | None] = [None] * num_slots
        """By slot: the digest of what it holds."""
        self.pinned: set[int] = set()
        """Slots that are about to be read: `store` leaves them alone."""

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, key: BlockKey) -> tuple[BlockKey, int] | None:
        """The key as stored and its slot, if exactly this prefix is here."""
        found = self._slots.get(key.digest)
        return found if found is not None and same_prefix(found[0], key) else None

    def touch(self, key: BlockKey) -> None:
        """Marks a stored prefix as the most recently used."""
        self._slots.move_to_end(key.digest)

    def store(self, key: BlockKey) -> int | None:
        """A slot for this prefix, to be copied into; None if it is here already or no slot can be
        had.
        """
        if key.digest in self._slots:
            # Also when another prefix has the same digest: the stored one stays.
            self._slots.move_to_end(key.digest)
            return None
        slot = self._free.popitem()[0] if self._free else self._evict()
        if slot is not None:
            self._slots[key.digest] = (key, slot)
            self._names[slot] = key.digest
        return slot

    def drop(self, slot: int) -> None:
        """Forgets what a slot holds (the copy into it failed)."""
        name = self._names[slot]
        if name is not None:
            self._names[slot] = None
            del self._slots[name]
            self._free[slot] = None

    def is_sound(self, slot: int) -> bool:
        """Whether a slot is either free, or listed under the digest noted for it."""
        name = self._names[slot]
        if name is None or slot in self._free:
            return name is None and slot in self._free
        found = self._slots.get(name)
        return found is not None and found[0].digest == name and found[1] == slot

    def _evict(self) -> int | None:
        for digest, (_, slot) in self._slots.items():
            if slot not in self.pinned:
                del self._slots[digest]
                return slot
        return None
