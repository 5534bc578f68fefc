"""How the server touches files in folders of its own: never through a link, whole or not at all,
and with errors that a client may see.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from quire.server.errors import ApiError

logger = logging.getLogger(__name__)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
UNFINISHED = ".unfinished"
"""Of files that are being written: who finds one at a start may remove it."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def disk_errors_for_client() -> Iterator[None]:
    """OSError becomes what a client may see: no path and no address. The log has the cause."""
    try:
        yield
    except OSError as error:
        logger.error("the disk failed a request: %s", error.strerror or type(error).__name__)
        if error.errno in _FULL:
            message = "the server's disk is full: try again later"
            raise ApiError(507, message, code="disk_full", retry_after=10.0) from None
        message = "the server could not use its disk; its log says why, under the request id"
        raise ApiError(503, message, code="disk_failed", retry_after=10.0) from None


def create(path: Path) -> int:
    """A new file that this user alone may read, open for writing; whatever has its name is in the
    way (OSError).
    """
    return os.open(path, _NEW, 0o600)


def open_plain(path: Path) -> int:
    """An existing file, open for reading; OSError if it is a link or anything but a file."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is no plain file")
    return number


def write_all(number: int, data: bytes) -> None:
    """A system call may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[os.write(number, view) :]


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a file's contents, aside and renamed: there is the old file or the new one, and no
    third thing.
    """
    aside = path.with_suffix(UNFINISHED)
    aside.unlink(missing_ok=True)
    number = create(aside)
    try:
        try:
            write_all(number, data)
        finally:
            os.close(number)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def read_whole(path: Path, most_bytes: int) -> bytes:
    """A small file; OSError if it is larger than that."""
    with os.fdopen(open_plain(path), "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, "it is too large")
    return data
