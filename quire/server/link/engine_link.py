"""One engine process and the channel to it, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import signal

import msgspec

from quire.errors import EngineError, QuireError
from quire.process.child import Child
from quire.server.config import ServerConfig
from quire.server.guard.quotas import tenant_weights
from quire.server.link.channel import Channel
from quire.server.link.messages import (
    Command,
    EngineProcessConfig,
    Event,
    Fatal,
    Loading,
    Ready,
    decode_event,
    encode,
)
from quire.server.tasks import RunningTimeClock, running

logger = logging.getLogger(__name__)

_MOST_WAITING = 1000
"""Messages that this process may be behind; then the engine waits for it."""
_EXIT_SECONDS = 5.0
_LAST_WORDS = 0.5
_STACKS_SECONDS = 1.0
"""For a hung process to write down where it hangs."""


class EngineLink:
    """Not used again: a new process gets a new one, so nothing late from an old one is ever heard."""

    def __init__(self, config: ServerConfig, clock: RunningTimeClock) -> None:
        self._config = config
        self._clock = clock
        self._child: Child | None = None
        self._channel = Channel(self._take, self._lost)
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()
        """Events that have come and were not received yet."""
        self._broken = asyncio.Event()
        self._fault = ""
        self._last_heard = 0.0

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._child is not None
        return self._child.pid

    async def start(self) -> Ready:
        """Starts the process and waits until it is ready; raises EngineError, or what it says is
        wrong.
        """
        config = self._config
        share = self._config.share
        try:
            self._child = Child(
                config.engine_module, environment=share.environment, leads_group=True
            )
            await self._channel.open(self._child.connection)
        except OSError as error:
            raise EngineError(f"the engine process could not be started: {error}") from error
        first = EngineProcessConfig(
            config.model,
            {**config.engine, **tenant_weights(config)},
            config.log_format,
            config.log_level,
            share.log_name,
            share.block_events,
        )
        self.send_bytes(msgspec.msgpack.encode(first))
        return await self._first_event()

    # Messages

    def send(self, command: Command) -> None:
        """Never blocks, never raises: `broken` tells of a command that could not be sent."""
        try:
            self.send_bytes(encode(command))
        except OSError as error:
            self._break(f"a command could not be sent to it ({type(command).__name__}: {error})")

    def send_bytes(self, data: bytes) -> None:
        self._channel.send(data)

    async def broken(self) -> str:
        """Waits until the connection is of no more use and says why. From then on the two sides may
        disagree on what is running, so neither is the process.
        """
        await self._broken.wait()
        return self._fault

    async def receive(self) -> Event:
        return _decode(await self.receive_bytes())

    def receive_now(self) -> Event | None:
        """What has come already; None if nothing has."""
        return (
            None if self._waiting.empty() else _decode(self._received(self._waiting.get_nowait()))
        )

    async def receive_bytes(self) -> bytes:
        """The next event as it came."""
        return self._received(await self._waiting.get())

    def _received(self, data: bytes) -> bytes:
        if self._waiting.empty():
            self._channel.resume()
        return data

    def _take(self, data: bytes) -> None:
        self._waiting.put_nowait(data)
        if self._waiting.qsize() > _MOST_WAITING:
            self._channel.pause()

    def _lost(self) -> None:
        self._break("its connection is closed")

    def _break(self, fault: str) -> None:
        if not self._broken.is_set():
            self._fault = fault
            self._broken.set()

    # Its end

    async def wait(self) -> str:
        """Waits for the process to end and says how it did."""
        assert self._child is not None
        how = await self._child.ended()
        self._child.kill()  # a compiler that it had started would go on
        return how

    async def kill_hung(self) -> None:
        """Makes the process write down where it hangs, then kills it."""
        assert self._child is not None
        self._child.signal(signal.SIGUSR1)
        await asyncio.sleep(_STACKS_SECONDS)
        self._child.kill()

    async def stop(self) -> None:
        """Ends the process. Can be called at any point; raises nothing."""
        if self._child is None:
            return
        try:
            self._child.kill()
            self._channel.close()  # before the child closes the socket under it
            await self._child.end_now(_EXIT_SECONDS)
        except Exception:
            logger.exception("the engine process could not be left behind cleanly")

    # Its start

    async def _first_event(self) -> Ready:
        self._last_heard = self._clock.now
        async with running(self._ready_or_fatal(), self.wait(), self._watch_start()) as (
            receiving,
            exiting,
            watching,
        ):
            if not receiving.done() and watching.done():
                await self.kill_hung()
                raise EngineError(watching.result())
            if not receiving.done():  # its last words may be on their way
                await asyncio.wait((receiving,), timeout=_LAST_WORDS)
            if not receiving.done():
                raise EngineError(
                    f"the engine process did not start: {exiting.result()}; its log is above"
                )
            event = receiving.result()
        if isinstance(event, Fatal):
            raise QuireError(event.message) if event.is_users_fault else EngineError(event.message)
        assert isinstance(event, Ready)
        return event

    async def _ready_or_fatal(self) -> Event:
        while isinstance(event := await self.receive(), Loading):
            self._last_heard = self._clock.now
        return event

    async def _watch_start(self) -> str:
        while self._clock.now - self._last_heard < self._config.start_seconds:
            await asyncio.sleep(self._clock.interval)
        silent = f"it gave no sign of life for {self._config.start_seconds:g} s while it started"
        return f"{silent}; its stacks are above. If it needs longer, raise --start-timeout"


def _decode(data: bytes) -> Event:
    try:
        return decode_event(data)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the engine process said what can't be read: {error}") from error
