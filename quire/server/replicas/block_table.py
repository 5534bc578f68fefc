"""Which replicas have which blocks cached: compact, and quick for the hundreds of blocks that a long prompt has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.observe.block_names import Names

MOST_REPLICAS = 64
"""That one table can have."""
_WIDTH = 8
"""Slots of a bucket."""
_FULL, _FULLEST = 0.5, 0.7
"""The part of the slots that is taken when all expected blocks are there; beyond the second, a table grows."""
_FEW = 48
"""Up to so many names are quicker done one by one than by numpy."""

_Places = npt.NDArray[np.intp]
_Bits = npt.NDArray[np.unsignedinteger[Any]]


class BlockTable:
    """A hash table in which a name stands in its slot, or in another one of the same bucket, beside a bit for each
    replica that has the block. What a bucket has no room for is in a dict: few, while there is the room that was
    reserved. So many names at once take a few calls of numpy, and what is removed leaves nothing behind."""

    def __init__(self, num_replicas: int) -> None:
        bits = next(bits for bits in (8, 16, 32, MOST_REPLICAS) if num_replicas <= bits)
        self._kind = np.dtype(f"u{bits // 8}").type
        self._counts = [0] * num_replicas
        self._make(8)

    def _make(self, num_buckets: int) -> None:
        self._num_slots = num_buckets * _WIDTH
        self._names = np.zeros(self._num_slots, np.uint64)
        """0 in a slot that is free."""
        self._buckets = self._names.reshape(num_buckets, _WIDTH)
        self._bits: _Bits = np.zeros(self._num_slots, self._kind)
        # The same memory, for reading one by one.
        self._name_view, self._bit_view = self._names.data, self._bits.data
        self._beside: dict[int, int] = {}
        """The bits of names for which there was no slot."""
        self._are_crowded = np.zeros(num_buckets, np.bool_)
        """Buckets of which there is, or was, a name beside."""
        self._size = 0

    def count(self, replica: int) -> int:
        """How many blocks a replica has."""
        return self._counts[replica]

    def reserve(self, num_blocks: int) -> None:
        """Makes room for so many blocks in all."""
        if num_blocks > _FULL * self._num_slots:
            self._resize(num_blocks)

    def add(self, replica: int, names: Names) -> None:
        """A replica has these blocks; no name may be there twice."""
        if self._size + len(names) > _FULLEST * self._num_slots:
            self._resize(2 * (self._size + len(names)))
        if len(names) > _FEW:
            self._add_many(replica, np.maximum(names, 1))
        else:
            for name in names.tolist():
                self._add_one(replica, name or 1)

    def discard(self, replica: int, names: Names) -> None:
        """A replica has these blocks no more."""
        if len(names) > _FEW:
            self._discard_many(replica, np.maximum(names, 1))
        else:
            for name in names.tolist():
                self._discard_one(replica, name or 1)

    def clear(self, replica: int) -> None:
        """A replica has nothing any more."""
        self.discard(replica, self._names[(self._bits & self._kind(1 << replica)) != 0])
        for name in list(self._beside):
            self._discard_one(replica, name)

    def leading(self, names: Names, replicas: Sequence[int]) -> dict[int, int]:
        """How many of these blocks each of the replicas has, from the first on. Where a block is, those before it are,
        too (`quire.observe.cache_events`): it is enough to halve the distance again and again."""
        found: dict[int, int] = {}

        def search(low: int, high: int, wanted: int) -> None:
            """All of the wanted have the first `low`, and at most the first `high`."""
            middle = low if not low else high - 1  # most prompts are new, or known as far as anybody else knows them
            while low < high:
                have = wanted & self._held(int(names[middle]) or 1)
                if have == wanted:
                    low = middle + 1
                else:
                    if have:
                        search(middle + 1, high, have)
                    wanted ^= have
                    high = middle
                middle = (low + high) // 2
            while wanted:
                found[(wanted & -wanted).bit_length() - 1] = low
                wanted &= wanted - 1

        search(0, len(names), sum([1 << replica for replica in replicas]))
        return found

    def in_row(self, names: Names, replicas: Sequence[int], first_needed: _Places) -> dict[int, int]:
        """How many of these blocks each of the replicas need not compute, if it is enough to have those from
        `first_needed` of the last of them on, to that."""
        bits, numbers = self._held_many(np.maximum(names, 1)), np.arange(len(names))
        anybody = int(np.bitwise_or.reduce(bits))
        found = dict.fromkeys(replicas, 0)
        for replica in replicas:
            if not anybody >> replica & 1:
                continue
            last_missing = np.maximum.accumulate(np.where(bits >> self._kind(replica) & self._kind(1), -1, numbers))
            ends = np.flatnonzero(last_missing < first_needed)
            found[replica] = int(ends[-1]) + 1 if len(ends) else 0
        return found

    # One by one

    def _place(self, name: int) -> int | None:
        """The slot that a name stands in."""
        slot = (name >> 32) * self._num_slots >> 32
        if self._name_view[slot] == name:
            return slot
        first = slot - slot % _WIDTH
        bucket = self._name_view[first : first + _WIDTH].tolist()
        return first + bucket.index(name) if name in bucket else None

    def _free_place(self, name: int) -> int | None:
        """A slot that it could stand in."""
        slot = (name >> 32) * self._num_slots >> 32
        if not self._name_view[slot]:
            return slot
        first = slot - slot % _WIDTH
        bucket = self._name_view[first : first + _WIDTH].tolist()
        return first + bucket.index(0) if 0 in bucket else None

    def _held(self, name: int) -> int:
        place = self._place(name)
        return self._beside.get(name, 0) if place is None else self._bit_view[place]

    def _add_one(self, replica: int, name: int) -> None:
        place = self._place(name)
        bits = self._beside.get(name, 0) if place is None else self._bit_view[place]
        if bits >> replica & 1:
            return
        self._counts[replica] += 1
        if not bits:
            self._size += 1
            place = self._free_place(name)
            if place is None:
                self._are_crowded[((name >> 32) * self._num_slots >> 32) // _WIDTH] = True
            else:
                self._name_view[place] = name
        self._set(name, place, bits | 1 << replica)

    def _discard_one(self, replica: int, name: int) -> None:
        place = self._place(name)
        bits = self._beside.get(name, 0) if place is None else self._bit_view[place]
        if bits >> replica & 1:
            self._counts[replica] -= 1
            self._set(name, place, bits ^ 1 << replica)

    def _set(self, name: int, place: int | None, bits: int) -> None:
        """Who has a block that is in the table."""
        self._size -= not bits
        if place is not None:
            self._bit_view[place] = bits
            if not bits:
                self._name_view[place] = 0
        elif bits:
            self._beside[name] = bits
        else:
            del self._beside[name]

    # Many at once

    def _slots(self, names: Names) -> _Places:
        # By the upper half of a name: the sums that names are mix their upper bits best.
        return ((names >> np.uint64(32)) * np.uint64(self._num_slots) >> np.uint64(32)).astype(np.intp)

    def _places(self, names: Names) -> tuple[_Places, _Places]:
        """The slots that names stand in, and which of them (by number) stand in none."""
        places = self._slots(names)
        others = np.flatnonzero(self._names[places] != names)
        numbers = places[others] // _WIDTH
        are_equal = self._buckets[numbers] == names[others, None]
        columns = are_equal.argmax(axis=1)
        places[others] = numbers * _WIDTH + columns
        return places, others[~are_equal[np.arange(len(others)), columns]]

    def _held_many(self, names: Names) -> _Bits:
        places, absent = self._places(names)
        bits = self._bits[places]
        bits[absent] = 0
        for number in self._beside_of(names, absent).tolist():
            bits[number] = self._beside[int(names[number])]
        return bits

    def _beside_of(self, names: Names, absent: _Places) -> _Places:
        """Those of the absent that are beside the table."""
        maybe = absent[self._are_crowded[self._slots(names[absent]) // _WIDTH]]
        return maybe[[name in self._beside for name in names[maybe].tolist()]] if len(maybe) else maybe

    def _add_many(self, replica: int, names: Names) -> None:
        bit = self._kind(1 << replica)
        places, absent = self._places(names)
        known = np.delete(places, absent)
        before = self._bits[known]
        self._counts[replica] += int(np.count_nonzero(before & bit == 0))
        self._bits[known] = before | bit
        beside = self._beside_of(names, absent)
        for name in names[beside].tolist():
            self._add_one(replica, name)
        new = names[np.setdiff1d(absent, beside, assume_unique=True)] if len(beside) else names[absent]
        self._counts[replica] += len(new)
        self._size += len(new)
        self._insert(new, np.full(len(new), bit))

    def _insert(self, names: Names, bits: _Bits) -> None:
        """Finds slots for names that have none."""
        while len(names):
            slots = self._slots(names)
            numbers = slots // _WIDTH
            are_free = self._buckets[numbers] == 0
            columns = are_free.argmax(axis=1)
            places = np.where(self._names[slots] == 0, slots, numbers * _WIDTH + columns)
            have_room = self._names[places] == 0
            if not have_room.all():
                crowded = ~have_room
                self._are_crowded[numbers[crowded]] = True
                self._beside.update(zip(names[crowded].tolist(), bits[crowded].tolist(), strict=True))
                names, bits, places = names[have_room], bits[have_room], places[have_room]
            self._names[places] = names  # of those that want the same slot, one gets it
            have_it = self._names[places] == names
            self._bits[places[have_it]] = bits[have_it]
            names, bits = names[~have_it], bits[~have_it]

    def _discard_many(self, replica: int, names: Names) -> None:
        bit = self._kind(1 << replica)
        places, absent = self._places(names)
        known = np.delete(places, absent)
        had = known[(self._bits[known] & bit) != 0]
        after = self._bits[had] ^ bit
        self._bits[had] = after
        gone = had[after == 0]
        self._names[gone] = 0
        self._counts[replica] -= len(had)
        self._size -= len(gone)
        for name in names[self._beside_of(names, absent)].tolist():
            self._discard_one(replica, name)

    def _resize(self, num_blocks: int) -> None:
        are_taken = self._names != 0
        names, bits, beside, size = self._names[are_taken], self._bits[are_taken], self._beside, self._size
        self._make(int(num_blocks / _FULL / _WIDTH) + 1)
        self._size = size
        self._insert(names, bits)
        self._insert(np.array(list(beside), np.uint64), np.array(list(beside.values()), self._kind))
