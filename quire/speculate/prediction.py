"""Guesses from the client's own idea of the answer (`prediction`)."""

from __future__ import annotations

from collections.abc import Sequence

_RESUMES = 3
"""After so many tokens in a row that are in the prediction, too, the answer is back on it."""


class PredictedAnswer:
    """A prediction, and how far the answer has followed it."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._next = 0
        """What of it the answer comes to next; -1 where the answer says something else."""
        self._num_read = 0
        self._places: dict[tuple[int, ...], list[int]] = {}

    def guess(self, answer: Sequence[int], count: int) -> Sequence[int]:
        """So many tokens of the prediction, or those that are left, if the answer follows it. `answer` is what has come
        so far; it only grows."""
        predicted = self._token_ids
        for position in range(self._num_read, len(answer)):
            if 0 <= self._next < len(predicted) and predicted[self._next] == answer[position]:
                self._next += 1
            else:
                self._next = self._find(tuple(answer[max(0, position + 1 - _RESUMES) : position + 1]))
        self._num_read = len(answer)
        return predicted[self._next : self._next + count] if self._next >= 0 else ()

    def _find(self, tokens: tuple[int, ...]) -> int:
        """Behind the first place where these tokens stand in the prediction."""
        if not self._places:
            for end in range(_RESUMES, len(self._token_ids)):
                self._places.setdefault(self._token_ids[end - _RESUMES : end], []).append(end)
        found = self._places.get(tokens, ())
        ahead = [place for place in found if place > self._num_read - _RESUMES]
        return ahead[0] if ahead else (found[0] if found else -1)
