"""The engine as a worker sees it: at the other end of a socket, behind the server's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from quire.server import messages
from quire.server.engine_client import State, unavailable
from quire.server.errors import ApiError
from quire.server.listeners import Listener, Listeners
from quire.server.workers import messages as wire
from quire.server.workers.messages import Frames, FromWorker, ToWorker, decode_to_worker, frame

_DESCRIBE_SECONDS = 6.0
_STORE_SECONDS = 30.0


class RemoteEngines(asyncio.Protocol):
    """What `EngineClient` is to the server's own process. Also the way to what else there is one of."""

    def __init__(self, ready: messages.Ready) -> None:
        self.state: State = "ready"
        self.ready: messages.Ready | None = ready
        self.on_drain: Callable[[], None] = lambda: None
        self.on_find: Callable[[str], dict[str, Any] | None] = lambda _: None
        self.lost = asyncio.get_running_loop().create_future()
        """Done when the connection is gone."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = Frames()
        self._listeners = Listeners()
        self._tickets: dict[int, asyncio.Future[Any]] = {}
        self._num_tickets = 0

    def send(self, message: FromWorker) -> None:
        if self._transport is not None:
            self._transport.write(frame(message))

    # What the service asks (`EngineClient` has the same)

    @property
    def seconds_silent(self) -> float:
        return 0.0  # the server's own process watches

    @property
    def is_stalled(self) -> bool:
        return False

    def add(self, message: messages.AddRequest, names: Sequence[str], listener: Listener) -> None:
        if self.state != "ready":
            raise unavailable()
        self._listeners.add(message.request_id, names, listener)
        self.send(wire.Add(message, tuple(names)))

    def abort(self, request_ids: Sequence[str]) -> None:
        live = tuple(request_id for request_id in request_ids if request_id in self._listeners)
        for request_id in live:
            self._listeners.remove(request_id)
        if live:
            self.send(messages.Abort(live))

    def end(self, name: str) -> None:
        if self.state != "ready":
            raise unavailable()
        self.send(messages.End(name))

    async def describe(self, request_id: str, explain: bool = False) -> dict[str, Any] | None:
        ticket, future = self._ticket()
        self.send(messages.Describe(ticket, request_id, explain))
        try:
            found: dict[str, Any] | None = await asyncio.wait_for(future, _DESCRIBE_SECONDS)
        except TimeoutError:
            return None
        return found

    async def start(self) -> messages.Ready:
        """The server's process has started it."""
        assert self.ready is not None
        return self.ready

    async def stop(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Tells everybody who waits that the server is going down."""
        self._listeners.fail_all(ApiError(503, "the server is going down", code="shutting_down"))

    # What the store asks, from a thread

    def ask(self, make: Callable[[int], wire.Store | wire.Recall]) -> bytes | None:
        """Waits for the answer to a question about stored responses; not on the event loop."""
        return asyncio.run_coroutine_threadsafe(self._ask(make), self._loop).result(_STORE_SECONDS)

    @property
    def is_on_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    async def _ask(self, make: Callable[[int], wire.Store | wire.Recall]) -> bytes | None:
        ticket, future = self._ticket()
        self.send(make(ticket))
        answer: bytes | None = await future
        return answer

    def _ticket(self) -> tuple[int, asyncio.Future[Any]]:
        self._num_tickets += 1
        ticket = self._num_tickets
        future = self._tickets[ticket] = self._loop.create_future()
        future.add_done_callback(lambda _: self._tickets.pop(ticket, None))
        return ticket, future

    # asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for one in self._frames.feed(data):
            self._take(decode_to_worker(one))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    # What the server's process says

    def _take(self, message: ToWorker) -> None:
        match message:
            case messages.Updates():
                self._listeners.take(message, self.abort)
            case wire.Failed():
                listener = self._listeners.remove(message.request_id)
                if listener is not None:
                    listener.fail(message.error())
            case wire.State():
                self.state, self.ready = cast(State, message.state), message.ready or self.ready
            case messages.Described():
                self._answer(message.ticket, message.record)
            case wire.Recalled():
                self._answer(message.ticket, message.response)
            case wire.Find():
                self.send(wire.Found(message.ticket, self.on_find(message.name)))
            case wire.Drain():
                self.on_drain()

    def _answer(self, ticket: int, found: Any) -> None:
        future = self._tickets.get(ticket)
        if future is not None and not future.done():
            future.set_result(found)
