"""A batch whose engines run on a Ray cluster. Requests are read and answers written here, in their order, so a batch
comes out the same, and goes on after an interruption, as it does on one machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import ray

from quire.cluster.ray_pool import RayPool
from quire.cluster.settings import RaySettings
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.observe.prometheus import ServerMetrics
from quire.server.batches.run import MakeEngines
from quire.server.config import ServerConfig
from quire.server.engine_client import Engines

_CONNECT_SECONDS = 10.0


@contextlib.contextmanager
def engines_at(address: str) -> Iterator[MakeEngines]:
    """Within, there is a connection to the cluster, and engines are made there: as many as the batch has replicas, each
    with the GPUs it needs, if the cluster has any and the engine may use them."""
    try:
        _check_reachable(address)
        ray.init(address=address, logging_level="warning", log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:  # Ray's own ConnectionError is an OSError
        reason = str(error).strip().partition("\n")[0]
        raise QuireError(f"--ray {address}: there is no Ray cluster that can be reached: {reason}") from None

    def make(config: ServerConfig, metrics: ServerMetrics, on_failure: Callable[[], None]) -> Engines:
        engine = EngineConfig.of(config.engine)
        has_gpus = engine.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        gpus = engine.tensor_parallel_size if has_gpus else 0
        settings = RaySettings(
            model=config.model, min_replicas=config.replicas, max_replicas=config.replicas, gpus_per_replica=gpus,
            down_seconds=1e9, engine=config.engine,
        )  # fmt: skip
        options = config.engine if gpus else {**config.engine, "device": "cpu"}
        return RayPool(replace(config, replicas=config.replicas + 1, engine=options), metrics, on_failure, settings)

    try:
        yield make
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and host and port.isdigit() and "/" not in address:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
