"""One HTTP worker: `python -m quire.server.link.workers.worker`, started by `hub`.

It accepts connections from the server's listening socket, and ends with the server's process:
nothing is left behind, however that dies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path
from typing import cast

import msgspec
import uvicorn

from quire.checkpoints.sources import resolve
from quire.frontend.tokenizer import Tokenizer
from quire.observe.shared_metrics import Numbers
from quire.observe.tracing import Tracing
from quire.process.child import end_with_parent, ignore_terminal_signals
from quire.server.adapters import ServedAdapters
from quire.server.app import create_app
from quire.server.config import ServerConfig, decode_config
from quire.server.guard.counts import Counts
from quire.server.guard.quotas import Quotas, limits_by_owner
from quire.server.http_server import (
    HttpServer,
    http_settings,
    open_tokenizer,
    prepare_process,
    settle,
)
from quire.server.link.channel import BlockingChannel
from quire.server.link.engine_client import Engines
from quire.server.link.messages import Listening, WorkerConfig
from quire.server.link.replicas.open import metrics_for
from quire.server.link.workers.accept import Accepting
from quire.server.link.workers.engines import RemoteEngines, RemoteStore
from quire.server.link.workers.forward import Forward
from quire.server.logs import set_up_logging
from quire.server.service import GenerationService

logger = logging.getLogger(__name__)


class _Server(HttpServer):
    """Accepts its part of the connections."""

    def __init__(self, settings: uvicorn.Config, listener: socket.socket, counts: Counts) -> None:
        super().__init__(settings)
        self._listener = listener
        self._counts = counts
        self._accepting: Accepting | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._accepting = Accepting(
            self._listener, self.new_protocol, self.config.ssl, self.handshake_seconds, self._counts
        )
        self._accepting.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.stop()
        await super().shutdown([])


def main() -> int:
    ignore_terminal_signals()
    end_with_parent()
    connection = socket.socket(fileno=os.dup(0))
    first = msgspec.msgpack.decode(BlockingChannel(connection).receive() or b"", type=WorkerConfig)
    config = decode_config(first.server)
    set_up_logging(config.log_format, config.log_level, f"worker-{first.worker}")
    with prepare_process() as runner:
        tokenizer = open_tokenizer(resolve(config.model), config)
        runner.run(_serve(first, config, tokenizer, connection))
    return 0


async def _serve(
    first: WorkerConfig, config: ServerConfig, tokenizer: Tokenizer, connection: socket.socket
) -> None:
    folder = Path(first.folder)
    engines = RemoteEngines(first.ready)
    adapters = ServedAdapters(config.adapters, config.adapter_folder)
    engines.on_adapters = adapters.replace
    await engines.open(connection)
    counts = Counts(folder / "counts", first.worker, config.http_workers + 1)
    quotas = Quotas(
        limits_by_owner(config), folder / "quotas", first.worker, config.http_workers + 1
    )
    metrics = metrics_for(config, Numbers(folder / f"numbers-{first.worker}"))
    endpoint = config.otlp_traces_endpoint
    tracing = None if endpoint is None else Tracing.to_endpoint(endpoint)
    client = cast(Engines, engines)
    store = RemoteStore(config, engines)
    service = GenerationService(
        config, tokenizer, client, first.ready, metrics, tracing, store, counts, quotas
    )
    service.adapters = adapters
    app = Forward(create_app(service), str(folder / "inner"))
    server = _Server(
        http_settings(config, app, counts), socket.socket(fileno=first.listener), counts
    )

    def drain() -> None:
        service.is_draining = True
        server.should_exit = True

    def find(an_id: str, owner: str | None) -> dict[str, object] | None:
        record = service.records.find(an_id, owner)
        return None if record is None else {**record.describe(), "owner": record.owner}

    def newest(count: int, owner: str | None) -> list[dict[str, object]]:
        records = service.records.newest(count, owner)
        return [{**record.describe(), "owner": record.owner} for record in records]

    engines.on_drain = drain
    engines.on_find = find
    engines.on_newest = newest
    settle()
    server.on_started = lambda: engines.send(Listening())
    serving = asyncio.create_task(server.serve())
    await asyncio.wait((serving, engines.lost), return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        logger.error("the server's process is gone; so this worker ends")
        os._exit(1)
    serving.result()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)


if __name__ == "__main__":
    sys.exit(main())
