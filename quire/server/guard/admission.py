"""Who is let in: a bounded queue, in answers and in prompt tokens. Who is not is told when to come again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from quire.server.errors import ApiError

_MEMORY = 32
"""Answers whose end is remembered to guess how soon there will be room."""
_LONGEST_WAIT = 60.0


class Ticket:
    """A place for one request; given back exactly once, however often `release` is called."""

    def __init__(self, admission: Admission, num_answers: int) -> None:
        self._admission = admission
        self._num_answers = num_answers
        self._num_tokens = 0
        self._is_open = True

    def add_tokens(self, num_tokens: int) -> None:
        """The prompts are known: they wait from now on. Raises if there is no room for them."""
        self._admission.add_tokens(num_tokens)
        self._num_tokens += num_tokens

    def begun(self, num_tokens: int) -> None:
        """So many of its prompt tokens wait no longer."""
        num_tokens = min(num_tokens, self._num_tokens)
        self._num_tokens -= num_tokens
        self._admission.num_tokens -= num_tokens

    def release(self) -> None:
        if self._is_open:
            self._is_open = False
            self.begun(self._num_tokens)
            self._admission.leave(self._num_answers)


class Admission:
    """Counts answers (those being prepared included) and the prompt tokens that wait."""

    def __init__(
        self,
        max_running: int,
        max_queued_requests: int,
        max_queued_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_answers = max_running + max_queued_requests
        self._max_running = max_running
        self._most_tokens = max_queued_tokens
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_MEMORY)
        self.num_answers = 0
        self.num_tokens = 0

    def enter(self, num_answers: int) -> Ticket:
        """Raises ApiError 429 if the queue is full. An empty server takes any request."""
        if self.num_answers and self.num_answers + num_answers > self._most_answers:
            raise self._full(f"{self.num_answers} answers are running or waiting (at most {self._most_answers})")
        self.num_answers += num_answers
        return Ticket(self, num_answers)

    def add_tokens(self, num_tokens: int) -> None:
        if self.num_tokens and self.num_tokens + num_tokens > self._most_tokens:
            raise self._full(f"{self.num_tokens} prompt tokens are waiting (at most {self._most_tokens})")
        self.num_tokens += num_tokens

    def leave(self, num_answers: int) -> None:
        self.num_answers -= num_answers
        self._ends.append(self._clock())

    def _full(self, why: str) -> ApiError:
        message = f"the server is busy: {why}; try again later"
        return ApiError(429, message, code="queue_full", retry_after=self._guess_wait())

    def _guess_wait(self) -> float:
        """How long it takes, at the pace of late, until the queue is half empty."""
        if len(self._ends) < 2:
            return 1.0
        pace = (len(self._ends) - 1) / max(1e-3, self._clock() - self._ends[0])
        waiting = max(1, self.num_answers - self._max_running)
        return min(_LONGEST_WAIT, max(1.0, waiting / 2 / pace))
