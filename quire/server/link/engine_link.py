"""One engine process, from its start to its end, with the channel to it."""

from __future__ import annotations

import asyncio
import logging
import signal

import msgspec

from quire.errors import EngineError, QuireError
from quire.process.child import Child
from quire.server.adapters import slot_memory
from quire.server.config import ServerConfig
from quire.server.guard.quotas import tenant_weights
from quire.server.link.channel import ReadChannel
from quire.server.link.messages import (
    EngineProcessConfig,
    Event,
    Fatal,
    Loading,
    Ready,
    decode_event,
)
from quire.server.tasks import RunningTimeClock, running

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0
_LAST_WORDS = 0.5
_STACKS_SECONDS = 1.0
"""For a hung process to write down where it hangs."""


class EngineLink(ReadChannel):
    """Not used again: a new process gets a new one, so nothing late from an old one is ever heard."""

    def __init__(self, config: ServerConfig, clock: RunningTimeClock) -> None:
        super().__init__()
        self._config = config
        self._clock = clock
        self._child: Child | None = None
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
            await self.open(self._child.connection)
        except OSError as error:
            raise EngineError(f"the engine process could not be started: {error}") from error
        first = EngineProcessConfig(
            config.model,
            {**config.engine, **slot_memory(config), **tenant_weights(config)},
            config.log_format,
            config.log_level,
            share.log_name,
            share.block_events,
        )
        self.send(first)
        return await self._first_event()

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
            self.close()  # before the child closes the socket under it
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
            try:
                event = receiving.result()
            except msgspec.MsgspecError as error:
                raise unreadable(error) from error
        if isinstance(event, Fatal):
            raise QuireError(event.message) if event.is_users_fault else EngineError(event.message)
        assert isinstance(event, Ready)
        return event

    async def _ready_or_fatal(self) -> Event:
        while isinstance(event := decode_event(await self.receive()), Loading):
            self._last_heard = self._clock.now
        return event

    async def _watch_start(self) -> str:
        while self._clock.now - self._last_heard < self._config.start_seconds:
            await asyncio.sleep(self._clock.interval)
        silent = f"it gave no sign of life for {self._config.start_seconds:g} s while it started"
        return f"{silent}; its stacks are above. If it needs longer, raise --start-timeout"


def unreadable(error: msgspec.MsgspecError) -> EngineError:
    return EngineError(f"the engine process said what can't be read: {error}")
