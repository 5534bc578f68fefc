"""Requests kept in order of importance."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from quire.engine.request import Request


def _order(request: Request) -> tuple[int, float, int]:
    return request.order


class RequestQueue:
    """A sorted list of requests: the most important first; the last one is preempted first."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def snapshot(self) -> list[Request]:
        """A copy, to iterate over while the queue changes."""
        return self._requests.copy()

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_order)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.order, key=_order)
        assert self._requests[index] is request, f"request {request.request_id} is not in this queue"
        del self._requests[index]
