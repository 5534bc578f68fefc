"""From the engine to whoever waits: what it says finds its listener, and what that makes of it is
told once per turn of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from quire.server.errors import ApiError, to_api_error
from quire.server.link import messages
from quire.step import RequestUpdate

logger = logging.getLogger(__name__)


Grow = Callable[[tuple[int, ...], float], None]
"""Told of an answer's new tokens, and when they came."""


NO_OUTPUTS: Mapping[str, list[int]] = MappingProxyType({})


class Listener(Protocol):
    """Whoever waits for a request. Called on the event loop, in the order of events; must not
    block.
    """

    def accepted(self, request_id: str) -> None: ...

    def refused(self, refusal: messages.Refused) -> None: ...

    def started(self, answer_id: str, cached_tokens: int) -> None:
        """An answer left the queue; comes again if it was preempted."""

    def update(self, update: RequestUpdate) -> None: ...

    def grower(self, answer_id: str) -> Grow:
        """`update` for the times when this answer gains tokens and nothing else, which is nearly
        always.
        """

    def fail(self, error: ApiError) -> None:
        """The engine is gone, and the request with it, or an update could not be taken."""


class Listeners:
    """The requests that are under way."""

    def __init__(self) -> None:
        self._listeners: dict[str, Listener] = {}
        """By the request's id."""
        self._unfinished: dict[str, set[str]] = {}
        """Of a request's answers that are not finished."""
        self._requests: dict[str, str] = {}
        """The request's id by the id of an answer."""
        self._grow: dict[str, tuple[Grow, list[int] | None]] = {}
        """Whom to tell of an answer's tokens, and where to keep them, by its id."""
        self._computed: dict[str, Callable[[], None]] = {}
        """Whom to tell of its first ones."""

    def __len__(self) -> int:
        return len(self._listeners)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._listeners

    def add(
        self,
        request_id: str,
        answer_ids: Sequence[str],
        listener: Listener,
        outputs: Mapping[str, list[int]] = NO_OUTPUTS,
        computed: Callable[[], None] | None = None,
    ) -> None:
        """Tokens that an answer gains and nothing else are added to its list in `outputs`, if it
        has one there; the first of them are told by `computed`, too.
        """
        self._listeners[request_id] = listener
        self._unfinished[request_id] = set(answer_ids)
        for answer_id in answer_ids:
            self._requests[answer_id] = request_id
            self._grow[answer_id] = listener.grower(answer_id), outputs.get(answer_id)
            if computed is not None:
                self._computed[answer_id] = computed

    def remove(self, request_id: str) -> Listener | None:
        """Nothing further is heard of it."""
        listener = self._listeners.pop(request_id, None)
        for answer_id in self._unfinished.pop(request_id, ()):
            self._forget(answer_id)
        return listener

    def _forget(self, answer_id: str) -> None:
        del self._requests[answer_id], self._grow[answer_id]
        self._computed.pop(answer_id, None)

    def take(self, event: messages.Updates, abort: Callable[[Sequence[str]], None]) -> None:
        """Tells everybody what is theirs; `abort` ends a request whose listener could not take it."""
        for request_id in event.accepted:
            if request_id in self._listeners:
                self._listeners[request_id].accepted(request_id)
        for refusal in event.refused:
            refused = self.remove(refusal.request_id)
            if refused is not None:
                refused.refused(refusal)
        for answer_id in event.started:
            if answer_id in self._requests:
                self._listeners[self._requests[answer_id]].started(
                    answer_id, event.cached.get(answer_id, 0)
                )
        now = time.monotonic()
        known = self._grow.get
        computed = self._computed
        for answer_id, token_ids in zip(
            event.appended_request_ids, event.appended_token_ids, strict=True
        ):
            answer = known(answer_id)
            if answer is None:
                continue  # whoever waited has left
            if computed and answer_id in computed:
                computed.pop(answer_id)()
            grow, output = answer
            if output is not None:
                output += token_ids
            try:
                grow(token_ids, now)
            except Exception as error:
                self._fail(self._requests[answer_id], error, abort)
        for update in event.updates:
            owner = self._requests.get(update.request_id)
            if owner is None:
                continue  # whoever waited has left
            listener = self._listeners[owner]
            if update.finish_reason is not None:
                self._forget(update.request_id)
                self._unfinished[owner].remove(update.request_id)
                if not self._unfinished[owner]:
                    self.remove(owner)
            try:
                listener.update(update)
            except Exception as error:
                self._fail(owner, error, abort, listener)

    def _fail(
        self,
        owner: str,
        error: Exception,
        abort: Callable[[Sequence[str]], None],
        listener: Listener | None = None,
    ) -> None:
        """A fault in one request's text must not stop the others'."""
        listener = listener or self._listeners[owner]
        logger.error("request %s failed on its way back", owner)
        abort([owner])
        listener.fail(to_api_error(error))

    def fail_all(self, error: ApiError) -> None:
        listeners = list(self._listeners.values())
        self._listeners.clear()
        self._requests.clear()
        self._grow.clear()
        self._computed.clear()
        self._unfinished.clear()
        for listener in dict.fromkeys(listeners):
            try:
                listener.fail(error)
            except Exception:
                logger.exception("somebody who waits could not be told that the engine is gone")


class Connection(Protocol):
    """A client's."""

    def write(self, data: bytes) -> None: ...


class BatchedCallbacks:
    """Runs callbacks in the event loop's next turn, with one handle for all of them; a long row of
    them in several turns, so that others are served in between.

    What they have to write is written when all of them have run: a system call after each would
    drive the interpreter out of the processor's caches, and cost a third more.
    """

    _AT_ONCE = 256

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self.writes: list[tuple[Connection, bytes]] = []
        """For callbacks: what is written at the end of the turn, and where."""

    def add(self, callback: Callable[[], None]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._run)
        self._waiting.append(callback)

    def _run(self) -> None:
        callbacks = self._waiting
        self._waiting = callbacks[self._AT_ONCE :]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._run)
        for callback in callbacks[: self._AT_ONCE]:
            try:
                callback()
            except Exception:
                logger.exception("what has come could not be told")
        writes = self.writes
        self.writes = []
        for connection, data in writes:
            try:
                connection.write(data)
            except Exception:
                logger.exception("what has come could not be written")
