"""Messages between two of our processes, each with its length in front, through the socket that a
child has to its parent (`quire.process.child`).

Not by ZeroMQ, which did this for engines once: its threads have to be woken for every message, and
a child has this socket anyway.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec

from quire.server.link.messages import encode

_LENGTH = struct.Struct("<I")
_READ_AT_ONCE = 256 * 1024
_MOST_UNSENT = 16 * 2**20
"""Bytes that the other side may be behind; then whoever sends waits for it."""
_MOST_WAITING = 1000
"""Messages that a reader may be behind; then the other side waits for it."""


def frame(data: bytes) -> bytes:
    """A message as it is sent."""
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Takes what comes apart into messages."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Those that are complete."""
        self._held += data
        found = []
        start = 0
        while len(self._held) >= start + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held, start)
            end = start + _LENGTH.size + length
            if len(self._held) < end:
                break
            found.append(bytes(self._held[start + _LENGTH.size : end]))
            start = end
        del self._held[:start]
        return found


class Channel(asyncio.Protocol):
    """An end on an event loop. Sending never waits."""

    def __init__(self, take: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """`take` is called with every message, `lost` when no more can come."""
        self._take = take
        self._lost = lost
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._is_paused = False

    async def open(self, connection: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    def send(self, message: msgspec.Struct) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """A message that is encoded already."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(data))

    @property
    def num_unread(self) -> int:
        """Bytes that were sent, and that the other side has left lying."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def pause(self) -> None:
        """Takes no more until `resume`; the other side will have to wait."""
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._is_paused:
            self._is_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for one in self._frames.feed(data):
            self._take(one)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


class ReadChannel(Channel):
    """An end whose messages wait until they are asked for. While many do, the other side waits."""

    def __init__(self) -> None:
        super().__init__(self._keep, lambda: self._break("its connection is closed"))
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()
        self._broken = asyncio.Event()
        self._fault = ""

    async def broken(self) -> str:
        """Waits until the connection is of no more use and says why. From then on the two sides may
        disagree on what is running, so neither is the process at its other end.
        """
        await self._broken.wait()
        return self._fault

    def send(self, message: msgspec.Struct) -> None:
        """Never blocks, never raises: `broken` tells of a message that could not be sent."""
        try:
            super().send(message)
        except OSError as error:
            self._break(f"a message could not be sent to it ({type(message).__name__}: {error})")

    async def receive(self) -> bytes:
        """The next message."""
        return self._received(await self._waiting.get())

    def receive_now(self) -> bytes | None:
        """One that has come already; None if none has."""
        return None if self._waiting.empty() else self._received(self._waiting.get_nowait())

    def _received(self, data: bytes) -> bytes:
        if self._waiting.empty():
            self.resume()
        return data

    def _keep(self, data: bytes) -> None:
        self._waiting.put_nowait(data)
        if self._waiting.qsize() > _MOST_WAITING:
            self.pause()

    def _break(self, fault: str) -> None:
        if not self._broken.is_set():
            self._fault = fault
            self._broken.set()


class BlockingChannel:
    """An end in a process without an event loop. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket, most_unsent: int = _MOST_UNSENT) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._most_unsent = most_unsent
        self._frames = Frames()
        self._received: deque[bytes] = deque()
        self._unsent = bytearray()
        self._sending = threading.Lock()

    @classmethod
    def to_parent(cls, most_unsent: int = _MOST_UNSENT) -> BlockingChannel:
        return cls(socket.socket(fileno=os.dup(0)), most_unsent)

    def fileno(self) -> int:
        """Readable when something has come that `receive` does not have yet."""
        return self._connection.fileno()

    @property
    def has_received(self) -> bool:
        """Whether `receive` has a message already."""
        return bool(self._received)

    def wait(self, seconds: float | None = None) -> bool:
        """Whether `receive` has something to say, now or within so many seconds."""
        return self.has_received or _wait(self._connection, select.POLLIN, seconds)

    def receive(self, seconds: float | None = None) -> bytes | None:
        """The next message; None if none came for so long. Raises EOFError when no more can come."""
        while not self._received:
            try:
                data = self._connection.recv(_READ_AT_ONCE)
            except BlockingIOError:
                if seconds == 0.0 or not self.wait(seconds):
                    return None
                continue
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError("the other side is gone")
            self._received.extend(self._frames.feed(data))
        return self._received.popleft()

    def send(self, message: msgspec.Struct) -> None:
        """Waits only if the other side is far behind."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """A message that is encoded already."""
        with self._sending:
            self._unsent += frame(data)
            self._write()
            if len(self._unsent) > self._most_unsent:
                self._write_all(None)

    def flush(self, seconds: float | None = None) -> None:
        """Waits, for so long at most, until all is sent that was to be."""
        with self._sending:
            self._write_all(seconds)

    def _write_all(self, seconds: float | None) -> None:
        while self._unsent and _wait(self._connection, select.POLLOUT, seconds):
            self._write()

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:  # nobody is there to hear it; that is for `receive` to say
            self._unsent.clear()


def _wait(connection: socket.socket, event: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


class Tickets:
    """Questions that wait for their answers, on an event loop."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._last = 0

    async def ask(self, send: Callable[[int], None], seconds: float) -> Any:
        """Has the question sent, with a ticket, and waits for its answer. TimeoutError if none
        comes.
        """
        self._last += 1
        ticket = self._last
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        send(ticket)
        try:
            return await asyncio.wait_for(future, seconds)
        finally:
            del self._waiting[ticket]

    def answer(self, ticket: int, value: Any) -> None:
        """What nobody waits for any more is forgotten."""
        future = self._waiting.get(ticket)
        if future is not None and not future.done():
            future.set_result(value)

    def answer_all(self, value: Any) -> None:
        for ticket in list(self._waiting):
            self.answer(ticket, value)
