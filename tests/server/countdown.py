"""Faults that are counted down: with "engine_send 3" in the file named by QUIRE_TEST_FAULT the
third such call fails, and the file is empty then. So a test knows whether the fault was met.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import zmq


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
    """Sends of this process through zmq fail when they are due."""
    send = zmq.Socket.send

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        if is_due(kind):
            raise zmq.ZMQError(zmq.ENOTSUP)
        return send(self, *args, **options)

    zmq.Socket.send = counted  # type: ignore[method-assign]
