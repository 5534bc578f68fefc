"""Stored responses as a worker sees them: the server's own process keeps them."""

from __future__ import annotations

import msgspec

from quire.server.config import ServerConfig
from quire.server.link.workers.engines import RemoteEngines
from quire.server.link.workers.messages import Recall, Store
from quire.server.stored.store import ResponseStore, StoredResponse, StoreLimits


class RemoteStore(ResponseStore):
    """Asks for every response; who reads one has to be in a thread."""

    is_remote = True

    def __init__(self, config: ServerConfig, engines: RemoteEngines) -> None:
        super().__init__(
            StoreLimits(config.stored_responses, config.stored_bytes, config.stored_seconds)
        )
        self._engines = engines

    def put(self, stored: StoredResponse) -> None:
        """In a thread, it is kept when this returns; on the event loop (nobody waits: the client
        has left, or is told of an error), it will be.
        """
        if self._engines.is_on_loop:
            self._engines.send(Store(0, msgspec.json.encode(stored)))
        else:
            data = msgspec.json.encode(stored)
            self._engines.ask(lambda ticket: Store(ticket, data))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        return _decoded(self._engines.ask(lambda ticket: Recall(ticket, owner, response_id)))

    def holder_of(self, owner: str, item_id: str) -> StoredResponse | None:
        return _decoded(self._engines.ask(lambda ticket: Recall(ticket, owner, item_id=item_id)))

    def delete(self, owner: str, response_id: str) -> bool:
        raise NotImplementedError("responses are deleted by the server's own process")


def _decoded(data: bytes | None) -> StoredResponse | None:
    return None if data is None else msgspec.json.decode(data, type=StoredResponse)
