"""Draft tokens from the answer that the client expects (`prediction`)."""

from __future__ import annotations

from collections.abc import Sequence

from quire.speculate.ngram import NgramIndex


class PredictedAnswer:
    """The predicted answer with the real answer appended: a text that repeats its own beginning, so
    that an `NgramIndex` finds how far the answer follows the prediction, and where it returns to
    it.
    """

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._size = len(token_ids)
        self._token_ids = list(token_ids)
        """The prediction and the answer so far."""
        self._index = NgramIndex(self._size)

    def propose(self, answer: Sequence[int], count: int) -> Sequence[int]:
        """The next `count` tokens of the prediction, or those left, if `answer`, all of it so far,
        follows it.
        """
        tokens = self._token_ids
        tokens += answer[len(tokens) - self._size :]
        place = self._index.follow(tokens)
        if place < 0 and self._index.extend(tokens, self._size):
            place = self._index.find(tokens)
        return tuple(tokens[place : min(place + count, self._size)]) if place >= 0 else ()
