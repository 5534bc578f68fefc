"""Accepts connections from a listening socket that several workers share, so that each gets its
part of them.

The system wakes all who wait for a connection, and the first takes it: mostly the one that ran
last. So a worker that has more connections than another looks away for a moment. If nobody else
took it by then (the other one is busy, or has just died), it does.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from quire.server.guard.counts import CONNECTIONS, Counts

_AHEAD = 1
"""More connections than another worker has, up to which nobody minds."""
_MOMENT, _MOST_MOMENTS = 0.002, 3
_NO_DESCRIPTORS_PAUSE = 0.1


class Accepting:
    """One worker's."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        handshake_seconds: float | None,
        counts: Counts,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_seconds = handshake_seconds
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._coming: set[asyncio.Task[object]] = set()
        """Connections that were accepted and have no protocol yet."""
        self._num_moments = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = False

    def start(self) -> None:
        self._listener.setblocking(False)
        self._is_open = True
        self._loop.add_reader(self._listener.fileno(), self._take)

    def stop(self) -> None:
        """Those who come from now on are for others."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listener.fileno())
            if self._timer is not None:
                self._timer.cancel()
            self._listener.close()

    def _take(self) -> None:
        ahead = self._counts.own(CONNECTIONS) + len(self._coming) - self._counts.least(CONNECTIONS)
        if ahead > _AHEAD and self._num_moments < _MOST_MOMENTS:
            self._num_moments += 1
            self._pause(_MOMENT)
            return
        self._num_moments = 0
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return  # another worker was faster, or the client has left
        except OSError:
            self._pause(_NO_DESCRIPTORS_PAUSE)
            return
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connecting = self._loop.connect_accepted_socket(
            self._make_protocol,
            accepted,
            ssl=self._tls,
            ssl_handshake_timeout=self._handshake_seconds,
        )
        task: asyncio.Task[object] = self._loop.create_task(connecting)
        self._coming.add(task)
        task.add_done_callback(self._came)

    def _came(self, task: asyncio.Task[object]) -> None:
        self._coming.discard(task)
        if not task.cancelled():
            task.exception()  # a handshake that failed is the client's affair

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._timer = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        if self._is_open:
            self._loop.add_reader(self._listener.fileno(), self._take)
