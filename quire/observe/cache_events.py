"""Which blocks an engine has cached, told as they come and go: for whoever sends requests where their prompts lie.

A block is named by the first eight bytes of its digest. It is cached as long as the device or the host tier has it.
"""

from __future__ import annotations

from quire.engine.block_key import BlockKey
from quire.engine.block_manager import BlockManager
from quire.engine.block_pool import Block
from quire.engine.host_tier import HostTier
from quire.engine.prefix_cache import PrefixCache

NAME_BYTES = 8
"""Of a digest. Two blocks of one name in a million are as good as impossible, and would cost a detour at most."""


class _Cache(PrefixCache):
    """A prefix cache that notes which full blocks were published or removed."""

    def __init__(self, block_size: int, changed: dict[bytes, None]) -> None:
        super().__init__(block_size)
        self._changed = changed

    def publish(self, key: BlockKey, block: Block) -> bool:
        is_new = super().publish(key, block)
        if is_new and not self.is_partial(key):
            self._changed[key.digest] = None
        return is_new

    def remove(self, block: Block) -> BlockKey:
        key = super().remove(block)
        if not self.is_partial(key):
            self._changed[key.digest] = None
        return key

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks


class _Tier(HostTier):
    """A host tier that notes which blocks were stored or dropped."""

    def __init__(self, num_slots: int, changed: dict[bytes, None]) -> None:
        super().__init__(num_slots)
        self._changed = changed

    def store(self, key: BlockKey) -> int | None:
        slot = super().store(key)
        if slot is not None:
            self._changed[key.digest] = None
        return slot

    def drop(self, slot: int) -> None:
        self._note(slot)
        super().drop(slot)

    def _evict(self) -> int | None:
        slot = super()._evict()
        if slot is not None:
            self._note(slot)
        return slot

    def _note(self, slot: int) -> None:
        name = self._names[slot]
        if name is not None:
            self._changed[name] = None

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots


class CacheEvents:
    """Watches the caches of an engine that has computed nothing yet."""

    def __init__(self, blocks: BlockManager) -> None:
        assert not len(blocks.cache), "blocks are cached already"
        self._changed: dict[bytes, None] = {}
        self._cache = blocks.cache = _Cache(blocks.block_size, self._changed)
        self._tier = blocks.host = _Tier(blocks.host.num_slots, self._changed)

    def take(self) -> tuple[bytes, bytes]:
        """The names of blocks that were cached, and of those that are no longer, since the last call."""
        stored, removed = bytearray(), bytearray()
        for digest in self._changed:
            is_here = digest in self._cache or digest in self._tier
            (stored if is_here else removed).extend(digest[:NAME_BYTES])
        self._changed.clear()
        return bytes(stored), bytes(removed)
