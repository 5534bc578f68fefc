"""Who is let in: a bounded queue, in answers and in prompt tokens, and nobody whose first token
would come too late. Who is not is told when to come again.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from quire.server.errors import ApiError
from quire.server.guard.counts import ANSWERS, TOKENS, Counts
from quire.server.guard.first_tokens import Ahead, FirstTokens
from quire.server.guard.quotas import QuotaTicket

_MEMORY = 32
"""Answers whose end is remembered to guess how soon there will be room."""
_LONGEST_WAIT = 60.0


class Ticket:
    """A place for one request; given back exactly once, however often `release` is called."""

    def __init__(
        self, admission: Admission, owner: str, num_answers: int, quota: QuotaTicket | None
    ) -> None:
        self._admission = admission
        self._owner = owner
        self._num_answers = num_answers
        self._quota = quota
        self._num_tokens = 0
        self._ahead: Ahead | None = None
        self._since = 0.0
        self._is_open = True

    def add_tokens(self, num_tokens: int, first_token_seconds: float | None = None) -> None:
        """The prompts are known: they wait from now on. Raises if there is no room for them, or if
        the first token is not to be expected within so many seconds.
        """
        self._admission.add_tokens(self._owner, num_tokens)
        self._num_tokens += num_tokens
        self._ahead = self._admission.ahead(self._owner)
        self._since = self._admission.check_first_token(self._ahead, first_token_seconds)
        if self._quota is not None:
            self._quota.add_tokens(num_tokens)

    def begun(self, num_tokens: int) -> None:
        """So many of its prompt tokens wait no longer."""
        num_tokens = min(num_tokens, self._num_tokens)
        self._num_tokens -= num_tokens
        self._admission.begun(self._owner, num_tokens)

    def answered(self) -> None:
        """Its first token has come."""
        if self._ahead is not None:
            self._admission.saw_first_token(self._ahead, self._since)
            self._ahead = None

    def release(self, completion_tokens: int = 0) -> None:
        """It is over, with so many tokens in its answers."""
        if self._is_open:
            self._is_open = False
            self.begun(self._num_tokens)
            self._admission.leave(self._owner, self._num_answers)
            if self._quota is not None:
                self._quota.add_tokens(completion_tokens)
                self._quota.release()


class Admission:
    """Counts answers (those being prepared included) and the prompt tokens that wait."""

    def __init__(
        self,
        max_running: int,
        max_queued_requests: int,
        max_queued_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        counts: Counts | None = None,
        is_fair: bool = False,
    ) -> None:
        """`counts`: those of all processes that share these limits. `is_fair`: a request waits for
        its own key's, whatever others have sent.
        """
        self._most_answers = max_running + max_queued_requests
        self._max_running = max_running
        self._most_tokens = max_queued_tokens
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_MEMORY)
        self._counts = counts or Counts()
        self._is_fair = is_fair
        self._own_answers: Counter[str] = Counter()
        self._own_tokens: Counter[str] = Counter()
        """By key, in this process, if that matters."""
        self._first_tokens = FirstTokens()

    def enter(self, num_answers: int, owner: str = "", quota: QuotaTicket | None = None) -> Ticket:
        """Raises ApiError 429 if the queue is full. An empty server takes any request."""
        before = self._counts.add(ANSWERS, num_answers) - num_answers
        if before > 0 and before + num_answers > self._most_answers:
            self._counts.add(ANSWERS, -num_answers)
            raise self._full(
                f"{before} answers are running or waiting (at most {self._most_answers})"
            )
        if self._is_fair:
            self._own_answers[owner] += num_answers
        return Ticket(self, owner, num_answers, quota)

    def add_tokens(self, owner: str, num_tokens: int) -> None:
        before = self._counts.add(TOKENS, num_tokens) - num_tokens
        if before > 0 and before + num_tokens > self._most_tokens:
            self._counts.add(TOKENS, -num_tokens)
            raise self._full(f"{before} prompt tokens are waiting (at most {self._most_tokens})")
        if self._is_fair:
            self._own_tokens[owner] += num_tokens

    def ahead(self, owner: str) -> Ahead:
        """What whoever came last waits for."""
        if self._is_fair:
            return Ahead(self._own_tokens[owner], self._own_answers[owner] - 1)
        return Ahead(self.num_tokens, max(0, self.num_answers - self._max_running))

    def check_first_token(self, ahead: Ahead, most_seconds: float | None) -> float:
        """Raises ApiError 429 if a first token would come later than that. Returns the time. A
        server with nothing else to do takes any request.
        """
        if most_seconds is not None and self.num_answers > 1:
            expected = self._first_tokens.expected(ahead)
            if expected > most_seconds:
                message = (
                    f"the first token would come after {expected:.1f} s, and {most_seconds:g} s are "
                    "allowed; try again later"
                )
                raise ApiError(429, message, code="too_late", retry_after=expected - most_seconds)
        return self._clock()

    def saw_first_token(self, ahead: Ahead, since: float) -> None:
        self._first_tokens.observe(ahead, self._clock() - since)

    def begun(self, owner: str, num_tokens: int) -> None:
        """So many tokens wait no longer."""
        self._counts.add(TOKENS, -num_tokens)
        if self._is_fair:
            _take(self._own_tokens, owner, num_tokens)

    def leave(self, owner: str, num_answers: int) -> None:
        self._counts.add(ANSWERS, -num_answers)
        if self._is_fair:
            _take(self._own_answers, owner, num_answers)
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


def _take(counts: Counter[str], owner: str, amount: int) -> None:
    counts[owner] -= amount
    if not counts[owner]:
        del counts[owner]
