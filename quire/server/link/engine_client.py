"""The HTTP process's side of the engine: requests go down, what becomes of them comes back, and an
engine that dies or hangs is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from quire.errors import QuireError
from quire.observe.prometheus import ServerMetrics
from quire.observe.step_log import StepSummary, describe_steps
from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.link import messages
from quire.server.link.channel import Tickets
from quire.server.link.engine_link import EngineLink, unreadable
from quire.server.link.listeners import NO_OUTPUTS, Listeners
from quire.server.link.listeners import Listener as Listener
from quire.server.tasks import RunningTimeClock, running

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "failed", "stopped"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_MOST_FAILED_STARTS = 5
_LAST_STEPS = 20
_DESCRIBE_SECONDS = 5.0
_LOAD_SECONDS = 120.0
"""For an adapter to be read."""
_LAST_WORDS = 0.5
_UPDATES_AT_ONCE = 2048
"""Taken in before they are told: some 10 ms of work."""


class Engines(Protocol):
    """One engine or several, as the rest of the server sees them: `EngineClient`,
    `quire.server.link.replicas.pool`.
    """

    @property
    def state(self) -> State: ...

    @property
    def ready(self) -> messages.Ready | None:
        """What the engines said about themselves."""

    @property
    def engines(self) -> Sequence[EngineClient]:
        """Those that can be watched, each by itself."""

    @property
    def seconds_silent(self) -> float: ...

    @property
    def is_stalled(self) -> bool: ...

    async def start(self) -> messages.Ready: ...

    async def stop(self) -> None: ...

    def abandon(self) -> None: ...

    def add(self, message: messages.AddRequest, listener: Listener) -> None: ...

    def abort(self, request_ids: Sequence[str]) -> None: ...

    def end(self, request_id: str) -> None: ...

    async def describe(self, request_id: str) -> dict[str, Any] | None: ...

    async def load_adapter(self, adapter: messages.AdapterFolder) -> dict[str, Any]:
        """Has an engine read an adapter: what it is, or its `error`."""

    def unload_adapter(self, name: str) -> None: ...

    async def control(self, action: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """Has all engines do something between two steps; raises ApiError if they can't."""


class EngineClient:
    """One engine, whichever process it runs in at the moment."""

    def __init__(
        self, config: ServerConfig, metrics: ServerMetrics, on_failure: Callable[[], None]
    ) -> None:
        """`on_failure` is called when the engine could not be started again and again."""
        self._config = config
        self._metrics = metrics
        self._on_failure = on_failure
        self._link: EngineLink | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._listeners = Listeners()
        self._tickets = Tickets()
        self._clock = RunningTimeClock(min(1.0, config.stall_seconds / 4))
        self._ticking: asyncio.Task[None] | None = None
        self._last_heard = 0.0
        """By that clock."""
        self._owes = False
        """Whether it was silent when its requests were taken from it: then its silence still
        counts.
        """
        self._last_steps: deque[StepSummary] = deque(maxlen=_LAST_STEPS)
        self._on_watched: Callable[[messages.Watched], None] | None = None
        self.number = 0
        """Which of a pool's engines it is."""
        self.state: State = "starting"
        self.ready: messages.Ready | None = None
        """What the engine said about itself, the last time it started."""
        self.weights_version = 0
        """Of the weights that it computes with."""

    # Its life

    async def start(self) -> messages.Ready:
        """Starts the engine and waits until the model is loaded; raises QuireError if that fails."""
        self._ticking = asyncio.create_task(self._clock.run())
        self._link = self._new_link()
        try:
            ready = await self._link.start()
        except BaseException:
            self.state = "stopped"
            await self._link.stop()
            raise
        self._became_ready(ready)
        self._supervisor = asyncio.create_task(self._supervise())
        self._supervisor.add_done_callback(self._ended)
        return ready

    async def stop(self) -> None:
        """Ends the engine process; what is running is lost."""
        self.state = "stopped"
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._ticking is not None:
            self._ticking.cancel()
        if self._link is not None:
            await self._link.stop()
        self.abandon()

    def abandon(self) -> None:
        """Tells everybody who waits that the server is going down."""
        self._lose_all(going_down())

    @property
    def seconds_silent(self) -> float:
        """How long the engine has had work without giving a sign of life, and this process was
        there to hear it.
        """
        return self._clock.now - self._last_heard if self._listeners or self._owes else 0.0

    @property
    def is_stalled(self) -> bool:
        return self.seconds_silent > self._config.stall_seconds

    # Requests

    def add(
        self,
        message: messages.AddRequest,
        listener: Listener,
        outputs: Mapping[str, list[int]] = NO_OUTPUTS,
        computed: Callable[[], None] | None = None,
    ) -> None:
        """Hands a request over. `listener` hears of it from now on, the verdict whether the engine
        takes it first; `outputs` and `computed` as in `Listeners.add`.
        """
        link = self._live_link()
        if not self._listeners and not self._owes:
            self._last_heard = self._clock.now  # an idle engine has nothing to say
        self._listeners.add(message.request_id, message.answer_ids, listener, outputs, computed)
        link.send(message)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Nobody waits for these any more; nothing further is heard of them."""
        live = tuple(request_id for request_id in request_ids if request_id in self._listeners)
        for request_id in live:
            self._listeners.remove(request_id)
        if live and self._link is not None and self.state == "ready":
            self._link.send(messages.Abort(live))

    def end(self, request_id: str) -> None:
        """An answer has come to a stop string. Its metrics come as a last update."""
        self._live_link().send(messages.End(request_id))

    async def describe(self, request_id: str) -> dict[str, Any] | None:
        """What the engine's log says about a request; None if it says nothing (any more).
        TimeoutError: the engine was too busy to say.
        """
        if self._link is None or self.state != "ready":
            return None
        link = self._link
        found: dict[str, Any] | None = await self._tickets.ask(
            lambda ticket: link.send(messages.Describe(ticket, request_id)),
            _DESCRIBE_SECONDS,
        )
        return found

    async def load_adapter(self, adapter: messages.AdapterFolder) -> dict[str, Any]:
        link = self._live_link()
        found: dict[str, Any] | None = await self._tickets.ask(
            lambda ticket: link.send(messages.LoadAdapter(ticket, adapter)), _LOAD_SECONDS
        )
        if found is None:
            raise unavailable()
        return found

    async def control(self, action: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """Has the engine do something between two steps; raises ApiError if it can't."""
        link = self._live_link()
        try:
            found: dict[str, Any] | None = await self._tickets.ask(
                lambda ticket: link.send(messages.Control(ticket, action, arguments)), seconds
            )
        except TimeoutError as error:
            why = f"the engine has not done it within {seconds:g} s; it may do it yet"
            raise ApiError(504, why, code="engine_busy") from error
        if found is None:
            raise unavailable()
        if "error" in found:
            status, field = found["status"], found.get("field")
            code = {400: "invalid_value", 409: "conflict"}.get(status)
            raise ApiError(status, found["error"], field=field, code=code)
        return found

    def order(self, action: str, **arguments: Any) -> None:
        """`control` whose answer nobody waits for."""
        self._live_link().send(messages.Control(0, action, arguments))

    @property
    def process(self) -> object:
        """Another one whenever the engine was started again."""
        return self._link

    def unload_adapter(self, name: str) -> None:
        if self._link is not None and self.state == "ready":
            self._link.send(messages.UnloadAdapter(name))

    def _new_link(self) -> EngineLink:
        """To a process that is to be started."""
        return EngineLink(self._config, self._clock)

    @property
    def engines(self) -> Sequence[EngineClient]:
        """Those that can be watched, each by itself."""
        return (self,)

    def watch(self, listener: Callable[[messages.Watched], None] | None) -> None:
        """Has the engine tell `listener` what it does, and every engine that comes after it; None:
        no more.
        """
        self._on_watched = listener
        if self._link is not None and self.state == "ready":
            self._link.send(messages.Watch(listener is not None))

    def _live_link(self) -> EngineLink:
        if self._link is None or self.state != "ready":
            raise unavailable()
        return self._link

    def _became_ready(self, ready: messages.Ready) -> None:
        self.ready = ready
        self.weights_version = 0
        self._metrics.set_cache(ready.num_blocks, ready.block_size, ready.bytes_per_block)
        self._metrics.memory(ready.memory)
        self.state = "ready"
        self._heard()
        if self._on_watched is not None:
            self.watch(self._on_watched)

    async def _supervise(self) -> None:
        """Serves the engine's events until it is gone, then gets a new one. Ends when that fails
        for good.
        """
        while True:
            assert self._link is not None
            try:
                reason = await self._serve(self._link)
            except Exception as error:
                logger.exception("what the engine says could not be followed")
                reason = one_line(error)
            self.state = "restarting"
            logger.error("the engine process is gone: %s", reason)
            logger.error("its last steps: %s", describe_steps(self._last_steps))
            self._last_steps.clear()
            self._lose_all(
                unavailable("the engine failed while computing this request; it is being restarted")
            )
            await self._link.stop()
            self._metrics.restarted()
            if not await self._restart():
                logger.error(
                    "the engine could not be started %d times; giving up", _MOST_FAILED_STARTS
                )
                return

    async def _restart(self) -> bool:
        """Tries until there is an engine again, whatever was in the way: memory, descriptors,
        folders may come back.
        """
        pause = _FIRST_PAUSE
        for _ in range(_MOST_FAILED_STARTS):
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)
            try:
                self._link = self._new_link()
                self._became_ready(await self._link.start())
            except Exception as error:
                logger.error("the engine could not be started: %s", one_line(error))
                if self._link is not None:
                    await self._link.stop()
            else:
                return True
        return False

    def _ended(self, supervisor: asyncio.Task[None]) -> None:
        """Without its supervisor, nobody would replace the engine: the server can't go on."""
        if self.state == "stopped" or supervisor.cancelled():
            return
        if (error := supervisor.exception()) is not None:
            logger.error("the engine's supervisor failed", exc_info=error)
        self.state = "failed"
        self._lose_all(unavailable("the engine could not be started again; the server goes down"))
        self._on_failure()

    async def _serve(self, link: EngineLink) -> str:
        """Why the engine is gone."""
        async with running(
            self._watch(link), self._read(link), link.wait(), link.broken()
        ) as tasks:
            _, reading, exiting, breaking = tasks
            # That we killed it is what explains its end. Its last words, if it had any, are a
            # better explanation than its exit code, and that is a better one than our not reaching
            # it.
            if not exiting.done() and breaking.done():
                await asyncio.wait((exiting,), timeout=_LAST_WORDS)
            if not reading.done() and exiting.done():
                await asyncio.wait((reading,), timeout=_LAST_WORDS)
            return str(next(task for task in tasks if task.done()).result())

    async def _read(self, link: EngineLink) -> str:
        while True:
            data: bytes | None = await link.receive()
            num_updates = 0
            while data is not None:
                try:
                    event = messages.decode_event(data)
                except msgspec.MsgspecError as error:
                    raise unreadable(error) from error
                self._heard()
                if isinstance(event, messages.Fatal):
                    return event.message
                if isinstance(event, messages.Updates):
                    self._take_updates(event)
                    num_updates += len(event.appended_request_ids) + len(event.updates)
                elif isinstance(event, messages.Described):
                    self._tickets.answer(event.ticket, event.record)
                elif isinstance(event, messages.Watched) and self._on_watched is not None:
                    self._on_watched(event)
                # If this process lags, several steps are taken in at once and told together.
                data = link.receive_now() if num_updates < _UPDATES_AT_ONCE else None
            # what has come is told before more is looked at, and others have their turn
            await asyncio.sleep(0)

    async def _watch(self, link: EngineLink) -> str:
        while True:
            await asyncio.sleep(self._clock.interval)
            self._look_at_silence()
            if self.seconds_silent > self._config.hang_seconds:
                silent = self.seconds_silent
                await link.kill_hung()
                return (
                    f"it had work and gave no sign of life for {silent:.0f} s; its stacks are above"
                )

    def _heard(self) -> None:
        self._last_heard = self._clock.now
        self._owes = False

    def _look_at_silence(self) -> None:
        """Called again and again while there is an engine; whoever has others may do something
        before it is killed.
        """

    def _take_updates(self, event: messages.Updates) -> None:
        # First the blocks: who hears of an answer may send the next prompt, which begins with it.
        if event.blocks_stored or event.blocks_removed:
            self._blocks_changed(event.blocks_stored, event.blocks_removed)
        self._listeners.take(event, self.abort)
        if event.steps:
            self._last_steps.extend(event.steps)
            self._metrics.steps(event.steps, event.num_free_blocks)
        if event.weights_version is not None and self.ready is not None:
            base = self.ready.fingerprint.partition("-w")[0]
            fingerprint = f"{base}-w{event.weights_version}"
            self.ready = msgspec.structs.replace(self.ready, fingerprint=fingerprint)
            self.weights_version = event.weights_version
            self._weights_changed(fingerprint)
        self._metrics.memory(event.memory)

    def _blocks_changed(self, stored: bytes, removed: bytes) -> None:
        """What it has cached, and has no more; told if it was asked to tell that."""

    def _weights_changed(self, fingerprint: str) -> None:
        """What its answers are told apart by from now on."""

    def _lose_all(self, error: ApiError) -> None:
        self._tickets.answer_all(None)
        self._listeners.fail_all(error)


def one_line(error: Exception) -> str:
    """In one line. What is ours says what it is; of others the type tells more than some messages."""
    return str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"


def unavailable(message: str = "the engine is being restarted; try again in a moment") -> ApiError:
    return ApiError(503, message, code="engine_unavailable", retry_after=5.0)


def going_down() -> ApiError:
    return ApiError(503, "the server is going down", code="shutting_down")
