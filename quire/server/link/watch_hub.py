"""Those who watch the engine: one subscription for all of them, and the last ten minutes for
whoever comes later.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from quire.observe.request_records import RecordBook
from quire.server.errors import ApiError
from quire.server.http_responses import named_event
from quire.server.link.engine_client import EngineClient, Engines
from quire.server.link.messages import Watched
from quire.server.link.others import OwnFrames, OwnNames

KEPT_SECONDS = 600.0
_MOST_BYTES = 16 * 2**20
_MOST_WATCHERS = 16
_MOST_WAITING = 100
"""Requests in the queue that are named."""
_GRACE_SECONDS = 5.0
"""For which the engine is watched on when the last watcher has left: pages are loaded again."""
_LOOK_SECONDS = 0.5
"""After which a watcher without news looks whether the server goes down,"""
_ALIVE_LOOKS = 20
"""and after so many looks gets a comment: a connection that is gone shows."""


_FRAME = "frame"


def _message_of(event: bytes) -> dict[str, Any]:
    """What an event was made of."""
    found: dict[str, Any] = msgspec.json.decode(event.partition(b"data: ")[2])
    return found


class _Segment(NamedTuple):
    """Begins with a frame that tells everything: the earliest point from which one can follow."""

    start: int
    """The number of that event."""
    time: float


class WatchHubs:
    """A hub for each engine that somebody wants to see."""

    def __init__(
        self, client: Engines, records: RecordBook, is_closing: Callable[[], bool]
    ) -> None:
        """`is_closing` says whether the server goes down: it waits for connections to end."""
        self._client = client
        self._records = records
        self._is_closing = is_closing
        self._hubs: WeakKeyDictionary[EngineClient, WatchHub] = WeakKeyDictionary()
        """Engines may come and go."""

    def of(self, number: int) -> WatchHub:
        """The hub of one of the engines; raises ApiError if there is none of this number."""
        engines = self._client.engines
        if not 0 <= number < len(engines):
            raise ApiError(
                404,
                f"engine: there are {len(engines)}, counted from 0",
                field="engine",
                code="not_found",
            )
        engine = engines[number]
        if engine not in self._hubs:
            self._hubs[engine] = WatchHub(engine, self._records, self._is_closing)
        return self._hubs[engine]


class WatchHub:
    """Of one engine, of which nothing is asked, and nothing kept, unless somebody watches. All
    watchers read the same events, each at its own pace; one that falls behind what is kept goes on
    where that begins.
    """

    def __init__(
        self, client: EngineClient, records: RecordBook, is_closing: Callable[[], bool]
    ) -> None:
        self._client = client
        self._records = records
        self._events: list[bytes] = []
        self._first = 0
        """The number of the first event that is kept."""
        self._num_bytes = 0
        self._segments: deque[_Segment] = deque()
        self._news = asyncio.Event()
        self._num_watchers = 0
        self._is_watching = False
        self._leaving: asyncio.TimerHandle | None = None
        self._is_closing = is_closing

    def check_room(self) -> None:
        if self._num_watchers >= _MOST_WATCHERS:
            raise ApiError(429, f"{_MOST_WATCHERS} others are watching already", retry_after=10.0)

    async def follow(self, names: OwnNames | None = None) -> AsyncGenerator[bytes, None]:
        """What a watcher is sent: what is known of the last ten minutes, then frame after frame.
        `names`: of the requests it may see, if these are not all.
        """
        own = None if names is None else OwnFrames(names)
        self._num_watchers += 1
        self._begin()
        number = self._first
        quiet = 0
        try:
            yield b": watching\n\n"
            while not self._is_closing():
                number = max(number, self._first)
                news = self._events[number - self._first :]
                if news:
                    number += len(news)
                    quiet = 0
                    if own is not None:
                        news = [
                            named_event(_FRAME, await own.filter(_message_of(event)))
                            for event in news
                        ]
                    yield b"".join(news)
                elif not await self._has_news():
                    quiet += 1
                    if quiet % _ALIVE_LOOKS == 0:
                        yield b": nothing new\n\n"
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._leaving = asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._leave)

    async def _has_news(self) -> bool:
        try:
            return await asyncio.wait_for(self._news.wait(), _LOOK_SECONDS)
        except TimeoutError:
            return False

    def _begin(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if not self._is_watching:
            self._is_watching = True
            self._client.watch(self._take)

    def _leave(self) -> None:
        self._leaving = None
        self._is_watching = False
        self._client.watch(None)
        self._segments.clear()
        self._drop(len(self._events))

    def _take(self, watched: Watched) -> None:
        """On the event loop, a few times a second."""
        if watched.is_key:
            self._segments.append(_Segment(self._first + len(self._events), watched.time))
        elif not self._segments:
            return  # of a subscription that is over
        # Who waits now is nothing that a moment of the past had.
        queue = [] if watched.is_past else self._waiting()
        message = {"frame": msgspec.Raw(watched.frame), "queue": queue, "past": watched.is_past}
        event = named_event(_FRAME, message)
        self._events.append(event)
        self._num_bytes += len(event)
        while len(self._segments) > 1 and (
            self._segments[1].time < watched.time - KEPT_SECONDS or self._num_bytes > _MOST_BYTES
        ):
            self._segments.popleft()
            self._drop(self._segments[0].start - self._first)
        self._news.set()
        self._news = asyncio.Event()

    def _drop(self, count: int) -> None:
        """The oldest events."""
        self._num_bytes -= sum(map(len, self._events[:count]))
        del self._events[:count]
        self._first += count

    def _waiting(self) -> list[tuple[str, float, int]]:
        """Requests that have not begun: no step names them yet."""
        waiting = self._records.waiting()
        return [
            (one.response_id, round(one.created, 3), one.prompt_tokens)
            for one in waiting[:_MOST_WAITING]
        ]
