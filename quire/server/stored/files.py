"""The folder of `--store DIR`: one file for each stored response, readable by this user alone.

Files are written aside and renamed, so that one is there whole or not at all, by a thread of its
own, so that no request waits for a disk. A disk that fails costs what it would have kept, and a
line in the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.server.disk import UNFINISHED, open_plain, write_whole
from quire.server.owned_folder import own_folder

logger = logging.getLogger(__name__)

_SUFFIX = ".response"
_MOST_WAITING = 64 * 2**20
"""Bytes that may wait for the disk."""


class ResponseFiles:
    """Owns the folder: no other server may use it at the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = own_folder(folder, "--store")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._has_failed = False
        self._num_waiting = 0

    def load(self, most_bytes: int) -> Iterator[tuple[Path, bytes]]:
        """The files and what they hold, the oldest first; those beyond the limit are removed,
        oldest first.
        """
        for path in self._folder.glob(f"*{UNFINISHED}"):
            path.unlink(missing_ok=True)
        found = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                about = path.stat(follow_symlinks=False)
                found.append((about.st_mtime_ns, about.st_size, path))
        found.sort(reverse=True)
        kept = []
        num_bytes = 0
        for _, size, path in found:
            num_bytes += size
            if num_bytes > most_bytes:
                path.unlink(missing_ok=True)
            else:
                kept.append(path)
        for path in reversed(kept):
            try:
                with os.fdopen(open_plain(path), "rb") as file:
                    data = file.read()
            except OSError as error:
                logger.warning("a stored response can't be read: %s", error.strerror)
            else:
                yield path, data

    def write(self, response_id: str, data: bytes) -> None:
        if self._num_waiting + len(data) > _MOST_WAITING:
            self._say("the disk is too slow")
            return
        self._num_waiting += len(data)
        self._submit(self._write, self._path(response_id), data)

    def remove(self, response_id: str) -> None:
        self._submit(self._remove, self._path(response_id))

    def discard(self, path: Path) -> None:
        """Removes a file that is of no use."""
        self._submit(self._remove, path)

    def close(self) -> None:
        """Waits until all is written."""
        self._writer.shutdown()
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def _submit(self, function: Callable[..., None], *args: object) -> None:
        # a request that outlives the server: its response is not kept
        with contextlib.suppress(RuntimeError):
            self._writer.submit(function, *args)

    def _path(self, response_id: str) -> Path:
        # Ids are our own, but a name made of a digest is safe whatever they are.
        return self._folder / (hashlib.sha256(response_id.encode()).hexdigest()[:32] + _SUFFIX)

    def _write(self, path: Path, data: bytes) -> None:
        try:
            write_whole(path, data)
            self._has_failed = False
        except OSError as error:
            self._say(error.strerror)
        finally:
            self._num_waiting -= len(data)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._say(error.strerror)

    def _say(self, cause: str | None) -> None:
        if not self._has_failed:  # once, not for every response of a full disk
            logger.warning("stored responses are kept in memory only, writing fails: %s", cause)
        self._has_failed = True
