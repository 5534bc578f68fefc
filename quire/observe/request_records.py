"""What the HTTP process knows about requests, for longer than the engine's step log remembers them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import Any


def belongs_to(name: str, request_id: str) -> bool:
    """Whether an answer is one of the request's: names are `id`, `id/0` and, for batches, `id.1/0`."""
    return name == request_id or (name.startswith(request_id) and name[len(request_id)] in "./")


@dataclass(slots=True)
class RequestRecord:
    """What the HTTP process knows about a request."""

    response_id: str
    request_id: str
    endpoint: str
    created: float
    """By the clock on the wall."""
    state: str = "queued"
    """queued, running, finished, aborted or failed."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None
    timings: dict[str, float | None] = field(default_factory=dict)
    """Seconds since arrival."""
    started: float = 0.0
    """When it came, by this machine's monotonic clock, which its engine has, too."""
    notes: dict[str, Any] = field(default_factory=dict)
    owner: str = ""
    """Whose key it came with, which nobody is told."""

    def describe(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "owner"}

    def answered(self, seconds: float, reading: float, moment: float, started: float = 0.0) -> None:
        """The last byte has been handed over, then and so long after the request came; reading its
        body has taken so long. What was sent while the engine still computed took nobody's time.
        """
        total = self.timings.get("total")
        if total is not None:
            self.started = started
            self.timings["reading"] = round(reading, 6)
            self.timings["network"] = round(reading + max(0.0, moment - self.created - total), 6)
            self.timings["answered"] = round(seconds, 6)

    def attributes(self) -> dict[str, int | list[str]]:
        """Of the request's span, under the names tools know."""
        return {
            "gen_ai.usage.prompt_tokens": self.prompt_tokens,
            "gen_ai.usage.completion_tokens": self.completion_tokens,
            "quire.cached_tokens": self.cached_tokens,
            "gen_ai.response.finish_reasons": list(self.finish_reasons),
        }


class RecordBook:
    """The last requests, found by the id of their response or of their HTTP request. Clients choose
    the latter, so two of them may be the same: each key finds its own.
    """

    def __init__(self, keep: int = 2048) -> None:
        self._keep = keep
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._by_request_id: dict[tuple[str | None, str], str] = {}
        """By owner, or None for all of them, and the id: the newest response."""

    def add(self, record: RequestRecord) -> None:
        self._records[record.response_id] = record
        for owner in (record.owner, None):
            self._by_request_id[owner, record.request_id] = record.response_id
        while len(self._records) > self._keep:
            _, old = self._records.popitem(last=False)
            for owner in (old.owner, None):
                if self._by_request_id.get((owner, old.request_id)) == old.response_id:
                    del self._by_request_id[owner, old.request_id]

    def waiting(self) -> list[RequestRecord]:
        """Those that have not begun, oldest first."""
        return [record for record in self._records.values() if record.state == "queued"]

    def newest(self, count: int, owner: str | None) -> list[RequestRecord]:
        """The last ones of this owner, or with None of anybody, newest first."""
        own = (one for one in reversed(self._records.values()) if owner in (None, one.owner))
        return list(islice(own, count))

    def find(self, name: str, owner: str | None) -> RequestRecord | None:
        """One of this owner's, or with None of anybody's."""
        found = self._records.get(self._by_request_id.get((owner, name), name))
        return found if found is not None and owner in (None, found.owner) else None
