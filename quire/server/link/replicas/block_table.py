"""Which engines have which blocks cached: for each block's name an integer whose bits say who has
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import and_, or_

from quire.observe.block_names import Names

_SHARD_BITS = 12
_SHARD_SHIFT = 64 - _SHARD_BITS
"""By the upper bits of a name: the sums that names are mix those best."""
_MOST_DEPTHS = 64
"""Different numbers of leading blocks that are looked for; beyond them, engines count as having
fewer than they do.
"""

Depths = list[tuple[int, int]]
"""Groups of members (bits), and how many blocks from the first on all of a group have."""


class BlockTable:
    """Members come and go at no cost: one that left is a bit that nobody asks for any more, which
    is removed a part at a time, with the calls that follow. Names are spread over many dicts, so
    that none takes long to grow or to look through.
    """

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(1 << _SHARD_BITS)]
        self._counts: list[int] = []
        """Blocks of each member, by its bit's number."""
        self._bits: list[int] = []
        """One integer for all blocks that only that member has."""
        self._free: list[int] = []
        self._leaving: dict[int, int] = {}
        """Members that are gone, and at which shard removing them began."""
        self._left_bits = 0
        self._next_shard = 0

    def join(self) -> int:
        """A new member without blocks: the number of its bit."""
        if self._free:
            return self._free.pop()
        self._counts.append(0)
        self._bits.append(1 << len(self._bits))
        return len(self._counts) - 1

    def leave(self, member: int) -> None:
        """It has nothing any more, and must not be asked about."""
        if not self._counts[member]:
            self._free.append(member)
            return
        self._leaving[member] = self._next_shard
        self._left_bits |= self._bits[member]

    def count(self, member: int) -> int:
        """How many blocks it has."""
        return self._counts[member]

    def __len__(self) -> int:
        """Different blocks, those of members that have left included while they are being removed."""
        return sum(map(len, self._shards))

    def add(self, member: int, names: Names) -> None:
        """It has these blocks."""
        self._tidy()
        shards = self._shards
        bit = self._bits[member]
        new = 0
        for name in names.tolist():
            shard = shards[name >> _SHARD_SHIFT]
            held = shard.get(name)
            if held is None:
                shard[name] = bit
                new += 1
            elif not held & bit:
                shard[name] = held | bit
                new += 1
        self._counts[member] += new

    def discard(self, member: int, names: Names) -> None:
        """It has these blocks no more."""
        self._tidy()
        shards = self._shards
        bit = self._bits[member]
        gone = 0
        for name in names.tolist():
            shard = shards[name >> _SHARD_SHIFT]
            held = shard.get(name, 0)
            if held & bit:
                gone += 1
                self._set(shard, name, held ^ bit)
        self._counts[member] -= gone

    def _set(self, shard: dict[int, int], name: int, held: int) -> None:
        if not held:
            del shard[name]
        elif held & (held - 1):
            shard[name] = held
        else:
            shard[name] = self._bits[held.bit_length() - 1]

    def _tidy(self) -> None:
        """Removes those who left from one of the dicts."""
        if not self._leaving:
            return
        place = self._next_shard
        shard = self._shards[place]
        left = self._left_bits
        for name in [name for name, held in shard.items() if held & left]:
            self._set(shard, name, shard[name] & ~left)
        self._next_shard = (place + 1) % len(self._shards)
        for member in [
            member for member, began in self._leaving.items() if began == self._next_shard
        ]:
            del self._leaving[member]
            self._left_bits ^= self._bits[member]
            self._counts[member] = 0
            self._free.append(member)

    def _held(self, name: int) -> int:
        return self._shards[name >> _SHARD_SHIFT].get(name, 0)

    def leading(self, names: Names, wanted: int) -> Depths:
        """How many of these blocks each of the wanted has, from the first on; who has none is left
        out. Where a block is, those before it are, too (`quire.observe.cache_events`): it is enough
        to halve the distance again and again.
        """
        found: Depths = []
        waiting = [(0, len(names), wanted)]
        while waiting:
            # all of the wanted have the first `low`, and at most the first `high`
            low, high, wanted = waiting.pop()
            # most prompts are new, or known as far as anybody else knows them
            middle = low if not low else high - 1
            while low < high:
                have = wanted & self._held(int(names[middle]))
                if have == wanted:
                    low = middle + 1
                else:
                    if have and len(found) + len(waiting) < _MOST_DEPTHS:
                        waiting.append((middle + 1, high, have))
                    elif have:
                        found.append((have, middle + 1))
                    wanted ^= have
                    high = middle
                middle = (low + high) // 2
            if low and wanted:
                found.append((wanted, low))
        return found

    def in_row(self, names: Names, wanted: int, first_needed: Sequence[int]) -> Depths:
        """How many of these blocks each of the wanted need not compute, if it is enough to have
        those from `first_needed` of the last of them on, to that; who has none is left out.
        """
        held = [wanted & self._held(name) for name in names.tolist()]
        found: Depths = []
        somebody = reduce(or_, held, 0)
        if not somebody:
            return found
        have_all = [have & somebody for have in _running_and(held, first_needed)]
        later = list(accumulate(reversed(have_all), or_, initial=0))
        for place, have in enumerate(have_all):
            only_here = have & ~later[len(have_all) - 1 - place]
            if only_here:
                found.append((only_here, place + 1))
        return found


def _running_and(values: Sequence[int], first: Sequence[int]) -> list[int]:
    """For each place the `and` of the values from `first[place]`, which never falls, to it. (A
    queue of two stacks: each value is looked at twice, however far `first` lies back.)
    """
    found: list[int] = []
    front: list[int] = []
    """The `and` of the values from each place below `split` to the split, the lowest place last."""
    split = 0
    back = -1
    for place, value in enumerate(values):
        if first[place] >= split and place >= split:
            # All of the front is behind us: what came since becomes the front, this value included.
            front = list(accumulate(reversed(values[first[place] : place + 1]), and_))
            split = place + 1
            back = -1
        else:
            back &= value
            del front[split - first[place] :]
        found.append(back & front[-1] if front else back)
    return found
