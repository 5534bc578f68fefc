"""The checks of `check_invariants`, at a cost that does not grow with the cache.

`check_invariants` looks at every block, which takes tens of milliseconds for a large cache: too
long for an engine that is idle for a moment, since the next request may be on its way. Here each
call checks requests, rows and totals in full, and some of the blocks and host slots, the next ones
each time.
"""

from __future__ import annotations

from quire.engine.invariants import InvariantError, check_block, check_host_sums, check_requests
from quire.engine.scheduler import Scheduler


class IdleCheck:
    """Checks an idle engine (nothing to schedule, to commit or to report) and remembers how far it
    has come. One fault it never finds: a digest in the prefix cache whose block carries another,
    which `PrefixCache.publish` can't produce.
    """

    def __init__(self, scheduler: Scheduler, slice_size: int = 256) -> None:
        self._scheduler = scheduler
        self._slice_size = slice_size
        """Blocks, and host slots, per call: a fraction of a millisecond."""
        self._next = 0
        """Where the next slice of blocks, and of host slots, begins."""

    def check(self) -> None:
        """Raises InvariantError, saying what is wrong, if this call finds anything."""
        blocks = self._scheduler.blocks
        pool, host, num_usable = blocks.pool, blocks.host, len(blocks.pool.blocks) - 1
        check_requests(self._scheduler)
        if pool.num_free != num_usable:
            raise InvariantError(
                f"{pool.num_free} blocks are free of {num_usable}, though nobody runs"
            )
        if len(blocks.cache) > num_usable:
            raise InvariantError(f"the cache has {len(blocks.cache)} names for {num_usable} blocks")
        check_host_sums(host)
        start, end = self._next, self._next + self._slice_size
        self._next = end if end < max(len(pool.blocks), host.num_slots) else 0
        for block in pool.blocks[start:end]:
            check_block(blocks, block, num_tables=0)
        for slot in range(start, min(end, host.num_slots)):
            if not host.is_sound(slot):
                raise InvariantError(f"host slot {slot} is lost, or stored under another name")
