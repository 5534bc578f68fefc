"""A small HTTP client for streams of events, quick enough not to be what is measured.

HTTP/1.1 with keep-alive and nothing else: no redirects, no compression, no proxies. A general
client spends more on each event than a server does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator
from typing import Any, Self
from urllib.parse import urlsplit

from quire.errors import QuireError

_READ_SIZE = 64 * 1024


class HttpError(QuireError):
    """A server that can't be reached, does not speak HTTP, or says no."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """Requests to one server. Connections are kept for the next request; `close` ends those not in
    use.
    """

    def __init__(self, base_url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        """`timeout`: the most seconds between two pieces of an answer."""
        try:
            parts = urlsplit(base_url)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not host:
            raise HttpError(f"--base-url: {base_url!r} is no address such as http://127.0.0.1:8000")
        self._host = host
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._root = parts.path.rstrip("/")
        self._timeout = timeout
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept: */*\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def get(self, path: str) -> bytes:
        """The body of a page."""
        return b"".join([piece async for piece in self._exchange("GET", path, b"")])

    async def get_json(self, path: str) -> Any:
        return _parsed(await self.get(path), path)

    async def post_json(self, path: str, body: object) -> Any:
        data = b"".join(
            [piece async for piece in self._exchange("POST", path, json.dumps(body).encode())]
        )
        return _parsed(data, path)

    async def events(self, path: str, body: object) -> AsyncGenerator[bytes]:
        """The data of each server-sent event of the answer. Leaving early (aclose) cuts the
        connection.
        """
        rest = b""
        async with contextlib.aclosing(
            self._exchange("POST", path, json.dumps(body).encode())
        ) as pieces:
            async for piece in pieces:
                lines = (rest + piece).split(b"\n")
                rest = lines.pop()
                for line in lines:
                    if line.startswith(b"data:"):
                        yield line[5:].strip()

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes]:
        """Sends a request and yields the answer's body in pieces as they come; raises HttpError for
        a status that is no success.
        """
        head = f"{method} {self._root}{path} HTTP/1.1\r\n{self._headers}"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        data = head.encode("latin-1") + b"\r\n" + body
        connection = None
        try:
            connection, status = await self._send(data)
            if status >= 300:
                text = b"".join([piece async for piece in connection.body()]).decode(
                    errors="replace"
                )
                raise HttpError(f"{path}: HTTP {status}: {_message(text)}", status)
            async for piece in connection.body():
                yield piece
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            closed = "the server closed the connection" if isinstance(error, EOFError) else ""
            what = closed or str(error) or type(error).__name__
            raise HttpError(f"{self._host}:{self._port}{path}: {what}") from error
        finally:
            if connection is not None:
                if connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.close()

    async def _send(self, data: bytes) -> tuple[_Connection, int]:
        """Over a kept connection or a new one. A server may have closed one while it lay idle; then
        the request goes over another.
        """
        while True:
            is_kept = bool(self._idle)
            connection = self._idle.pop() if is_kept else await self._connect()
            try:
                return connection, await connection.send(data)
            except BaseException as error:
                connection.close()
                if not (is_kept and isinstance(error, OSError | EOFError)):
                    raise

    async def _connect(self) -> _Connection:
        async with asyncio.timeout(self._timeout):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        return _Connection(reader, writer, self._timeout)


class _Connection:
    """One connection and the answer that is being read from it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout: float
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._timeout = timeout
        self._headers: dict[str, str] = {}
        self._keeps_alive = False
        self.is_reusable = False
        """The answer was read to its end, and the server keeps the connection."""

    def close(self) -> None:
        self._writer.close()

    async def send(self, data: bytes) -> int:
        """Sends a request and reads the headers of its answer; returns the status."""
        self.is_reusable = False
        self._writer.write(data)
        async with asyncio.timeout(self._timeout):
            head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").rstrip().split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise ValueError(f"the answer is no HTTP: {first[:60]!r}")
        parts = (line.partition(":") for line in lines)
        self._headers = {name.strip().lower(): value.strip() for name, _, value in parts}
        self._keeps_alive = (
            version == "HTTP/1.1" and self._headers.get("connection", "").lower() != "close"
        )
        return int(status[:3])

    async def body(self) -> AsyncGenerator[bytes]:
        """In pieces as they come."""
        if self._headers.get("transfer-encoding", "").lower() == "chunked":
            while piece := await self._chunk():
                yield piece
        elif "content-length" in self._headers:
            async with asyncio.timeout(self._timeout):
                whole = await self._reader.readexactly(int(self._headers["content-length"]))
            yield whole
        else:
            while piece := await asyncio.wait_for(self._reader.read(_READ_SIZE), self._timeout):
                yield piece
            return
        self.is_reusable = self._keeps_alive

    async def _chunk(self) -> bytes:
        async with asyncio.timeout(self._timeout):
            size = int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16)
            if size:
                return (await self._reader.readexactly(size + 2))[:size]
            while await self._reader.readuntil(b"\r\n") != b"\r\n":  # trailers
                pass
            return b""


def _parsed(data: bytes, path: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise QuireError(
            f"the server's answer to {path} is no JSON: is it a Quire server?"
        ) from None


def _message(text: str) -> str:
    """What an error's body says, whatever its shape."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        return str(json.loads(text)["error"]["message"])
    return text[:300]
