"""The folder of `--batches DIR`: uploaded files, batches, and their answers. Readable by this user alone, bounded, and
still there after a restart.

What is known of a file or a batch is a small file of JSON beside the data, written aside and renamed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire.server.errors import ApiError
from quire.server.guard.connection import new_id
from quire.server.owned_folder import own_folder

_MOST_ENTRIES = 10_000
"""Files, and batches."""
_OVER = ("completed", "cancelled", "failed")
_SHOWN = (
    *("id", "created_at", "endpoint", "input_file_id", "completion_window", "metadata", "status"),
    *("output_file_id", "error_file_id", "errors", "in_progress_at", "cancelling_at"),
)
"""Fields of a batch that its client sees as they are."""


class StoredFile(msgspec.Struct, kw_only=True):
    """A file as its client sees it, and whose it is."""

    id: str
    owner: str
    created_at: int
    bytes: int
    filename: str
    purpose: str

    def shown(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self) | {"object": "file", "status": "processed", "status_details": None}
        del fields["owner"]
        return fields


class StoredBatch(msgspec.Struct, kw_only=True):
    """A batch, as far as it has come."""

    id: str
    owner: str
    created_at: int
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None = None
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: dict[str, Any] | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    in_progress_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None

    @property
    def is_over(self) -> bool:
        return self.status in _OVER

    def shown(self) -> dict[str, Any]:
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        ended = {f"{status}_at": self.ended_at if self.status == status else None for status in _OVER}
        fields = {name: getattr(self, name) for name in _SHOWN}
        unused = {"expires_at": None, "expired_at": None, "finalizing_at": None}
        return {"object": "batch", "request_counts": counts, **fields, **ended, **unused}


_Entry = TypeVar("_Entry", StoredFile, StoredBatch)


class BatchStore:
    """Owns the folder. Safe to use from several threads; nothing here is quick, so not from the event loop."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._lock = threading.RLock()
        self._owned = own_folder(folder, "--batches", "files", "batches", "work")
        for leftover in (folder / "work").glob("upload-*"):
            leftover.unlink(missing_ok=True)
        self._files = self._load("files", StoredFile)
        self._batches = self._load("batches", StoredBatch)

    def close(self) -> None:
        os.close(self._owned)

    # Files

    @property
    def room(self) -> int:
        """Bytes that may still be kept."""
        with self._lock:
            kept = sum(one.bytes for one in self._files.values())
        return self._most_bytes - kept - sum(one.stat().st_size for one in (self.folder / "work").iterdir())

    def add_file(self, owner: str, filename: str, purpose: str, source: Path, name: str | None = None) -> StoredFile:
        """Takes a file over, under a new id unless it has one."""
        with self._lock:
            if len(self._files) >= _MOST_ENTRIES:
                raise ApiError(413, f"{_MOST_ENTRIES} files are stored already: delete some", code="too_many_files")
            size = source.stat().st_size
            stored = StoredFile(
                id=name or new_id("file-"),
                owner=owner,
                created_at=int(time.time()),
                bytes=size,
                filename=filename,
                purpose=purpose,
            )
            os.replace(source, self.path_of(stored))
            self._save("files", stored)
            self._files[stored.id] = stored
            return stored

    def path_of(self, file: StoredFile) -> Path:
        return self.folder / "files" / f"{file.id}.data"

    def file(self, owner: str, file_id: str) -> StoredFile:
        return _owned(self._files, owner, file_id, "file")

    def files(self, owner: str) -> list[StoredFile]:
        """The newest last."""
        with self._lock:
            return _in_order(one for one in self._files.values() if one.owner == owner)

    def delete_file(self, owner: str, file_id: str) -> None:
        with self._lock:
            stored = self.file(owner, file_id)
            if any(one.input_file_id == file_id and not one.is_over for one in self._batches.values()):
                raise ApiError(409, "a batch that is not over yet needs this file: cancel it first", code="file_in_use")
            del self._files[file_id]
            (self.folder / "files" / f"{file_id}.json").unlink(missing_ok=True)
            self.path_of(stored).unlink(missing_ok=True)

    # Batches

    def add_batch(self, batch: StoredBatch) -> None:
        with self._lock:
            self.file(batch.owner, batch.input_file_id)
            if len(self._batches) >= _MOST_ENTRIES:
                self._forget_oldest()
            self._save("batches", batch)
            self._batches[batch.id] = batch

    def batch(self, owner: str, batch_id: str) -> StoredBatch:
        return _owned(self._batches, owner, batch_id, "batch")

    def batches(self, owner: str) -> list[StoredBatch]:
        with self._lock:
            return _in_order(one for one in self._batches.values() if one.owner == owner)

    def unfinished(self) -> list[StoredBatch]:
        with self._lock:
            return _in_order(one for one in self._batches.values() if not one.is_over)

    def save(self, batch: StoredBatch) -> None:
        with self._lock:
            self._save("batches", batch)

    def work_path(self, batch: StoredBatch) -> Path:
        """Where its answers grow."""
        return self.folder / "work" / batch.id

    def new_upload(self) -> Path:
        return self.folder / "work" / new_id("upload-")

    # Inside

    def _forget_oldest(self) -> None:
        over = [one for one in _in_order(self._batches.values()) if one.is_over]
        if not over:
            raise ApiError(429, f"{_MOST_ENTRIES} batches wait already", code="too_many_batches")
        del self._batches[over[0].id]
        (self.folder / "batches" / f"{over[0].id}.json").unlink(missing_ok=True)

    def _load(self, kind: str, type: type[_Entry]) -> dict[str, _Entry]:
        found: dict[str, _Entry] = {}
        for path in (self.folder / kind).glob("*.json"):
            try:
                entry = msgspec.json.decode(path.read_bytes(), type=type)
            except (msgspec.MsgspecError, OSError):
                continue  # not ours, or damaged: it is left alone
            found[entry.id] = entry
        return found

    def _save(self, kind: str, entry: StoredFile | StoredBatch) -> None:
        path = self.folder / kind / f"{entry.id}.json"
        aside = path.with_suffix(".unfinished")
        aside.write_bytes(msgspec.json.encode(entry))
        os.replace(aside, path)


def _owned(entries: dict[str, _Entry], owner: str, name: str, what: str) -> _Entry:
    found = entries.get(name)
    if found is None or found.owner != owner:
        message = f"{what}_id: there is no {what} {name[:128]!r}: it was deleted, or belongs to another key"
        raise ApiError(404, message, field=f"{what}_id", code="not_found")
    return found


def _in_order(entries: Iterable[_Entry]) -> list[_Entry]:
    key: Callable[[_Entry], tuple[int, str]] = lambda one: (one.created_at, one.id)  # noqa: E731
    return sorted(entries, key=key)


def split_answers(answers: Path, output: Path, errors: Path) -> tuple[int, int]:
    """Divides complete lines into those that are answers and those that are errors; how many there are of each."""
    counts = [0, 0]
    with answers.open("rb") as source, output.open("wb") as good, errors.open("wb") as bad:
        for line in source:
            response = msgspec.json.decode(line).get("response")
            is_error = response is None or response["status_code"] != 200
            (bad if is_error else good).write(line)
            counts[is_error] += 1
    return counts[0], counts[1]
