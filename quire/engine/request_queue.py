"""Requests kept in order of importance."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from quire.engine.request import Request


class RequestQueue(list[Request]):
    """A list of requests that `add` keeps sorted: the most important first; the last one is
    preempted first.
    """

    order = staticmethod(attrgetter("order"))

    @property
    def queues(self) -> list[RequestQueue]:
        """Each is in order."""
        return [self]

    def add(self, request: Request) -> None:
        """Puts a request where its turn is, behind its equals."""
        insort(self, request, key=self.order)

    def remove(self, request: Request, /) -> None:
        index = bisect_left(self, self.order(request), key=self.order)
        assert self[index] is request, f"request {request.request_id} is not in this queue"
        del self[index]

    def first(self) -> Request:
        """Who is next; there must be somebody."""
        return self[0]

    def candidates(self) -> Iterator[Request]:
        """Whom to admit, in this order. A request may be removed before the next one is asked for."""
        index = 0
        while index < len(self):
            request = self[index]
            yield request
            index += index < len(self) and self[index] is request
