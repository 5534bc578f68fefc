"""What passes between the server's process and an HTTP worker: msgpack of these values over a unix
socket.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.link import messages


class Add(msgspec.Struct, tag="add"):
    """A request for the engine, with the names of its answers."""

    request: messages.AddRequest
    names: tuple[str, ...]


class Listening(msgspec.Struct, tag="listening"):
    """The worker is there."""

    worker: int


class Found(msgspec.Struct, tag="found"):
    """The answer to `Find`: the fields of the record."""

    ticket: int
    record: dict[str, Any] | None


class Store(msgspec.Struct, tag="store"):
    """Keep a response, which is written as its file is."""

    ticket: int
    response: bytes


class Recall(msgspec.Struct, tag="recall"):
    """A stored response, by its id or by an item it holds."""

    ticket: int
    owner: str
    response_id: str | None = None
    item_id: str | None = None


class Pong(msgspec.Struct, tag="pong"):
    """The answer to `Ping`: the worker lives."""


FromWorker = Listening | Add | messages.Abort | messages.End | Found | Store | Recall | Pong


class State(msgspec.Struct, tag="state"):
    """How the engine is."""

    state: str
    ready: messages.Ready | None


class Failed(msgspec.Struct, tag="failed"):
    """A request is lost: what its client is told."""

    request_id: str
    status: int
    message: str
    kind: str
    field: str | None
    code: str | None
    retry_after: float | None

    @classmethod
    def of(cls, request_id: str, error: ApiError) -> Failed:
        told = (error.status, error.message, error.type, error.field, error.code, error.retry_after)
        return cls(request_id, *told)

    def error(self) -> ApiError:
        more = {name: getattr(self, name) for name in ("field", "code", "retry_after")}
        return ApiError(self.status, self.message, type=self.kind, **more)


class Find(msgspec.Struct, tag="find"):
    """Does the worker know a request of this name, asked for by this owner, or with None by
    anybody?
    """

    ticket: int
    name: str
    owner: str | None


class Recalled(msgspec.Struct, tag="recalled"):
    """The answer to `Store` and `Recall`."""

    ticket: int
    response: bytes | None


class Drain(msgspec.Struct, tag="drain"):
    """Take nobody in any more, and end when all requests have."""


class Ping(msgspec.Struct, tag="ping"):
    """Is the worker there?"""


ToWorker = State | messages.Updates | Failed | Find | Recalled | Ping | Drain


class WorkerConfig(msgspec.Struct):
    """The one line a worker reads from its standard input."""

    server: dict[str, Any]
    worker: int
    listener: int
    """The number of the listening socket."""
    folder: str
    ready: messages.Ready


_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
decode_from_worker: Callable[[bytes], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode
decode_to_worker: Callable[[bytes], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode


def frame(message: FromWorker | ToWorker) -> bytes:
    """The bytes of a message, with their number in front."""
    data = _encode(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Takes what comes apart into messages."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Those that are complete."""
        self._held += data
        found, start = [], 0
        while len(self._held) >= start + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held, start)
            end = start + _LENGTH.size + length
            if len(self._held) < end:
                break
            found.append(bytes(self._held[start + _LENGTH.size : end]))
            start = end
        del self._held[:start]
        return found


def encode_config(config: ServerConfig) -> dict[str, Any]:
    """A server's options as plain values."""
    found = {name: getattr(config, name) for name in ServerConfig.__slots__}
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def decode_config(fields: dict[str, Any]) -> ServerConfig:
    return msgspec.convert(fields, ServerConfig, dec_hook=lambda kind, value: kind(value))
