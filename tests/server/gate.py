"""A door in front of a server that can be shut: for a browser the server is gone then, and comes
back.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Gate:
    """Listens on a port of its own and passes everything on, while it is open."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._connections: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self._bytes_left = 0
        self._act: Callable[[], None] | None = None
        self.port = 0
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen()
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def when_said(self, num_bytes: int, act: Callable[[], None] | None) -> None:
        """Does something, or nothing any more, as soon as the server has said so much more."""
        self._bytes_left, self._act = num_bytes, act

    def shut(self) -> None:
        """Nobody gets in, and whoever is in is thrown out."""
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._listener = None
        for one in self._connections:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                outer, _ = listener.accept()
                inner = socket.create_connection(("127.0.0.1", self._target))
                self._connections += (outer, inner)
                threading.Thread(target=self._pass_on, args=(outer, inner), daemon=True).start()
                threading.Thread(
                    target=self._pass_on, args=(inner, outer, True), daemon=True
                ).start()

    def _pass_on(
        self, source: socket.socket, target: socket.socket, is_answer: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
                if is_answer and self._act is not None:
                    self._bytes_left -= len(data)
                    if self._bytes_left <= 0:
                        act, self._act = self._act, None
                        act()
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
                one.close()
