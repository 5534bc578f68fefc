"""When a first token is to be expected, by what was seen of late: so that a request that would come
too late is refused at once, not after it has waited.

What a request waits for are the prompt tokens before it (its own included) and, where all rows are
taken, answers that have to end first. Two rates, of the last few dozen first tokens, say how long
that takes. Queues of a length that was never seen are not guessed at: at most twice the longest.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_MEMORY = 64


class Ahead(NamedTuple):
    """What a request has before it."""

    num_tokens: int
    """Of prompts, its own included."""
    num_answers: int
    """Beyond those that can run."""


class FirstTokens:
    """Learns from first tokens."""

    def __init__(self) -> None:
        self._seen: deque[tuple[Ahead, float]] = deque(maxlen=_MEMORY)
        self._per_token = self._per_answer = 0.0

    def observe(self, ahead: Ahead, seconds: float) -> None:
        """A first token came after so many seconds."""
        self._seen.append((ahead, seconds))
        free = [(one, taken) for one, taken in self._seen if not one.num_answers]
        self._per_token = _slope([(one.num_tokens, taken) for one, taken in free])
        self._per_answer = _slope(
            [
                (one.num_answers, max(0.0, taken - self._per_token * one.num_tokens))
                for one, taken in self._seen
                if one.num_answers
            ]
        )

    def expected(self, ahead: Ahead) -> float:
        """Seconds until the first token of a request that has this before it."""
        if not self._seen:
            return 0.0
        tokens, answers = (2 * max(one[part] for one, _ in self._seen) for part in range(2))
        return self._per_token * min(ahead.num_tokens, tokens) + self._per_answer * min(
            ahead.num_answers, answers
        )


def _slope(points: list[tuple[int, float]]) -> float:
    """Of a line from zero, by least squares: long waits count most, in which what every request
    takes anyway is little.
    """
    squares = sum(count * count for count, _ in points)
    return sum(count * seconds for count, seconds in points) / squares if squares else 0.0
