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
from dataclasses import replace
from pathlib import Path

from quire.observe.request_records import RequestRecord
from quire.observe.shared_metrics import Numbers
from quire.process.child import Child
from quire.process.temporary_folders import temporary_folder
from quire.server.config import ServerConfig, encode_config
from quire.server.guard.counts import Counts
from quire.server.guard.quotas import Quotas, limits_by_owner
from quire.server.link.engine_client import Engines
from quire.server.link.messages import AdapterFolder, Drain, WorkerConfig
from quire.server.link.workers.relay import WorkerLink, state_of
from quire.server.service import GenerationService

logger = logging.getLogger(__name__)

_LONGEST_PARENT = 75
"""Bytes; the system takes some 100 for the path of a socket."""
_BACKLOG = 2048
"""Connections that wait to be accepted."""
_LOOK_SECONDS = 0.5
"""Between two looks whether the engine is there, for workers; a request for one that is not is
refused anyway.
"""
_PINGS = 8
"""Without an answer, in `hang_seconds`: then a worker hangs."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_MOST_FAILED_STARTS = 5
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
        self.quotas = Quotas(
            limits_by_owner(config), self.folder / "quotas", 0, config.http_workers + 1
        )
        self._service: GenerationService | None = None
        self._client: Engines | None = None
        self._links: dict[int, WorkerLink] = {}
        self._children: dict[int, Child] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._all_listening = asyncio.Event()
        self._draining = asyncio.Event()

    @property
    def inner_socket(self) -> str:
        """Where the server's own process answers what workers don't."""
        return str(self.folder / "inner")

    async def start(self, service: GenerationService, client: Engines) -> None:
        """Starts the workers; returns when they accept connections."""
        self._service = service
        self._client = client
        service.other_processes = self
        numbers = [Numbers(self.folder / f"numbers-{worker}") for worker in self._workers()]
        service.metrics.show(numbers)
        loop = asyncio.get_running_loop()
        self._listener.listen(_BACKLOG)
        self._tasks = [loop.create_task(self._supervise(worker)) for worker in self._workers()]
        self._tasks += [loop.create_task(self._tell_state()), loop.create_task(self._watch())]
        await self._all_listening.wait()

    def drain(self) -> None:
        """Workers take nobody in any more, and end when their requests have."""
        self._listener.close()
        self._draining.set()
        self._all_listening.set()
        for link in self._listening():
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
        for link in self._links.values():
            link.lost()
        for child in self._children.values():
            await child.end_now(_EXIT_SECONDS)
        self._stack.close()

    async def find_record(self, an_id: str, owner: str | None) -> RequestRecord | None:
        """What a worker knows about a request of this owner."""
        asking = [link.find_record(an_id, owner) for link in self._listening()]
        for found in asyncio.as_completed(asking):
            record = await found
            if record is not None:
                return record
        return None

    async def newest_records(self, count: int, owner: str | None) -> list[RequestRecord]:
        """The last requests that came to any worker."""
        asking = [link.newest_records(count, owner) for link in self._listening()]
        return [record for records in await asyncio.gather(*asking) for record in records]

    async def share_adapters(self, adapters: tuple[AdapterFolder, ...]) -> None:
        """Every worker hears of them; one that is being started finds them in front of its first
        request.
        """
        await asyncio.gather(*(link.tell_adapters(adapters) for link in self._links.values()))

    # Inside

    def _workers(self) -> range:
        return range(1, self._config.http_workers + 1)

    def _listening(self) -> list[WorkerLink]:
        return [link for link in self._links.values() if link.is_listening]

    def _on_listening(self, link: WorkerLink) -> None:
        if self._draining.is_set():
            link.send(Drain())
        if len(self._listening()) == self._config.http_workers:
            self._all_listening.set()

    async def _supervise(self, worker: int) -> None:
        """Keeps a worker running until the server goes down."""
        failed = 0
        pause = _FIRST_PAUSE
        while not self._draining.is_set():
            started = time.monotonic()
            try:
                how = await self._run(worker)
            except OSError as error:
                how = f"it could not be started: {error}"
            link = self._links.pop(worker, None)
            lost = 0 if link is None else link.lost()
            self.counts.clear(worker)
            self.quotas.clear(worker)
            if self._draining.is_set():
                return
            child = self._children.get(worker)
            who = f"HTTP worker {worker}" + (f" (process {child.pid})" if child is not None else "")
            logger.error(
                "%s is gone: %s; %d answers were lost with it; it is started again", who, how, lost
            )
            assert self._service is not None
            self._service.metrics.worker_restarted(lost)
            failed = failed + 1 if link is None or not link.is_listening else 0
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
        client = self._client
        service = self._service
        assert client is not None
        assert client.ready is not None
        assert service is not None
        listener = self._listener.fileno()
        child = Child("quire.server.link.workers.worker", pass_fds=(listener,))
        self._children[worker] = child
        link = WorkerLink(client, service.responses, self._on_listening, child.kill)
        self._links[worker] = link
        await link.open(child.connection)
        adapters = tuple((one.name, one.path) for one in service.adapters.known)
        config = encode_config(replace(self._config, adapters=adapters))
        link.send(WorkerConfig(config, worker, listener, str(self.folder), client.ready))
        return await child.ended()

    async def _watch(self) -> None:
        """Ends workers that hang. Times in which this process did not run itself count for nothing."""
        pause = self._config.hang_seconds / _PINGS
        while True:
            await asyncio.sleep(pause)
            for worker, link in self._links.items():
                if link.is_listening and link.ping() >= _PINGS:
                    logger.error(
                        "HTTP worker %d gave no sign of life for %.0f s", worker, _PINGS * pause
                    )
                    self._children[worker].kill()

    async def _tell_state(self) -> None:
        """Workers hear how the engine is when that changes."""
        assert self._client is not None
        while True:
            state = state_of(self._client)
            for link in self._listening():
                link.tell_state(state)
            await asyncio.sleep(_LOOK_SECONDS)
