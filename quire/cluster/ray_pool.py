"""A pool of engines that are actors of Ray."""

from __future__ import annotations

from collections.abc import Callable

from quire.cluster.ray_engine import RayLink
from quire.cluster.settings import RaySettings, engine_parts
from quire.observe.prometheus import ServerMetrics
from quire.server.config import ServerConfig
from quire.server.link.engine_link import EngineLink
from quire.server.link.replicas.elastic import ElasticPool
from quire.server.link.replicas.replica import Replica


class RayReplica(Replica):
    """An engine in an actor."""

    def __init__(
        self, config: ServerConfig, metrics: ServerMetrics, pool: RayPool, number: int
    ) -> None:
        super().__init__(config, metrics, pool, number)
        self._settings = pool.settings

    def _new_link(self) -> EngineLink:
        return RayLink(
            self._config, self._clock, self._settings.bundle, self._settings.schedule_seconds
        )


class RayPool(ElasticPool):
    """As many of them as the settings say, on whichever machines have room."""

    def __init__(
        self,
        config: ServerConfig,
        metrics: ServerMetrics,
        on_failure: Callable[[], None],
        settings: RaySettings,
    ) -> None:
        self.settings = settings
        super().__init__(config, metrics, on_failure, settings.rule())

    def _divide(self, config: ServerConfig) -> list[ServerConfig]:
        self._parts = engine_parts(config)
        return self._parts

    def _new_replica(self, config: ServerConfig, number: int) -> Replica:
        return RayReplica(config, self._server_metrics.of_engine(str(number)), self, number)
