"""Which replica gets a request: the one that has the least to compute for it.

That is what the replica has to do already, what it has not cached of the prompt, and, where its cache is full, what it
will have to compute again because that takes its place. So a request goes where most of its prompt lies unless that
replica is busier by more than the difference. The picture of what is cached comes from the
engines themselves (`quire.observe.cache_events`); prompts that are being computed count as cached where that happens.

Pure data: no clock, no chance, no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.observe.block_names import Names, unpack_names
from quire.server.replicas.block_table import MOST_REPLICAS, BlockTable

ANSWER_TOKENS = 32
"""An answer that runs delays a newcomer like so many tokens of a prompt."""
QUEUED_TOKENS = 256
"""And one that has no place to run in yet like so many."""
HOME_TOKENS = 64
"""Where the conversation was before is worth so many tokens: it stays there when its blocks are gone, or are elsewhere
as well."""
_MOST_HOMES = 16384
_LOOK_BACK = 64
"""Blocks at the end of a prompt among which the end of the last one is looked for."""
_MOST_EXPECTED = 16
"""Blocks of a prompt being computed that count as cached."""


@dataclass(slots=True)
class _Replica:
    """What is known about one of them, from its start to its end."""

    max_num_seqs: int = 1
    num_blocks: int = 0
    expected: dict[int, int] = field(default_factory=dict)
    """Blocks that are being computed, with the number of requests that do it."""
    waiting_tokens: int = 0
    num_answers: int = 0

    @property
    def load(self) -> int:
        """In prompt tokens."""
        queued = max(0, self.num_answers - self.max_num_seqs)
        return self.waiting_tokens + ANSWER_TOKENS * self.num_answers + QUEUED_TOKENS * queued

    def num_evicted(self, num_cached: int, num_new: int) -> int:
        """How many blocks go when so many come."""
        return min(num_new, max(0, num_cached + len(self.expected) + num_new - self.num_blocks))


@dataclass(slots=True, eq=False)
class Assignment:
    """A request's place: on which replica, and how it adds to that one's load."""

    replica: int
    num_cached: int
    """Tokens of the prompt that are there, or will be."""
    waiting_tokens: int
    """Those that are still to be computed."""
    num_answers: int
    expected: tuple[int, ...]
    """Blocks that come to be cached through it."""
    counted: _Replica
    """Where it is counted: the replica of that number may be another one by now."""
    is_open: bool = True


class PrefixRouter:
    """Chooses replicas, which are numbered, and keeps count of what they have to do."""

    def __init__(self, num_replicas: int) -> None:
        self.block_size = 16
        self._window = 0
        self._replicas = [_Replica() for _ in range(num_replicas)]
        rest = range(num_replicas, 0, -MOST_REPLICAS)
        self._tables = [BlockTable(min(MOST_REPLICAS, count)) for count in rest]
        self._homes: OrderedDict[int, int] = OrderedDict()
        """Where prompts went, by the name of their last full block, the latest last."""
        self._next = 0

    # What the engines tell

    def join(self, replica: int, block_size: int, num_blocks: int, max_num_seqs: int, window: int = 0) -> None:
        """A replica starts, with nothing cached and nothing to do. `window`: how far its model looks back (0: to the
        first token); they all have the same model."""
        self.block_size = block_size
        self._window = window
        self._replace(replica, _Replica(max_num_seqs, num_blocks))
        table, _ = self._table(replica)
        first = replica - replica % MOST_REPLICAS
        table.reserve(sum(one.num_blocks for one in self._replicas[first : first + MOST_REPLICAS]))

    def leave(self, replica: int) -> None:
        """A replica is lost; whatever was assigned to it counts no more."""
        self._replace(replica, _Replica())

    def _replace(self, replica: int, new: _Replica) -> None:
        self._replicas[replica] = new
        table, number = self._table(replica)
        table.clear(number)

    def _table(self, replica: int) -> tuple[BlockTable, int]:
        """Where its blocks are, and its number there."""
        return self._tables[replica // MOST_REPLICAS], replica % MOST_REPLICAS

    def note_blocks(self, replica: int, stored: bytes, removed: bytes) -> None:
        """Blocks that a replica has, or has no more."""
        table, number = self._table(replica)
        if removed:
            table.discard(number, unpack_names(removed))
        if stored:
            table.add(number, unpack_names(stored))

    # What requests ask

    def place(self, names: Names, num_tokens: int, num_answers: int, candidates: Sequence[int]) -> Assignment:
        """The best of the candidates, of which there must be one, for a prompt whose full blocks have these names.
        Equals take turns."""
        leading = self.leading(names, candidates)
        home = self._home(names)
        size, count = self.block_size, len(self._replicas)

        def cost(number: int) -> tuple[int, int, int]:
            replica = self._replicas[number]
            num_new = num_tokens - leading[number] * size
            lost = size * replica.num_evicted(self.num_cached_blocks(number), -(-num_new // size))
            work = replica.load + num_new + lost - HOME_TOKENS * (number == home)
            return work, replica.num_answers, (number - self._next) % count

        best = min(candidates, key=cost)
        self._next = (best + 1) % count
        first = leading[best]
        expected = tuple(names[first : first + _MOST_EXPECTED].tolist())
        rest = num_tokens - first * size
        assignment = Assignment(best, first * size, rest, num_answers, expected, self._replicas[best])
        self._count(assignment, names)
        return assignment

    def leading(self, names: Names, candidates: Sequence[int]) -> dict[int, int]:
        """How many of these blocks each candidate has, or will have, from the first on; with a window, how many it
        need not compute."""
        found: dict[int, int] = {}
        size = self.block_size
        ends = np.arange(size, (len(names) + 1) * size, size) if self._window else None
        first_needed = None if ends is None else np.maximum(0, ends - self._window + 1) // size
        for number, table in enumerate(self._tables):
            first = number * MOST_REPLICAS
            here = [one - first for one in candidates if 0 <= one - first < MOST_REPLICAS]
            counts = table.leading(names, here) if first_needed is None else table.in_row(names, here, first_needed)
            found |= {first + one: count for one, count in counts.items()}
        for number in candidates:
            expected, count = self._replicas[number].expected, found[number]
            if expected:
                while count < len(names) and int(names[count]) in expected:
                    count += 1
                found[number] = count
        return found

    def computed(self, assignment: Assignment) -> None:
        """A prompt is computed: its blocks are cached or not, as the engine says."""
        if not assignment.is_open:
            return
        replica = assignment.counted
        replica.waiting_tokens -= assignment.waiting_tokens
        assignment.waiting_tokens = 0
        for name in assignment.expected:
            if replica.expected[name] == 1:
                del replica.expected[name]
            else:
                replica.expected[name] -= 1
        assignment.expected = ()

    def answered(self, assignment: Assignment) -> None:
        """One of its answers is complete."""
        if assignment.is_open:
            assignment.num_answers -= 1
            assignment.counted.num_answers -= 1

    def close(self, assignment: Assignment) -> None:
        """The request is over, or not here any more. Does nothing the second time."""
        self.computed(assignment)
        if assignment.is_open:
            assignment.is_open = False
            assignment.counted.num_answers -= assignment.num_answers

    def load(self, replica: int) -> int:
        """What a replica has to do, in prompt tokens."""
        return self._replicas[replica].load

    def has_room(self, replica: int, num_answers: int) -> bool:
        """Whether so many more answers could run there at once."""
        one = self._replicas[replica]
        return one.num_answers + num_answers <= one.max_num_seqs

    def num_cached_blocks(self, replica: int) -> int:
        table, number = self._table(replica)
        return table.count(number)

    def _count(self, assignment: Assignment, names: Names) -> None:
        replica = assignment.counted
        replica.waiting_tokens += assignment.waiting_tokens
        replica.num_answers += assignment.num_answers
        expected = replica.expected
        for name in assignment.expected:
            expected[name] = expected.get(name, 0) + 1
        if len(names):
            last = int(names[-1])
            self._homes[last] = assignment.replica
            self._homes.move_to_end(last)
            if len(self._homes) > _MOST_HOMES:
                self._homes.popitem(last=False)

    def _home(self, names: Names) -> int | None:
        """Where the longest beginning of a prompt that was a prompt itself has been sent."""
        homes = self._homes
        if homes:
            for name in reversed(names[-_LOOK_BACK:].tolist()):
                if name in homes:
                    return homes[name]
        return None
