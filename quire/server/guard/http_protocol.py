"""uvicorn's HTTP protocol with limits it does not have: on headers and trailers, on time, on
connections, and on clients that do not read.

Trailers are counted and dropped: nothing here has a use for them, and what was decided on the
headers must hold.

Whoever gets an answer before all of the body was read could not read that: closing would reset the
connection. So what comes is read on and dropped, for a bounded time and amount.

A client that closes its sending half gets its answer. One that leaves looks the same, until
something is written to it; so while there is no answer, a little is written that means nothing (100
Continue, a comment in a stream). If that is met by a reset, nobody is there.

Requests sent before the answer to the last one has come (pipelining) are dropped with the
connection: while they wait, nobody would notice that the client has left.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.server.config import ServerConfig
from quire.server.errors import ApiError, error_body
from quire.server.guard.counts import CONNECTIONS, Counts
from quire.server.guard.host import is_host
from quire.server.guard.request_ids import new_id
from quire.server.http_responses import DIRECT_BODY

_SEND_BUFFER = 128 * 1024
"""The kernel's part of what may be on its way to a client that does not read."""
_LINGER_SECONDS = 10.0
_LINGER_BYTES = 64 * 2**20
"""How long, and how much of, what a client still sends is read after the answer."""
_CHUNK_HEAD = 20
"""Bytes around a chunk that are free: its size in at most 16 digits, and two ends of lines."""
_EXTRA = "trailers and extensions of chunks"
_FIRST_PROBE, _LONGEST_PROBE = 0.005, 5.0
"""Seconds between two looks whether a client that sends no more is there."""


class _RefusedError(Exception):
    """Stops the parser."""


class _GentlyClosed:
    """The transport as a request's answer sees it: its end is `close`."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class _DirectBody:
    """`quire.server.http_responses.DirectBody` of one response. It keeps what it needs of the
    response itself: looking there costs several lines of the processor's cache for each token.
    """

    __slots__ = ("_cycle", "_is_chunked", "_write", "is_blocked", "is_lost")

    def __init__(self, cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
        self._cycle = cycle
        self._write = transport.write
        self._is_chunked: bool | None = None
        self.is_blocked = cycle.flow.write_paused
        self.is_lost = False
        """The connection is closed."""

    def write(self, data: bytes) -> None:
        """As `RequestResponseCycle.send` writes a part of a body."""
        if self.is_lost:
            return
        if self._is_chunked is None:  # known since the response began
            self._is_chunked = bool(self._cycle.chunked_encoding)
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Made by `limited_protocol`, which sets the limits."""

    limits: ServerConfig
    counts: Counts

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_headers = True
        self._num_header_bytes = 0
        self._num_extra_bytes = 0
        """Of a body, what is not its contents: extensions of chunks, and trailers."""
        self._is_chunked = False
        self._is_pipelined = False
        self._is_lingering = False
        self._num_lingering_bytes = 0
        self._refusal: ApiError | None = None
        self._direct: _DirectBody | None = None
        """Of the last request."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        """Of lingering, and of looking whether a client is there."""
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        if self.counts.add(CONNECTIONS, 1) > self.limits.max_connections:
            self._refuse(ApiError(503, "too many connections; try again later", retry_after=1.0))
            transport.close()
            return
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.counts.add(CONNECTIONS, -1)
        if self._direct is not None:
            self._direct.is_lost = True
        for timer in (self._header_timer, self._write_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            self._num_lingering_bytes += len(data)
            if self._num_lingering_bytes > _LINGER_BYTES:
                self.transport.close()
            return
        if self._is_pipelined or self.transport.is_closing():
            return
        if self._in_headers:
            if self._header_timer is None:
                self._start_header_timer()
            self._num_header_bytes += len(data)
        else:
            self._num_extra_bytes += len(data)
        super().data_received(data)
        # The heads of chunks are mostly shorter than what is taken off for them; that earns nobody
        # anything.
        self._num_extra_bytes = max(0, self._num_extra_bytes)
        most = self.limits.max_header_bytes
        is_too_much = (
            self._num_header_bytes > most if self._in_headers else self._num_extra_bytes > most
        )
        if is_too_much and self.parser is not None:
            self._refuse(self._too_large("headers" if self._in_headers else _EXTRA))

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; it may still wait for an answer. True: the connection stays
        open.
        """
        cycle = self.cycle
        is_answered = cycle is None or cycle.response_complete
        if (
            is_answered
            or self._is_lingering
            or not self._in_headers
            or cycle.scope["http_version"] != "1.1"
        ):
            return False
        cycle.keep_alive = False
        self._probe(_FIRST_PROBE)
        return True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._header_timer is None:  # it came together with the end of the one before
            self._start_header_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # else it is a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._is_pipelined = True
            self.cycle.keep_alive = False
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        # What came together with the headers is of the body already.
        self._num_extra_bytes = max(0, self._num_header_bytes - size)
        self._in_headers = False
        self._num_header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        if size > self.limits.max_header_bytes:
            self._refusal = self._too_large("headers")
            raise _RefusedError
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or not all(map(is_host, hosts)):
            self._refusal = ApiError(
                400, "the Host header must be one name or address, perhaps with a port"
            )
            raise _RefusedError
        codings = [
            value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"
        ]
        if codings not in ([], [b"chunked"]):
            message = "bodies are accepted as they are or in chunks, in no other transfer-encoding"
            self._refusal = ApiError(415, message)
            raise _RefusedError
        self._is_chunked = bool(codings)
        super().on_headers_complete()
        self._direct = _DirectBody(self.cycle, self.transport)
        self.scope["extensions"] = {DIRECT_BODY: self._direct}  # type: ignore[dict-item]
        self.cycle.transport = _GentlyClosed(self.transport, self._close_gently)  # type: ignore[assignment]

    def on_chunk_header(self) -> None:
        self._num_extra_bytes -= _CHUNK_HEAD

    def on_body(self, body: bytes) -> None:
        self._num_extra_bytes -= len(body)
        if not self._is_pipelined:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_pipelined:
            # It may all have come at once, so that this is the first time to look.
            if self._is_chunked and self._num_extra_bytes > self.limits.max_header_bytes:
                self._refusal = self._too_large(_EXTRA)
                raise _RefusedError
            self._in_headers = True
            super().on_message_complete()

    def shutdown(self) -> None:
        super().shutdown()
        if self._is_lingering:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._direct is not None:
            self._direct.is_blocked = True
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._direct is not None:
            self._direct.is_blocked = False
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        """What the parser could not read, or refused to read on."""
        message = (
            "this is not a valid HTTP request"
            if self._in_headers
            else "the body's chunks are malformed"
        )
        self._refuse(self._refusal or ApiError(400, message))

    def _start_header_timer(self) -> None:
        seconds = self.limits.header_seconds
        error = ApiError(408, f"the headers did not arrive within {seconds:g} s")
        self._header_timer = self.loop.call_later(seconds, self._refuse, error)

    def _too_large(self, what: str) -> ApiError:
        most = self.limits.max_header_bytes
        return ApiError(431, f"the {what} are too large: at most {most} bytes are accepted")

    def _refuse(self, error: ApiError) -> None:
        """Answers without any application, and closes."""
        if self.transport.is_closing() or self._is_lingering:
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            # wrong is what was sent ahead: it is dropped, and the answer comes
            if self._in_headers:
                self._is_pipelined = True
                cycle.keep_alive = False
                return
            if cycle.response_started:  # nothing can be said in the middle of an answer
                self.transport.abort()
                return
            cycle.disconnected = True  # for the application, the client has left
            cycle.message_event.set()
        http_request_id = new_id("req-")
        body = json.dumps(error_body("", error, http_request_id)).encode()
        headers = {
            **error.headers(),
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": http_request_id,
            "connection": "close",
        }
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        self._is_pipelined = True  # whatever follows, nobody will look at it
        self._close_gently()

    def _close_gently(self) -> None:
        """Closes the connection; if the client is still sending, when it has stopped or had its
        time.
        """
        if self.transport.is_closing() or self._is_lingering:
            return
        if self._in_headers and not self._is_pipelined:
            self.transport.close()
            return
        self._is_lingering = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._end_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def _probe(self, pause: float) -> None:
        """Looks whether a client that sends no more is there, as long as it waits for an answer."""
        cycle = self.cycle
        transport = self.transport
        if cycle.response_complete or transport.is_closing():
            return
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None and raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
            return
        if not cycle.response_started:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif cycle.chunked_encoding and not self.flow.write_paused:  # a stream of events
            transport.write(b"3\r\n:\n\n\r\n")
        self._end_timer = self.loop.call_later(pause, self._probe, min(2 * pause, _LONGEST_PROBE))


def limited_protocol(config: ServerConfig, counts: Counts | None = None) -> type[LimitedProtocol]:
    """The protocol with a server's limits; `counts`: those of all processes that share them."""
    return type(
        "ServerProtocol", (LimitedProtocol,), {"limits": config, "counts": counts or Counts()}
    )
