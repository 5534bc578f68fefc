"""Gives requests their blocks: from the pool, from the prefix cache, from the host tier, or from a fork.

Keeps pool, cache and tier in step with each other and writes down the copies that make the device agree.
Copies are appended at the moment the bookkeeping changes and are executed in that order, before anything the
step computes: so a block is saved before it is overwritten, and a slot is read before it is reused.

Blocks are given up while steps that read or write them are still in flight. That is safe because the device
does everything in order of submission: whoever gets such a block next touches it in a later step. The one
thing that never follows from it is a published block: results of a row that was given up are discarded, so
what they wrote is never offered to the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.engine.block_pool import Block, BlockPool
from quire.engine.config import SchedulerConfig
from quire.engine.host_tier import HostTier
from quire.engine.prefix_cache import BlockKey, PrefixCache
from quire.engine.request import Request
from quire.errors import QuireError
from quire.step import BlockCopy


@dataclass(frozen=True, slots=True)
class Placement:
    """How a request's block table begins: `num_ready_blocks` of it hold tokens already."""

    num_ready_blocks: int
    num_device_tokens: int
    num_host_tokens: int


@dataclass(slots=True)
class _Hits:
    """A walk over the two tiers: for each leading block its device block, or its key and host slot."""

    found: list[Block | tuple[BlockKey, int]]
    device: list[Block]
    host_slots: list[int]


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
        self._copies: list[BlockCopy] = []

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies written down since the last call: they belong to the next step."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def grow(self, request: Request) -> Block | None:
        """One more block at the end of the table; None if there is none."""
        blocks = self._allocate(1)
        if blocks is None:
            return None
        request.block_table.append(blocks[0])
        return blocks[0]

    def fork(self, request: Request, source: Request, num_tokens: int) -> None:
        """Has a request that waits hold the blocks of the source's first `num_tokens` tokens, which are its own
        first ones too; `place` goes on from there. The last block may be partial: the source goes on filling
        it, so `place` copies it."""
        self.release(request)
        num_full = num_tokens // self.block_size
        request.block_table = source.block_table[: self.config.blocks_for(num_tokens)]
        for block in request.block_table:
            self.pool.share(block)
        request.num_held_tokens = num_tokens
        request.num_published_blocks = min(source.num_published_blocks, num_full)
        request.forked_from = source.request_id
        if len(request.block_keys) < num_full:
            request.block_keys = source.block_keys[:num_full]

    def place(self, request: Request, reserve_tokens: int) -> Placement | None:
        """Fills the table of a request with blocks for all its known tokens: those it was forked with, or else
        cached ones as far as they go, and fresh ones for the rest. None, and nothing changed, unless
        `reserve_tokens` would fit too."""
        if request.num_held_tokens:
            return self._place_forked(request, reserve_tokens)
        num_tokens = len(request.token_ids)
        hits = self._match(request, num_tokens)
        num_free = self.pool.num_free - sum(block.ref_count == 0 for block in hits.device)
        if self.config.blocks_for(reserve_tokens) - len(hits.device) > num_free:
            return None
        fresh = self._share_and_allocate(
            hits.device, hits.host_slots, self.config.blocks_for(num_tokens) - len(hits.device)
        )
        if fresh is None:
            return None
        fresh.reverse()
        for hit in hits.found:
            if isinstance(hit, Block):
                request.block_table.append(hit)
                continue
            key, slot = hit
            block = fresh.pop()
            self._copies.append(BlockCopy("host_to_device", slot, block.block_id))
            self.cache.publish(key, block)
            request.block_table.append(block)
        while fresh:
            request.block_table.append(fresh.pop())
        for hit in reversed(hits.found):
            # Last block first, so that in this tier too a prefix outlives what hangs on it.
            if not isinstance(hit, Block):
                self.host.touch(hit[0])
        request.num_published_blocks = len(hits.found)
        return Placement(len(hits.found), len(hits.device) * self.block_size, len(hits.host_slots) * self.block_size)

    def publish(self, request: Request) -> None:
        """Offers the blocks its committed tokens have filled to the cache."""
        num_full = request.num_committed_tokens // self.block_size
        if self.config.prefix_caching:
            self.cache.extend_keys(request.block_keys, request.token_ids, num_full, request.extra_keys)
            for index in range(request.num_published_blocks, num_full):
                self.cache.publish(request.block_keys[index], request.block_table[index])
        request.num_published_blocks = num_full

    def demote(self, request: Request) -> bool:
        """Saves a request's cached blocks to the host tier; whether any of them is there now."""
        if not self.host.num_slots:
            return False
        # What doesn't fit would only push out what was saved just before.
        saved = [block for block in request.block_table if block.key is not None][: self.host.num_slots]
        for block in reversed(saved):
            self._save(block)
        return any(block.key is not None and self.host.find(block.key) is not None for block in saved)

    def release(self, request: Request) -> None:
        """Gives up all its blocks, the last first, so that shared prefixes outlive tails."""
        for block in reversed(request.block_table):
            self.pool.release(block)
        request.block_table = []
        request.num_published_blocks = 0
        request.num_held_tokens = 0
        request.forked_from = None

    def void(self, copies: Iterable[BlockCopy]) -> None:
        """These copies were never made, or not known to be: whatever they brought is forgotten."""
        for copy in copies:
            if copy.kind == "device_to_host":
                self.host.drop(copy.target)
                continue
            block = self.pool.blocks[copy.target]
            if block.key is not None:
                self.cache.remove(block)
                if block.ref_count == 0:
                    self.pool.reposition(block)

    def _place_forked(self, request: Request, reserve_tokens: int) -> Placement | None:
        """Full blocks stay shared. A partial one is copied, unless nobody else has it any more."""
        table, num_held = request.block_table, request.num_held_tokens
        partial = table[-1] if num_held % self.block_size else None
        copied = partial if partial is not None and partial.ref_count > 1 else None
        num_ready = len(table)
        num_own = num_ready - (copied is not None)
        if self.config.blocks_for(reserve_tokens) - num_own > self.pool.num_free:
            return None
        fresh = self._allocate(self.config.blocks_for(len(request.token_ids)) - num_own)
        if fresh is None:
            return None
        if copied is not None:
            self._copies.append(BlockCopy("device_to_device", copied.block_id, fresh[0].block_id))
            self.pool.release(table.pop())
        elif partial is not None and partial.key is not None:
            # Its last owner had filled it with other tokens, which are now overwritten.
            self._save(partial)
            self.cache.remove(partial)
        table += fresh
        request.num_held_tokens = 0
        return Placement(num_ready, num_held, 0)

    def _match(self, request: Request, num_tokens: int) -> _Hits:
        """The cached blocks a request can start with; one token is always left to compute."""
        hits = _Hits([], [], [])
        # Cached blocks hold keys and values only: who needs the hidden state of every token computes them all.
        if not self.config.prefix_caching or request.pooling == "mean":
            return hits
        num_blocks = (num_tokens - 1) // self.block_size
        if request.score_prompt_from is not None:
            # A prompt position is scored by computing the token before it.
            num_blocks = min(num_blocks, (request.score_prompt_from - 1) // self.block_size)
        keys = request.block_keys
        self.cache.extend_keys(keys, request.token_ids, num_blocks, request.extra_keys)
        previous: BlockKey | None = None
        for index in range(num_blocks):
            key = keys[index]
            # The chain so far was just found equal: link to it, so the next comparison ends at once.
            key.parent = previous
            block = self.cache.find(key)
            if block is not None:
                assert block.key is not None
                found = block.key
                hits.found.append(block)
                hits.device.append(block)
            else:
                stored = self.host.find(key)
                if stored is None:
                    break
                found = stored[0]
                hits.found.append(stored)
                hits.host_slots.append(stored[1])
            found.parent = previous
            keys[index] = previous = found
        return hits

    def _share_and_allocate(self, shared: list[Block], host_slots: Iterable[int], num_fresh: int) -> list[Block] | None:
        """References `shared`, then takes fresh blocks; if that can't be done, nothing is held."""
        for block in shared:
            self.pool.share(block)
        # Taking blocks may demote others: not into the slots we are going to read.
        self.host.pin(host_slots)
        fresh: list[Block] | None = None
        try:
            fresh = self._allocate(num_fresh)
        finally:
            self.host.unpin()
            if fresh is None:
                for block in reversed(shared):
                    self.pool.release(block)
        return fresh

    def _allocate(self, count: int) -> list[Block] | None:
        """That many blocks from the free list, whatever they held saved or forgotten; all or none."""
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
        """Copies a cached block to the host tier, unless it is there or there is no room."""
        assert block.key is not None
        slot = self.host.store(block.key)
        if slot is not None:
            self._copies.append(BlockCopy("device_to_host", block.block_id, slot))
