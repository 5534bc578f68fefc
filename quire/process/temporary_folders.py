"""Temporary folders that are not left behind: if a process was killed, the next who needs one takes
its folder away.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOCK = ".quire-temporary-folder"


@contextlib.contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new folder for this user alone, in `parent` or where the system keeps such folders; gone at
    the end.

    A lock says that its process lives: whatever way that ends, the system takes the lock away.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_leftovers(prefix, parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody is taking it away already: he came before the lock
            os.close(lock)
            continue
        except OSError:  # a file system without locks: nobody will think that this is a leftover
            break
        if (folder / _LOCK).exists():
            break
        os.close(lock)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_leftovers(prefix: str, parent: Path) -> None:
    """Takes away such folders of this user whose process is gone. One without a lock is not ours to
    judge.
    """
    for path in parent.glob(f"{glob.escape(prefix)}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(lock)
