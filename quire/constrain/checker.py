"""The engine's side of the process that tries grammars out (`check_child`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.constrain import limits
from quire.errors import EngineError
from quire.process.child import Child

_SECONDS = limits.COMPILE_WALL_SECONDS + 20.0
"""For an answer: beyond what compiling may take, for the process to start and read the vocabulary,
and to fork.
"""


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
        self._child: Child | None = None
        self._lock = threading.Lock()

    def check(self, grammar: str) -> Verdict:
        """Blocks for as long as compiling takes, at most the time limit."""
        with self._lock:
            if self._child is None or self._child.end is not None:
                self._start()
            reply = self._ask({"grammar": grammar}, "died; try again")
            return Verdict(reply["error"], reply["bytes"])

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._stop()
        # What is dropped are Rust's last words.
        self._child = Child("quire.constrain.check_child", errors="dropped")
        self._ask(self._vocabulary, "could not start")

    def _ask(self, message: object, problem: str) -> dict[str, Any]:
        assert self._child is not None
        try:
            reply: dict[str, Any] = self._child.ask(message, _SECONDS)
        except OSError:
            self._stop()
            raise EngineError(f"the process that checks grammars {problem}") from None
        return reply

    def _stop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
