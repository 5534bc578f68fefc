"""Faults that are counted down: with "engine_send 3" in the file named by QUIRE_TEST_FAULT the
third such call fails, and the file is empty then. So a test knows whether the fault was met.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from quire.server.link.channel import BlockingChannel, Channel


def is_due(kind: str) -> bool:
    """Whether this call is the one that has to fail."""
    order = Path(os.environ["QUIRE_TEST_FAULT"])
    try:
        fault, _, count = order.read_text().partition(" ")
    except FileNotFoundError:  # never there, or the other process has just taken it away
        return False
    if fault != kind:
        return False
    left = int(count) - 1
    order.write_text(f"{kind} {left}" if left else "")
    return not left


def break_sends(kind: str) -> None:
    """Messages of this process fail to be sent when they are due."""
    for channel in (Channel, BlockingChannel):
        channel.send = _counted(channel.send, kind)  # type: ignore[method-assign]


def _counted(send: Any, kind: str) -> Any:
    def counted(self: Any, data: bytes) -> None:
        if is_due(kind):
            raise OSError(errno.ENOTSUP, "Operation not supported")
        send(self, data)

    return counted
