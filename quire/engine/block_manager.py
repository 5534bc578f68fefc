"""Gives requests their blocks: from the pool, from the prefix cache, or from the host tier.

Updates pool, cache and tier together, and lists the copies of keys and values that the runner must
make to match. A copy is listed at the moment the bookkeeping changes; the runner makes a step's
copies in that order, before it computes anything. So a block is saved before it is overwritten, and
a host slot is read before it is reused.

A request may give up blocks while steps in flight still read or write them. That is safe because
the device works in order of submission: the next owner uses them in a later step. But what such a
step wrote is never published in the prefix cache: its result is discarded for a request that no
longer has its row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import compress

from quire.engine.block_key import BlockKey
from quire.engine.block_pool import Block, BlockPool
from quire.engine.config import SchedulerConfig
from quire.engine.host_tier import HostTier
from quire.engine.prefix_cache import PrefixCache
from quire.engine.prefix_match import PrefixIndex, PrefixMatch
from quire.engine.request import Request, RequestState
from quire.engine.state_keeper import StateKeeper
from quire.errors import QuireError
from quire.step import BlockCopy


@dataclass(frozen=True, slots=True)
class Placement:
    """What the cache had for a request: the first `num_ready_blocks` of its block table hold tokens
    already.
    """

    num_ready_blocks: int
    num_device_tokens: int
    num_host_tokens: int


class BlockManager:
    """Owner of the block pool, the prefix cache and the host tier."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        pool: BlockPool | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        self.config = config
        self.block_size = config.block_size
        self.pool = pool or BlockPool(config.num_blocks)
        self.states = None if config.state is None else StateKeeper(config, config.state, self.pool)
        if cache is None:  # an empty one is false
            cache = PrefixCache(config.block_size)
        self.prefixes = PrefixIndex(config, cache, HostTier(config.num_host_blocks), self.states)
        self._groups = config.num_groups
        self._leaving = config.leaving_groups
        self._copies: list[BlockCopy] = []

    def reset(self) -> None:
        """Forgets all cached prefixes, on the device and on the host tier; no request may hold a
        block.
        """
        for block in self.pool.blocks:
            assert not block.ref_count, f"{block} is in use"
            if block.key is not None:
                self.cache.remove(block)
                self.pool.place(block)
        for slot in range(self.host.num_slots):
            self.host.drop(slot)
        self._copies.clear()

    @property
    def cache(self) -> PrefixCache:
        return self.prefixes.cache

    @property
    def host(self) -> HostTier:
        return self.prefixes.host

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
        """Fills a request's table with blocks for all its known tokens: cached blocks for its
        prefix, free ones for the rest. Returns None, with nothing changed, unless there are free
        blocks for `reserve_tokens` tokens too.
        """
        match = self.prefixes.match(request)
        if not self._has_room(match, reserve_tokens):
            # these blocks are needed as free ones
            match = replace(match, partial=[], num_partial=0)
            if match.copied and not self._has_room(match, reserve_tokens):
                match = PrefixMatch()  # and those of a state, without which nothing else is of use
        if not self._has_room(match, reserve_tokens):
            return None
        found, state_blocks = match.found, self.config.num_state_blocks
        on_host = [hit for hit in (*found, *match.state) if isinstance(hit, tuple)]
        num_host = sum(isinstance(hit, tuple) for hit in found)
        num_fresh = self.config.blocks_for(len(request.token_ids)) - (len(found) - num_host)
        taken = [*match.shared, *match.copied]
        fresh = self._share_and_allocate(
            taken, (slot for _, slot in on_host), num_fresh + state_blocks
        )
        if fresh is None:
            return None
        free = iter(fresh[: len(fresh) - state_blocks])
        for hit in found:
            if hit is None or isinstance(hit, Block):
                request.block_table.append(hit or self.pool.blocks[0])
                continue
            block = next(free)
            self._fill(hit, block)
            self.cache.publish(hit[0], block)
            request.block_table.append(block)
        empty = list(free)
        for source, target in zip(match.partial, empty, strict=False):
            self._fill(source, target)
        request.block_table += empty
        num_found = len(found) // self._groups
        if self.states is not None:
            self._place_states(request, match, fresh[len(fresh) - state_blocks :])
        for block in match.copied:
            self.pool.release(block)
        for key, _ in reversed(on_host):
            # Last block first: the tier drops what was used longest ago, and a prefix should
            # outlive its continuation.
            self.host.touch(key)
        request.num_published_blocks = num_found
        request.num_left_blocks = {
            group: self.config.first_kept(group, num_found * self.block_size)
            for group in self._leaving
        }
        num_host = -(-num_host // self._groups)
        return Placement(
            num_ready_blocks=len(found) + len(match.partial),
            num_device_tokens=(num_found - num_host) * self.block_size + match.num_partial,
            num_host_tokens=num_host * self.block_size,
        )

    def _has_room(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether free blocks are left for this number of tokens, and for states, if what is cached
        is used.
        """
        num_covered = sum(not isinstance(hit, tuple) for hit in match.found)
        num_needed = self.config.blocks_for(num_tokens) - num_covered + self.config.num_state_blocks
        return num_needed <= self.pool.num_free - sum(
            not block.ref_count for block in (*match.shared, *match.copied)
        )

    def _place_states(self, request: Request, match: PrefixMatch, fresh: list[Block]) -> None:
        """Gives a request its two states; that in which computing begins is copied from where it is
        cached.
        """
        assert self.states is not None
        count, chunk = self.states.spec.num_blocks, self.states.spec.chunk
        request.states = [RequestState(fresh[:count]), RequestState(fresh[count:])]
        num_tokens = len(match.found) // self._groups * self.block_size
        if match.state:
            state = request.states[num_tokens // chunk % 2]
            state.chunk = num_tokens // chunk
            for hit, block in zip(match.state, state.blocks, strict=True):
                assert hit is not None
                self._fill(hit, block)
        parts = match.num_blocks_alike * self.block_size // chunk * chunk
        request.state_ends = (parts,) if parts > num_tokens else ()

    def _fill(self, hit: Block | tuple[BlockKey, int], target: Block) -> None:
        """Lists the copy of a cached block into a fresh one."""
        if isinstance(hit, Block):
            self._copies.append(BlockCopy("device_to_device", hit.block_id, target.block_id))
        else:
            self._copies.append(BlockCopy("host_to_device", hit[1], target.block_id))

    def advance_states(self, request: Request, start: int, end: int, reserve: int) -> None:
        """Notes that a step computes a request's tokens `start` to `end`; states that it overwrites
        are copied, if they are to be kept, but not into the last `reserve` free blocks.
        """
        if self.states is None:
            return

        def allocate(count: int) -> list[Block] | None:
            return self._allocate(count) if self.pool.num_free - count >= reserve else None

        self._copies += self.states.advance(self.cache, request, start, end, allocate)

    def publish(self, request: Request) -> None:
        """Puts the blocks that committed tokens have filled into the prefix cache, and gives up
        blocks that no later step of this request reads.
        """
        num_full = request.num_committed_tokens // self.block_size
        groups = self._groups
        if self.config.prefix_caching:
            self.prefixes.extend_keys(request, num_full)
            for index in range(request.num_published_blocks * groups, num_full * groups):
                self.cache.publish(request.block_keys[index], request.block_table[index])
        request.num_published_blocks = num_full
        if self.states is not None:
            self.states.publish(self.cache, request)
        for group in self._leaving:
            kept = self.config.first_kept(group, request.num_committed_tokens)
            for place in range(request.num_left_blocks[group], kept):
                self._leave(request, place * groups + group)
            request.num_left_blocks[group] = kept

    def _leave(self, request: Request, index: int) -> None:
        """A request gives up a block that it will not look at again."""
        block = request.block_table[index]
        is_record = self.config.groups[index % self._groups].keeps == "records"
        if is_record and block.key is not None and block.ref_count == 1:
            self.cache.remove(block)  # the next chunk's state says all that it did
        self.pool.release(block)
        request.block_table[index] = self.pool.blocks[0]

    def publish_partial(self, request: Request) -> None:
        """Puts the last, partly filled block of its committed tokens into the prefix cache, and the
        state before them, for requests whose prompt continues there: the other answers to its
        prompt, or the next beams of a beam search.
        """
        num_full, num_rest = divmod(request.num_committed_tokens, self.block_size)
        if not self.config.prefix_caching:
            return
        self.prefixes.extend_keys(request, num_full)
        if self.states is not None:
            self.states.publish_last(self.cache, request)
        place = num_full * self._groups
        if not num_rest or request.block_table[place].key is not None:
            return
        first = num_full * self.block_size
        tokens = request.token_ids[first : first + num_rest]
        for group, (parent, extra) in enumerate(self.prefixes.partial_keys(request, num_full)):
            self.cache.publish(
                self.cache.key(parent, tokens, extra), request.block_table[place + group]
            )

    def publish_end(self, request: Request) -> None:
        """Puts what later requests may continue from into the prefix cache: the state at its end,
        and if it says so its last block.
        """
        if request.caches_partial_block:
            self.publish_partial(request)
        elif self.states is not None and self.config.prefix_caching:
            self.prefixes.extend_keys(request, request.num_committed_tokens // self.block_size)
            self.states.publish_last(self.cache, request)

    def demote(self, request: Request) -> bool:
        """Saves a request's cached blocks to the host tier; whether any of them is there now."""
        if not self.host.num_slots:
            return False
        table = request.block_table
        if self.states is not None:
            self.prefixes.extend_keys(request, request.num_committed_tokens // self.block_size)
            self.states.publish_last(self.cache, request)
            table = [*(block for state in request.states for block in state.blocks), *table]
        # More blocks than the tier has slots would only evict those saved just before.
        is_full = [
            block.key is not None and not self.cache.is_partial(block.key) for block in table
        ]
        saved = list(compress(table, is_full))[: self.host.num_slots]
        for block in reversed(saved):
            self._save(block)
        return any(
            block.key is not None and self.host.find(block.key) is not None for block in saved
        )

    def release(self, request: Request) -> None:
        """Gives up all its blocks, the last first, so that the beginning, which others may share,
        is evicted last.
        """
        if self.states is not None:
            self.states.release(request)
        self._give_back([block for block in request.block_table if block.block_id])
        request.block_table = []
        request.num_published_blocks = 0
        request.num_left_blocks = {}

    def void(self, copies: Iterable[BlockCopy]) -> None:
        """These copies may not have been made: what they should have written leaves the cache and
        the tier.
        """
        for copy in copies:
            if copy.kind == "device_to_host":
                self.host.drop(copy.target)
                continue
            block = self.pool.blocks[copy.target]
            if block.key is not None:
                self.cache.remove(block)
                if block.ref_count == 0:
                    self.pool.place(block)

    def _share_and_allocate(
        self, shared: list[Block], host_slots: Iterable[int], num_fresh: int
    ) -> list[Block] | None:
        """References `shared` and takes `num_fresh` free blocks; None, with nothing changed, if too
        few are free.
        """
        for block in shared:
            self.pool.share(block)
        # Taking free blocks may save what they hold to the host tier: not into the slots that will
        # be read.
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
        """That many free blocks, or None; prefixes they hold are saved to the host tier and leave
        the cache.
        """
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
        """Lists a copy of a cached block to the host tier, unless it is there, has no room there,
        or is not full.
        """
        assert block.key is not None
        if self.cache.is_partial(block.key):
            return
        slot = self.host.store(block.key)
        if slot is not None:
            self._copies.append(BlockCopy("device_to_host", block.block_id, slot))
