"""One worker's requests on their way to the engine and back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

import msgspec

from quire.observe.request_records import RequestRecord
from quire.server.errors import ApiError
from quire.server.link import messages
from quire.server.link.engine_client import Engines
from quire.server.link.workers.messages import (
    Add,
    Failed,
    Found,
    Frames,
    FromWorker,
    Listening,
    Ping,
    Pong,
    Recall,
    Recalled,
    State,
    Store,
    ToWorker,
    decode_from_worker,
    frame,
)
from quire.server.listeners import Grow
from quire.server.service import GenerationService
from quire.server.stored.store import StoredResponse
from quire.server.tasks import NextTurn
from quire.step import RequestUpdate

logger = logging.getLogger(__name__)

_MOST_UNREAD = 64 * 2**20
"""Bytes. A worker that does not read so much is stuck; it is ended, and with it its requests."""


class Hub(Protocol):
    """Whom a link belongs to."""

    @property
    def service(self) -> GenerationService: ...

    def listening(self, worker: int, link: WorkerLink) -> None: ...

    def unlinked(self, link: WorkerLink) -> None: ...


class WorkerLink(asyncio.Protocol):
    """The connection of one worker. What the engine says in one turn goes out in one message."""

    def __init__(self, hub: Hub, client: Engines) -> None:
        self._hub = hub
        self._client = client
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._requests: dict[str, _Request] = {}
        self._out = messages.Updates()
        self._is_due = False
        self._next_turn = NextTurn()
        self._last_state: State | None = None
        self._num_unanswered = 0
        self.finding: dict[int, Callable[[RequestRecord | None], None]] = {}
        """Who waits for the answer to a `Find`, by ticket."""

    def send(self, message: ToWorker) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frame(message))
        if self._transport.get_write_buffer_size() > _MOST_UNREAD:
            logger.error("an HTTP worker does not read what the engine says; it is ended")
            self._transport.abort()

    def tell_state(self, state: State) -> None:
        if state != self._last_state:
            self._last_state = state
            self.send(state)

    def ping(self) -> int:
        """Asks for a sign of life; how many times that has been done in vain."""
        self._num_unanswered += 1
        self.send(Ping())
        return self._num_unanswered - 1

    def lost(self) -> int:
        """The worker is gone: nobody waits for its requests any more. How many answers they would
        have had.
        """
        requests, self._requests = self._requests, {}
        if self._transport is not None:
            self._transport.abort()
        self._client.abort(tuple(requests))
        for answered in self.finding.values():
            answered(None)
        return sum(one.num_unfinished for one in requests.values())

    # asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._hub.unlinked(self)

    def data_received(self, data: bytes) -> None:
        for one in self._frames.feed(data):
            self._take(decode_from_worker(one))

    # From the worker

    def _take(self, message: FromWorker) -> None:
        match message:
            case Listening():
                self._hub.listening(message.worker, self)
                self.tell_state(State(self._client.state, self._client.ready))
            case Add():
                self._add(message)
            case messages.Abort():
                for request_id in message.request_ids:
                    self._requests.pop(request_id, None)
                self._client.abort(message.request_ids)
            case messages.End():
                with contextlib.suppress(ApiError):  # the engine is gone, as its listener hears
                    self._client.end(message.name)
            case Pong():
                self._num_unanswered = 0
            case Found():
                answered = self.finding.pop(message.ticket, None)
                if answered is not None:
                    answered(None if message.record is None else RequestRecord(**message.record))
            case Store():
                self._hub.service.responses.put(
                    msgspec.json.decode(message.response, type=StoredResponse)
                )
                self.send(Recalled(message.ticket, None))
            case Recall():
                self._recall(message)

    def _add(self, message: Add) -> None:
        request_id = message.request.request_id
        listener = self._requests[request_id] = _Request(self, request_id, len(message.names))
        try:
            self._client.add(message.request, message.names, listener)
        except ApiError as error:
            listener.fail(error)

    def _recall(self, message: Recall) -> None:
        store = self._hub.service.responses
        if message.response_id is not None:
            found = store.get(message.owner, message.response_id)
        else:
            found = store.holder_of(message.owner, message.item_id or "")
        self.send(Recalled(message.ticket, None if found is None else msgspec.json.encode(found)))

    # From the engine

    def news(self) -> messages.Updates:
        """What goes out in this turn."""
        if not self._is_due:
            self._is_due = True
            self._next_turn.add(self._flush)
        return self._out

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def fail(self, failed: Failed) -> None:
        """A request is lost; what was said of it before goes first."""
        self._flush()
        self.send(failed)

    def _flush(self) -> None:
        if self._is_due:
            self._is_due = False
            out, self._out = self._out, messages.Updates()
            self.send(out)


class _Request:
    """Listens for one request of a worker."""

    def __init__(self, link: WorkerLink, request_id: str, num_answers: int) -> None:
        self._link = link
        self._request_id = request_id
        self.num_unfinished = num_answers
        self._told_in: messages.Updates | None = None
        """The last message with an update of it: tokens that come after that, in the same one, must
        not go first.
        """

    def accepted(self, request_id: str) -> None:
        self._link.news().accepted.append(request_id)

    def refused(self, refusal: messages.Refused) -> None:
        self._link.news().refused.append(refusal)
        self._link.forget(self._request_id)

    def started(self, name: str, cached_tokens: int) -> None:
        news = self._link.news()
        news.started.append(name)
        news.cached[name] = cached_tokens

    def update(self, update: RequestUpdate) -> None:
        self._told_in = news = self._link.news()
        news.updates.append(update)
        if update.finish_reason is not None:
            self.num_unfinished -= 1
            if not self.num_unfinished:
                self._link.forget(self._request_id)

    def grower(self, name: str) -> Grow:
        return partial(self._grow, name)

    def _grow(self, name: str, token_ids: tuple[int, ...], now: float) -> None:
        news = self._link.news()
        if self._told_in is news:
            news.updates.append(RequestUpdate(name, token_ids))
        else:
            news.grown.append(name)
            news.grown_ids.append(token_ids)

    def fail(self, error: ApiError) -> None:
        self._link.forget(self._request_id)
        self._link.fail(Failed.of(self._request_id, error))
