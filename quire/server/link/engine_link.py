"""One engine process and the two sockets to it, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from pathlib import Path

import msgspec
import zmq

from quire.errors import EngineError, QuireError
from quire.process.child import Child
from quire.process.temporary_folders import temporary_folder
from quire.server.config import ServerConfig
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
from quire.server.tasks import AttendedClock, running

logger = logging.getLogger(__name__)

_DESCRIPTORS = 32
"""More than a process and its sockets need. Without them libzmq would end us rather than say so."""
_LONGEST_PARENT = 75
"""Bytes; the system takes some 100 for the path of a socket."""
_EXIT_SECONDS = 5.0
_STACKS_SECONDS = 1.0
"""For a hung process to write down where it hangs."""


class EngineLink:
    """Not used again: a new process gets a new one, so nothing late from an old one is ever heard."""

    def __init__(self, config: ServerConfig, clock: AttendedClock) -> None:
        self._config = config
        self._clock = clock
        self._child: Child | None = None
        self._folder = contextlib.ExitStack()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._commands: zmq.Socket[bytes] | None = None
        self._events: zmq.Socket[bytes] | None = None
        self._readable: asyncio.Future[None] | None = None
        """Of who waits for an event."""
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
        try:
            await self._start()
        except (OSError, zmq.ZMQError) as error:
            raise EngineError(f"the engine process could not be started: {error}") from error
        return await self._first_event()

    async def _start(self) -> None:
        config = self._config
        _check_descriptors()
        # For this user alone, and so are the sockets in it. Their paths must not be long.
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) > _LONGEST_PARENT:
            parent = Path("/tmp")
        folder = self._folder.enter_context(temporary_folder("quire-", parent))
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._commands.set_hwm(0)  # bounded by admission: as many as there are requests
        self._events = self._context.socket(zmq.PULL)
        self._events.set_hwm(1000)
        commands, events = (f"ipc://{folder}/{name}" for name in ("commands", "events"))
        self._commands.bind(commands)
        self._events.bind(events)
        asyncio.get_running_loop().add_reader(self._events.fileno(), self._is_readable)
        share = config.share
        self._child = Child(config.engine_module, environment=share.environment, leads_group=True)
        first = EngineProcessConfig(
            config.model,
            config.engine,
            commands,
            events,
            config.log_format,
            config.log_level,
            share.log_name,
            share.block_events,
        )
        await self._child.tell(msgspec.json.encode(first) + b"\n")

    async def receive(self) -> Event:
        return _decode(await self.receive_bytes())

    def receive_now(self) -> Event | None:
        """What has come already; None if nothing has."""
        data = self._bytes_now()
        return None if data is None else _decode(data)

    async def receive_bytes(self) -> bytes:
        """The next event as it came. (zmq.asyncio does the same in several turns of the event
        loop.)
        """
        while (data := self._bytes_now()) is None:
            # The socket's descriptor tells of what comes from now on, since nothing was left.
            self._readable = asyncio.get_running_loop().create_future()
            try:
                await self._readable
            finally:
                self._readable = None
        return data

    def _bytes_now(self) -> bytes | None:
        assert self._events is not None
        try:
            return self._events.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _is_readable(self) -> None:
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)

    def send(self, command: Command) -> None:
        """Never blocks, never raises: `broken` tells of a command that could not be sent."""
        assert self._commands is not None
        try:
            self._commands.send(encode(command), zmq.NOBLOCK)
        except (zmq.ZMQError, OSError) as error:
            self._fault = f"{type(command).__name__}: {error}"
            self._broken.set()

    async def broken(self) -> str:
        """Waits for a command that can't be sent and says which. From then on the two sides may
        disagree on what is running, so the process is of no more use.
        """
        await self._broken.wait()
        return f"a command could not be sent to it ({self._fault})"

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
        """Ends the process and closes the sockets. Can be called at any point; raises nothing."""
        for what in (self._end_process, self._close_sockets):
            try:
                await what()
            except Exception:
                logger.exception("the engine process could not be left behind cleanly")
        self._folder.close()

    async def _end_process(self) -> None:
        if self._child is not None:
            self._child.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._child.ended(), _EXIT_SECONDS)
            self._child.close()

    async def _close_sockets(self) -> None:
        if self._context is not None:
            if self._events is not None:
                asyncio.get_running_loop().remove_reader(self._events.fileno())
                self._events.close(linger=0)
            self._context.destroy(linger=0)
            self._context = self._commands = self._events = None

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
                await asyncio.wait((receiving,), timeout=0.5)
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


def _check_descriptors() -> None:
    """Raises OSError if there are too few left."""
    opened: list[int] = []
    try:
        opened.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(_DESCRIPTORS))
    finally:
        for one in opened:
            os.close(one)
