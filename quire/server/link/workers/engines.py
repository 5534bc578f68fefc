"""The engine as a worker sees it: at the other end of a socket, behind the server's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from quire.server.link import messages
from quire.server.link.engine_client import State, unavailable
from quire.server.link.workers import messages as wire
from quire.server.link.workers.messages import Frames, FromWorker, ToWorker, decode_to_worker, frame
from quire.server.listeners import Listener, Listeners

_STORE_SECONDS = 30.0


class RemoteEngines(asyncio.Protocol):
    """What `EngineClient` is to the server's own process. Also the way to what else there is one
    of.
    """

    def __init__(self, ready: messages.Ready) -> None:
        self.state: State = "ready"
        self.ready: messages.Ready | None = ready
        self.on_drain: Callable[[], None] = lambda: None
        self.on_find: Callable[[str, str | None], dict[str, Any] | None] = lambda *_: None
        self.lost = asyncio.get_running_loop().create_future()
        """Done when the connection is gone."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = Frames()
        self._listeners = Listeners()
        self._tickets: dict[int, asyncio.Future[bytes | None]] = {}
        self._num_tickets = 0

    def send(self, message: FromWorker) -> None:
        if self._transport is not None:
            self._transport.write(frame(message))

    # What calls ask (`EngineClient` has the same)

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
        self._num_tickets += 1
        ticket = self._num_tickets
        future: asyncio.Future[bytes | None] = self._loop.create_future()
        self._tickets[ticket] = future
        self.send(make(ticket))
        try:
            return await future
        finally:
            del self._tickets[ticket]

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
            case wire.Recalled():
                future = self._tickets.get(message.ticket)
                if future is not None and not future.done():
                    future.set_result(message.response)
            case wire.Ping():
                self.send(wire.Pong())
            case wire.Find():
                self.send(wire.Found(message.ticket, self.on_find(message.name, message.owner)))
            case wire.Drain():
                self.on_drain()
