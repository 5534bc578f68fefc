"""Child processes in Python: started, talked to, watched and ended in one way.

A child's standard input is a socket whose other end is ours. What there is to say goes through it,
in both directions, and its end tells the child that we are gone, however we went. Whatever a child
prints goes where its errors go.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from typing import IO, Any, Literal, NoReturn

import quire

_REAP_SECONDS = 5.0
"""For a process that was killed to be gone: the system may hold it, in a driver, say."""
_LAST_WORDS = 2000
"""Characters."""


class Child:
    """`python -m module`. It ends when this object does: at its `close`, when nobody refers to it
    any more, and with this process.
    """

    def __init__(
        self,
        module: str,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        leads_group: bool = False,
        errors: Literal["shown", "kept", "dropped"] = "shown",
    ) -> None:
        """Raises OSError if it can't be started. `environment` is added to ours. With `leads_group`
        whatever the child has started is killed with it. What it writes to its standard error is
        written to ours, or kept for `last_words`, or dropped.
        """
        with contextlib.ExitStack() as stack:
            own, theirs = socket.socketpair()
            stack.callback(own.close)
            self._log: IO[bytes] | None = None
            written_to: int | IO[bytes] = 2
            if errors == "kept":
                written_to = self._log = stack.enter_context(tempfile.TemporaryFile())
            elif errors == "dropped":
                written_to = subprocess.DEVNULL
            with theirs:
                self._process = Popen(
                    [python, "-m", module],
                    stdin=theirs.fileno(),
                    stdout=written_to,
                    stderr=written_to,
                    env={**os.environ, **(environment or {}), "PYTHONPATH": _python_path()},
                    pass_fds=pass_fds,
                    process_group=0 if leads_group else None,
                )
            closing = stack.pop_all()
        self.connection = own
        """To the child. Its timeout is the user's to set."""
        self._leads_group = leads_group
        self._owner = os.getpid()
        self._lines: IO[bytes] | None = None
        self._closing = closing
        self._finalizer = weakref.finalize(
            self, _end, self._process, leads_group, self._owner, closing
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def end(self) -> str | None:
        """How it ended, in words; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def wait(self, seconds: float | None = None) -> str | None:
        """Waits for its end, and says how it ended; None if it has not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.end

    async def ended(self) -> str:
        """`wait` on an event loop of any kind; may be cancelled and called again."""
        import asyncio

        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        process = self._process

        def watch() -> None:
            process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=watch, name="child's end", daemon=True).start()
        await ended.wait()
        return self.end or ""

    async def end_now(self, seconds: float) -> None:
        """`close` on an event loop, which waits so long for the process to be gone."""
        import asyncio

        self.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended(), seconds)
        self.close()

    def signal(self, number: signal.Signals) -> None:
        """Does nothing once it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Also what it has started, if it leads a group: that may be there when the child is not."""
        if os.getpid() == self._owner:
            _kill(self._process, self._leads_group)

    def close(self, seconds: float = 0.0) -> None:
        """Ends it. If it reads its connection to the end, it has so many seconds to end by itself.
        A fork of this process has no children: there, nothing happens.
        """
        if os.getpid() != self._owner:
            return
        if seconds and self._finalizer.alive:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
            self.wait(seconds)
        self._finalizer()

    def ask(self, message: object, seconds: float | None = None) -> Any:
        """A line of JSON, answered by another (`ParentLines` is the child's side). Raises
        TimeoutError if the child says nothing for so long, ConnectionError if it is gone.
        """
        self.connection.settimeout(seconds)
        self.connection.sendall(json.dumps(message).encode() + b"\n")
        if self._lines is None:
            self._lines = self.connection.makefile("rb")
            # Closed with the connection, which stays open for as long as a file of it does.
            self._closing.callback(self._lines.close)
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("it ended before it had answered")
        return json.loads(line)

    def last_words(self) -> str:
        """The end of what it wrote to its standard error, if that is kept."""
        assert self._log is not None
        self.wait(_REAP_SECONDS)  # one that is about to end may still be writing them
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4 * _LAST_WORDS))
        return self._log.read().decode(errors="replace")[-_LAST_WORDS:].strip()


def _python_path() -> str:
    """So that the child finds the package it is part of, wherever this process found it."""
    root = str(Path(quire.__file__).parents[1])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def _kill(process: Popen[bytes], leads_group: bool) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if leads_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _end(
    process: Popen[bytes], leads_group: bool, owner: int, closing: contextlib.ExitStack
) -> None:
    if os.getpid() == owner:
        _kill(process, leads_group)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_SECONDS)
        closing.close()


# The child's side


def ignore_terminal_signals() -> None:
    """They reach every process of a terminal or service; the parent decides what they mean."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)


def end_with_parent() -> None:
    """From now on this process ends at once when its parent is gone, whatever it is doing, and so
    does its group, if it leads one.
    """
    threading.Thread(target=_watch_parent, name="parent", daemon=True).start()


def _watch_parent() -> None:
    while not _is_parent_gone(None):
        pass
    end_group()


def _is_parent_gone(seconds: float | None) -> bool:
    """Looks, for so long at most. What the parent says is left for others to read."""
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    found = poll.poll(None if seconds is None else 1000 * seconds)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in found)


def end_group() -> NoReturn:
    """Ends this process at once, and what it has started, if it leads a group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


class ParentLines:
    """What `Child.ask` says, and the way to answer."""

    def __init__(self) -> None:
        self._file = socket.socket(fileno=os.dup(0)).makefile("rwb")

    def __iter__(self) -> Iterator[Any]:
        """Until the parent has no more to say. If it is gone, this process ends, with its group."""
        for line in self._file:
            yield json.loads(line)
        if _is_parent_gone(0.0):
            end_group()

    def answer(self, message: object) -> None:
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()
