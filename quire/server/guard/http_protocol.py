"""uvicorn's HTTP protocol with limits it does not have: on headers, on time, on connections, and on clients that
do not read.

Requests sent before the answer to the last one has come (pipelining) are dropped with the connection: while they
wait, nobody would notice that the client has left.
"""

from __future__ import annotations

import asyncio
import json
import socket
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.server.config import ServerConfig
from quire.server.errors import ApiError, error_body
from quire.server.guard.connection import new_id

_SEND_BUFFER = 128 * 1024
"""The kernel's part of what may be on its way to a client that does not read."""


class _RefusedError(Exception):
    """Stops the parser."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Made by `limited_protocol`, which sets the limits."""

    limits: ServerConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_headers = True
        self._num_header_bytes = 0
        self._is_pipelined = False
        self._refusal: ApiError | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(ApiError(503, "too many connections; try again later", retry_after=1.0))
            return
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_pipelined or self.transport.is_closing():
            return
        if self._in_headers:
            if self._header_timer is None:
                self._start_header_timer()
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._num_header_bytes > self.limits.max_header_bytes and self.parser is not None:
            self._refuse(self._headers_too_large())

    def on_headers_complete(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._is_pipelined = True
            self.cycle.keep_alive = False
            return
        self._in_headers = False
        self._num_header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._refusal = self._headers_too_large()
            raise _RefusedError
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            message = "bodies are accepted as they are or in chunks, in no other transfer-encoding"
            self._refusal = ApiError(415, message)
            raise _RefusedError
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_pipelined:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_pipelined:
            self._in_headers = True
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        """What the parser could not read, or refused to read on."""
        if self.cycle is not None and not self.cycle.response_complete and not self._in_headers:
            self.transport.abort()  # a broken body: nothing can be said in the middle of an answer
            return
        self._refuse(self._refusal or ApiError(400, "this is not a valid HTTP request"))

    def _start_header_timer(self) -> None:
        seconds = self.limits.header_seconds
        error = ApiError(408, f"the headers did not arrive within {seconds:g} s")
        self._header_timer = self.loop.call_later(seconds, self._refuse, error)

    def _headers_too_large(self) -> ApiError:
        most = self.limits.max_header_bytes
        return ApiError(431, f"the headers are too large: at most {most} bytes are accepted")

    def _refuse(self, error: ApiError) -> None:
        """Answers without any application, and closes."""
        if self.transport.is_closing():
            return
        request_id = new_id("req-")
        body = json.dumps(error_body("", error, request_id)).encode()
        headers = {
            **error.headers(),
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": request_id,
            "connection": "close",
        }
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        self.transport.close()


def limited_protocol(config: ServerConfig) -> type[LimitedProtocol]:
    """The protocol with a server's limits."""
    return type("ServerProtocol", (LimitedProtocol,), {"limits": config})
