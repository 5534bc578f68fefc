"""Requests kept in order of importance."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from quire.engine.request import Request

_order = attrgetter("order")


class RequestQueue(list[Request]):
    """A list of requests that `add` keeps sorted: the most important first; the last one is
    preempted first.
    """

    def add(self, request: Request) -> None:
        insort(self, request, key=_order)

    def remove(self, request: Request, /) -> None:
        index = bisect_left(self, request.order, key=_order)
        assert self[index] is request, f"request {request.request_id} is not in this queue"
        del self[index]
