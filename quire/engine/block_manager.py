"""Gives requests their blocks: from the pool, from the prefix cache, or from the host tier.

Updates pool, cache and tier together, and lists the copies of keys and values that the runner must make to match.
A copy is listed at the moment the bookkeeping changes; the runner makes a step's copies in that order, before it
computes anything. So a block is saved before it is overwritten, and a host slot is read before it is reused.

A request may give up blocks while steps in flight still read or write them. That is safe because the device works in
order of submission: the next owner uses them in a later step. But what such a step wrote is never published in the
prefix cache: its result is discarded for a request that no longer has its row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress

from quire.engine.block_key import BlockKey
from quire.engine.block_pool import Block, BlockPool
from quire.engine.config import SchedulerConfig
from quire.engine.host_tier import HostTier
from quire.engine.prefix_cache import PrefixCache
from quire.engine.request import Request
from quire.errors import QuireError
from quire.step import BlockCopy


@dataclass(frozen=True, slots=True)
class Placement:
    """What the cache had for a request: the first `num_ready_blocks` of its block table hold tokens already."""

    num_ready_blocks: int
    num_device_tokens: int
    num_host_tokens: int


_Hit = Block | tuple[BlockKey, int] | None
"""Where a block is cached: on the device, or on the host tier (key and slot); None: not needed, before the window."""


class BlockManager:
    """Owner of the block pool, the prefix cache and the host tier."""

    def __init__(
        self, config: SchedulerConfig, *, pool: BlockPool | None = None, cache: PrefixCache | None = None
    ) -> None:
        self.config = config
        self.block_size = config.block_size
        self.pool = pool or BlockPool(config.num_blocks)
        self.cache = cache or PrefixCache(config.block_size)
        self.host = HostTier(config.num_host_blocks)
        self._groups = config.num_groups
        self._num_full = config.num_groups - config.num_windowed
        self._copies: list[BlockCopy] = []

    def reset(self) -> None:
        """Forgets all cached prefixes, on the device and on the host tier; no request may hold a block."""
        for block in self.pool.blocks:
            assert not block.ref_count, f"{block} is in use"
            if block.key is not None:
                self.cache.remove(block)
                self.pool.place(block)
        for slot in range(self.host.num_slots):
            self.host.drop(slot)
        self._copies.clear()

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies listed since the last call: they belong to the next step."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def grow(self, request: Request) -> tuple[int, ...] | None:
        """Appends one block of each group of layers to the table; None if too few are free."""
        blocks = self._allocate(self._groups)
        if blocks is None:
            return None
        request.block_table += blocks
        return tuple(block.block_id for block in blocks)

    def num_held(self, request: Request) -> int:
        """How many tokens its table has blocks for."""
        return len(request.block_table) // self._groups * self.block_size

    def place(self, request: Request, reserve_tokens: int) -> Placement | None:
        """Fills a request's table with blocks for all its known tokens: cached blocks for its prefix, free ones for the
        rest. Returns None, with nothing changed, unless there are free blocks for `reserve_tokens` tokens too."""
        found, partial, num_partial = self._match(request)
        on_device = [hit for hit in found if isinstance(hit, Block)]
        on_host = [hit for hit in found if isinstance(hit, tuple)]
        num_covered = len(found) - len(on_host)
        num_fresh = self.config.blocks_for(len(request.token_ids)) - num_covered
        num_needed = self.config.blocks_for(reserve_tokens) - num_covered
        num_free = self.pool.num_free - sum(not block.ref_count for block in on_device)
        if num_needed > num_free - sum(not block.ref_count for block in partial):
            partial, num_partial = [], 0  # these blocks are needed as free ones
        if num_needed > num_free:
            return None
        fresh = self._share_and_allocate([*on_device, *partial], (slot for _, slot in on_host), num_fresh)
        if fresh is None:
            return None
        taken = iter(fresh)
        for hit in found:
            if hit is None or isinstance(hit, Block):
                request.block_table.append(hit or self.pool.blocks[0])
                continue
            key, slot = hit
            block = next(taken)
            self._copies.append(BlockCopy("host_to_device", slot, block.block_id))
            self.cache.publish(key, block)
            request.block_table.append(block)
        empty = list(taken)
        for source, target in zip(partial, empty, strict=False):
            self._copies.append(BlockCopy("device_to_device", source.block_id, target.block_id))
            self.pool.release(source)
        request.block_table += empty
        for key, _ in reversed(on_host):
            # Last block first: the tier drops what was used longest ago, and a prefix should outlive its continuation.
            self.host.touch(key)
        request.num_published_blocks = num_found = len(found) // self._groups
        request.num_left_blocks = self.config.first_kept(num_found * self.block_size)
        num_host = -(-len(on_host) // self._groups)
        return Placement(
            num_ready_blocks=len(found) + len(partial),
            num_device_tokens=(num_found - num_host) * self.block_size + num_partial,
            num_host_tokens=num_host * self.block_size,
        )

    def publish(self, request: Request) -> None:
        """Puts the blocks that committed tokens have filled into the prefix cache, and gives up blocks before the
        sliding window: no later step of this request reads them."""
        num_full = request.num_committed_tokens // self.block_size
        groups = self._groups
        if self.config.prefix_caching:
            self.cache.extend_keys(request.block_keys, request.token_ids, num_full, self._extra_keys(request))
            for index in range(request.num_published_blocks * groups, num_full * groups):
                self.cache.publish(request.block_keys[index], request.block_table[index])
        request.num_published_blocks = num_full
        kept = self.config.first_kept(request.num_committed_tokens)
        for index in range(request.num_left_blocks * groups, kept * groups):
            if index % groups >= self._num_full:
                self.pool.release(request.block_table[index])
                request.block_table[index] = self.pool.blocks[0]
        request.num_left_blocks = kept

    def publish_partial(self, request: Request) -> None:
        """Puts the last, partly filled block of its committed tokens into the prefix cache, for requests whose prompt
        continues there: the other answers to its prompt, or the next beams of a beam search."""
        num_full, num_rest = divmod(request.num_committed_tokens, self.block_size)
        place, extra_keys = num_full * self._groups, self._extra_keys(request)
        if not self.config.prefix_caching or not num_rest or request.block_table[place].key is not None:
            return
        first = num_full * self.block_size
        self.cache.extend_keys(request.block_keys, request.token_ids, num_full, extra_keys)
        tokens = request.token_ids[first : first + num_rest]
        for group, extra in enumerate(extra_keys):
            parent = request.block_keys[place + group - self._groups] if num_full else None
            self.cache.publish(self.cache.key(parent, tokens, extra), request.block_table[place + group])

    def demote(self, request: Request) -> bool:
        """Saves a request's cached blocks to the host tier; whether any of them is there now."""
        if not self.host.num_slots:
            return False
        # More blocks than the tier has slots would only evict those saved just before.
        is_full = [block.key is not None and not self.cache.is_partial(block.key) for block in request.block_table]
        saved = list(compress(request.block_table, is_full))[: self.host.num_slots]
        for block in reversed(saved):
            self._save(block)
        return any(block.key is not None and self.host.find(block.key) is not None for block in saved)

    def release(self, request: Request) -> None:
        """Gives up all its blocks, the last first, so that the beginning, which others may share, is evicted last."""
        self._give_back([block for block in request.block_table if block.block_id])
        request.block_table = []
        request.num_published_blocks = request.num_left_blocks = 0

    def void(self, copies: Iterable[BlockCopy]) -> None:
        """These copies may not have been made: what they should have written leaves the cache and the tier."""
        for copy in copies:
            if copy.kind == "device_to_host":
                self.host.drop(copy.target)
                continue
            block = self.pool.blocks[copy.target]
            if block.key is not None:
                self.cache.remove(block)
                if block.ref_count == 0:
                    self.pool.place(block)

    def _match(self, request: Request) -> tuple[list[_Hit], list[Block], int]:
        """The cached blocks a request can start with; one token is always left to compute. Then partly filled blocks,
        one per group of layers, and how many of the request's next tokens they hold. These are copied, not shared,
        since the request that filled them may go on writing into them."""
        # The cache holds keys and values, no hidden states: a mean over all hidden states needs every token computed.
        if not self.config.prefix_caching or request.pooling == "mean":
            return [], [], 0
        num_usable = len(request.token_ids) - 1
        if request.score_prompt_from is not None:
            # A prompt position is scored by computing the token before it.
            num_usable = min(num_usable, request.score_prompt_from - 1)
        num_blocks, groups = num_usable // self.block_size, self._groups
        keys, extra_keys = request.block_keys, self._extra_keys(request)
        self.cache.extend_keys(keys, request.token_ids, num_blocks, extra_keys)
        found = self._find_blocks(keys, num_blocks)
        num_found = len(found) // groups
        first = num_found * self.block_size
        rest = request.token_ids[first : min(num_usable, first + self.block_size)]
        parents = keys[(num_found - 1) * groups : num_found * groups] if num_found else [None] * groups
        partial = (self.cache.find_partial(one, rest, extra) for one, extra in zip(parents, extra_keys, strict=True))
        held = [one for one in partial if one is not None]
        if len(held) < groups:
            return found, [], 0
        return found, [block for block, _ in held], min(count for _, count in held)

    def _find_blocks(self, keys: list[BlockKey], num_blocks: int) -> list[_Hit]:
        """Where the first blocks of a sequence are cached, up to the last one after which no group lacks anything: a
        group of layers without a window needs all blocks, one with a window those from its begin on."""
        groups, full = self._groups, self._num_full
        found: list[_Hit] = []
        unbroken = [0] * groups
        """By group of layers: how many blocks, up to the one looked at, were found without a gap."""
        num_found = 0
        for place in range(num_blocks * groups):
            group, key = place % groups, keys[place]
            # The blocks before were just compared: with their key as the parent, `same_prefix` stops there at once.
            key.parent = keys[place - groups] if place >= groups else None
            hit = self.cache.find(key) or self.host.find(key)
            if hit is not None:
                stored = hit.key if isinstance(hit, Block) else hit[0]
                assert stored is not None
                stored.parent = key.parent
                keys[place] = stored
            elif group < full:
                break
            found.append(hit)
            unbroken[group] = unbroken[group] + 1 if hit is not None else 0
            number = place // groups + 1
            if group == groups - 1 and min(unbroken) >= number - self.config.first_kept(number * self.block_size):
                num_found = number
        kept = self.config.first_kept(num_found * self.block_size)
        needed = (place % groups < full or place // groups >= kept for place in range(num_found * groups))
        return [hit if is_needed else None for hit, is_needed in zip(found, needed, strict=False)]

    def _extra_keys(self, request: Request) -> list[tuple[str, ...]]:
        """The extra keys of each group of layers: their blocks hold different keys and values for the same tokens."""
        extra = request.extra_keys
        return [extra, *((*extra, f"group {group}") for group in range(1, self._groups))]

    def _share_and_allocate(self, shared: list[Block], host_slots: Iterable[int], num_fresh: int) -> list[Block] | None:
        """References `shared` and takes `num_fresh` free blocks; None, with nothing changed, if too few are free."""
        for block in shared:
            self.pool.share(block)
        # Taking free blocks may save what they hold to the host tier: not into the slots that will be read.
        self.host.pinned.update(host_slots)
        fresh: list[Block] | None = None
        try:
            fresh = self._allocate(num_fresh)
        finally:
            self.host.pinned.clear()
            if fresh is None:
                self._give_back(shared)
        return fresh

    def _allocate(self, count: int) -> list[Block] | None:
        """That many free blocks, or None; prefixes they hold are saved to the host tier and leave the cache."""
        blocks: list[Block] = []
        try:
            while len(blocks) < count:
                block = self.pool.take()
                if block is None:
                    self._give_back(blocks)
                    return None
                if block.key is not None:
                    self._save(block)
                    self.cache.remove(block)
                blocks.append(block)
        except QuireError:
            self._give_back(blocks)
            raise
        return blocks

    def _give_back(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            self.pool.release(block)

    def _save(self, block: Block) -> None:
        """Lists a copy of a cached block to the host tier, unless it is there, has no room there, or is not full."""
        assert block.key is not None
        if self.cache.is_partial(block.key):
            return
        slot = self.host.store(block.key)
        if slot is not None:
            self._copies.append(BlockCopy("device_to_host", block.block_id, slot))
