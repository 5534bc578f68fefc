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
from collections.abc import Iterator, Mapping, Sequence
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
        self._served: dict[str, float] = {}
        """Tokens computed for each tenant, over its weight; but for `_num_uncharged`."""
        self.num_live: Counter[str] = Counter()
        """Requests that have not ended, of each tenant that has any."""
        self.rows: Counter[str] = Counter()
        """Running requests, of each tenant that has any."""
        self._total_weight = 0.0
        self._mean_tokens = 0.0
        """Of requests that have ended lately."""
        self._decoding: list[Request] = []
        """The requests that computed a token each in the last step."""
        self._decoding_shares: dict[str, float] = {}
        """What their tenants have to be charged for it, ..."""
        self._num_uncharged = 0
        """...so many times."""
        self._last_served = 0.0
        """What the last one had had when nobody was left."""
        self.are_even = False
        """Whether it is known that nobody has to give a row up, until somebody comes, goes, gets a
        row or gives one up.
        """

    def weight(self, tenant: str) -> float:
        """How many shares a tenant has; 1 unless it was set."""
        return self._weights.get(tenant, 1.0)

    def enter(self, tenant: str) -> None:
        """One more request of a tenant."""
        self.are_even = False
        if tenant not in self.num_live:
            self._charge_decoded()
            served = self._served
            least = min((served[one] for one in self.num_live), default=self._last_served)
            served[tenant] = max(served.get(tenant, 0.0), least)
            self._total_weight += self.weight(tenant)
        self.num_live[tenant] += 1

    def leave(self, tenant: str, num_tokens: int) -> None:
        """A request of a tenant has ended, with so many tokens."""
        self._mean_tokens += _LEARN * (num_tokens - self._mean_tokens)
        self.are_even = False
        self.num_live[tenant] -= 1
        if self.num_live[tenant]:
            return
        self._charge_decoded()
        del self.num_live[tenant]
        self._total_weight -= self.weight(tenant)
        if not self.num_live:
            self._last_served, self._total_weight = self._served[tenant], 0.0
        if len(self._served) - len(self.num_live) > _MOST_ABSENT:
            self._served = {one: self._served[one] for one in self.num_live}
            self._decoding, self._decoding_shares = [], {}

    def start(self, tenant: str) -> None:
        """A request of a tenant got a row."""
        self.are_even = False
        self.rows[tenant] += 1

    def stop(self, tenant: str) -> None:
        """A request of a tenant gave its row up."""
        self.are_even = False
        self.rows[tenant] -= 1
        if not self.rows[tenant]:
            del self.rows[tenant]

    def had(self, tenant: str) -> float:
        """Tokens computed for a tenant, over its weight."""
        decoded = self._num_uncharged * self._decoding_shares.get(tenant, 0.0)
        return self._served.get(tenant, 0.0) + decoded

    def standing(self, tenant: str) -> float:
        """What a tenant has had, and what its running requests will have by half of their time:
        the lowest is next.
        """
        ahead = self.rows[tenant] * self._mean_tokens / 2
        return self.had(tenant) + ahead / self.weight(tenant)

    def least_served(self, requests: Sequence[Request]) -> Request | None:
        """The first of those whose tenant has had least."""
        return min(requests, key=lambda one: self.standing(one.tenant), default=None)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Tokens were computed for a tenant for the first time."""
        self._served[tenant] += num_tokens / self.weight(tenant)

    def charge_decodes(self, requests: list[Request], recomputed: Sequence[str]) -> None:
        """A token was computed for each of these requests; not for the first time for a request of
        each of the tenants `recomputed`.
        """
        if requests != self._decoding:
            self._charge_decoded()
            self._decoding = requests.copy()
            counts = Counter(map(_tenant, requests))
            self._decoding_shares = {one: count / self.weight(one) for one, count in counts.items()}
        self._num_uncharged += 1
        for tenant in recomputed:
            self.charge(tenant, -1)

    def _charge_decoded(self) -> None:
        """While the same requests decode, their steps are only counted."""
        for tenant, share in self._decoding_shares.items():
            self._served[tenant] += self._num_uncharged * share
        self._num_uncharged = 0

    def giver(self, tenant: str) -> str | None:
        """The tenant that has the most rows beyond its share, if this one has had less and has
        fewer rows than its share. Nobody gives its only row.
        """
        if self._rows_are_even():
            self.are_even = True
            return None
        if self.rows[tenant] >= max(1, int(self._fair_rows(tenant))):
            return None
        had = self.had(tenant)
        over = [
            one
            for one, rows in self.rows.items()
            if rows > max(1.0, self._fair_rows(one)) and self.had(one) > had
        ]
        return max(over, key=lambda one: (self.rows[one] / self.weight(one), one), default=None)

    def _rows_are_even(self) -> bool:
        """Whether nobody has more rows than its share, or nobody who has requests waiting has fewer."""
        rows, fair_rows = self.rows, self._fair_rows
        return not any(count > max(1.0, fair_rows(one)) for one, count in rows.items()) or not any(
            rows[one] < min(count, max(1, int(fair_rows(one))))
            for one, count in self.num_live.items()
        )

    def _fair_rows(self, tenant: str) -> float:
        return self._num_rows * self.weight(tenant) / self._total_weight


class _TenantQueue(RequestQueue):
    """One tenant's waiting requests: its own priorities count, then arrival."""

    order = staticmethod(attrgetter("priority", "order"))


class FairQueue(dict[Request, None]):
    """Waiting requests, by tenant. All of them are keys here as well, so that asking whether there
    is any takes no Python: each step does.
    """

    def __init__(self, shares: FairShares) -> None:
        super().__init__()
        self._shares = shares
        self._queues: dict[str, _TenantQueue] = {}

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
        """Puts a request where its turn is among its tenant's."""
        self._queues.setdefault(request.tenant, _TenantQueue()).add(request)
        self[request] = None

    def remove(self, request: Request) -> None:
        queue = self._queues[request.tenant]
        queue.remove(request)
        del self[request]
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
