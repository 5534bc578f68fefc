"""The HTTP server of one process: uvicorn with this server's limits, and what the process needs for
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from quire.checkpoints.sources import ModelSource
from quire.frontend.tokenizer import Tokenizer
from quire.process.gc_pauses import IdleCollector, share_heaps
from quire.server.config import ServerConfig
from quire.server.guard.counts import Counts
from quire.server.guard.http_protocol import LimitedProtocol, limited_protocol

_GC_THRESHOLDS = (50_000, 20, 50)
_SWITCH_SECONDS = 0.001
"""For which a thread that makes a large answer keeps the interpreter from the event loop; Python's
own are 5 ms.
"""


_SILENCE = 1.0
"""Seconds without requests, after which nobody is expected for as long as it takes to tidy up: some
tens of milliseconds.
"""
_TIDY_INTERVAL = 5.0
_TICK = 1.0


class HttpServer(uvicorn.Server):
    """uvicorn without its own idea of signals, which gives back the memory of what it has answered
    when nobody asks.
    """

    on_started: Callable[[], None] = staticmethod(lambda: None)
    """Called when connections are accepted."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._exiting = asyncio.Event()
        super().__init__(config)
        self._collector = IdleCollector(time.monotonic(), _TIDY_INTERVAL)
        self._last_busy = time.monotonic()
        self._num_answered = self._num_tidied = 0
        """Requests so far, and when it tidied up last."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def should_exit(self) -> bool:
        return self._exiting.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exiting.set()

    async def main_loop(self) -> None:
        """Once a second. uvicorn's own looks ten times a second whether it should exit, in every
        process there is.
        """
        while not await self.on_tick(0):
            self._tidy(time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exiting.wait(), _TICK)

    def _tidy(self, now: float) -> None:
        state = self.server_state
        if state.tasks or state.total_requests != self._num_answered:
            self._last_busy = now
            self._num_answered = state.total_requests
        elif (
            self._num_answered > self._num_tidied
            and now - self._last_busy >= _SILENCE
            and self._collector.is_due(now)
        ):
            self._num_tidied = self._num_answered
            self._collector.collect(now)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        is_own = self.config.ssl is not None and bool(sockets)
        await super().startup([] if is_own else sockets)
        for one in sockets or () if is_own else ():
            # As uvicorn does it, but a handshake that stops is timed out like headers that don't
            # come.
            server = await asyncio.get_running_loop().create_server(
                self.new_protocol,
                sock=one,
                ssl=self.config.ssl,
                backlog=self.config.backlog,
                ssl_handshake_timeout=self.handshake_seconds,
            )
            self.servers.append(server)
        self.on_started()

    @property
    def handshake_seconds(self) -> float | None:
        """For a client's TLS; None without it."""
        if self.config.ssl is None:
            return None
        return cast(type[LimitedProtocol], self.config.http_protocol_class).limits.header_seconds

    def new_protocol(self) -> asyncio.Protocol:
        kind = cast(type[LimitedProtocol], self.config.http_protocol_class)
        return kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


def http_settings(
    config: ServerConfig, app: ASGIApp, counts: Counts | None = None, unix_socket: str | None = None
) -> uvicorn.Config:
    """For the port, whose limits `counts` counts for, or for a socket of this machine, which is
    behind it.
    """
    more: dict[str, Any] = {"ssl_certfile": config.tls_certificate, "ssl_keyfile": config.tls_key}
    return uvicorn.Config(
        app,
        http=limited_protocol(config, counts),
        ws="none",
        lifespan="off",
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        **(more if unix_socket is None else {"uds": unix_socket}),
    )


def prepare_process() -> asyncio.Runner:
    """Before anything is served; with the event loop on which it will be."""
    share_heaps()
    _raise_file_limit()
    sys.setswitchinterval(_SWITCH_SECONDS)
    loop_factory = uvicorn.Config(app="", loop="auto", log_config=None).get_loop_factory()
    return asyncio.Runner(loop_factory=loop_factory)


def settle() -> None:
    """What is here now stays: the collector need not look through it while requests wait. Nor
    through a large body again and again while it is being made: its parts are no garbage yet.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def open_tokenizer(source: ModelSource, config: ServerConfig) -> Tokenizer:
    """A model's tokenizer, if possible without importing torch, which takes seconds and 170 MB."""
    if config.engine.get("skip_tokenizer_init"):
        return Tokenizer.without_text()
    if (source.path / "tokenizer.json").is_file():
        return Tokenizer.from_hf_folder(source.path)
    if source.path.suffix.lower() == ".gguf":
        from quire.checkpoints.gguf_header import read_header

        metadata = read_header(source.path).metadata
        # the engine's process checks the rest of the file
        if metadata.get("split.count", 1) in (0, 1):
            return Tokenizer.from_gguf(metadata)
    from quire import load

    return load.open_tokenizer(source)


def _raise_file_limit() -> None:
    """Every connection is an open file, and the usual limit is meant for programs of another kind."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
