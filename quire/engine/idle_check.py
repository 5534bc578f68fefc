"""The checks of `check_invariants`, at a cost that does not grow with the cache.

`check_invariants` looks at every block, which takes tens of milliseconds for a large cache: too long for an engine that
is idle for a moment, since the next request may be on its way. Here each call checks requests, rows and totals in full,
and some of the blocks and host slots, the next ones each time.
"""

from __future__ import annotations

from quire.engine.invariants import InvariantError, check_block, check_host_sums, check_requests
from quire.engine.scheduler import Scheduler


class IdleCheck:
    """Checks an idle engine (nothing to schedule, to commit or to report) and remembers how far it has come.

    It finds at once what is wrong with queues, rows, groups and totals, and a wrong block or slot when its slice comes.
    One fault it never finds: a digest in the prefix cache whose block carries another digest, which
    `PrefixCache.publish` can't produce.
    """

    def __init__(self, scheduler: Scheduler, slice_size: int = 256) -> None:
        self._scheduler = scheduler
        self._slice_size = slice_size
        """Blocks, and host slots, per call: a fraction of a millisecond."""
        self._next_block = 0
        self._next_slot = 0

    def check(self) -> None:
        """Raises InvariantError, saying what is wrong, if this call finds anything."""
        scheduler = self._scheduler
        check_requests(scheduler)
        self._check_sums()
        self._check_next_blocks()
        self._check_next_slots()

    def _check_sums(self) -> None:
        blocks = self._scheduler.blocks
        num_usable, num_free = len(blocks.pool.blocks) - 1, blocks.pool.num_free
        if num_free != num_usable:
            raise InvariantError(f"{num_free} blocks are free of {num_usable}, though nobody runs")
        if len(blocks.cache) > num_usable:
            raise InvariantError(f"the cache has {len(blocks.cache)} names for {num_usable} blocks")
        check_host_sums(blocks.host)

    def _check_next_blocks(self) -> None:
        blocks = self._scheduler.blocks
        start, end = self._next_block, self._next_block + self._slice_size
        self._next_block = end if end < len(blocks.pool.blocks) else 0
        for block in blocks.pool.blocks[start:end]:
            check_block(block, block in blocks.pool.free, num_tables=0)
            if block.key is not None and not blocks.cache.knows(block):
                raise InvariantError(f"{block} is cached under another name")

    def _check_next_slots(self) -> None:
        host = self._scheduler.blocks.host
        start, end = self._next_slot, min(self._next_slot + self._slice_size, host.num_slots)
        self._next_slot = end if end < host.num_slots else 0
        for slot in range(start, end):
            if not host.is_sound(slot):
                raise InvariantError(f"host slot {slot} is lost, or stored under another name")
