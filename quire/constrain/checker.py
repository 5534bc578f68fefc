"""The engine's side of the process that tries grammars out (`check_child`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quire
from quire.constrain import limits
from quire.errors import EngineError

# Beyond the wall time the fork gets: for the process to start and read the vocabulary, and to fork.
_GRACE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What compiling a grammar came to."""

    error: str
    """Empty for a good grammar."""
    num_bytes: int
    """What it takes in memory, as seen from outside."""


class GrammarChecker:
    """Tries one grammar at a time, in a process started for the first of them. Safe to share
    between threads.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
    ) -> None:
        self._vocabulary = {
            "bytes": b"".join(tokens).hex(),
            "lengths": [len(token) for token in tokens],
            "special": list(special_token_ids),
            "eos": list(eos_token_ids),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes]], GrammarChecker] | None = None
        self._lock = threading.Lock()

    def check(self, grammar: str) -> Verdict:
        """Blocks for as long as compiling takes, at most the time limit."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                self._send({"grammar": grammar})
                reply = self._receive()
            except OSError:
                self._stop()
                raise EngineError("the process that checks grammars died; try again") from None
            return Verdict(reply["error"], reply["bytes"])

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._stop()
        package_root = str(Path(quire.__file__).parents[1])
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quire.constrain.check_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # where Rust's last words would go
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._finalizer = weakref.finalize(self, _end, self._process)
        try:
            self._send(self._vocabulary)
        except OSError:
            self._stop()
            raise EngineError("the process that checks grammars could not start") from None

    def _send(self, message: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select(
            [self._process.stdout], [], [], limits.COMPILE_WALL_SECONDS + _GRACE_SECONDS
        )
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise OSError("no answer")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was still to be written has nobody to read it
            pipe.close()
