"""Guesses from the text itself: what followed the last time the same tokens stood there."""

from __future__ import annotations

from collections.abc import Sequence

_SIZE = 3
"""A place is found by so many tokens in a row."""
_BITS = 21
"""Of a token id; larger ones only make more places look alike, and every place is compared."""
_MASK = (1 << _SIZE * _BITS) - 1
_MAX_PLACES = 6
"""So many of the latest places are compared."""
_LONGEST = 24
"""A repetition as long as this is as good as any longer one."""


class NgramIndex:
    """Where in a growing sequence each three tokens in a row occurred: the latest place, and from there the ones before
    it. A token costs a fraction of a microsecond and some hundred bytes, a search a few microseconds, however long the
    sequence is."""

    __slots__ = ("_before", "_key", "_latest")

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        """By tokens: where the last of them stands."""
        self._before: list[int] = []
        """For every indexed token, where the one before with the same tokens up to it stands; -1: nowhere."""
        self._key = 0

    def extend(self, token_ids: Sequence[int], most: int) -> bool:
        """Takes in at most so many further tokens, all but the last one; whether these are all."""
        begin = len(self._before)
        end = min(len(token_ids) - 1, begin + most)
        key, latest, append = self._key, self._latest, self._before.append
        for position in range(begin, end):
            key = (key << _BITS | token_ids[position]) & _MASK
            append(latest.get(key, -1))
            latest[key] = position
        self._key = key
        return end >= len(token_ids) - 1

    def find(self, token_ids: Sequence[int]) -> int:
        """Behind the place where the sequence's last tokens occurred before, with as many as possible of those before
        them, the latest if there are several. -1 if there is none."""
        last = len(token_ids) - 1
        place = self._latest.get((self._key << _BITS | token_ids[last]) & _MASK, -1)
        best, longest = -1, _SIZE - 1
        for _ in range(_MAX_PLACES):
            if place < longest:
                break
            length = 0
            while length < _LONGEST and length <= place and token_ids[place - length] == token_ids[last - length]:
                length += 1
            if length > longest:
                best, longest = place + 1, length
                if length == _LONGEST:
                    break
            place = self._before[place]
        return best


def continuation(token_ids: Sequence[int], begin: int, count: int) -> Sequence[int]:
    """What follows from a place on; at the sequence's end it goes on from that place, as in a text that repeats."""
    found = token_ids[begin : begin + count]
    if len(found) < count:
        found = (list(found) * (1 + count // len(found)))[:count]
    return found
