"""The server's end of the channel to one worker: its requests on their way to the engine and back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from quire.observe.request_records import RequestRecord
from quire.server.errors import ApiError
from quire.server.link import messages
from quire.server.link.channel import Channel, Tickets
from quire.server.link.engine_client import Engines
from quire.server.link.listeners import BatchedCallbacks, Grow
from quire.server.stored.store import ResponseStore, StoredResponse
from quire.step import RequestUpdate

logger = logging.getLogger(__name__)

_MOST_UNREAD = 64 * 2**20
"""Bytes. A worker that does not read so much is stuck; it is ended, and with it its requests."""
_FIND_SECONDS = 2.0


class WorkerLink(Channel):
    """What the engine says in one turn goes out in one message."""

    def __init__(
        self,
        client: Engines,
        store: ResponseStore,
        on_listening: Callable[[WorkerLink], None],
        on_lost: Callable[[], None],
    ) -> None:
        """`on_lost` is called when the channel is closed: without it a worker is of no use."""
        super().__init__(self._receive, on_lost)
        self._client = client
        self._store = store
        self._on_listening = on_listening
        self._requests: dict[str, _Request] = {}
        self.out = messages.Updates()
        """What goes out in this turn."""
        self.is_due = False
        self._callbacks = BatchedCallbacks()
        self._last_state: messages.EngineState | None = None
        self._num_unanswered = 0
        self._tickets = Tickets()
        self.is_listening = False

    def send(self, message: msgspec.Struct) -> None:
        super().send(message)
        if self.num_unread > _MOST_UNREAD:
            logger.error("an HTTP worker does not read what the engine says; it is ended")
            self.close()

    def tell_state(self, state: messages.EngineState) -> None:
        """If it is another one than the worker knows."""
        if state != self._last_state:
            self._last_state = state
            self.send(state)

    def ping(self) -> int:
        """Asks for a sign of life; how many times that has been done in vain."""
        self._num_unanswered += 1
        self.send(messages.Ask(0, messages.Ping()))
        return self._num_unanswered - 1

    async def find_record(self, an_id: str, owner: str | None) -> RequestRecord | None:
        """What the worker knows about a request of this owner."""
        found = await self._ask(messages.Find(an_id, owner))
        return None if found is None else RequestRecord(**found)

    async def newest_records(self, count: int, owner: str | None) -> list[RequestRecord]:
        """The last requests that came to the worker."""
        found = await self._ask(messages.Newest(count, owner))
        return [RequestRecord(**one) for one in found or ()]

    async def tell_adapters(self, adapters: tuple[messages.AdapterFolder, ...]) -> None:
        """Returns when the worker knows them; one that does not say so in time hears of them later."""
        await self._ask(messages.Adapters(adapters))

    async def _ask(self, question: messages.Find | messages.Newest | messages.Adapters) -> Any:
        """The worker's answer; None if it does not say in time."""
        try:
            return await self._tickets.ask(
                lambda ticket: self.send(messages.Ask(ticket, question)), _FIND_SECONDS
            )
        except TimeoutError:
            return None

    def lost(self) -> int:
        """The worker is gone: nobody waits for its requests any more. How many answers they would
        have had.
        """
        requests = self._requests
        self._requests = {}
        self.close()
        self._client.abort(tuple(requests))
        self._tickets.answer_all(None)
        return sum(one.num_unfinished for one in requests.values())

    # From the worker

    def _receive(self, data: bytes) -> None:
        message = messages.decode_from_worker(data)
        match message:
            case messages.Listening():
                self.is_listening = True
                self.tell_state(state_of(self._client))
                self._on_listening(self)
            case messages.AddRequest():
                self._add(message)
            case messages.Abort():
                for request_id in message.request_ids:
                    self._requests.pop(request_id, None)
                self._client.abort(message.request_ids)
            case messages.End():
                with contextlib.suppress(ApiError):  # the engine is gone, as its listener hears
                    self._client.end(message.request_id)
            case messages.Answer():
                self._num_unanswered = 0
                self._tickets.answer(message.ticket, message.value)
            case messages.Ask():
                self.send(messages.Answer(message.ticket, self._answer(message.question)))

    def _add(self, message: messages.AddRequest) -> None:
        request_id = message.request_id
        listener = self._requests[request_id] = _Request(self, request_id, len(message.answer_ids))
        try:
            self._client.add(message, listener)
        except ApiError as error:
            listener.fail(error)

    def _answer(self, question: object) -> bytes | None:
        found: StoredResponse | None = None
        match question:
            case messages.Store():
                self._store.put(msgspec.json.decode(question.response, type=StoredResponse))
            case messages.Recall(owner, str(response_id)):
                found = self._store.get(owner, response_id)
            case messages.Recall(owner, None, str(item_id)):
                found = self._store.holder_of(owner, item_id)
        return None if found is None else msgspec.json.encode(found)

    # From the engine

    def news(self) -> messages.Updates:
        """`out`, which goes out."""
        if not self.is_due:
            self.is_due = True
            self._callbacks.add(self._flush)
        return self.out

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def fail(self, request_id: str, error: ApiError) -> None:
        """A request is lost; what was said of it before goes first."""
        self.forget(request_id)
        self._flush()
        self.send(
            messages.Failed(
                request_id,
                error.status,
                error.message,
                error.type,
                error.field,
                error.code,
                error.retry_after,
            )
        )

    def _flush(self) -> None:
        if self.is_due:
            self.is_due = False
            out = self.out
            self.out = messages.Updates()
            self.send(out)


def state_of(client: Engines) -> messages.EngineState:
    return messages.EngineState(client.state, client.ready)


class _Request:
    """Listens for one request of a worker."""

    def __init__(self, link: WorkerLink, request_id: str, num_answers: int) -> None:
        self._link = link
        self._request_id = request_id
        self.num_unfinished = num_answers
        self._last_updates: messages.Updates | None = None
        """The last message with an update of it: tokens that come after that, in the same one, must
        not go first.
        """

    def accepted(self, request_id: str) -> None:
        self._link.news().accepted.append(request_id)

    def refused(self, refusal: messages.Refused) -> None:
        self._link.news().refused.append(refusal)
        self._link.forget(self._request_id)

    def started(self, request_id: str, cached_tokens: int) -> None:
        news = self._link.news()
        news.started.append(request_id)
        news.cached[request_id] = cached_tokens

    def update(self, update: RequestUpdate) -> None:
        self._last_updates = news = self._link.news()
        news.updates.append(update)
        if update.finish_reason is not None:
            self.num_unfinished -= 1
            if not self.num_unfinished:
                self._link.forget(self._request_id)

    def grower(self, request_id: str) -> Grow:
        link = self._link

        def grow(token_ids: tuple[int, ...], now: float) -> None:
            news = link.out
            if not link.is_due:
                link.news()
            if self._last_updates is news:
                news.updates.append(RequestUpdate(request_id, token_ids))
            else:
                news.appended_request_ids.append(request_id)
                news.appended_token_ids.append(token_ids)

        return grow

    def fail(self, error: ApiError) -> None:
        self._link.fail(self._request_id, error)
