"""Fair shares of the engine for its tenants (keys, users), whoever sends how much.

Each tenant has a counter: the tokens computed for it, over its weight. The waiting request of the
tenant with the lowest counter is admitted next. Whoever comes after a pause starts with the
counter of the one who has had least: nobody saves up for later, and nobody loses its debts by
leaving for a moment. Tokens from the prefix cache are free, and so is what a preemption has
computed again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from quire.engine.request import Request
from quire.engine.request_queue import RequestQueue

_LEARN = 0.05
"""What a request that has ended counts in the mean of tokens."""
_tenant = attrgetter("params.tenant")
_MOST_ABSENT = 10_000
"""Counters kept of tenants that have no request; beyond it all of them are forgotten."""


class FairShares:
    """What tenants have had, and how many rows they have now."""

    def __init__(self, weights: Mapping[str, float], num_rows: int) -> None:
        self._weights = weights
        self._num_rows = num_rows
        self.served: dict[str, float] = {}
        """Tokens computed for each tenant, over its weight."""
        self.num_live: Counter[str] = Counter()
        """Requests that have not ended, of each tenant that has any."""
        self.rows: Counter[str] = Counter()
        """Running requests, of each tenant that has any."""
        self._total_weight = 0.0
        self._mean_tokens = 0.0
        """Of requests that have ended lately."""
        self._decoding: list[Request] = []
        """The requests that computed a token each in the last step."""
        self._decoding_shares: list[tuple[str, float]] = []
        """What their tenants were charged for it."""
        self._last_served = 0.0
        """What the last one had had when nobody was left."""

    def weight(self, tenant: str) -> float:
        """How many shares a tenant has; 1 unless it was set."""
        return self._weights.get(tenant, 1.0)

    def enter(self, tenant: str) -> None:
        """One more request of a tenant."""
        if tenant not in self.num_live:
            least = min((self.served[one] for one in self.num_live), default=self._last_served)
            self.served[tenant] = max(self.served.get(tenant, 0.0), least)
            self._total_weight += self.weight(tenant)
        self.num_live[tenant] += 1

    def leave(self, tenant: str, num_tokens: int) -> None:
        """A request of a tenant has ended, with so many tokens."""
        self._mean_tokens += _LEARN * (num_tokens - self._mean_tokens)
        self.num_live[tenant] -= 1
        if self.num_live[tenant]:
            return
        del self.num_live[tenant]
        self._total_weight -= self.weight(tenant)
        if not self.num_live:
            self._last_served, self._total_weight = self.served[tenant], 0.0
        if len(self.served) - len(self.num_live) > _MOST_ABSENT:
            self.served = {one: self.served[one] for one in self.num_live}

    def start(self, tenant: str) -> None:
        """A request of a tenant got a row."""
        self.rows[tenant] += 1

    def stop(self, tenant: str) -> None:
        """A request of a tenant gave its row up."""
        self.rows[tenant] -= 1
        if not self.rows[tenant]:
            del self.rows[tenant]

    def standing(self, tenant: str) -> float:
        """What a tenant has had, and what its running requests will have by half of their time:
        the lowest is next.
        """
        ahead = self.rows[tenant] * self._mean_tokens / 2
        return self.served[tenant] + ahead / self.weight(tenant)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Tokens were computed for a tenant for the first time."""
        self.served[tenant] += num_tokens / self.weight(tenant)

    def charge_decodes(self, requests: list[Request], recomputed: Iterable[str]) -> None:
        """A token was computed for each of these requests; not for the first time for a request of
        each of the tenants `recomputed`.
        """
        if requests != self._decoding:
            self._decoding = requests.copy()
            counts = Counter(map(_tenant, requests))
            self._decoding_shares = [
                (one, count / self.weight(one)) for one, count in counts.items()
            ]
        served = self.served
        for tenant, share in self._decoding_shares:
            served[tenant] += share
        for tenant in recomputed:
            self.charge(tenant, -1)

    def giver(self, tenant: str) -> str | None:
        """The tenant that has the most rows beyond its share, if this one has had less and has
        fewer rows than its share. Nobody gives its only row.
        """
        if self.rows[tenant] >= max(1, int(self._fair_rows(tenant))):
            return None
        over = [
            one
            for one, rows in self.rows.items()
            if rows > max(1.0, self._fair_rows(one)) and self.served[one] > self.served[tenant]
        ]
        return max(over, key=lambda one: (self.rows[one] / self.weight(one), one), default=None)

    def _fair_rows(self, tenant: str) -> float:
        return self._num_rows * self.weight(tenant) / self._total_weight


class _TenantQueue(RequestQueue):
    """One tenant's waiting requests: its own priorities count, then arrival."""

    order = staticmethod(attrgetter("priority", "order"))


class FairQueue:
    """Waiting requests, by tenant."""

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._queues: dict[str, _TenantQueue] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        for queue in self._queues.values():
            yield from queue

    @property
    def queues(self) -> list[RequestQueue]:
        """Each is in order."""
        return list(self._queues.values())

    def first(self) -> Request:
        """Who is next; there must be somebody."""
        queues, standing = self._queues, self._shares.standing
        if len(queues) == 1:
            (queue,) = queues.values()
            return queue[0]
        _, tenant = min((standing(tenant), tenant) for tenant in queues)
        return queues[tenant][0]

    def add(self, request: Request) -> None:
        self._queues.setdefault(request.tenant, _TenantQueue()).add(request)
        self._num_requests += 1

    def remove(self, request: Request) -> None:
        queue = self._queues[request.tenant]
        queue.remove(request)
        self._num_requests -= 1
        if not queue:
            del self._queues[request.tenant]

    def candidates(self) -> Iterator[Request]:
        """Whom to admit: each time the next of the tenant that has had least by then. A request may
        be removed before the next one is asked for, and its tenant charged.
        """
        standing = self._shares.standing
        turns = {tenant: queue.candidates() for tenant, queue in self._queues.items()}
        heap = [(standing(tenant), tenant) for tenant in turns]
        heapq.heapify(heap)
        while heap:
            _, tenant = heapq.heappop(heap)
            request = next(turns[tenant], None)
            if request is not None:
                yield request
                heapq.heappush(heap, (standing(tenant), tenant))
