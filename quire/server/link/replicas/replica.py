"""One engine of a pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from quire.observe.prometheus import ServerMetrics
from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.link import messages
from quire.server.link.engine_client import EngineClient
from quire.server.link.replicas.relay import Relay, bind_to
from quire.server.link.replicas.router import PrefixRouter
from quire.server.link.replicas.weights import PoolWeights


class Pool(Protocol):
    """What an engine tells its pool."""

    router: PrefixRouter
    weights: PoolWeights

    def joined(self, replica: Replica) -> None: ...
    def left(self, replica: Replica) -> None: ...
    def failed(self, number: int) -> None: ...
    def look_at(self, replica: Replica) -> None: ...
    def relieve(self, replica: Replica) -> None: ...
    def relays_at(self, number: int) -> Iterable[Relay]: ...


class Replica(EngineClient):
    """One of the engines, which tells the pool when it comes and goes and what it has cached."""

    def __init__(
        self, config: ServerConfig, metrics: ServerMetrics, pool: Pool, number: int
    ) -> None:
        super().__init__(config, metrics, lambda: pool.failed(number))
        self._pool = pool
        self.number = number

    def _became_ready(self, ready: messages.Ready) -> None:
        super()._became_ready(ready)
        self._pool.joined(self)

    def _blocks_changed(self, stored: bytes, removed: bytes) -> None:
        self._pool.router.note_blocks(self.number, stored, removed)

    def _weights_changed(self, fingerprint: str) -> None:
        bind_to(self._pool.relays_at(self.number), fingerprint)
        self._pool.weights.settle()
        self._pool.look_at(self)

    @property
    def is_suspect(self) -> bool:
        """It may hang: whoever can be served elsewhere is."""
        return self.seconds_silent > self._config.suspect_seconds

    def _look_at_silence(self) -> None:
        self._pool.look_at(self)
        if self.is_suspect and self._listeners:
            self._pool.relieve(self)

    def forsake(self, request_id: str) -> None:
        """Takes a request from an engine that is silent; that it was silent is not forgotten for
        that.
        """
        self._owes = True
        self.abort([request_id])

    def _lose_all(self, error: ApiError) -> None:
        self._pool.left(self)
        super()._lose_all(error)
