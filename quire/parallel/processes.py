"""The processes of the ranks beside rank 0: started, watched, and ended.

A thread hears what they say. It knows at once when one of them is gone; one that hangs is the one
that has said nothing when the others, and rank 0, have given up waiting for it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from quire.parallel.group import GroupError
from quire.parallel.messages import Alive, Computed, Done, Failed, Hello, Task, frame, receive
from quire.process.child import Child
from quire.process.life import sign_of_life

_LAST_WORDS = 3.0
"""Seconds in which ranks that have given up, too, say so."""
_EXIT_SECONDS = 5.0


class RankProcess:
    """One of them."""

    def __init__(self, task: Task) -> None:
        self.rank = task.rank
        self.child = Child("quire.parallel.rank")
        # one that does not take its messages hangs
        self.connection.settimeout(task.step_seconds)
        self.is_up = False
        self.failed: Failed | None = None

    @property
    def connection(self) -> socket.socket:
        return self.child.connection

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.child.pid})"

    def end_of_it(self) -> str:
        """How the process ended, in words."""
        return f"is gone: {self.child.wait(_EXIT_SECONDS) or 'it closed its connection'}"


class RankProcesses:
    """All of them, and the thread that listens."""

    def __init__(self, tasks: Sequence[Task], on_failure: Callable[[], None]) -> None:
        """`on_failure` is called from a thread when the group is found to be broken."""
        self.processes: list[RankProcess] = []
        self._owner = os.getpid()
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._problem: str | None = None
        self._broken, self._tell_broken = socket.socketpair()
        self._is_closing = False
        self._expected: dict[int, int] = {}
        self._reported: dict[int, dict[int, int]] = {}
        self._answers: dict[int, dict[int, Done]] = {}
        """By ticket, what ranks have done."""
        self._sending = threading.Lock()
        try:
            for task in tasks:
                self.processes.append(RankProcess(task))
            for one, task in zip(self.processes, tasks, strict=True):
                self.send_to(one, frame(task))
        except BaseException:
            self.close()
            raise
        self._listener = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._listener.start()

    @property
    def problem(self) -> str | None:
        """Why the group is broken, if it is."""
        return self._problem

    @property
    def are_own(self) -> bool:
        """Whether this process started them: not in a fork."""
        return os.getpid() == self._owner

    @property
    def broken_fd(self) -> int:
        """Readable once there is one."""
        return self._broken.fileno()

    def wait_until_up(self, seconds: float) -> None:
        """Until every process has imported what it needs."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._problem or all(one.is_up for one in self.processes), seconds
            )
        if self._problem is None and (
            late := [one.name for one in self.processes if not one.is_up]
        ):
            self._break(f"{', '.join(late)} did not start within {seconds:.0f} s")
        if self._problem is not None:
            raise GroupError(self._problem)

    def send(self, message: object) -> None:
        """To all of them, from any thread."""
        data = frame(message)
        with self._sending:
            for one in self.processes:
                self.send_to(one, data)

    def answers(self, ticket: int, seconds: float) -> dict[int, Done]:
        """By rank, what came of a message with this ticket; raises GroupError if one of them is
        gone, or does not say within so many seconds, which ends the group.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._problem is None and time.monotonic() < deadline:
                if len(self._answers.get(ticket, ())) == len(self.processes):
                    return self._answers.pop(ticket)
                self._changed.wait(1.0)
                sign_of_life()
            found = self._answers.pop(ticket, {})
        silent = [one.name for one in self.processes if one.rank not in found]
        self._break(f"{' and '.join(silent)} hangs: no answer for {seconds:.0f} s")
        raise GroupError(self._problem or "the group was closed")

    def send_to(self, one: RankProcess, data: bytes) -> None:
        try:
            one.connection.sendall(data)
        except TimeoutError:
            self._break(
                f"{one.name} hangs: it has not taken a message for {one.connection.gettimeout():.0f} s"
            )
        except OSError:
            pass  # it is gone, and the listener says how

    def expect(self, computed: Computed) -> None:
        """What rank 0 found for a step, which must be what all find."""
        with self._changed:
            self._expected[computed.step_id] = computed.checksum
            reports = list(self._reported.pop(computed.step_id, {}).items())
        for rank, found in reports:
            self._compare(rank, computed.step_id, computed.checksum, found)

    def explain(self, error: BaseException) -> str:
        """What went wrong, for an error that rank 0 met in the middle of a step: whose fault it is,
        if it is another rank's. Ranks that gave up waiting say so within a moment; one that says
        nothing hangs.
        """
        if not isinstance(error, GroupError):
            return f"rank 0 failed: {type(error).__name__}: {error}"
        deadline = time.monotonic() + _LAST_WORDS
        with self._changed:
            while self._problem is None and time.monotonic() < deadline:
                if self.processes and all(one.failed is not None for one in self.processes):
                    break
                self._changed.wait(0.05)
            silent = [one.name for one in self.processes if one.failed is None]
        if self._problem is not None:
            return self._problem
        who = f"{' and '.join(silent)} hangs" if silent else "the ranks lost each other"
        return f"{who}: {error}"

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for one in self.processes:
                selector.register(one.connection, selectors.EVENT_READ, one)
            while selector.get_map():
                for key, _ in selector.select():
                    process: RankProcess = key.data
                    try:
                        self._take(process, receive(process.connection))
                    except (EOFError, OSError):
                        selector.unregister(process.connection)
                        if not self._is_closing and process.failed is None:
                            self._break(f"{process.name} {process.end_of_it()}")

    def _take(self, one: RankProcess, message: object) -> None:
        if isinstance(message, (Hello, Alive)):
            sign_of_life()
        if isinstance(message, Computed):
            with self._changed:
                expected = self._expected.get(message.step_id)
                if expected is None:
                    self._reported.setdefault(message.step_id, {})[one.rank] = message.checksum
            if expected is not None:
                self._compare(one.rank, message.step_id, expected, message.checksum)
            return
        if isinstance(message, Done):
            with self._changed:
                self._answers.setdefault(message.ticket, {})[one.rank] = message
                self._changed.notify_all()
            return
        with self._changed:
            one.is_up = one.is_up or isinstance(message, Hello)
            if isinstance(message, Failed):
                one.failed = message
            self._changed.notify_all()
        if isinstance(message, Failed) and not message.is_groups:
            self._break(f"{one.name} failed: {message.message}")

    def _compare(self, rank: int, step_id: int, expected: int, found: int) -> None:
        if found != expected:
            self._break(
                f"rank {rank} drew other tokens than rank 0 in step {step_id}: this is a bug in Quire"
            )
        with self._changed:  # steps are reported in their order
            for old in [one for one in self._expected if one < step_id - 16]:
                del self._expected[old]

    def _break(self, problem: str) -> None:
        with self._changed:
            if self._problem is not None or self._is_closing:
                return
            self._problem = problem
            self._changed.notify_all()
            self._tell_broken.send(b"!")
        self._on_failure()

    def close(self, is_orderly: bool = False) -> None:
        """Ends them: by the end of their connections where they listen, else by force. A fork of
        this process has none of its own, and leaves those of its parent alone.
        """
        if not self.are_own:
            return
        self._is_closing = True
        for one in self.processes:
            with contextlib.suppress(OSError):
                one.connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + (_EXIT_SECONDS if is_orderly else 0.0)
        for one in self.processes:
            one.child.wait(max(deadline - time.monotonic(), 0.0))
            one.child.kill()
        if (
            self.processes
            and hasattr(self, "_listener")
            and self._listener is not threading.current_thread()
        ):
            self._listener.join(_EXIT_SECONDS)
        for one in self.processes:
            one.child.close()
        for connection in (self._broken, self._tell_broken):
            connection.close()
