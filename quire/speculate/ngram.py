"""Guesses from the text itself: what followed the last time the same tokens stood there."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

_SIZE = 3
"""A place is found by so many tokens in a row."""
_SCANNED = 1024
"""So many tokens are searched as they are, which takes less time than to index them."""
_MAX_PLACES = 6
"""So many of the latest places are compared."""
_LONGEST = 24
"""A repetition as long as this is as good as any longer one."""
_RESUMES = 6
"""After so many tokens of a repetition it is expected to go on behind one that differs: a copy with changes."""
_LOST = 32
"""After fewer, only if it has gone on, no more than so many tokens later. From then on one is enough."""
_as_bytes = struct.Struct(f"={_SIZE}I").pack


class NgramIndex:
    """Where in a growing sequence each three tokens in a row occurred, the latest places first. Nothing is done for a
    token until somebody searches, and then little: a search takes a few microseconds, however long the sequence is."""

    __slots__ = ("_before", "_end", "_latest", "_length", "_place", "_recent", "_resumes", "_run")

    def __init__(self, length: int = 0) -> None:
        """With a `length`: places are looked for in so many tokens only, which are expected to come once more."""
        self._end = length or sys.maxsize
        self._latest: dict[tuple[int, ...], int] = {}
        """By tokens: where the last of them stands."""
        self._before = [-1] * (_SIZE - 1)
        """For every indexed token, where the one before with the same tokens up to it stands; -1: nowhere."""
        self._recent = bytearray()
        """The tokens after these, four bytes each, and two before them, as far as there was a search."""
        self._place, self._length, self._run, self._resumes = 0 if length else -1, length, 0, _RESUMES
        """The last place that was found, how long the sequence was then, how many tokens before were the same, and how
        many must be for it to go on behind a change."""

    def follow(self, token_ids: Sequence[int]) -> int:
        """Further behind the place that was found last, if what has come since is what stands there; else -1."""
        place, length, run = self._place, self._length, self._run
        num_new = len(token_ids) - length
        if place < 0 or num_new > _LOST:
            return -1
        end = place + num_new
        if token_ids[place:end] == token_ids[length:]:
            self._run = run + num_new
        elif run + num_new > self._resumes and token_ids[place : end - 1] == token_ids[length:-1]:
            self._run = 0
        elif num_new > _SIZE and token_ids[end - _SIZE : end] == token_ids[-_SIZE:]:
            self._run, self._resumes = _SIZE, 1
        else:
            return -1
        self._place, self._length = end, len(token_ids)
        return end

    def extend(self, token_ids: Sequence[int], most: int) -> bool:
        """Indexes at most so many tokens, if there are too many to be searched as they are; whether all is ready."""
        begin, last = len(self._before), min(len(token_ids) - 1, self._end)
        if last - begin <= _SCANNED:
            return True
        end = min(last, begin + most)
        latest, append = self._latest, self._before.append
        in_a_row = zip(token_ids[begin - 2 : end], token_ids[begin - 1 : end], token_ids[begin:end], strict=False)
        for position, key in enumerate(in_a_row, begin):
            append(latest.get(key, -1))
            latest[key] = position
        self._recent.clear()
        return last - end <= _SCANNED

    def find(self, token_ids: Sequence[int]) -> int:
        """Behind the place where the sequence's last tokens occurred before, with as many as possible of those before
        them, the latest if there are several. -1 if there is none."""
        last = len(token_ids) - 1
        best, longest = -1, _SIZE - 1
        tail = token_ids[last - longest :]
        for place in islice(self._places(token_ids), _MAX_PLACES):
            # Only a place where one token more is the same can be better than the best so far.
            if place >= longest and token_ids[place - longest : place + 1] == tail:
                length = longest + 1
                while length < _LONGEST and length <= place and token_ids[place - length] == token_ids[last - length]:
                    length += 1
                best, longest = place + 1, length
                if length == _LONGEST:
                    break
                tail = token_ids[last - longest :]
        if best >= 0:
            self._place, self._length, self._run, self._resumes = best, last + 1, longest, _RESUMES
        return best

    def _places(self, token_ids: Sequence[int]) -> Iterator[int]:
        """Where the last of the same three tokens stands as at the sequence's end, the latest first."""
        recent, indexed, tokens = self._recent, len(self._before), token_ids[-_SIZE:]
        if len(tokens) < _SIZE:
            return
        first = indexed - _SIZE + 1
        recent += array("I", token_ids[first + len(recent) // 4 : min(len(token_ids) - 1, self._end)])
        sought = _as_bytes(*tokens)
        found = recent.rfind(sought)
        while found >= 0:
            if not found % 4:
                yield indexed + found // 4
            found = recent.rfind(sought, 0, found + len(sought) - 1)
        place = self._latest.get(tuple(tokens), -1)
        while place >= 0:
            yield place
            place = self._before[place]


def continuation(token_ids: Sequence[int], begin: int, count: int) -> Sequence[int]:
    """What follows from a place on; at the sequence's end it goes on from that place, as in a text that repeats."""
    found = token_ids[begin : begin + count]
    if len(found) < count:
        found = (list(found) * (1 + count // len(found)))[:count]
    return found
