"""Who is let in: a bounded queue, in answers and in prompt tokens. Who is not is told when to come
again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from quire.server.errors import ApiError
from quire.server.guard.counts import ANSWERS, TOKENS, Counts

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
        self._admission.begun(num_tokens)

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
        counts: Counts | None = None,
    ) -> None:
        """`counts`: those of all processes that share these limits."""
        self._most_answers = max_running + max_queued_requests
        self._max_running = max_running
        self._most_tokens = max_queued_tokens
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_MEMORY)
        self._counts = counts or Counts()

    def enter(self, num_answers: int) -> Ticket:
        """Raises ApiError 429 if the queue is full. An empty server takes any request."""
        before = self._counts.add(ANSWERS, num_answers) - num_answers
        if before > 0 and before + num_answers > self._most_answers:
            self._counts.add(ANSWERS, -num_answers)
            raise self._full(
                f"{before} answers are running or waiting (at most {self._most_answers})"
            )
        return Ticket(self, num_answers)

    def add_tokens(self, num_tokens: int) -> None:
        before = self._counts.add(TOKENS, num_tokens) - num_tokens
        if before > 0 and before + num_tokens > self._most_tokens:
            self._counts.add(TOKENS, -num_tokens)
            raise self._full(f"{before} prompt tokens are waiting (at most {self._most_tokens})")

    def begun(self, num_tokens: int) -> None:
        """So many tokens wait no longer."""
        self._counts.add(TOKENS, -num_tokens)

    def leave(self, num_answers: int) -> None:
        self._counts.add(ANSWERS, -num_answers)
        self._ends.append(self._clock())

    @property
    def num_answers(self) -> int:
        """Over all processes."""
        return self._counts.total(ANSWERS)

    @property
    def num_tokens(self) -> int:
        return self._counts.total(TOKENS)

    def _full(self, why: str) -> ApiError:
        message = f"the server is busy: {why}; try again later"
        return ApiError(429, message, code="queue_full", retry_after=self._guess_wait())

    def _guess_wait(self) -> float:
        """How long it takes, at the pace of late, until the queue is half empty."""
        if len(self._ends) < 2:
            return 1.0
        # Those who ended here; others who serve the same queue are as fast.
        pace = (
            self._counts.num_workers
            * (len(self._ends) - 1)
            / max(1e-3, self._clock() - self._ends[0])
        )
        waiting = max(1, self.num_answers - self._max_running)
        return min(_LONGEST_WAIT, max(1.0, waiting / 2 / pace))
