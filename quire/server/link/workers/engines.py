"""The engine and the stored responses as a worker sees them: at the other end of its channel, where
the server's own process has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.link import messages
from quire.server.link.channel import Channel, Tickets
from quire.server.link.engine_client import State, unavailable
from quire.server.link.listeners import Listener, Listeners
from quire.server.stored.store import ResponseStore, StoredResponse, StoreLimits

_STORE_SECONDS = 30.0


class RemoteEngines(Channel):
    """What `EngineClient` is to the server's own process."""

    def __init__(self, ready: messages.Ready) -> None:
        super().__init__(self._receive, self._set_lost)
        self.state: State = "ready"
        self.ready: messages.Ready | None = ready
        self.on_drain: Callable[[], None] = lambda: None
        self.on_find: Callable[[str, str | None], dict[str, Any] | None] = lambda *_: None
        self.on_newest: Callable[[int, str | None], list[dict[str, Any]]] = lambda *_: []
        self.on_adapters: Callable[[tuple[messages.AdapterFolder, ...]], None] = lambda _: None
        self.lost = asyncio.get_running_loop().create_future()
        """Done when the channel is closed."""
        self._loop = asyncio.get_running_loop()
        self._listeners = Listeners()
        self._tickets = Tickets()

    # What calls ask (`EngineClient` has the same)

    def add(self, message: messages.AddRequest, listener: Listener) -> None:
        if self.state != "ready":
            raise unavailable()
        self._listeners.add(message.request_id, message.answer_ids, listener)
        self.send(message)

    def abort(self, request_ids: Sequence[str]) -> None:
        live = tuple(request_id for request_id in request_ids if request_id in self._listeners)
        for request_id in live:
            self._listeners.remove(request_id)
        if live:
            self.send(messages.Abort(live))

    def end(self, request_id: str) -> None:
        if self.state != "ready":
            raise unavailable()
        self.send(messages.End(request_id))

    # What the store asks, from a thread

    def ask(self, question: messages.Store | messages.Recall) -> bytes | None:
        """Waits for the answer; not on the event loop."""
        asking = self._tickets.ask(
            lambda ticket: self.send(messages.Ask(ticket, question)), _STORE_SECONDS
        )
        return cast(bytes | None, asyncio.run_coroutine_threadsafe(asking, self._loop).result())

    @property
    def is_on_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    # What the server's process says

    def _receive(self, data: bytes) -> None:
        message = messages.decode_to_worker(data)
        match message:
            case messages.Updates():
                self._listeners.take(message, self.abort)
            case messages.Failed():
                listener = self._listeners.remove(message.request_id)
                if listener is not None:
                    listener.fail(
                        ApiError(
                            message.status,
                            message.message,
                            type=message.kind,
                            field=message.field,
                            code=message.code,
                            retry_after=message.retry_after,
                        )
                    )
            case messages.EngineState():
                self.state = cast(State, message.state)
                self.ready = message.ready or self.ready
            case messages.Answer():
                self._tickets.answer(message.ticket, message.value)
            case messages.Ask(question=messages.Find(an_id, owner)):
                self.send(messages.Answer(message.ticket, self.on_find(an_id, owner)))
            case messages.Ask(question=messages.Newest(count, owner)):
                self.send(messages.Answer(message.ticket, self.on_newest(count, owner)))
            case messages.Ask(question=messages.Adapters(adapters)):
                self.on_adapters(adapters)
                self.send(messages.Answer(message.ticket))
            case messages.Ask():
                self.send(messages.Answer(message.ticket))
            case messages.Drain():
                self.on_drain()

    def _set_lost(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


class RemoteStore(ResponseStore):
    """Asks for every response; who reads one has to be in a thread."""

    is_remote = True

    def __init__(self, config: ServerConfig, engines: RemoteEngines) -> None:
        super().__init__(
            StoreLimits(config.stored_responses, config.stored_bytes, config.stored_seconds)
        )
        self._engines = engines

    def put(self, stored: StoredResponse) -> None:
        """In a thread, it is kept when this returns; on the event loop (nobody waits: the client
        has left, or is told of an error), it will be.
        """
        question = messages.Store(msgspec.json.encode(stored))
        if self._engines.is_on_loop:
            self._engines.send(messages.Ask(0, question))
        else:
            self._engines.ask(question)

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        return self._recall(messages.Recall(owner, response_id))

    def holder_of(self, owner: str, item_id: str) -> StoredResponse | None:
        return self._recall(messages.Recall(owner, item_id=item_id))

    def _recall(self, question: messages.Recall) -> StoredResponse | None:
        data = self._engines.ask(question)
        return None if data is None else msgspec.json.decode(data, type=StoredResponse)

    def delete(self, owner: str, response_id: str) -> bool:
        raise NotImplementedError("responses are deleted by the server's own process")
