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
_RESUMES = 6
"""After so many tokens of a repetition it is expected to go on behind one that differs: a copy with changes."""


class NgramIndex:
    """Where in a growing sequence each three tokens in a row occurred: the latest place, and from there the ones before
    it. A token costs a fraction of a microsecond and some hundred bytes, a search a few microseconds, however long the
    sequence is."""

    __slots__ = ("_before", "_latest", "_length", "_place", "_run")

    def __init__(self, place: int = -1, length: int = 0) -> None:
        """A sequence of this `length` may be expected to go on as from this `place`."""
        self._latest: dict[int, int] = {}
        """By tokens: where the last of them stands."""
        self._before: list[int] = []
        """For every indexed token, where the one before with the same tokens up to it stands; -1: nowhere."""
        self._place, self._length, self._run = place, length, 0
        """The last place that was found, how long the sequence was then, and how many tokens before were the same."""

    def follow(self, token_ids: Sequence[int]) -> int:
        """Further behind the place that was found last, if what has come since is what stands there; else -1. That
        takes no search, and what has come need not be taken in: it would be found where it was copied from."""
        place, length, run = self._place, self._length, self._run
        end = place + len(token_ids) - length
        if place < 0:
            return -1
        if token_ids[place:end] == token_ids[length:]:
            self._run += end - place
        elif run + end - place > _RESUMES and token_ids[place : end - 1] == token_ids[length:-1]:
            self._run = 0
        else:
            return -1
        self._place, self._length = end, len(token_ids)
        if run >= _SIZE and len(self._before) == length - 1:
            self._before += [-1] * (end - place)
        return end

    def extend(self, token_ids: Sequence[int], most: int) -> bool:
        """Takes in at most so many further tokens, all but the last one; whether these are all."""
        begin, last = len(self._before), len(token_ids) - 1
        latest, append, key = self._latest, self._before.append, _key(token_ids[max(begin - _SIZE, 0) : begin])
        for position, token in enumerate(token_ids[begin : min(last, begin + most)], begin):
            key = (key << _BITS | token) & _MASK
            append(latest.get(key, -1))
            latest[key] = position
        return len(self._before) == last

    def find(self, token_ids: Sequence[int]) -> int:
        """Behind the place where the sequence's last tokens occurred before, with as many as possible of those before
        them, the latest if there are several. -1 if there is none."""
        last = len(token_ids) - 1
        place = self._latest.get(_key(token_ids[-_SIZE:]), -1)
        best, longest = -1, _SIZE - 1
        tail = token_ids[last - longest :]
        for _ in range(_MAX_PLACES):
            if place < longest:
                break
            # Only a place where one token more is the same can be better than the best so far.
            if token_ids[place - longest : place + 1] == tail:
                length = longest + 1
                while length < _LONGEST and length <= place and token_ids[place - length] == token_ids[last - length]:
                    length += 1
                best, longest = place + 1, length
                if length == _LONGEST:
                    break
                tail = token_ids[last - longest :]
            place = self._before[place]
        self._place, self._length, self._run = best, last + 1, longest
        return best


def _key(token_ids: Sequence[int]) -> int:
    key = 0
    for token in token_ids:
        key = (key << _BITS | token) & _MASK
    return key


def continuation(token_ids: Sequence[int], begin: int, count: int) -> Sequence[int]:
    """What follows from a place on; at the sequence's end it goes on from that place, as in a text that repeats."""
    found = token_ids[begin : begin + count]
    if len(found) < count:
        found = (list(found) * (1 + count // len(found)))[:count]
    return found
