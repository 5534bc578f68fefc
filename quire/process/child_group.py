"""Child processes that end with this one, however it ends, and so does what they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any, Self

_GUARD = "import os, signal; os.read(0, 1); os.killpg(0, signal.SIGKILL)"


class ChildGroup:
    """A process group of its own.

    Its first member waits for the end of a pipe whose other end this process holds, and then kills
    the group. The system closes the pipe when this process is killed; a compiler would go on, and
    so would what it has started.
    """

    def __init__(self) -> None:
        self._guard: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )

    def run(self, command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
        """A command in the group, with what it wrote; raises TimeoutExpired when it takes longer
        than `seconds`.
        """
        return subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            process_group=self._guard.pid,
        )

    def start(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """A process in the group; what it writes, errors too, can be read from its `stdout`."""
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            process_group=self._guard.pid,
        )

    def close(self) -> None:
        """Ends whatever still runs in the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        pipe: IO[Any] | None = self._guard.stdin
        assert pipe is not None
        pipe.close()
        self._guard.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
