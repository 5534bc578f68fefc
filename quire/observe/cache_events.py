"""Which blocks an engine has cached, told as they come and go: for whoever sends requests where
their prompts lie.

A block is cached as long as the device or the host tier has it and all those before it: without
them nobody finds it. If all layers have windows, those before it are given up while it is still of
use: then every block that is there is told of, and whoever listens looks for as many in a row as
the window wants. `quire.observe.block_names` names it.

Whatever else explains the engine reads steps; this can't. A step names blocks by their numbers.
What they hold, when it can be found (of several copies the first, from the commit on that fills it)
and when no longer (a placement that fails may have given blocks up, a failed step's copies are
forgotten) follows from rules of the block manager that an observer would have to repeat; and
digests in steps would cost every engine, while only one of several replicas is asked for them. So
whoever listens gives the block manager caches that take notes; nobody else pays for it.
"""

from __future__ import annotations

from quire.engine.block_key import BlockKey
from quire.engine.block_manager import BlockManager
from quire.engine.block_pool import Block
from quire.engine.config import SchedulerConfig
from quire.engine.host_tier import HostTier
from quire.engine.prefix_cache import PrefixCache
from quire.observe.block_names import BlockNamer, pack_names

_Changes = dict[bytes, BlockKey | None]
"""By digest, the blocks of which something was stored or removed, with their keys if they were
stored.
"""


class _Cache(PrefixCache):
    """A prefix cache that notes which full blocks of tokens were published or removed; states are
    not told of.
    """

    def __init__(self, block_size: int, changed: _Changes) -> None:
        super().__init__(block_size)
        self._changed = changed

    def publish(self, key: BlockKey, block: Block) -> bool:
        is_new = super().publish(key, block)
        if is_new and len(key.token_ids) == self.block_size:
            self._changed[key.digest] = key
        return is_new

    def remove(self, block: Block) -> BlockKey:
        key = super().remove(block)
        if len(key.token_ids) == self.block_size:
            self._changed.setdefault(key.digest, None)
        return key

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks


class _Tier(HostTier):
    """A host tier that notes which blocks were stored or dropped."""

    def __init__(self, num_slots: int, changed: _Changes) -> None:
        super().__init__(num_slots)
        self._changed = changed

    def store(self, key: BlockKey) -> int | None:
        slot = super().store(key)
        if slot is not None and key.token_ids:
            self._changed[key.digest] = key
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
            self._changed.setdefault(name, None)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots


class _Stored:
    """A block that the device or the host tier has."""

    __slots__ = ("is_announced", "name", "next", "parent")

    def __init__(self, name: int, parent: bytes | None) -> None:
        self.name = name
        self.parent = parent
        """The digest of the block before it."""
        self.next: list[bytes] = []
        """The digests of those behind it."""
        self.is_announced = False
        """Whether it counts as cached."""


def window_of(config: SchedulerConfig) -> int:
    """How many tokens the layers look back, if all of them have windows; else 0."""
    has_windows = all(group.keeps == "window" for group in config.groups)
    return max(group.size for group in config.groups) if has_windows else 0


class CacheEvents:
    """Watches the caches of an engine that has computed nothing yet."""

    def __init__(self, blocks: BlockManager) -> None:
        assert not len(blocks.cache), "blocks are cached already"
        self._changed: _Changes = {}
        self._cache = blocks.prefixes.cache = _Cache(blocks.block_size, self._changed)
        self._tier = blocks.prefixes.host = _Tier(blocks.host.num_slots, self._changed)
        self._namer = BlockNamer(blocks.block_size)
        self._announces_all = window_of(blocks.config) > 0
        self._stored: dict[bytes, _Stored] = {}
        """By digest."""
        self._orphans: dict[bytes, list[bytes]] = {}
        """Stored blocks, by the digest of the one before them, which is not."""

    def take(self) -> tuple[bytes, bytes]:
        """The names of blocks that were cached, and of those that are no longer, since the last
        call.
        """
        come: dict[int, None] = {}
        gone: dict[int, None] = {}
        for digest, key in self._changed.items():
            is_here = digest in self._cache or digest in self._tier
            was_here = digest in self._stored
            if is_here and not was_here:
                assert key is not None, "it came without being stored"
                self._store(key, come, gone)
            elif was_here and not is_here:
                self._remove(digest, come, gone)
        self._changed.clear()
        return pack_names(list(come)), pack_names(list(gone))

    def _store(self, key: BlockKey, come: dict[int, None], gone: dict[int, None]) -> None:
        before = None if key.parent is None else key.parent.digest
        parent = None if before is None else self._stored.get(before)
        block = self._stored[key.digest] = _Stored(self._name(key), before)
        block.next = self._orphans.pop(key.digest, [])
        if parent is not None:
            parent.next.append(key.digest)
        elif before is not None:
            self._orphans.setdefault(before, []).append(key.digest)
        if self._announces_all or before is None or (parent is not None and parent.is_announced):
            self._announce(block, True, come, gone)

    def _remove(self, digest: bytes, come: dict[int, None], gone: dict[int, None]) -> None:
        block = self._stored.pop(digest)
        if block.is_announced:
            self._announce(block, False, gone, come)
        if block.next:
            self._orphans[digest] = block.next
        if block.parent is not None:
            parent = self._stored.get(block.parent)
            (self._orphans[block.parent] if parent is None else parent.next).remove(digest)
            if parent is None and not self._orphans[block.parent]:
                del self._orphans[block.parent]

    def _announce(
        self, block: _Stored, is_cached: bool, announced: dict[int, None], other: dict[int, None]
    ) -> None:
        """This block, and with it those behind it, are cached now, or not any more."""
        left = [block]
        while left:
            one = left.pop()
            one.is_announced = is_cached
            if one.name in other:
                del other[one.name]
            else:
                announced[one.name] = None
            if not self._announces_all:
                left += [self._stored[digest] for digest in one.next]

    def _name(self, key: BlockKey) -> int:
        """By that of its parent, which nearly always is stored."""
        chain = [key]
        while (parent := chain[-1].parent) is not None and parent.digest not in self._stored:
            chain.append(parent)
        name = (
            self._namer.start(chain[-1].extra_keys)
            if parent is None
            else self._stored[parent.digest].name
        )
        while chain:
            key = chain.pop()
            name = self._namer.following(
                name, key.token_ids, key.extra_keys if key.parent is not None else ()
            )
        return name
