"""What rank 0 and the others say to each other beside what they gather, and how: pickled, over a
pair of sockets.

Both ends are processes of one program, started by it; nobody else can reach these sockets.
"""

from __future__ import annotations

import pickle
import socket
import struct
import zlib
from array import array
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.sources import ModelSource
from quire.config import EngineConfig
from quire.models.parameters import SleepLevel
from quire.step import StepResult

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Task:
    """What a rank is to do; the first message to it."""

    rank: int
    source: ModelSource
    config: EngineConfig
    """The whole engine's."""
    folder: str
    """Where the ranks meet."""
    num_threads: int
    start_seconds: float
    """Within which everything must be loaded."""
    step_seconds: float
    """Within which each gather of a step must be over."""


class Hello(NamedTuple):
    """The process lives, and torch is imported."""


class Alive(NamedTuple):
    """It still loads or compiles."""


class Computed(NamedTuple):
    """A step's results are there; ranks that agree have the same checksum."""

    step_id: int
    checksum: int


class Sleep(NamedTuple):
    """To a rank: give memory back, after all steps before this message (`Runner.sleep`)."""

    level: SleepLevel


class Wake(NamedTuple):
    """To a rank: take it again."""


class Reload(NamedTuple):
    """To a rank: read the weights from the model's files again. Answered by `Done`."""

    ticket: int


class PrepareUpdate(NamedTuple):
    """To a rank: read its part of these weights and keep them ready, while it computes steps.
    Answered by `Done`.
    """

    ticket: int
    stored: Checkpoint


class CommitUpdate(NamedTuple):
    """To a rank: replace its weights by those of a preparation. Answered by `Done`."""

    ticket: int
    prepared: int
    """The preparation's ticket."""


class AbandonUpdate(NamedTuple):
    """To a rank: forget what was prepared, if it is this."""

    prepared: int


class LoadAdapter(NamedTuple):
    """To a rank: read an adapter, as rank 0 has done."""

    folder: Path
    digest: str


class RemoveAdapter(NamedTuple):
    """To a rank: let go of one."""

    digest: str


Management = (
    Sleep
    | Wake
    | Reload
    | PrepareUpdate
    | CommitUpdate
    | AbandonUpdate
    | LoadAdapter
    | RemoveAdapter
)
"""To a rank, between steps."""


class Done(NamedTuple):
    """A rank has done what it was asked to, or could not."""

    ticket: int
    error: str | None = None
    missing: frozenset[str] = frozenset()
    """Weights that it has not got now."""
    has_changed: bool = True
    """Whether any of its weights are others than before."""


class Failed(NamedTuple):
    """The last message of a rank."""

    message: str
    is_groups: bool
    """Whether it only found out that others failed."""


def checksum(result: StepResult) -> int:
    """Of the tokens that were drawn, which all ranks must agree on."""
    numbers = array("q", chain.from_iterable((*result.tokens.values(), *result.drafts.values())))
    numbers.extend((len(result.tokens), len(result.errors), len(result.ended)))
    return zlib.crc32(numbers)


def frame(message: object) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def receive(connection: socket.socket) -> Any:
    """The next message; EOFError at the end."""
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    return pickle.loads(_receive_exactly(connection, length))  # noqa: S301, from our own process


def _receive_exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = connection.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count
    return data
