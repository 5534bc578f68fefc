"""Bounds of single keys: requests and tokens in any 60 seconds, and requests at a time.

What a key has used stands in a table that all HTTP processes share (`Counts`): each writes its own
row, a slot for each of the last 60 seconds, and reads the sums. Clients learn how much is left from
the headers that OpenAI's clients know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.guard.auth import owner_name
from quire.server.guard.counts import Counts
from quire.server.guard.key_limits import KeyLimits

_SECONDS = 60
_SLOT = 3
"""Columns of a second: which one it is, requests, tokens."""
_COLUMNS = 1 + _SLOT * _SECONDS
"""Of a key: requests that run or wait, then the seconds."""
_REQUESTS, _TOKENS = 1, 2


def limits_by_owner(config: ServerConfig) -> dict[str, KeyLimits]:
    return {owner_name(key.encode()): one for key, one in config.key_limits.items()}


def tenant_weights(config: ServerConfig) -> dict[str, str]:
    """Keys' shares, as an option of the engine."""
    weights = {owner: one.weight for owner, one in limits_by_owner(config).items()}
    named = ",".join(f"{owner}={weight:g}" for owner, weight in weights.items() if weight != 1)
    return {"tenant_weights": named} if named else {}


class Quotas:
    """What keys with bounds have used, and whether they may go on."""

    def __init__(
        self,
        limits: Mapping[str, KeyLimits],
        path: Path | None = None,
        row: int = 0,
        num_rows: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limits`: by the owner's name, in the same order in every process. `clock`: the same one
        for all of them.
        """
        self._limits = {owner: one for owner, one in limits.items() if one.has_bounds}
        self._first = {owner: _COLUMNS * place for place, owner in enumerate(self._limits)}
        self._counts = Counts(path, row, num_rows, _COLUMNS * len(self._limits))
        self._clock = clock

    def clear(self, row: int) -> None:
        """A process is gone, and its requests with it."""
        self._counts.clear(row)

    def enter(self, owner: str) -> QuotaTicket | None:
        """One more request, if it may be; raises ApiError 429. None: nothing is counted for it."""
        limits = self._limits.get(owner)
        if limits is None:
            return None
        first = self._first[owner]
        num_running = self._counts.add(first, 1)
        self._use(first, _REQUESTS, 1)
        try:
            if limits.max_requests is not None and num_running > limits.max_requests:
                raise self._refusal(
                    owner, f"{limits.max_requests} requests of this key are running or waiting", 1.0
                )
            for column, most, what in (
                (_REQUESTS, limits.requests_per_minute, "requests"),
                (_TOKENS, limits.tokens_per_minute, "tokens"),
            ):
                used = self._used(first, column)
                # Of tokens, one that is left admits a request of any length: a key whose bound is
                # less than a prompt could never use it.
                if most is not None and sum(used) > most - (column == _TOKENS):
                    wait = _until_below(used, most)
                    raise self._refusal(owner, f"this key may use {most} {what} a minute", wait)
        except ApiError:
            self._counts.add(first, -1)
            self._use(first, _REQUESTS, -1)
            raise
        return QuotaTicket(self, owner)

    def add_tokens(self, owner: str, num_tokens: int) -> None:
        self._use(self._first[owner], _TOKENS, num_tokens)

    def leave(self, owner: str) -> None:
        self._counts.add(self._first[owner], -1)

    def headers(self, owner: str) -> dict[str, str]:
        """How much is allowed and left, as OpenAI's clients read it."""
        limits = self._limits.get(owner)
        if limits is None:
            return {}
        found: dict[str, str] = {}
        for column, most, what in (
            (_REQUESTS, limits.requests_per_minute, "requests"),
            (_TOKENS, limits.tokens_per_minute, "tokens"),
        ):
            if most is not None:
                used = self._used(self._first[owner], column)
                found |= {
                    f"x-ratelimit-limit-{what}": str(most),
                    f"x-ratelimit-remaining-{what}": str(max(0, most - sum(used))),
                    f"x-ratelimit-reset-{what}": f"{_until_below(used, 1)}s",
                }
        return found

    def _use(self, first: int, column: int, amount: int) -> None:
        """Adds to this process's slot of this second."""
        second = int(self._clock())
        slot = first + 1 + _SLOT * (second % _SECONDS)
        if self._counts.own(slot) != second:  # of a minute ago
            for place, value in ((_REQUESTS, 0), (_TOKENS, 0), (0, second)):
                self._counts.set(slot + place, value)
        self._counts.add(slot + column, amount)

    def _used(self, first: int, column: int) -> list[int]:
        """In each of the last seconds, over all processes, the oldest first."""
        now = int(self._clock())
        used = []
        for second in range(now - _SECONDS + 1, now + 1):
            slot = first + 1 + _SLOT * (second % _SECONDS)
            amounts = zip(
                self._counts.column(slot), self._counts.column(slot + column), strict=True
            )
            used.append(sum(amount for written, amount in amounts if written == second))
        return used

    def _refusal(self, owner: str, why: str, wait: float) -> ApiError:
        return ApiError(
            429,
            f"{why}; try again later",
            code="rate_limit_exceeded",
            retry_after=wait,
            more_headers=self.headers(owner),
        )


class QuotaTicket:
    """One request's place among its key's; given back exactly once."""

    def __init__(self, quotas: Quotas, owner: str) -> None:
        self._quotas = quotas
        self._owner = owner
        self._is_open = True

    def add_tokens(self, num_tokens: int) -> None:
        self._quotas.add_tokens(self._owner, num_tokens)

    def release(self) -> None:
        if self._is_open:
            self._is_open = False
            self._quotas.leave(self._owner)


def _until_below(used: list[int], most: int) -> int:
    """Seconds until less than `most` is used: the oldest goes first."""
    left = sum(used)
    for seconds, amount in enumerate(used):
        if left < most:
            return seconds
        left -= amount
    return len(used)
