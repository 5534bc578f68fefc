"""The folder of `--batches DIR`: uploaded files, batches, and their answers. Readable by this user
alone, bounded in all and per key, and still there after a restart.

What is known of a file or a batch is a small file of JSON beside the data, written aside and
renamed, before the data takes its name. So data that nothing is known of was being deleted, or is
an upload that never ended: it is removed at the next start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from quire.server.batches.entries import RECORD_BYTES, StoredBatch, StoredFile
from quire.server.batches.requests import BAD_JSON
from quire.server.batches.room import FolderLimits, NoRoomError, Room, Take
from quire.server.batches.work import WorkFiles
from quire.server.disk import (
    UNFINISHED,
    create,
    open_plain,
    read_whole,
    write_all,
    write_whole,
)
from quire.server.errors import ApiError
from quire.server.guard.request_ids import new_id
from quire.server.owned_folder import own_folder

logger = logging.getLogger(__name__)

_MOST_RECORD_BYTES = 2**20
_SEEN_SECONDS = 120
"""By then a client that waits for a batch's end has asked for it."""
_KINDS = ("output", "errors")
"""Of a batch's answers."""
_FIELDS = {"output": "output_file_id", "errors": "error_file_id"}
_NAMES = {"output": "output", "errors": "error"}

_Entry = TypeVar("_Entry", StoredFile, StoredBatch)


class Upload:
    """A file that is being received: counted as it comes, gone unless it is kept."""

    def __init__(self, path: Path, owner: str, take: Take, give_back: Take, expected: int) -> None:
        """`expected`: bytes that are counted before the first has come; what the record will take
        is, too.
        """
        self._take = take
        self._give_back = give_back
        self._counted = 0
        self._number: int | None = None
        self.path = path
        self.owner = owner
        self.size = 0
        self._count(expected + RECORD_BYTES)
        try:
            self._number = create(path)
        except OSError:
            self.discard()
            raise

    def write(self, data: bytes) -> None:
        assert self._number is not None
        self._count(self.size + len(data) + RECORD_BYTES - self._counted)
        write_all(self._number, data)
        self.size += len(data)

    def kept(self) -> None:
        """It has become a stored file, which is counted from now on."""
        self._close()

    def discard(self) -> None:
        """Nothing is left of it; does nothing once it is kept."""
        if self._close():
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _count(self, num_bytes: int) -> None:
        if num_bytes > 0:
            self._take(self.owner, num_bytes)
            self._counted += num_bytes

    def _close(self) -> bool:
        is_open = self._number is not None or self._counted > 0
        if self._number is not None:
            os.close(self._number)
            self._number = None
        if self._counted:
            self._give_back(self.owner, self._counted)
            self._counted = 0
        return is_open


class BatchStore:
    """Owns the folder. Safe to use from several threads; nothing here is quick, so not from the
    event loop, but for looking up what is in memory: `file`, `batch`.

    Where an owner is asked for, None is everybody's: an admin key's.
    """

    def __init__(self, folder: Path, limits: FolderLimits) -> None:
        self.folder = folder
        self.room = Room(limits)
        self._limits = limits
        self._lock = threading.RLock()
        self._owned = own_folder(folder, "--batches", "files", "batches", "work")
        self._files = self._load("files", StoredFile)
        self._batches = self._load("batches", StoredBatch)
        self._tidy()

    def close(self) -> None:
        os.close(self._owned)

    # Files

    def new_upload(self, owner: str, expected: int = 0) -> Upload:
        """Raises ApiError if so many bytes are too many, or there are too many files."""
        with self._lock:
            self._check_count(owner)
        path = self.folder / "work" / new_id("upload-")
        return Upload(path, owner, self.take, self.room.give_back, expected)

    def add_file(self, upload: Upload, filename: str, purpose: str) -> StoredFile:
        """Takes an upload over."""
        with self._lock:
            self._check_count(upload.owner)
            stored = StoredFile(
                id=new_id("file-"),
                owner=upload.owner,
                created_at=int(time.time()),
                bytes=upload.size,
                filename=filename,
                purpose=purpose,
            )
            self._keep(stored, upload.path)
            upload.kept()
            return stored

    def path_of(self, file: StoredFile) -> Path:
        return self.folder / "files" / f"{file.id}.data"

    def open_file(self, file: StoredFile) -> int:
        """Its data, open for reading; raises ApiError if somebody took it away."""
        try:
            return open_plain(self.path_of(file))
        except FileNotFoundError:
            raise _missing(file.id, "file") from None

    def file(self, owner: str | None, file_id: str) -> StoredFile:
        return _owned(self._files, owner, file_id, "file")

    def files(self, owner: str | None) -> list[StoredFile]:
        """The newest last."""
        with self._lock:
            return _in_order(one for one in self._files.values() if owner in (None, one.owner))

    def delete_file(self, owner: str | None, file_id: str) -> None:
        with self._lock:
            stored = self.file(owner, file_id)
            if any(
                one.input_file_id == file_id and not one.is_over for one in self._batches.values()
            ):
                raise ApiError(
                    409,
                    "a batch that is not over yet needs this file: cancel it first",
                    code="file_in_use",
                )
            # Known no more, then gone: a start removes data that nothing is known of.
            self._record_of("files", file_id).unlink(missing_ok=True)
            del self._files[file_id]
            self.path_of(stored).unlink(missing_ok=True)
            self.room.give_back(stored.owner, stored.counted_bytes)

    # Batches

    def add_batch(self, batch: StoredBatch) -> None:
        with self._lock:
            self.file(batch.owner, batch.input_file_id)
            own = [one for one in self._batches.values() if one.owner == batch.owner]
            if len(own) >= self._limits.entries_per_key:
                self._forget_oldest(own)
            self.take(batch.owner, batch.counted_bytes)
            try:
                self.save(batch)
            except BaseException:
                self.room.give_back(batch.owner, batch.counted_bytes)
                raise
            self._batches[batch.id] = batch

    def batch(self, owner: str | None, batch_id: str) -> StoredBatch:
        return _owned(self._batches, owner, batch_id, "batch")

    def batches(self, owner: str | None) -> list[StoredBatch]:
        with self._lock:
            return _in_order(one for one in self._batches.values() if owner in (None, one.owner))

    def unfinished(self) -> list[StoredBatch]:
        with self._lock:
            return _in_order(one for one in self._batches.values() if not one.is_over)

    def save(self, batch: StoredBatch) -> None:
        with self._lock:
            write_whole(self._record_of("batches", batch.id), msgspec.json.encode(batch))

    def open_work(self, batch: StoredBatch) -> WorkFiles:
        """Where its answers grow."""
        output, errors = (self._work_path(batch.id, kind) for kind in _KINDS)
        return WorkFiles(output, errors, batch.owner, self._take_in_time, self.room.give_back)

    def end_batch(self, batch: StoredBatch, outcome: str) -> None:
        """Makes output files of its answers; they are counted already. Raises OSError, and may be
        called again, now or after a restart.
        """
        with self._lock:
            if batch.outcome is None:
                batch.outcome = outcome
                self.save(batch)
            for kind in _KINDS:
                setattr(batch, _FIELDS[kind], self._take_work(batch, kind))
            over = msgspec.structs.replace(batch, status=batch.outcome, ended_at=int(time.time()))
            self.save(over)
            batch.status = over.status
            batch.ended_at = over.ended_at

    def take(self, owner: str, num_bytes: int, kept_seconds: int = 0) -> None:
        """Counts bytes before they are written; raises NoRoomError. What nobody can delete, the
        records of batches that are over (for so long at least), makes room, the oldest first.
        """
        with self._lock:
            while True:
                try:
                    self.room.take(owner, num_bytes)
                    return
                except NoRoomError:
                    before = int(time.time()) - kept_seconds
                    over = [
                        one
                        for one in self._batches.values()
                        if one.owner == owner and one.is_over and (one.ended_at or 0) <= before
                    ]
                    if not over or num_bytes > self._limits.bytes_per_key:
                        raise
                    self._forget(min(over, key=lambda one: (one.created_at, one.id)))

    # Inside

    def _take_in_time(self, owner: str, num_bytes: int) -> None:
        """For answers, which can wait: a batch that is over stays until its client has seen it."""
        self.take(owner, num_bytes, kept_seconds=_SEEN_SECONDS)

    def _take_work(self, batch: StoredBatch, kind: str) -> str | None:
        """The id of the file that holds the batch's answers of a kind, if there are any."""
        file_id = f"file-{batch.id.removeprefix('batch_')}-{_NAMES[kind]}"
        path = self._work_path(batch.id, kind)
        try:
            size = path.stat(follow_symlinks=False).st_size
        except FileNotFoundError:  # it was taken already, or there was none
            return file_id if file_id in self._files else None
        if not size:
            path.unlink()
            return None
        stored = StoredFile(
            id=file_id,
            owner=batch.owner,
            created_at=int(time.time()),
            bytes=size,
            filename=f"{batch.id}_{_NAMES[kind]}.jsonl",
            purpose="batch_output",
        )
        self._keep(stored, path)
        self.room.give_back(batch.owner, size)
        return file_id

    def _keep(self, stored: StoredFile, source: Path) -> None:
        """Makes a file of what was counted when it was written; it is counted twice for a moment,
        never not at all.
        """
        self.room.count(stored.owner, stored.counted_bytes)
        try:
            write_whole(self._record_of("files", stored.id), msgspec.json.encode(stored))
            os.replace(source, self.path_of(stored))
        except BaseException:
            self.room.give_back(stored.owner, stored.counted_bytes)
            with contextlib.suppress(OSError):
                self._record_of("files", stored.id).unlink(missing_ok=True)
            raise
        self._files[stored.id] = stored

    def _check_count(self, owner: str) -> None:
        most = self._limits.entries_per_key
        if sum(one.owner == owner for one in self._files.values()) >= most:
            raise ApiError(
                413, f"{most} files are stored already: delete some", code="too_many_files"
            )

    def _forget_oldest(self, own: list[StoredBatch]) -> None:
        over = [one for one in _in_order(own) if one.is_over]
        if not over:
            raise ApiError(
                429,
                f"{len(own)} of your batches wait already",
                code="too_many_batches",
                retry_after=60.0,
            )
        self._forget(over[0])

    def _forget(self, batch: StoredBatch) -> None:
        self._record_of("batches", batch.id).unlink(missing_ok=True)
        del self._batches[batch.id]
        self.room.give_back(batch.owner, batch.counted_bytes)

    def _work_path(self, batch_id: str, kind: str) -> Path:
        return self.folder / "work" / f"{batch_id}.{kind}"

    def _record_of(self, kind: str, name: str) -> Path:
        return self.folder / kind / f"{name}.json"

    def _load(self, kind: str, type: type[_Entry]) -> dict[str, _Entry]:
        found: dict[str, _Entry] = {}
        for path in (self.folder / kind).glob("*.json"):
            try:
                entry = msgspec.json.decode(read_whole(path, _MOST_RECORD_BYTES), type=type)
                if entry.id != path.stem:
                    raise ValueError("it belongs to another name")
            except (*BAD_JSON, OSError):
                logger.warning(
                    "a record in %s of the folder of --batches is damaged; it is removed", kind
                )
                _remove(path)
                continue
            found[entry.id] = entry
        return found

    def _tidy(self) -> None:
        """Counts what is there and belongs to somebody; removes what an earlier server left behind."""
        for name, stored in list(self._files.items()):
            path = self.path_of(stored)
            if path.is_symlink() or not path.is_file():
                del self._files[name]
                _remove(self._record_of("files", name))
                continue
            stored.bytes = path.stat().st_size
            self.room.count(stored.owner, stored.counted_bytes)
        work = set()
        for batch in self._batches.values():
            self.room.count(batch.owner, batch.counted_bytes)
            for kind in () if batch.is_over else _KINDS:
                path = self._work_path(batch.id, kind)
                if path.is_file() and not path.is_symlink():
                    work.add(path.name)
                    self.room.count(batch.owner, path.stat().st_size)
        known = {self.path_of(stored).name for stored in self._files.values()}
        for path in (self.folder / "files").iterdir():
            if path.name not in known and path.suffix in (".data", UNFINISHED):
                _remove(path)
        for path in (self.folder / "batches").glob(f"*{UNFINISHED}"):
            _remove(path)
        for path in (self.folder / "work").iterdir():
            if path.name not in work:
                _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # a folder, say, that somebody else put there
        path.unlink(missing_ok=True)


def _owned(entries: dict[str, _Entry], owner: str | None, name: str, what: str) -> _Entry:
    found = entries.get(name)
    if found is None or owner not in (None, found.owner):
        raise _missing(name, what)
    return found


def _missing(name: str, what: str) -> ApiError:
    message = (
        f"{what}_id: there is no {what} {name[:128]!r}: it was deleted, or belongs to another key"
    )
    return ApiError(404, message, field=f"{what}_id", code="not_found")


def _in_order(entries: Iterable[_Entry]) -> list[_Entry]:
    key: Callable[[_Entry], tuple[int, str]] = lambda one: (one.created_at, one.id)  # noqa: E731
    return sorted(entries, key=key)
