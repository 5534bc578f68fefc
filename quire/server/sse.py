"""Server-sent events: a stream that ends its generation however it ends itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import ApiError, error_body, to_api_error

logger = logging.getLogger(__name__)

_encode = msgspec.json.encode


class Abortable(Protocol):
    """What a stream carries: a generation."""

    def abort(self) -> None:
        """Ends it; does nothing when it is over."""


def data_event(body: object) -> bytes:
    """One event of OpenAI's kind: `body` is written as JSON."""
    return b"data: " + _encode(body) + b"\n\n"


def named_event(name: str, body: object) -> bytes:
    """One event with a name, as Anthropic and OpenAI's responses have them."""
    return b"event: " + name.encode("ascii") + b"\ndata: " + _encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def openai_error(path: str, error: ApiError, request_id: str) -> bytes:
    """How a stream that began well tells its end; clients of OpenAI raise it."""
    return data_event(error_body(path, error, request_id))


class EventStream(Response):
    """A response made of the events that `events` yields.

    An exception from it becomes the event that `on_error` makes. A client that leaves, a server that goes down:
    in every case `generation.abort()` is called.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        generation: Abortable,
        *,
        headers: Mapping[str, str] | None = None,
        on_error: Callable[[str, ApiError, str], bytes] = openai_error,
    ) -> None:
        self._events = events
        self._generation = generation
        self._on_error = on_error
        self._fields = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would collect the whole answer first
            **(headers or {}),
        }
        super().__init__(status_code=200, headers=self._fields)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(scope, send))
        watching = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((writing, watching), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._generation.abort()
            for task in (writing, watching):
                task.cancel()
            await asyncio.gather(writing, watching, return_exceptions=True)

    async def _write(self, scope: Scope, send: Send) -> None:
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._fields.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        try:
            async with contextlib.aclosing(self._events) as events:  # type: ignore[type-var]
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            await self._tell(error, scope, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tell(self, error: Exception, scope: Scope, send: Send) -> None:
        api_error = to_api_error(error)
        request_id: str = scope["state"]["request_id"]
        scope["state"]["error"] = api_error
        body = self._on_error(scope["path"], api_error, request_id)
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _disconnected(receive: Callable[[], Awaitable[object]]) -> None:
    while True:
        message = await receive()
        if isinstance(message, dict) and message["type"] == "http.disconnect":
            return
