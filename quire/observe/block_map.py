"""What every block of the pool is used for, as steps tell it: free, in use, shared, or cached, and
by whom.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby

FREE, USED, SHARED, CACHED, UNSEEN = range(5)
"""States of a block. Cached: nobody uses it, but it holds tokens of a request until it is taken
again. Unseen: no step has named it since the log begins.
"""
STATE_NAMES = ("free", "used", "shared", "cached", "unseen")
_STATES = 8
"""A block's code is its owner times this, plus its state."""


class BlockMap:
    """Counts references by what requests gained and gave up. An owner is a number: of the request
    that computed what the block holds, 0 if that is unknown.
    """

    def __init__(self, num_blocks: int, is_complete: bool) -> None:
        """`num_blocks` includes block 0, which nobody gets. `is_complete`: no step is missed, so
        the rest is free.
        """
        self._references = [0] * num_blocks
        self._owners = [0] * num_blocks
        self._holds_tokens = bytearray(num_blocks)
        self._codes = [FREE if is_complete else UNSEEN] * num_blocks
        self._changed: set[int] = set()

    def take(self, block: int, owner: int) -> None:
        """A request got it fresh."""
        self._references[block] = 1
        self._owners[block] = owner
        self._holds_tokens[block] = 0
        self._note(block)

    def share(self, block: int) -> None:
        """A request found what it needs in it."""
        self._references[block] += 1
        self._holds_tokens[block] = 1
        self._note(block)

    def give_up(self, block: int, holds_tokens: bool) -> None:
        """A request ended or gave way; `holds_tokens` if others can find them there."""
        self._references[block] = max(0, self._references[block] - 1)
        self._holds_tokens[block] |= holds_tokens
        self._note(block)

    def fill(self, block: int, owner: int) -> None:
        """A copy brought what this owner had computed."""
        self._owners[block] = owner
        self._holds_tokens[block] = 1
        self._note(block)

    def forget(self, block: int) -> None:
        """What a copy should have brought never came."""
        self._holds_tokens[block] = 0
        self._note(block)

    def owner(self, block: int) -> int:
        return self._owners[block]

    def state(self, block: int) -> int:
        return self._codes[block] % _STATES

    def take_changes(self) -> list[int]:
        """Block, code, block, code, … of those that changed since the last call."""
        flat: list[int] = []
        for block in sorted(self._changed):
            flat += (block, self._codes[block])
        self._changed.clear()
        return flat

    def runs(self) -> list[int]:
        """The whole map from block 1 on: code, how many of it, code, how many, …"""
        flat: list[int] = []
        for code, blocks in groupby(self._codes[1:]):
            flat += (code, len(list(blocks)))
        return flat

    def owners(self) -> set[int]:
        """Those whose tokens are in some block."""
        return {code // _STATES for code in set(self._codes)} - {0}

    def counts(self) -> dict[str, int]:
        """Blocks by the name of their state."""
        counts = Counter(code % _STATES for code in self._codes[1:])
        return {name: counts[state] for state, name in enumerate(STATE_NAMES)}

    def _note(self, block: int) -> None:
        references = self._references[block]
        state = CACHED if self._holds_tokens[block] else FREE
        if references:
            state = SHARED if references > 1 else USED
        self._codes[block] = state if state == FREE else self._owners[block] * _STATES + state
        self._changed.add(block)
