"""The server's side of its HTTP workers: starts them, stands between them and the engine, replaces
those that die.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.observe.request_records import RequestRecord
from quire.observe.shared_metrics import Numbers
from quire.process.child import Child
from quire.process.temporary_folders import temporary_folder
from quire.server.config import ServerConfig
from quire.server.guard.counts import Counts
from quire.server.link.engine_client import Engines
from quire.server.link.workers.messages import Drain, Find, State, WorkerConfig, encode_config
from quire.server.link.workers.relay import WorkerLink
from quire.server.service import GenerationService

logger = logging.getLogger(__name__)

_LONGEST_PARENT = 75
"""Bytes; the system takes some 100 for the path of a socket."""
_BACKLOG = 2048
"""Connections that wait to be accepted."""
_LOOK_SECONDS = 0.2
"""Between two looks whether the engine is there, for workers; a request for one that is not is
refused anyway.
"""
_PINGS = 8
"""Without an answer, in `hang_seconds`: then a worker hangs."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_MOST_FAILED_STARTS = 5
_FIND_SECONDS = 2.0
_EXIT_SECONDS = 5.0


class WorkerHub:
    """All workers of a server. `folder` has their sockets and what they count."""

    def __init__(
        self, config: ServerConfig, listener: socket.socket, on_failure: Callable[[], None]
    ) -> None:
        """`on_failure` is called when a worker could not be started again and again."""
        self._config = config
        self._listener = listener
        self._on_failure = on_failure
        self._stack = contextlib.ExitStack()
        parent = Path(tempfile.gettempdir())
        parent = parent if len(str(parent)) <= _LONGEST_PARENT else Path("/tmp")
        self.folder = self._stack.enter_context(temporary_folder("quire-http-", parent))
        self._counts_path = self.folder / "counts"
        self.counts = Counts(self._counts_path, 0, config.http_workers + 1)
        self._service: GenerationService | None = None
        self._client: Engines | None = None
        self._server: asyncio.Server | None = None
        self._links: dict[int, WorkerLink] = {}
        self._children: dict[int, Child] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._all_listening = asyncio.Event()
        self._draining = asyncio.Event()
        self._num_tickets = 0

    @property
    def inner_socket(self) -> str:
        """Where the server's own process answers what workers don't."""
        return str(self.folder / "inner")

    async def start(self, service: GenerationService, client: Engines) -> None:
        """Starts the workers; returns when they accept connections."""
        self._service, self._client = service, client
        service.find_elsewhere = self.find_record
        numbers = [Numbers(self.folder / f"numbers-{worker}") for worker in self._workers()]
        service.metrics.show(numbers)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: WorkerLink(self, client), str(self.folder / "link")
        )
        self._listener.listen(_BACKLOG)
        self._tasks = [loop.create_task(self._supervise(worker)) for worker in self._workers()]
        self._tasks += [loop.create_task(self._tell_state(client)), loop.create_task(self._watch())]
        await self._all_listening.wait()

    def drain(self) -> None:
        """Workers take nobody in any more, and end when their requests have."""
        self._listener.close()
        self._draining.set()
        self._all_listening.set()
        for link in self._links.values():
            link.send(Drain())

    async def wait(self) -> None:
        """Until all workers have ended, which they do when they are drained."""
        await asyncio.gather(*self._tasks[: self._config.http_workers], return_exceptions=True)

    def kill(self) -> None:
        """Ends them at once."""
        self._draining.set()
        for child in self._children.values():
            child.kill()

    async def stop(self) -> None:
        """Ends what is left of them."""
        self.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in self._children.values():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.ended(), _EXIT_SECONDS)
            child.close()
        if self._server is not None:
            self._server.close()
        self._stack.close()

    async def find_record(self, name: str, owner: str | None) -> RequestRecord | None:
        """What a worker knows about a request of this owner."""
        self._num_tickets += 1
        ticket = self._num_tickets
        future: asyncio.Future[RequestRecord | None] = asyncio.get_running_loop().create_future()
        links = list(self._links.values())
        if not links:
            return None
        missing = len(links)

        def answered(record: RequestRecord | None) -> None:
            nonlocal missing
            missing -= 1
            if not future.done() and (record is not None or not missing):
                future.set_result(record)

        for link in links:
            link.finding[ticket] = answered
            link.send(Find(ticket, name, owner))
        try:
            return await asyncio.wait_for(future, _FIND_SECONDS)
        except TimeoutError:
            return None
        finally:
            for link in links:
                link.finding.pop(ticket, None)

    # For links

    def listening(self, worker: int, link: WorkerLink) -> None:
        self._links[worker] = link
        if self._draining.is_set():
            link.send(Drain())
        if len(self._links) == self._config.http_workers:
            self._all_listening.set()

    def unlinked(self, link: WorkerLink) -> None:
        """Without its link a worker is of no use; its end is noticed by whoever waits for the
        process.
        """
        for worker, one in self._links.items():
            if one is link:
                self._children[worker].kill()

    @property
    def service(self) -> GenerationService:
        assert self._service is not None
        return self._service

    # Inside

    def _workers(self) -> range:
        return range(1, self._config.http_workers + 1)

    async def _supervise(self, worker: int) -> None:
        """Keeps a worker running until the server goes down."""
        failed, pause = 0, _FIRST_PAUSE
        while not self._draining.is_set():
            started = time.monotonic()
            try:
                how = await self._run(worker)
            except OSError as error:
                how = f"it could not be started: {error}"
            link = self._links.pop(worker, None)
            lost = link.lost() if link is not None else 0
            self.counts.clear(worker)
            if self._draining.is_set():
                return
            child = self._children.get(worker)
            who = f"HTTP worker {worker}" + (f" (process {child.pid})" if child is not None else "")
            logger.error(
                "%s is gone: %s; %d answers were lost with it; it is started again", who, how, lost
            )
            self.service.metrics.worker_restarted(lost)
            failed = failed + 1 if link is None else 0
            if failed >= _MOST_FAILED_STARTS:
                logger.error(
                    "HTTP worker %d could not be started %d times; giving up", worker, failed
                )
                self._on_failure()
                return
            pause = (
                _FIRST_PAUSE
                if time.monotonic() - started > 10 * _LONGEST_PAUSE
                else min(_LONGEST_PAUSE, 2 * pause)
            )
            await asyncio.sleep(pause)

    async def _run(self, worker: int) -> str:
        """From a worker's start to its end; how it ended."""
        assert self._client is not None
        assert self._client.ready is not None
        child = self._children[worker] = Child(
            "quire.server.link.workers.worker", pass_fds=(self._listener.fileno(),)
        )
        fields = encode_config(self._config)
        first = WorkerConfig(
            fields, worker, self._listener.fileno(), str(self.folder), self._client.ready
        )
        await child.tell(msgspec.json.encode(first) + b"\n")
        return await child.ended()

    async def _watch(self) -> None:
        """Ends workers that hang. Times in which this process did not run itself count for nothing."""
        pause = self._config.hang_seconds / _PINGS
        while True:
            await asyncio.sleep(pause)
            for worker, link in self._links.items():
                if link.ping() >= _PINGS:
                    logger.error(
                        "HTTP worker %d gave no sign of life for %.0f s", worker, _PINGS * pause
                    )
                    self._children[worker].kill()

    async def _tell_state(self, client: Engines) -> None:
        """Workers hear how the engine is when that changes."""
        while True:
            for link in self._links.values():
                link.tell_state(State(client.state, client.ready))
            await asyncio.sleep(_LOOK_SECONDS)
