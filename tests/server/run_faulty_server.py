"""The HTTP process with faults on demand, like `faulty_engine`: its sends to the engine and its
writes to clients.
"""

from __future__ import annotations

from typing import Any

from quire.server.guard.http_protocol import LimitedProtocol
from tests.server.countdown import break_sends, is_due


class FaultyTransport:
    """A connection that breaks in a write, or whose write raises."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if is_due("write_raises"):
            raise OSError("no buffer space")
        if is_due("write_lost"):
            self._transport.abort()
            return
        self._transport.write(data)


def break_writes() -> None:
    connect = LimitedProtocol.connection_made

    def connection_made(self: LimitedProtocol, transport: Any) -> None:
        connect(self, FaultyTransport(transport))  # type: ignore[arg-type]

    LimitedProtocol.connection_made = connection_made  # type: ignore[assignment]


def break_all() -> None:
    break_sends("http_send")
    break_writes()
