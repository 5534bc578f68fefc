"""The engines of a server: one, or several as one."""

from __future__ import annotations

from collections.abc import Callable

from quire.observe.prometheus import ALL_ENGINES, ServerMetrics
from quire.observe.shared_metrics import Numbers
from quire.server.config import ServerConfig
from quire.server.link.engine_client import Engines
from quire.server.link.replicas.pool import ReplicaPool
from quire.server.link.replicas.single import SingleEngine


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
