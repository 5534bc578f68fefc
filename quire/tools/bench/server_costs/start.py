"""A server in a process of its own, for as long as it is measured."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_SERVE = (sys.executable, "-m", "quire.cli.main", "serve", "--port=0")
_PATIENCE = 20.0
"""Seconds from its saying where it is to its answering there."""


class ServerProcess(NamedTuple):
    """One that takes requests."""

    url: str
    pid: int

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextlib.contextmanager
def serving(
    *options: str, command: Sequence[str] = _SERVE, **environment: str
) -> Iterator[ServerProcess]:
    """With these options and variables; by default `quire serve` at a free port."""
    # a pipe that nobody reads would stop the server when it is full
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [*command, *options], stdout=output, stderr=output, env={**os.environ, **environment}
        )
        try:
            found = None
            while found is None:
                time.sleep(0.1)
                output.seek(0)
                text = output.read()
                found = re.search(r"http://\S+:\d+", text)
                if process.poll() is not None:
                    raise SystemExit(f"the server did not start: {text}")
            _wait_until_open(found[0])
            yield ServerProcess(found[0], process.pid)
        finally:
            for _ in range(2):  # the second one ends it at once, whatever it is doing
                process.send_signal(signal.SIGTERM)
                time.sleep(0.1)
            process.wait(30)


def _wait_until_open(url: str) -> None:
    """A server says where it is a moment before it takes connections."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
            return
        time.sleep(0.05)
    raise SystemExit(f"the server does not answer at {url}")


def end_with_servers() -> None:
    """SIGTERM ends this process as an exception does, so that no server is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
