"""The engine process of `http_side.py`: no model, and as many tokens per second as it is told to give.

It speaks the engine's part (`quire.server.link.messages`): every step gives one token to each request.
The token's id tells the step, and when that was made stands in a file that `http_side.py` reads, so
that whoever reads a stream knows how long its tokens were on their way.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from quire.observe.step_log import StepSummary
from quire.process.child import end_with_parent, ignore_terminal_signals
from quire.server.link import messages
from quire.server.link.channel import BlockingChannel
from quire.step import RequestUpdate

FIRST_ID, NUM_IDS = 300, 1024
"""Of the tokens it gives. They come again after so many steps, which is longer than any of them is
on its way.
"""
_MOST_BEHIND = 64 * 1024
"""Bytes that may wait in this process; those that wait in the HTTP process come on top."""
VARIABLE = "QUIRE_BENCH_BOARD"


class Board:
    """What the two processes tell each other: the rate that is wanted, and when each step was made."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * (2 + NUM_IDS)))
        with path.open("r+b") as file:
            self._values = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self._values[0]

    @rate.setter
    def rate(self, value: float) -> None:
        self._values[0] = value

    @property
    def num_requests(self) -> int:
        """That the engine has."""
        return int(self._values[1])

    @num_requests.setter
    def num_requests(self, value: int) -> None:
        self._values[1] = value

    def made(self, token_id: int) -> float:
        """When the step that gave this token was made."""
        return self._values[2 + token_id - FIRST_ID]

    def make(self, step: int) -> int:
        """The token of a step that is made now."""
        self._values[2 + step % NUM_IDS] = time.monotonic()
        return FIRST_ID + step % NUM_IDS


def run(channel: BlockingChannel) -> None:
    board = Board(Path(os.environ[VARIABLE]))
    channel.receive()
    channel.send(
        messages.Ready(FIRST_ID + NUM_IDS, 64, 65536, 4096, 1_000_000, 16, "fcfs", "fp_bench")
    )
    names: dict[str, None] = {}
    step = 0
    due = time.monotonic()
    while True:
        out = messages.Updates(num_free_blocks=1_000_000)
        rate = board.rate
        is_idle = not names or not rate
        wait = 0.02 if is_idle else max(0.0, due - time.monotonic())
        if channel.wait(wait):
            while (data := channel.receive(0.0)) is not None:
                command = messages.decode_command(data)
                if isinstance(command, messages.AddRequest):
                    names[command.request_id] = None
                    out.accepted.append(command.request_id)
                    out.started.append(command.request_id)
                elif isinstance(command, messages.Abort):
                    for name in command.request_ids:
                        names.pop(name, None)
            board.num_requests = len(names)
        now = time.monotonic()
        if names and rate and now >= due:
            tokens = (board.make(step),)
            out.add_updates([RequestUpdate(name, tokens) for name in names])
            out.steps = [StepSummary(step, now, 0, 0, 0, len(names), 0, 0, 0.0)]
            step += 1
            # what was missed is caught up with, up to a point
            due = max(due + len(names) / rate, now - 0.05)
        elif is_idle:
            due = now
        if out.accepted or out.has_updates:
            channel.send(out)


if __name__ == "__main__":
    ignore_terminal_signals()
    end_with_parent()
    run(BlockingChannel.to_parent(_MOST_BEHIND))
