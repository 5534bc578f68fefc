"""Pauses, in which weights may be replaced or the engine may sleep: who is computed meanwhile."""

from __future__ import annotations

from quire.engine.request import Request
from quire.engine.request_table import RequestTable
from quire.errors import InvalidRequestError
from quire.step import PauseMode


class Pauses:
    """What a pause does to the requests of a table."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self.mode: PauseMode | None = None
        """How it was paused; None: it is not."""

    @property
    def may_compute(self) -> bool:
        """Whether any request will be scheduled; not one that waits for the end of a pause."""
        requests = self._table.requests
        return bool(requests) and any(map(self.lets_in, requests.values()))

    def lets_in(self, request: Request) -> bool:
        """Whether a request is computed now."""
        if self.mode is None:
            return True
        return self.mode == "wait" and request.prompt_progress.has_begun

    def begin(self, mode: PauseMode, now: float) -> None:
        """From the next step on nobody is computed, but with "wait" those who have begun; may be
        called again with another mode.
        """
        self.mode = mode
        if mode == "abort":
            for request in list(self._table.requests.values()):
                self._table.finish(request, "abort", now)

    def end(self) -> None:
        self.mode = None

    def give_up_rows(self, why: str) -> None:
        """Takes row and blocks from everybody; what they held is not worth keeping."""
        for request in list(self._table.running):
            self._table.preempt(request, why, saves=False)

    def change_weights(self, version: int, now: float) -> None:
        """What is computed from here on is computed by other weights; nobody may have a row. Block
        keys have the version in them, so blocks of the old weights could never be met; they are
        forgotten all the same, lest they be saved to the host tier when they are evicted. Requests
        that want another version end with an error.
        """
        self._table.weights_version = version
        for request in list(self._table.requests.values()):
            request.change_weights(version)
            try:
                self._table.check_weights(request)
            except InvalidRequestError as error:
                self._table.finish(request, "error", now, error=str(error))
        self._table.blocks.reset()
