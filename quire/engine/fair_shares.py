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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from quire.engine.request import Request
from quire.engine.request_queue import RequestQueue

_LEARN = 0.05
"""What a request that has ended counts in the mean of tokens."""
_tenant = attrgetter("params.tenant")
_INFINITY = float("inf")
_MOST_ABSENT = 10_000
"""Counters kept of tenants that have no request; beyond it all of them are forgotten."""
_MOST_SERVED = 2.0**20
"""Where the least served has had more, this is taken from all counters: a token for a weight of a
million would be lost among the digits of larger ones.
"""
_STALE = 64
"""Entries of the heap that may be stale beside as many as there are tenants."""


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
        self._without_row: list[tuple[float, str]] = []
        """A heap: what each tenant with requests and without a row has had. An entry is stale if that
        is not so any more.
        """
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
            least = self._least_had()
            if least > _MOST_SERVED:
                self._served = {one: max(0.0, had - least) for one, had in self._served.items()}
                self._find_without_row()
                least = 0.0
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
            self._total_weight += self.weight(tenant)
            self.num_live[tenant] += 1
            self._note_without_row(tenant)
        else:
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
            self._note_without_row(tenant)

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

    def least_without_row(self) -> tuple[float, str] | None:
        """What the least served of the tenants has had that wait without any row, and who it is."""
        heap = self._without_row
        while heap and not self._is_without_row(*heap[0]):
            heapq.heappop(heap)
        return heap[0] if heap else None

    @property
    def without_row(self) -> set[str]:
        """All of these."""
        return {entry[1] for entry in self._without_row if self._is_without_row(*entry)}

    def take_without_row(self) -> None:
        """Leaves the one out that `least_without_row` has just told, until it is given back."""
        heapq.heappop(self._without_row)

    def give_back_without_row(self, entries: Iterable[tuple[float, str]]) -> None:
        for entry in entries:
            heapq.heappush(self._without_row, entry)

    def _is_without_row(self, had: float, tenant: str) -> bool:
        return tenant in self.num_live and tenant not in self.rows and had == self.had(tenant)

    def _note_without_row(self, tenant: str) -> None:
        heapq.heappush(self._without_row, (self.had(tenant), tenant))
        if len(self._without_row) > 2 * len(self.num_live) + _STALE:
            self._find_without_row()

    def _find_without_row(self) -> None:
        self._without_row = [(self.had(one), one) for one in self.num_live if one not in self.rows]
        heapq.heapify(self._without_row)

    def _least_had(self) -> float:
        """What the least served tenant with requests has had."""
        least = min(map(self.had, self.rows), default=_INFINITY)
        waiting = self.least_without_row()
        if waiting is not None and waiting[0] < least:
            return waiting[0]
        return self._last_served if least == _INFINITY else least

    def least_served(self, requests: Sequence[Request]) -> Request | None:
        """The first of those whose tenant has had least."""
        return min(requests, key=lambda one: self.standing(one.tenant), default=None)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Tokens were computed for a tenant for the first time."""
        self._served[tenant] += num_tokens / self.weight(tenant)
        if tenant not in self.rows:
            self._note_without_row(tenant)

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
        if not any(count > max(1.0, fair_rows(one)) for one, count in rows.items()):
            return True
        return len(rows) == len(self.num_live) and not any(
            count < min(self.num_live[one], max(1, int(fair_rows(one))))
            for one, count in rows.items()
        )

    def _fair_rows(self, tenant: str) -> float:
        weight = self.weight(tenant)
        # a sum that large weights came to and left may have lost the small ones
        return self._num_rows * weight / max(weight, self._total_weight)


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
        queues, shares = self._queues, self._shares
        if len(queues) == 1:
            (queue,) = queues.values()
            return queue[0]
        turns = [(shares.standing(tenant), tenant) for tenant in shares.rows if tenant in queues]
        least = shares.least_without_row()
        if least is not None:
            turns.append(least)
        return queues[min(turns)[1]][0]

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
        queues, shares = self._queues, self._shares
        heap = [(shares.standing(tenant), tenant) for tenant in shares.rows if tenant in queues]
        heapq.heapify(heap)
        turns: dict[str, Iterator[Request]] = {}
        taken: list[tuple[float, str]] = []
        try:
            while True:
                least = shares.least_without_row()
                if least is not None and (not heap or least < heap[0]):
                    shares.take_without_row()
                    taken.append(least)
                    tenant = least[1]
                    if tenant in turns:
                        continue  # this is a second entry
                elif heap:
                    _, tenant = heapq.heappop(heap)
                else:
                    return
                if tenant not in turns:
                    turns[tenant] = queues[tenant].candidates()
                request = next(turns[tenant], None)
                if request is not None:
                    yield request
                    heapq.heappush(heap, (shares.standing(tenant), tenant))
        finally:
            shares.give_back_without_row(taken)
