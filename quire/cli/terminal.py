"""What goes to the person at the terminal: answers as they come on stdout, everything else on
stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from quire.outputs import RequestDelta


def say(message: str) -> None:
    """A line on stderr, so that output stays clean; dim where colours work."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(message, style="dim", markup=False)


class AnswerPrinter:
    """Streams the first unfinished answer to stdout; what later ones gain meanwhile waits for their
    turn.

    With several prompts each answer stands below its prompt.
    """

    def __init__(self, request_ids: Sequence[str], prompts: Sequence[str]) -> None:
        self._queue = list(zip(request_ids, prompts, strict=True))
        self._pending: dict[str, list[str]] = {request_id: [] for request_id in request_ids}
        self._finished: set[str] = set()
        self._several = len(self._queue) > 1
        self._begun = False

    def take(self, delta: RequestDelta) -> None:
        self._pending[delta.request_id].append(delta.text)
        if delta.finish_reason is not None:
            self._finished.add(delta.request_id)
        while self._queue:
            request_id, prompt = self._queue[0]
            if self._several and not self._begun:
                print(f"> {prompt}")
            self._begun = True
            sys.stdout.write("".join(self._pending[request_id]))
            sys.stdout.flush()
            self._pending[request_id].clear()
            if request_id not in self._finished:
                return
            print("\n" if self._several and len(self._queue) > 1 else "", flush=True)
            self._queue.pop(0)
            self._begun = False

    def interrupt(self) -> None:
        """Ends the line that was being written."""
        if self._begun:
            print()
