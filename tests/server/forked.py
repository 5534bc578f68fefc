"""Servers forked from a process that has everything imported: starting Python and importing takes
seconds of a processor, and tests start dozens of servers.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_IMPORTED = [
    "tests.server.run_server",
    "tests.server.run_faulty_server",
    "tests.server.faulty_engine",
    "tests.server.forked_engine",
    "pytest",
]


def fork_context() -> ForkServerContext:
    """Its processes have imported what a server and its engine import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


class ForkedServer:
    """A process that serves, with the methods of those of `subprocess`."""

    def __init__(
        self, fields: dict[str, Any], environment: dict[str, str], log: Path, faults: bool
    ) -> None:
        log.touch()
        arguments = (fields, environment, str(log), faults)
        self._process: ForkServerProcess = fork_context().Process(
            target=_serve, args=arguments, daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the server", seconds or 0.0)
        return self._process.exitcode

    def send_signal(self, which: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, which)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(fields: dict[str, Any], environment: dict[str, str], log: str, faults: bool) -> None:
    """In the new process."""
    # What was imported stays: a server that collects garbage when it is ready, as all do, would walk
    # over all of it, a million objects in memory that it shares until then.
    gc.freeze()
    from tests.server import run_faulty_server, run_server
    from tests.server.forked_engine import fork_engines

    os.environ.update(environment)
    # As a terminal starts it, however the tests themselves were started.
    under_nohup = "QUIRE_TEST_NOHUP" in environment
    signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    os.chdir(_ROOT)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    fork_engines()
    if faults:
        run_faulty_server.break_all()
    sys.exit(run_server.run(fields))
