"""Responses that were answered, kept for a bounded time and number, so that a client may go on with
one by its id instead of sending the conversation again. In memory, and in a folder too if the
server was given one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.server.config import ServerConfig
from quire.server.stored.files import ResponseFiles

logger = logging.getLogger(__name__)

_OVERHEAD = 1024
"""Bytes that a response takes beside its texts."""


class StoredResponse(msgspec.Struct, frozen=True):
    """One response as it is kept; also the form of its file."""

    id: str
    owner: str
    """Whose key it was asked with: nobody else finds it. Empty on a server without keys."""
    created: float
    previous_id: str | None
    body: msgspec.Raw
    """The response as its client got it, without logprobs."""
    items: msgspec.Raw
    """What this call added to the conversation, each item with an id."""
    item_ids: list[str]
    """Of these and of the answer's items."""

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.items) + sum(map(len, self.item_ids)) + _OVERHEAD

    def output(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = msgspec.json.decode(self.body)["output"]
        return found

    def input(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = msgspec.json.decode(self.items)
        return found

    def status(self) -> str:
        return str(msgspec.json.decode(self.body)["status"])


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much is kept. 0 responses: nothing."""

    responses: int
    num_bytes: int
    seconds: float


class ResponseStore:
    """All responses that are kept. The least recently used make room for new ones. Safe to use from
    several threads.
    """

    is_remote = False
    """Whether another process keeps them, so that whoever uses it has to be able to wait."""

    def __init__(
        self,
        limits: StoreLimits,
        files: ResponseFiles | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self._files = files
        self._clock = clock
        self._lock = threading.RLock()
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._by_item: dict[tuple[str, str], dict[str, None]] = {}
        """By owner and item: the responses that hold it, as an answer or as what led to one."""
        self._num_bytes = 0
        if files is not None:
            for path, data in files.load(limits.num_bytes):
                try:
                    self._add(msgspec.json.decode(data, type=StoredResponse))
                except (msgspec.MsgspecError, ValueError):
                    logger.warning(
                        "a file in the folder of stored responses is damaged; it is removed"
                    )
                    files.discard(path)
            self._make_room()

    @property
    def is_on(self) -> bool:
        return self.limits.responses > 0

    def of(self, owner: str) -> OwnResponses:
        """What one client has stored and may use."""
        return OwnResponses(self, owner)

    def put(self, stored: StoredResponse) -> None:
        with self._lock:
            self._add(stored)
            self._make_room()
            if self._files is not None and stored.id in self._responses:
                self._files.write(stored.id, msgspec.json.encode(stored))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        with self._lock:
            stored = self._responses.get(response_id)
            if stored is None or stored.owner != owner:
                return None
            if stored.created + self.limits.seconds <= self._clock():
                self._remove(response_id)
                return None
            self._responses.move_to_end(response_id)
            return stored

    def holder_of(self, owner: str, item_id: str) -> StoredResponse | None:
        """The newest response that holds an item."""
        with self._lock:
            holders = self._by_item.get((owner, item_id), {})
            return next(
                (found for one in [*holders][::-1] if (found := self.get(owner, one)) is not None),
                None,
            )

    def delete(self, owner: str, response_id: str) -> bool:
        with self._lock:
            found = self.get(owner, response_id) is not None
            if found:
                self._remove(response_id)
            return found

    def close(self) -> None:
        """Waits until all is written."""
        if self._files is not None:
            self._files.close()

    def _add(self, stored: StoredResponse) -> None:
        self._remove(stored.id, from_disk=False)
        self._responses[stored.id] = stored
        self._num_bytes += stored.num_bytes
        for item_id in stored.item_ids:
            self._by_item.setdefault((stored.owner, item_id), {})[stored.id] = None

    def _remove(self, response_id: str, from_disk: bool = True) -> None:
        stored = self._responses.pop(response_id, None)
        if stored is None:
            return
        self._num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            holders = self._by_item.get((stored.owner, item_id), {})
            holders.pop(response_id, None)
            if not holders:
                self._by_item.pop((stored.owner, item_id), None)
        if from_disk and self._files is not None:
            self._files.remove(response_id)

    def _make_room(self) -> None:
        oldest = self._clock() - self.limits.seconds
        for response_id in [one.id for one in self._responses.values() if one.created <= oldest]:
            self._remove(response_id)
        while (
            len(self._responses) > self.limits.responses or self._num_bytes > self.limits.num_bytes
        ):
            self._remove(next(iter(self._responses)))


def open_store(config: ServerConfig) -> ResponseStore:
    """The store that a server's options ask for."""
    limits = StoreLimits(config.stored_responses, config.stored_bytes, config.stored_seconds)
    return ResponseStore(limits, None if config.store is None else ResponseFiles(config.store))


@dataclass(frozen=True, slots=True)
class OwnResponses:
    """The part of the store that one client sees."""

    store: ResponseStore
    owner: str

    def get(self, response_id: str) -> StoredResponse | None:
        return self.store.get(self.owner, response_id)

    def items(self, item_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Those that are stored of these items, which are in the order of a conversation: the
        newest response that holds the last of them holds most of the others too, and each that is
        needed is read once.
        """
        found: dict[str, dict[str, Any]] = {}
        for item_id in reversed(item_ids):
            holder = None if item_id in found else self.store.holder_of(self.owner, item_id)
            if holder is not None:
                found = {item["id"]: item for item in (*holder.input(), *holder.output())} | found
        return found

    def chain(self, response_id: str) -> tuple[list[StoredResponse], str | None]:
        """The responses that lead to this one, the first of them first, and the id of one that is
        missing.
        """
        found: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            stored = self.get(wanted)
            if stored is None:
                return [], wanted
            found.append(stored)
            wanted = stored.previous_id
        return found[::-1], None

    def put(
        self, body: dict[str, Any], items: bytes, item_ids: Iterable[str], previous_id: str | None
    ) -> None:
        """Keeps a response, with what its call added to the conversation (JSON); `item_ids` are
        those of both.
        """
        self.store.put(
            StoredResponse(
                id=body["id"],
                owner=self.owner,
                created=float(body["created_at"]),
                previous_id=previous_id,
                body=msgspec.Raw(msgspec.json.encode(body)),
                items=msgspec.Raw(items),
                item_ids=list(item_ids),
            )
        )

    def delete(self, response_id: str) -> bool:
        return self.store.delete(self.owner, response_id)
