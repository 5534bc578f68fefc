"""The answers of a batch on disk: complete lines, in the order of the requests or of the answers,
whatever moment the process ends at.

They grow in `NAME.part`, which takes its name when it is complete. A run that finds such a file
takes up where it ends: each line's id tells that it answers this request under these options, and
half a line at its end is taken away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from quire.errors import InvalidRequestError, QuireError
from quire.server.batches.answers import WrittenAnswer, read_answer_line
from quire.server.batches.requests import BAD_JSON, BatchRequest, import_pyarrow
from quire.server.disk import create, write_all

_SYNC_SECONDS = 5.0
"""So much is computed again, at most, if not only the process ends but the machine."""
_ROWS_AT_ONCE = 1000
"""Of a Parquet file, that are in memory while it is written."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class AnswerFile:
    """Holds the lock on a file of answers."""

    def __init__(self, path: Path, restart: bool) -> None:
        self.path = path
        self.part = path.with_name(path.name + ".part")
        if path.suffix.lower() == ".parquet":
            import_pyarrow(path)
            if path.exists() and not restart:
                raise QuireError(
                    f"{path}: is there already: choose another --output, or replace it with --restart"
                )
        if os.path.isdir(path):
            raise InvalidRequestError(
                "--output", f"{path} is a folder: name a file, say {path / 'answers.jsonl'}"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(os.open(self.part, _FLAGS, 0o666), "a+b", buffering=0)
        except OSError as error:
            what = (
                f"{self.part} is a link: remove it"
                if error.errno == errno.ELOOP
                else str(error.strerror)
            )
            raise InvalidRequestError("--output", f"{path} can't be written: {what}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise QuireError(f"{path}: another run is writing these answers") from None
        if restart:
            self._file.truncate(0)
        is_done = path.exists() and not restart and not self._file.seek(0, os.SEEK_END)
        self._found = path if is_done else self.part
        """What there is already."""
        self.is_complete = False
        self._synced = time.monotonic()

    def resume(self, requests: Iterator[BatchRequest]) -> tuple[int, int]:
        """Reads what an earlier run wrote, and of `requests` those it has answered; how many, and
        how many of them are errors.
        """
        done = failed = end = 0
        for written, length in self._found_lines():
            request = next(requests, None)
            if request is None or written.id != request.answer_id:
                raise self._others(f"line {done + 1} answers")
            done += 1
            failed += _is_error(written)
            end += length
        self._take_up(end, next(requests, None) is None if self._found == self.path else False)
        return done, failed

    def resume_in_any_order(
        self, requests: Iterable[BatchRequest]
    ) -> tuple[int, int, Iterator[BatchRequest]]:
        """The same where answers stand in the order in which they came, and the requests that are
        left.
        """
        answered: set[str] = set()
        failed = end = 0
        for written, length in self._found_lines():
            answered.add(written.id)
            failed += _is_error(written)
            end += length
        is_known = [request.answer_id in answered for request in requests]
        if sum(is_known) < len(answered):
            raise self._others("some lines answer")
        self._take_up(end, all(is_known))
        left = (request for request, known in zip(requests, is_known, strict=True) if not known)
        return len(answered), failed, left

    def _found_lines(self) -> Iterator[tuple[WrittenAnswer, int]]:
        """Whole lines, and how long each is."""
        with self._found.open("rb") as reader:
            for line in reader:
                written = read_answer_line(line)
                if written is None:  # it was being written
                    return
                yield written, len(line)

    def _others(self, what: str) -> QuireError:
        return QuireError(
            f"{self._found}: {what} another request, or the same with other options. Go on with the command that began "
            "it, choose another --output, or begin anew with --restart"
        )

    def _take_up(self, end: int, is_all: bool) -> None:
        """What was found ends here; `is_all`: nothing is missing."""
        self.is_complete = self._found == self.path
        if not self.is_complete:
            self._file.truncate(end)
        elif not is_all:
            raise QuireError(
                f"{self.path}: has answers, but not to all requests: choose another --output, or --restart"
            )

    def write(self, lines: bytes) -> None:
        write_all(self._file.fileno(), lines)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def complete(self) -> None:
        """Everything is there."""
        try:
            os.fsync(self._file.fileno())
            if self.path.suffix.lower() == ".parquet":
                _write_parquet(self.part, self.path)
                self.part.unlink()
            else:
                self.part.replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            what = (
                f"{self.path}: can't be written: {error.strerror}; the answers are in {self.part}"
            )
            raise QuireError(f"{what}, and the same command goes on from there") from None

    def close(self) -> None:
        if self.part.exists() and not self.part.stat().st_size:
            self.part.unlink()
        self._file.close()


def _is_error(written: WrittenAnswer) -> bool:
    if bytes(written.error) != b"null":
        return True
    try:
        response = msgspec.json.decode(written.response)
    except BAD_JSON:
        return True
    return not isinstance(response, dict) or response.get("status_code") != 200


def _write_parquet(lines: Path, path: Path) -> None:
    """Columns id and custom_id; response and error as JSON text."""
    parquet = import_pyarrow(path)
    pyarrow = importlib.import_module("pyarrow")
    schema = pyarrow.schema(
        [(name, pyarrow.string()) for name in ("id", "custom_id", "response", "error")]
    )
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        with (
            os.fdopen(create(temporary), "wb") as file,
            parquet.ParquetWriter(file, schema) as writer,
        ):
            for rows in _in_batches(lines):
                writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema=schema))
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _in_batches(lines: Path) -> Iterator[list[dict[str, str | None]]]:
    rows: list[dict[str, str | None]] = []
    file: BinaryIO
    with lines.open("rb") as file:
        for line in file:
            found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            row: dict[str, str | None] = {
                name: msgspec.json.decode(found[name]) for name in ("id", "custom_id")
            }
            for name in ("response", "error"):
                text = bytes(found[name]).decode()
                row[name] = None if text == "null" else text
            rows.append(row)
            if len(rows) >= _ROWS_AT_ONCE:
                yield rows
                rows = []
    if rows:
        yield rows
