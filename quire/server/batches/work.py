"""The answers of a server's batch while it runs: two files of whole lines, those that are answers
and those that are errors, each in the order of the requests. When the batch is over they are its
output files, without being copied.

A run that finds such files takes up where they end: each line's id says which request it answers,
and whatever does not continue the order, or is half a line, is cut off.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from quire.server.batches.answers import BatchAnswer, read_answer_line
from quire.server.batches.requests import BatchRequest
from quire.server.batches.room import Take
from quire.server.disk import open_plain, write_all

_SYNC_SECONDS = 5.0
"""So much is computed again, at most, if not only the process ends but the machine."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class _Part:
    """One of the two files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = os.open(path, _FLAGS, 0o600)
        self.size = os.fstat(self.number).st_size
        self.num_lines = 0

    def cut(self, size: int) -> None:
        os.ftruncate(self.number, size)
        self.size = size


class WorkFiles:
    """Both files, whose bytes are counted for the batch's key. Not on the event loop."""

    def __init__(self, output: Path, errors: Path, owner: str, take: Take, give_back: Take) -> None:
        """What the files have already was counted before."""
        self._owner = owner
        self._take = take
        self._give_back = give_back
        self.output = _Part(output)
        try:
            self.errors = _Part(errors)
        except OSError:
            os.close(self.output.number)
            raise
        self._synced = time.monotonic()

    def resume(self, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
        """Reads what an earlier run wrote; the requests that are left."""
        parts = (self.output, self.errors)
        with contextlib.ExitStack() as stack:
            heads = [
                _Head(stack.enter_context(os.fdopen(open_plain(part.path), "rb"))) for part in parts
            ]
            left: Iterator[BatchRequest] = iter(())
            for request in requests:
                found = [head for head in heads if head.id == request.answer_id]
                if not found:
                    left = chain([request], requests)
                    break
                found[0].next()
            for part, head in zip(parts, heads, strict=True):
                if head.end < part.size:
                    self._give_back(self._owner, part.size - head.end)
                    part.cut(head.end)
                part.num_lines = head.num_lines
        return left

    def write(self, answers: Sequence[BatchAnswer]) -> None:
        """All of them or none: raises NoRoomError or OSError, and the files are as they were."""
        size = sum(len(one.line) for one in answers)
        self._take(self._owner, size)
        before = (self.output.size, self.errors.size)
        try:
            for part, is_error in ((self.output, False), (self.errors, True)):
                lines = [one.line for one in answers if one.is_error == is_error]
                data = b"".join(lines)
                write_all(part.number, data)
                part.size += len(data)
        except OSError:
            for part, length in zip((self.output, self.errors), before, strict=True):
                with contextlib.suppress(OSError):
                    part.cut(length)
            self._give_back(self._owner, size)
            raise
        for one in answers:
            (self.errors if one.is_error else self.output).num_lines += 1
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        os.fsync(self.output.number)
        os.fsync(self.errors.number)
        self._synced = time.monotonic()

    def close(self) -> None:
        os.close(self.output.number)
        os.close(self.errors.number)


class _Head:
    """The next line of a file that was not accounted for."""

    def __init__(self, file: Iterator[bytes]) -> None:
        self._file = file
        self.end = 0
        """Bytes of the lines before it."""
        self.num_lines = -1
        self._length = 0
        self.id: str | None = None
        self.next()

    def next(self) -> None:
        """Goes on to the line behind it."""
        self.end += self._length
        self.num_lines += 1
        line = next(self._file, b"")
        self._length = len(line)
        written = read_answer_line(line)
        self.id = None if written is None else written.id
