"""Draft tokens from the text itself: the tokens that followed when the last tokens occurred
before.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

_SIZE = 3
"""An earlier occurrence is found by this many tokens in a row."""
_SCANNED = 4096
"""The last tokens, up to this many, are not indexed but searched byte by byte, which takes less
time.
"""
_MAX_PLACES = 6
"""Only this many earlier occurrences, the latest ones, are compared."""
_LONGEST = 24
"""Repetitions are compared up to this length."""
_RESUMES = 6
"""After a repetition of more tokens than this, one token that differs does not end it: a copy with
small changes.
"""
_LOST = 32
"""A shorter one goes on only if, within this many tokens, three match again. From then on one is
enough.
"""
_as_bytes = struct.Struct(f"={_SIZE}I").pack


class NgramIndex:
    """Finds where three tokens in a row occurred in a growing sequence, the latest place first.
    Tokens are indexed only when there is a search, which takes a few microseconds however long the
    sequence is.
    """

    __slots__ = ("_before", "_end", "_latest", "_length", "_place", "_recent", "_resumes", "_run")

    def __init__(self, length: int = 0) -> None:
        """With a `length`, only the first `length` tokens are searched, and their repetition is
        expected first.
        """
        self._end = length or sys.maxsize
        self._latest: dict[tuple[int, ...], int] = {}
        """By three tokens: the position of the last one, at their latest indexed occurrence."""
        self._before = [-1] * (_SIZE - 1)
        """For every indexed position: where the same three tokens ended before; -1: nowhere."""
        self._recent = bytearray()
        """The tokens after the indexed ones (and two before them), four bytes each, up to the last
        search.
        """
        self._place, self._length, self._run, self._resumes = (
            0 if length else -1,
            length,
            0,
            _RESUMES,
        )
        """The position after the repetition found last (the next draft token), the sequence's
        length then, the length of that repetition, and how long one must be to go on after a
        change.
        """

    def follow(self, token_ids: Sequence[int]) -> int:
        """The position of the next draft token, if the tokens since the last one are those expected
        there; else -1.
        """
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
        """Indexes up to `most` tokens, if more than _SCANNED are not indexed; whether a search can
        be made now.
        """
        begin, last = len(self._before), min(len(token_ids) - 1, self._end)
        if last - begin <= _SCANNED:
            return True
        end = min(last, begin + most)
        latest, append = self._latest, self._before.append
        in_a_row = zip(
            token_ids[begin - 2 : end],
            token_ids[begin - 1 : end],
            token_ids[begin:end],
            strict=False,
        )
        for position, key in enumerate(in_a_row, begin):
            append(latest.get(key, -1))
            latest[key] = position
        self._recent.clear()
        return last - end <= _SCANNED

    def find(self, token_ids: Sequence[int]) -> int:
        """The position after the longest earlier occurrence of the sequence's last tokens, the
        latest of equally long ones; -1 if there is none.
        """
        last = len(token_ids) - 1
        best, longest, tail = -1, _SIZE - 1, None
        for place in islice(self._places(token_ids), _MAX_PLACES):
            # Better than the best so far only if one token more matches.
            if tail is None or (
                place >= longest and token_ids[place - longest : place + 1] == tail
            ):
                length = longest + 1
                while (
                    length < _LONGEST
                    and length <= place
                    and token_ids[place - length] == token_ids[last - length]
                ):
                    length += 1
                best, longest = place + 1, length
                if length == _LONGEST:
                    break
                tail = token_ids[last - longest :]
        if best >= 0:
            self._place, self._length, self._run, self._resumes = best, last + 1, longest, _RESUMES
        return best

    def _places(self, token_ids: Sequence[int]) -> Iterator[int]:
        """The positions where the sequence's last three tokens ended before, the latest first."""
        recent, indexed, tokens = self._recent, len(self._before), token_ids[-_SIZE:]
        if len(tokens) < _SIZE:
            return
        first = indexed - _SIZE + 1
        recent += array(
            "I", token_ids[first + len(recent) // 4 : min(len(token_ids) - 1, self._end)]
        )
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
    """The `count` tokens from `begin` on; at the sequence's end they start over at `begin`, as in a
    loop.
    """
    found = token_ids[begin : begin + count]
    if len(found) < count:
        found = (list(found) * (1 + count // len(found)))[:count]
    return found
