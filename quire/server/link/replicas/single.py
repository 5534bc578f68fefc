"""A pool of one engine: there is nothing to choose, but when the engine is lost its requests wait for
the one that takes its place, and go on from their tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.observe.block_names import Names
from quire.server.config import ServerConfig
from quire.server.link import messages
from quire.server.link.replicas.pool import ReplicaPool
from quire.server.link.replicas.replica import Replica

_NO_NAMES: Names = np.empty(0, np.uint64)


class SingleEngine(ReplicaPool):
    """Has all of the machine, and metrics under its own label only."""

    def describe_replicas(self) -> list[dict[str, Any]]:
        """None: the server's state is the engine's."""
        return []

    async def describe(self, request_id: str) -> dict[str, Any] | None:
        return await self.replicas[0].describe(request_id)

    def _divide(self, config: ServerConfig) -> list[ServerConfig]:
        return [config]

    def _new_replica(self, config: ServerConfig, number: int) -> Replica:
        return Replica(config, self._server_metrics, self, number)

    def _block_names(self, message: messages.AddRequest) -> Names:
        """Names would only serve to choose."""
        return _NO_NAMES
