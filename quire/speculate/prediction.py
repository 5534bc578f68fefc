"""Guesses from the client's own idea of the answer (`prediction`)."""

from __future__ import annotations

from collections.abc import Sequence

from quire.speculate.ngram import NgramIndex


class PredictedAnswer:
    """A prediction, and how far the answer has followed it: a text that the answer, behind it, repeats from its
    beginning, and wherever it comes back to it."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._size = len(token_ids)
        self._token_ids = list(token_ids)
        """With the answer behind it."""
        self._index = NgramIndex(self._size)

    def guess(self, answer: Sequence[int], count: int) -> Sequence[int]:
        """So many tokens of the prediction, or those that are left, if the answer follows it. `answer` is what has come
        so far; it only grows."""
        tokens = self._token_ids
        tokens += answer[len(tokens) - self._size :]
        place = self._index.follow(tokens)
        if place < 0 and self._index.extend(tokens, self._size):
            place = self._index.find(tokens)
        return tuple(tokens[place : min(place + count, self._size)]) if place >= 0 else ()
