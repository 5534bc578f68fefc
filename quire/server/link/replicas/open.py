"""The engines of a server: one, or several as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.observe.block_names import Names
from quire.observe.prometheus import ALL_ENGINES, ServerMetrics
from quire.observe.shared_metrics import Numbers
from quire.server.config import ServerConfig
from quire.server.link import messages
from quire.server.link.engine_client import Engines
from quire.server.link.replicas.pool import ReplicaPool
from quire.server.link.replicas.replica import Replica

_NO_NAMES: Names = np.empty(0, np.uint64)


def metrics_for(config: ServerConfig, numbers: Numbers | None = None) -> ServerMetrics:
    """What calls count is that of all engines together."""
    return ServerMetrics(
        config.model_names[0], "0" if config.replicas == 1 else ALL_ENGINES, numbers
    )


def open_engines(
    config: ServerConfig, metrics: ServerMetrics, on_failure: Callable[[], None]
) -> Engines:
    """As many engines as the configuration asks for; `on_failure` is called when none is left that
    could be started.
    """
    if config.replicas == 1:
        return SingleEngine(config, metrics, on_failure)
    return ReplicaPool(config, metrics, on_failure)


class SingleEngine(ReplicaPool):
    """There is nothing to choose, but when the engine is lost its requests wait for the one that
    takes its place, and go on from their tokens. It has all of the machine, and metrics under its
    own label only.
    """

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
