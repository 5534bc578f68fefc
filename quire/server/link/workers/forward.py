"""What a worker does not answer itself goes to the server's own process and back, as it is: files
and batches, stored responses, metrics, what became of a request, pages.
"""

from __future__ import annotations

import asyncio
import contextlib

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.errors import ApiError, error_response
from quire.server.guard.request_ids import http_request_id_of

OWN_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
    }
)
"""To which workers take POST requests themselves."""
_KEYS = frozenset({b"authorization", b"x-api-key"})
_HOP = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"expect", b"te", b"upgrade", b"date"}
)
"""Headers about one connection, not about the message."""
_READ_AT_ONCE = 64 * 1024
_IS_READ = "quire.is_read"
"""In a scope: all of the body has come."""


class Forward:
    """ASGI middleware around a worker's application; outermost, since the other process has limits
    and keys too.
    """

    def __init__(self, app: ASGIApp, path: str) -> None:
        """`path`: the socket on which the other process listens."""
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"] in OWN_PATHS and not _is_of_a_page(scope):
            await self._app(scope, receive, send)
            return
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=_READ_AT_ONCE)
        except OSError:
            scope.setdefault("state", {})["http_request_id"] = http_request_id_of(scope["headers"])
            error = ApiError(
                503, "the server is going down", code="shutting_down", retry_after=10.0
            )
            await error_response(scope, error)(scope, receive, send)
            return
        asking = asyncio.create_task(_ask(scope, receive, writer))

        async def closing_send(message: Message) -> None:
            if message["type"] == "http.response.start" and not scope.get(_IS_READ):
                # Whatever is still to come of the body is not worth reading.
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            await _answer(reader, closing_send, asking)
        finally:
            asking.cancel()
            writer.transport.abort()
            await asyncio.gather(asking, return_exceptions=True)


def _is_of_a_page(scope: Scope) -> bool:
    """A browser that was let in by a cookie, which only the server's own process can read."""
    names = {name for name, _ in scope["headers"]}
    return b"cookie" in names and not names & _KEYS


async def _ask(scope: Scope, receive: Receive, writer: asyncio.StreamWriter) -> None:
    """Sends the request; returns when the client has left."""
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    lines = [
        b"%b %b%b HTTP/1.1" % (scope["method"].encode("ascii"), scope["raw_path"], query),
        b"connection: close",
    ]
    lines += [b"%b: %b" % (name, value) for name, value in scope["headers"] if name not in _HOP]
    is_chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    if is_chunked:
        lines.append(b"transfer-encoding: chunked")
    writer.write(b"\r\n".join([*lines, b"", b""]))
    is_sent = False
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body = message.get("body", b"")
        if is_sent:
            continue
        if body:
            writer.write(b"%x\r\n%b\r\n" % (len(body), body) if is_chunked else body)
        is_sent = scope[_IS_READ] = not message.get("more_body", False)
        if is_sent and is_chunked:
            writer.write(b"0\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # it has answered and does not want the rest
            await writer.drain()


async def _answer(reader: asyncio.StreamReader, send: Send, asking: asyncio.Task[None]) -> None:
    """Passes the answer on as it comes, until it ends or the client leaves."""
    parts = _Parts()
    parser = httptools.HttpResponseParser(parts)
    while not parts.is_complete:
        reading = asyncio.ensure_future(reader.read(_READ_AT_ONCE))
        await asyncio.wait((reading, asking), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            reading.cancel()
            return
        data = reading.result()
        if not data:
            break
        parser.feed_data(data)
        for message in parts.take(parser):
            await send(message)
    if parts.has_begun:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Parts:
    """Collects what `httptools` finds."""

    def __init__(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._are_headers_complete = False
        self._body: list[bytes] = []
        self.has_begun = False
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in _HOP:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._are_headers_complete = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def take(self, parser: httptools.HttpResponseParser) -> list[Message]:
        """What can be passed on."""
        found: list[Message] = []
        if self._are_headers_complete and not self.has_begun:
            self.has_begun = True
            found.append(
                {
                    "type": "http.response.start",
                    "status": parser.get_status_code(),
                    "headers": self._headers,
                }
            )
        if self._body:
            found.append(
                {"type": "http.response.body", "body": b"".join(self._body), "more_body": True}
            )
            self._body = []
        return found
