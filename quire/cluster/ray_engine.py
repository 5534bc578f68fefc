"""An engine process on any machine of a Ray cluster, through an actor that stands beside it.

The actor starts the same process that a server on one machine starts, and passes messages on as
they are: msgpack in both directions. When the actor dies, or its machine, the process ends with it,
and the client hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any

import msgspec
import ray
import ray.actor
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.errors import EngineError, QuireError
from quire.server.config import ServerConfig
from quire.server.link.engine_link import EngineLink
from quire.server.link.messages import Fatal, Ready, decode_event, encode
from quire.server.tasks import RunningTimeClock

logger = logging.getLogger(__name__)

_STOP_SECONDS = 10.0
_WAITING_MESSAGES = 1000
"""Then the engine waits for whoever reads them."""


class EngineActor:
    """Runs on the machine of an engine."""

    def __init__(self, config: ServerConfig) -> None:
        self._clock = RunningTimeClock(1.0)
        self._link = EngineLink(config, self._clock)
        self._messages: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> tuple[bytes, str]:
        """What the engine says about itself when it is ready; or an error of the user's, which Ray
        must not wrap.
        """
        self._tasks.append(asyncio.create_task(self._clock.run()))
        try:
            ready = await self._link.start()
        except EngineError:
            raise
        except QuireError as error:
            return b"", str(error)
        self._tasks += [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        return encode(ready), ""

    async def send(self, data: bytes) -> None:
        self._link.send_bytes(data)

    async def receive(self) -> list[bytes]:
        """All messages that have come since the last call; waits for one."""
        await self._arrived.wait()
        self._arrived.clear()
        found = list(self._messages)
        self._messages.clear()
        self._room.set()
        return found

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._link.stop()

    async def pid(self) -> int:
        """The engine's process."""
        return self._link.pid

    async def _read(self) -> None:
        while True:
            while len(self._messages) >= _WAITING_MESSAGES:
                self._room.clear()
                await self._room.wait()
            self._tell(await self._link.receive())

    async def _watch(self) -> None:
        reason = await self._link.wait()
        await asyncio.sleep(0.2)  # its last words explain more
        self._tell(encode(Fatal(reason)))

    def _tell(self, data: bytes) -> None:
        self._messages.append(data)
        self._arrived.set()


class RayLink(EngineLink):
    """The client's end: one actor, in a placement group of its own, from its start to its end."""

    def __init__(
        self,
        config: ServerConfig,
        clock: RunningTimeClock,
        bundle: dict[str, float],
        schedule_seconds: float,
    ) -> None:
        super().__init__(config, clock)
        self._bundle = bundle
        self._schedule_seconds = schedule_seconds
        self._group: PlacementGroup | None = None
        self._actor: Any = None
        self._inbox: deque[bytes] = deque()
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> Ready:
        # All on one machine: the ranks of an engine share its memory.
        self._group = placement_group([self._bundle], strategy="STRICT_PACK")
        try:
            await asyncio.wait_for(_awaited(self._group.ready()), self._schedule_seconds)
        except TimeoutError:
            needed = ", ".join(f"{amount:g} {name}" for name, amount in self._bundle.items())
            raise EngineError(
                f"no machine of the cluster had room for an engine ({needed}) within {self._schedule_seconds:g} s"
            ) from None
        where = PlacementGroupSchedulingStrategy(self._group)
        options = {"num_cpus": self._bundle.get("CPU", 0), "num_gpus": self._bundle.get("GPU", 0)}
        remote = ray.remote(EngineActor).options(
            scheduling_strategy=where, max_concurrency=1000, **options
        )
        try:
            self._actor = remote.remote(self._config)
            ready, refusal = await _awaited(self._actor.start.remote())
        except ray.exceptions.RayError as error:
            raise EngineError(f"the engine's actor did not start: {_first_line(error)}") from error
        if refusal:
            raise QuireError(refusal)
        event = decode_event(ready)
        assert isinstance(event, Ready)
        return event

    async def receive(self) -> bytes:
        """The next message."""
        while not self._inbox:
            try:
                self._inbox.extend(await _awaited(self._actor.receive.remote()))
            except ray.exceptions.RayError as error:
                if not self._gone.done():
                    self._gone.set_result(f"its actor is gone: {_first_line(error)}")
                await asyncio.Event().wait()
        return self._inbox.popleft()

    def receive_now(self) -> bytes | None:
        return self._inbox.popleft() if self._inbox else None

    def send(self, message: msgspec.Struct) -> None:
        """One after the other: an actor takes the calls of one caller in their order."""
        if self._actor is not None:
            self._actor.send.remote(encode(message))

    async def wait(self) -> str:
        return await asyncio.shield(self._gone)

    async def kill_hung(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)

    async def stop(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                await asyncio.wait_for(_awaited(self._actor.stop.remote()), _STOP_SECONDS)
            with contextlib.suppress(Exception):  # it may be gone already
                ray.kill(self._actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._group)
        self._gone.cancel()


async def _awaited(reference: Any) -> Any:
    return await reference


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
