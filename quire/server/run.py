"""Runs the server from start to end: engine, HTTP, signals."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

from quire.checkpoints.sources import ModelSource, resolve
from quire.errors import QuireError
from quire.frontend.progress import ModelBars
from quire.frontend.tokenizer import Tokenizer
from quire.observe.tracing import Tracing
from quire.server.app import create_app
from quire.server.batches.queue import BatchQueue
from quire.server.batches.room import FolderLimits
from quire.server.batches.store import BatchStore
from quire.server.config import ServerConfig
from quire.server.http_server import (
    HttpServer,
    http_settings,
    open_tokenizer,
    prepare_process,
    settle,
)
from quire.server.link.messages import AdapterFolder, Ready
from quire.server.link.replicas.open import metrics_for, open_engines
from quire.server.link.workers.hub import WorkerHub
from quire.server.logs import set_up_logging
from quire.server.service import GenerationService
from quire.server.stored.store import ResponseStore, open_store

logger = logging.getLogger(__name__)

_LAST_WORDS = 0.5
"""Seconds for clients to be told that the server ends."""


def serve(config: ServerConfig) -> int:
    """Serves until a signal comes; returns the exit code."""
    set_up_logging(config.log_format, config.log_level, "server")
    with ModelBars(config.model) as bars:
        source = resolve(config.model, progress=bars("download"))
    responses = open_store(config)
    listener = _bind(config)
    with prepare_process() as runner:
        return runner.run(_Run(config, source, listener, responses).run())


class _Run:
    """One run of the server."""

    def __init__(
        self,
        config: ServerConfig,
        source: ModelSource,
        listener: socket.socket,
        responses: ResponseStore,
    ) -> None:
        self._config = config
        self._source = source
        self._listener = listener
        self._responses = responses
        self._metrics = metrics_for(config)
        endpoint = config.otlp_traces_endpoint
        self._tracing = None if endpoint is None else Tracing.to_endpoint(endpoint)
        self._client = open_engines(config, self._metrics, self._give_up)
        self._service: GenerationService | None = None
        self._store = (
            None if config.batches is None else BatchStore(config.batches, _folder_limits(config))
        )
        self._queue: BatchQueue | None = None
        self._server: HttpServer | None = None
        self._workers: WorkerHub | None = None
        self._starting: asyncio.Future[tuple[Ready, Tokenizer]] | None = None
        self._exit_code = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup means: go on
            if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN:
                loop.add_signal_handler(one, self._stop, one)
        try:
            started = await self._start()
            if started is not None:
                await self._serve(*started)
        finally:
            self._listener.close()
            if self._workers is not None:
                await self._workers.stop()
            if self._queue is not None:
                await self._queue.stop()
            await self._client.stop()
            await asyncio.to_thread(self._responses.close)
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
        return self._exit_code

    async def _start(self) -> tuple[Ready, Tokenizer] | None:
        """None if a signal came before the model was loaded."""
        opening = asyncio.to_thread(open_tokenizer, self._source, self._config)
        self._starting = asyncio.gather(self._client.start(), opening)
        try:
            started = await self._starting
        except asyncio.CancelledError:
            return None
        finally:
            self._starting = None
        for name, path in self._config.adapters:  # what is wrong with one is said now
            found = await self._client.load_adapter(AdapterFolder(name, path))
            if "error" in found:
                raise QuireError(f"--lora {name}: {found['error']}")
        return started

    async def _serve(self, ready: Ready, tokenizer: Tokenizer) -> None:
        config = self._config
        if config.http_workers > 1:
            self._workers = WorkerHub(config, self._listener, self._give_up)
        hub = self._workers
        counts = None if hub is None else hub.counts
        self._service = GenerationService(
            config,
            tokenizer,
            self._client,
            ready,
            self._metrics,
            self._tracing,
            self._responses,
            counts,
            None if hub is None else hub.quotas,
        )
        if self._store is not None:
            self._queue = BatchQueue(self._store, self._service)
            await self._queue.start()
        app = create_app(self._service, self._queue)
        self._server = HttpServer(
            http_settings(config, app, counts, None if hub is None else hub.inner_socket)
        )
        settle()
        if hub is None:
            self._tell_address()
            await self._server.serve(sockets=[self._listener])
            return
        inner = asyncio.create_task(self._server.serve())
        await hub.start(self._service, self._client)
        self._tell_address()
        await hub.wait()
        self._server.should_exit = True
        await inner

    def _tell_address(self) -> None:
        config = self._config
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if config.tls_certificate else "http"
        shown = f"[{host}]" if ":" in host else host
        what = "a page to talk and to watch: /, its API: /docs" if config.page else "its API: /docs"
        logger.info(
            "serving %s at %s://%s:%d (%s)", config.model_names[0], scheme, shown, port, what
        )
        if config.is_public and not config.api_keys:
            logger.warning("anybody who can reach this machine may use the server: set --api-key")

    def _stop(self, which: signal.Signals) -> None:
        """The first signal lets requests end, the second one does not. A terminal that closes may
        hang up twice, from shell and system, which is no impatience.
        """
        if self._starting is not None:
            self._starting.cancel()
            return
        if self._server is None or self._service is None:
            return
        if not self._service.is_draining:
            logger.info(
                "%s: no new requests; those that run have %.0f s to end; another Ctrl-C or SIGTERM ends them at once",
                which.name,
                self._config.drain_seconds,
            )
            self._service.is_draining = True
            self._end()
            asyncio.get_running_loop().call_later(self._config.drain_seconds, self._abort)
        elif which != signal.SIGHUP:
            logger.info("%s again: ending at once", which.name)
            self._exit_code = 128 + which
            self._abort()

    def _abort(self) -> None:
        """Ends all requests; their clients are told, if they listen."""
        self._client.abandon()
        asyncio.get_running_loop().call_later(_LAST_WORDS, self._end_at_once)

    def _end(self) -> None:
        """The server ends when its requests have; with workers, when they have ended."""
        assert self._server is not None
        if self._workers is None:
            self._server.should_exit = True
        else:
            self._workers.drain()

    def _end_at_once(self) -> None:
        assert self._server is not None
        self._server.force_exit = True
        if self._workers is not None:
            self._workers.kill()

    def _give_up(self) -> None:
        """The engine can't be started any more: whoever is there is told so, and the server ends."""
        self._exit_code = 1
        if self._server is not None:
            self._end()
            asyncio.get_running_loop().call_later(_LAST_WORDS, self._abort)


def _folder_limits(config: ServerConfig) -> FolderLimits:
    num_keys = len(set(map(str.strip, config.all_keys)))
    return FolderLimits.of(config.max_batch_bytes, num_keys, config.max_batch_bytes_per_key)


def _bind(config: ServerConfig) -> socket.socket:
    """Before the model is loaded, so that a port in use is known at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        where = f"{config.host}:{config.port}"
        raise QuireError(
            f"can't listen on {where}: {error.strerror}; choose another with --host and --port"
        ) from None
    return listener
