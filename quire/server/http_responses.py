"""Responses: JSON at once, or server-sent events as they come."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import InvalidRequestError
from quire.server.errors import ApiError, to_api_error
from quire.server.tasks import running

encode = msgspec.json.encode
_VALUES_AT_ONCE = 4096
"""Encoded in one go, during which no other thread of this process runs: a millisecond."""
_WRITTEN_AT_ONCE = 64 * 1024
"""Bytes."""
_LINE_ENDS = [(char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029"]
"""Characters that end a line for Python, but may stand in JSON as they are; and their escapes."""


class JsonResponse(Response):
    """Written by msgspec: several times as fast as the standard library."""

    media_type = "application/json"

    def __init__(
        self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(encode(content), status_code, headers)


class LargeJsonResponse(Response):
    """A body whose size the client has chosen: it comes in pieces, and between two of them others
    have their turn.
    """

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes], headers: Mapping[str, str] | None = None) -> None:
        self._pieces = pieces
        super().__init__(headers={**(headers or {}), "content-length": str(sum(map(len, pieces)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        *pieces, last = self._pieces
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        # The answer is over with it, here as for the client: that may send its next request at
        # once.
        await send({"type": "http.response.body", "body": last, "more_body": False})

    @classmethod
    def of(
        cls, make: Callable[[], Any], headers: Mapping[str, str] | None = None
    ) -> LargeJsonResponse:
        """Made of what `make` returns. To be called beside the event loop."""
        return cls(list(_joined(encode_in_pieces(make()))), headers)


def encode_in_pieces(value: Any) -> Iterator[bytes]:
    """JSON, piece by piece: the encoder keeps the interpreter to itself until it is done with what
    it was given.
    """
    weight = _weight(value)
    if weight <= _VALUES_AT_ONCE or not isinstance(value, dict | list | tuple):
        yield encode(value)
    elif isinstance(value, dict):
        yield b"{"
        for number, (key, item) in enumerate(value.items()):
            yield (b"," if number else b"") + encode(str(key)) + b":"
            yield from encode_in_pieces(item)
        yield b"}"
    else:
        yield b"["
        at_once = max(1, _VALUES_AT_ONCE * len(value) // weight)
        for start in range(0, len(value), at_once):
            if start:
                yield b","
            part = value[start : start + at_once]
            if len(part) > 1:
                yield encode(part)[1:-1]
            else:
                yield from encode_in_pieces(part[0])
        yield b"]"


def _weight(value: Any) -> int:
    """About how many values there are to encode; of the items of a list, which are alike, some are
    looked at.
    """
    if isinstance(value, dict):
        return 1 + sum(map(_weight, value.values()))
    if isinstance(value, list | tuple) and value:
        return 1 + len(value) * max(
            _weight(value[0]), _weight(value[len(value) // 2]), _weight(value[-1])
        )
    return 1 + len(value) // 1024 if isinstance(value, str) else 1


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """In pieces that are worth a write each."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _WRITTEN_AT_ONCE:
            yield b"".join(held)
            held = []
            size = 0
    yield b"".join(held)


def list_page(ids: Sequence[str], limit: int, after: str | None) -> tuple[slice, dict[str, Any]]:
    """What a page of one of OpenAI's lists has of these, and its fields besides `data`."""
    if after is not None and after not in ids:
        raise InvalidRequestError("after", "is the id of none of these")
    first = 0 if after is None else ids.index(after) + 1
    part = slice(first, first + limit)
    shown = ids[part]
    return part, {
        "object": "list",
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
        "has_more": first + limit < len(ids),
    }


def one_line(body: object) -> bytes:
    """JSON that is a single line for `str.splitlines`, which httpx's `iter_lines` uses, too."""
    written = encode(body)
    return written if written.isascii() else escape_line_ends(written)


def escape_line_ends(written: bytes) -> bytes:
    """JSON without those that only Python takes for the end of a line."""
    for char, escaped in _LINE_ENDS:
        written = written.replace(char, escaped)
    return written


def data_event(body: object) -> bytes:
    """One event of OpenAI's kind: `body` is written as JSON."""
    return b"data: " + one_line(body) + b"\n\n"


def named_event(name: str, body: object) -> bytes:
    """One event with a name, as Anthropic and OpenAI's responses have them."""
    return b"event: " + name.encode("ascii") + b"\ndata: " + one_line(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"

DIRECT_BODY = "quire.direct_body"
"""The ASGI extension under which a connection lends its `DirectBody`."""


class DirectBody(Protocol):
    """Writes on with the body of a response that has begun, as ASGI's `send` would, but at once."""

    is_blocked: bool
    """The client does not take what was written."""

    def write(self, data: bytes) -> None: ...


class EventStream(Response, ABC):
    """A response made of events.

    An exception while they are written becomes the event that `on_error` makes of the path, the
    error and the request's id. However it ends (all is written, the client leaves, the server goes
    down), `end` is called.
    """

    def __init__(
        self,
        on_error: Callable[[str, ApiError, str], bytes],
        end: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        self._on_error = on_error
        self._end = end
        self._fields = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would collect the whole answer first
            **headers,
        }
        super().__init__(status_code=200, headers=self._fields)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with running(self._write(scope, send), disconnected(receive)) as (writing, _):
                if writing.done():
                    writing.result()
        finally:
            self._end()

    async def _write(self, scope: Scope, send: Send) -> None:
        raw = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in self._fields.items()
        ]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        try:
            await self._write_events(scope, send)
        except Exception as error:
            api_error = scope["state"]["error"] = to_api_error(error)
            body = self._on_error(scope["path"], api_error, scope["state"]["http_request_id"])
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @abstractmethod
    async def _write_events(self, scope: Scope, send: Send) -> None:
        """Writes all there is."""


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    """Waits until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
