"""Which replica gets a request: the one that has the least to compute for it.

That is what the replica has to do already, what it has not cached of the prompt, and, where its
cache is full, what it will have to compute again because that takes its place. So a request goes
where most of its prompt lies unless that replica is busier by more than the difference. The picture
of what is cached comes from the engines themselves (`quire.observe.cache_events`); prompts that are
being computed count as cached where that happens.

Pure data: no clock, no chance, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np
import numpy.typing as npt

from quire.observe.block_names import Names, unpack_names
from quire.server.link.replicas.block_table import BlockTable, Depths

ANSWER_TOKENS = 32
"""An answer that runs delays a newcomer like so many tokens of a prompt."""
QUEUED_TOKENS = 256
"""And one that has no place to run in yet like so many."""
HOME_TOKENS = 64
"""Where the conversation was before is worth so many tokens: it stays there when its blocks are
gone, or are elsewhere as well.
"""
_MOST_HOMES = 1 << 15
"""Prompts of which it is known where they went."""
_LOOK_BACK = 64
"""Blocks at the end of a prompt among which the end of the last one is looked for."""
_ANSWER_BITS = 14
_MOST_ANSWERS = (1 << _ANSWER_BITS) - 1
_MOST_WORK = (1 << 46) - 1
_CLOSED = 1 << 61
"""Above whatever work and answers give together."""
_MOST_EXPECTED = 16
"""Blocks of a prompt being computed that count as cached."""


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
    start: int
    """Of the replica, counted: the one of that number may be another one by now."""
    is_open: bool = True


class PrefixRouter:
    """Chooses replicas, which are numbered, and keeps count of what they have to do.

    What a choice needs of each replica stands in arrays, so that a few calls of numpy compare a
    thousand of them.
    """

    def __init__(self, num_replicas: int) -> None:
        self.block_size = 16
        self._window = 0
        self._table = BlockTable()
        self._members = [self._table.join() for _ in range(num_replicas)]
        """Of each replica in the table."""
        self._replica_of = np.arange(num_replicas)
        """The other way round; of members that have left it says nothing."""
        self._wanted = sum([1 << member for member in self._members])
        """The bits of all of them."""
        self._starts = [0] * num_replicas
        self._max_num_seqs = [1] * num_replicas
        self._num_blocks = [0] * num_replicas
        self._waiting_tokens = [0] * num_replicas
        self._num_answers = [0] * num_replicas
        self._are_open = [False] * num_replicas
        self._loads = [0] * num_replicas
        """In prompt tokens."""
        self._keys = np.full(num_replicas, _CLOSED, np.int64)
        """Load and number of answers in one number, in this order; of those that are not open, a
        very large one.
        """
        self._free = [0] * num_replicas
        """Blocks that are neither cached nor expected, as what it takes to compute them: in the unit
        of the keys.
        """
        self._keys_less_free = self._keys.copy()
        self._scratch = np.empty(num_replicas, np.int64)
        self._new_work = np.empty(1, np.int64)
        """Arrays only: where one side is a number, a call of numpy takes twice as long."""
        self._num_open = 0
        self._expected: list[dict[int, int]] = [{} for _ in range(num_replicas)]
        """Blocks that each is computing, with the number of requests that do it."""
        self._expecting: dict[int, int] = {}
        """The same by name: the bits of who does."""
        self._homes: dict[int, int] = {}
        """Where prompts went, by the name of their last full block, the oldest first."""
        self._next = 0

    # What the engines tell

    def join(
        self, replica: int, block_size: int, num_blocks: int, max_num_seqs: int, window: int = 0
    ) -> None:
        """A replica starts, with nothing cached and nothing to do. `window`: how far its model
        looks back (0: to the first token); they all have the same model.
        """
        self.block_size = block_size
        self._window = window
        self._replace(replica, max_num_seqs, num_blocks)
        self.set_open(replica, True)

    def leave(self, replica: int) -> None:
        """A replica is lost; whatever was assigned to it counts no more."""
        self._replace(replica, 1, 0)
        self.set_open(replica, False)

    def set_open(self, replica: int, is_open: bool) -> None:
        """Whether it is chosen where no candidates are named; one that joins is."""
        self._num_open += is_open - self._are_open[replica]
        self._are_open[replica] = is_open
        self._count_load(replica)

    @property
    def has_open(self) -> bool:
        return self._num_open > 0

    @property
    def _block_work(self) -> int:
        """What a block takes to compute, in the unit of the keys."""
        return self.block_size << _ANSWER_BITS

    def _replace(self, replica: int, max_num_seqs: int, num_blocks: int) -> None:
        for name in self._expected[replica]:
            self._expect_no_more(name, 1 << self._members[replica])
        self._expected[replica] = {}
        old = self._members[replica]
        self._table.leave(old)
        new = self._members[replica] = self._table.join()
        if new >= len(self._replica_of):
            self._replica_of = np.concatenate([self._replica_of, np.zeros(new + 1, np.intp)])
        self._replica_of[new] = replica
        self._wanted ^= 1 << old
        self._wanted |= 1 << new
        self._starts[replica] += 1
        self._max_num_seqs[replica] = max_num_seqs
        self._num_blocks[replica] = num_blocks
        self._waiting_tokens[replica] = self._num_answers[replica] = 0
        self._count_blocks(replica)

    def note_blocks(self, replica: int, stored: bytes, removed: bytes) -> None:
        """Blocks that a replica has, or has no more."""
        member = self._members[replica]
        if removed:
            self._table.discard(member, unpack_names(removed))
        if stored:
            self._table.add(member, unpack_names(stored))
        self._count_blocks(replica)

    def _count_blocks(self, replica: int) -> None:
        num_taken = self._table.count(self._members[replica]) + len(self._expected[replica])
        free = self._free[replica] = (
            max(0, self._num_blocks[replica] - num_taken) * self._block_work
        )
        self._keys_less_free[replica] = int(self._keys[replica]) - free

    def _count_load(self, replica: int) -> None:
        num_answers = self._num_answers[replica]
        queued = max(0, num_answers - self._max_num_seqs[replica])
        load = self._waiting_tokens[replica] + ANSWER_TOKENS * num_answers + QUEUED_TOKENS * queued
        self._loads[replica] = load
        key = self._keys[replica] = self._key(replica) if self._are_open[replica] else _CLOSED
        self._keys_less_free[replica] = key - self._free[replica]

    def _key(self, replica: int) -> int:
        load = min(self._loads[replica], _MOST_WORK)
        return (load << _ANSWER_BITS) + min(self._num_answers[replica], _MOST_ANSWERS)

    # What requests ask

    def place(
        self,
        names: Names,
        num_tokens: int,
        num_answers: int,
        candidates: Sequence[int] | None = None,
    ) -> Assignment:
        """The best of the candidates, of which there must be one, for a prompt whose full blocks
        have these names; without candidates, of all that are open. Equals take turns.
        """
        depths = self._depths(names)
        keys = self._keys
        less_free = self._keys_less_free
        if candidates is not None:
            keys = np.full(len(keys), _CLOSED, np.int64)
            less_free = keys.copy()
            for number in candidates:
                keys[number] = key = self._key(number)
                less_free[number] = key - self._free[number]
        # Most have the same number of leading blocks: none, or those that all have. What is
        # compared is their work beside the tokens that come after these blocks.
        usual = self._usual(depths, len(keys))
        num_blocks = -(-num_tokens // self.block_size)
        self._new_work[0] = (num_blocks - usual) * self._block_work
        # Their work, and what they will have to compute again because the new blocks drive it out.
        lowest = np.add(less_free, self._new_work, out=self._scratch)
        np.maximum(lowest, keys, out=lowest)
        for members, depth in depths:
            if depth != usual:
                new_work = (num_blocks - depth) * self._block_work
                more = (usual - depth) * self._block_work
                for number in self._replicas_of(members):
                    key = max(int(keys[number]), int(less_free[number]) + new_work)
                    lowest[number] = key + more
        home = self._home(names)
        if home is not None:
            lowest[home] -= HOME_TOKENS << _ANSWER_BITS
        best = self._first_lowest(lowest)
        self._next = (best + 1) % len(keys)
        bit = 1 << self._members[best]
        first = next((depth for members, depth in depths if members & bit), 0)
        expected = dict.fromkeys(names[first : first + _MOST_EXPECTED].tolist())
        num_cached = first * self.block_size
        rest = num_tokens - num_cached
        assignment = Assignment(
            best, num_cached, rest, num_answers, tuple(expected), self._starts[best]
        )
        self._count(assignment, names)
        return assignment

    def _usual(self, depths: Depths, num_replicas: int) -> int:
        """How many leading blocks more than half of the replicas have."""
        for members, depth in depths:
            if 2 * members.bit_count() > num_replicas:
                return depth
        return 0

    def _first_lowest(self, keys: npt.NDArray[np.int64]) -> int:
        """The replica with the lowest key; of several, the one whose turn is next."""
        later = keys[self._next :]
        earlier = keys[: self._next]
        best = self._next + int(later.argmin())
        if self._next:
            other = int(earlier.argmin())
            if earlier[other] < keys[best]:
                return other
        return best

    def leading(self, names: Names, candidates: Sequence[int]) -> dict[int, int]:
        """How many of these blocks each candidate has, or will have, from the first on; with a
        window, how many it need not compute.
        """
        found = dict.fromkeys(candidates, 0)
        for members, depth in self._depths(names):
            found |= {number: depth for number in self._replicas_of(members) if number in found}
        return found

    def _depths(self, names: Names) -> Depths:
        """Who has how many leading blocks; without those that have none."""
        if self._window:
            size = self.block_size
            ends = np.arange(size, (len(names) + 1) * size, size)
            first_needed = np.maximum(0, ends - self._window + 1) // size
            depths = self._table.in_row(names, self._wanted, first_needed.tolist())
        else:
            depths = self._table.leading(names, self._wanted)
        return self._with_expected(names, depths) if self._expecting else depths

    def _with_expected(self, names: Names, depths: Depths) -> Depths:
        """Those who have so many blocks, and with them whoever computes the next ones."""
        known = reduce(or_, (members for members, _ in depths), 0)
        found: Depths = []
        for members, depth in (*depths, (self._wanted & ~known, 0)):
            while members:
                have = (
                    members & self._expecting.get(int(names[depth]), 0) if depth < len(names) else 0
                )
                if depth and members != have:
                    found.append((members ^ have, depth))
                members = have
                depth += 1
        return found

    def _replicas_of(self, members: int) -> list[int]:
        if not members & (members - 1):
            return [int(self._replica_of[members.bit_length() - 1])]
        packed = np.frombuffer(members.to_bytes(-(-members.bit_length() // 8), "little"), np.uint8)
        places = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
        found: list[int] = self._replica_of[places].tolist()
        return found

    def computed(self, assignment: Assignment) -> None:
        """A prompt is computed: its blocks are cached or not, as the engine says."""
        if not assignment.is_open or not self._counts_here(assignment):
            return
        if not assignment.waiting_tokens and not assignment.expected:
            return  # it was told before
        replica = assignment.replica
        self._waiting_tokens[replica] -= assignment.waiting_tokens
        assignment.waiting_tokens = 0
        expected = self._expected[replica]
        bit = 1 << self._members[replica]
        for name in assignment.expected:
            count = expected.pop(name)
            if count == 1:
                self._expect_no_more(name, bit)
            else:
                expected[name] = count - 1
        assignment.expected = ()
        self._count_blocks(replica)
        self._count_load(replica)

    def _expect_no_more(self, name: int, bit: int) -> None:
        others = self._expecting.pop(name) ^ bit
        if others:
            self._expecting[name] = others

    def answered(self, assignment: Assignment) -> None:
        """One of its answers is complete."""
        if assignment.is_open:
            assignment.num_answers -= 1
            self._add_answers(assignment, -1)

    def close(self, assignment: Assignment) -> None:
        """The request is over, or not here any more. Does nothing the second time."""
        self.computed(assignment)
        if assignment.is_open:
            assignment.is_open = False
            self._add_answers(assignment, -assignment.num_answers)

    def _counts_here(self, assignment: Assignment) -> bool:
        """Whether its replica is still the one that it was given to."""
        return self._starts[assignment.replica] == assignment.start

    def _add_answers(self, assignment: Assignment, count: int) -> None:
        if self._counts_here(assignment):
            self._num_answers[assignment.replica] += count
            self._count_load(assignment.replica)

    def load(self, replica: int) -> int:
        """What a replica has to do, in prompt tokens."""
        return self._loads[replica]

    def num_answers(self, replica: int) -> int:
        """Answers that it has not completed."""
        return self._num_answers[replica]

    def expected(self, replica: int) -> set[int]:
        """Blocks that it is computing."""
        return set(self._expected[replica])

    def has_room(self, replica: int, num_answers: int) -> bool:
        """Whether so many more answers could run there at once."""
        return self.num_answers(replica) + num_answers <= self._max_num_seqs[replica]

    def num_cached_blocks(self, replica: int) -> int:
        return self._table.count(self._members[replica])

    def _count(self, assignment: Assignment, names: Names) -> None:
        replica = assignment.replica
        self._waiting_tokens[replica] += assignment.waiting_tokens
        self._num_answers[replica] += assignment.num_answers
        expected = self._expected[replica]
        expecting = self._expecting
        bit = 1 << self._members[replica]
        if expecting.keys().isdisjoint(assignment.expected):  # nobody computes the same, as mostly
            expected.update(dict.fromkeys(assignment.expected, 1))
            expecting.update(dict.fromkeys(assignment.expected, bit))
        else:
            for name in assignment.expected:
                expected[name] = expected.get(name, 0) + 1
                expecting[name] = expecting.get(name, 0) | bit
        self._count_blocks(replica)
        self._count_load(replica)
        if len(names):
            last = int(names[-1])
            self._homes.pop(last, None)
            self._homes[last] = replica
            if len(self._homes) > _MOST_HOMES:
                del self._homes[next(iter(self._homes))]

    def _home(self, names: Names) -> int | None:
        """Where the longest beginning of a prompt that was a prompt itself has been sent."""
        homes = self._homes
        recent = names[: -_LOOK_BACK - 1 : -1].tolist()
        known = next(filter(homes.__contains__, recent), None)
        return None if known is None else homes[known]
