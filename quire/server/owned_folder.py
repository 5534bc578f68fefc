"""A folder that one server at a time may use."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from quire.errors import QuireError


def own_folder(folder: Path, option: str, *inner: str) -> int:
    """Makes it, readable by this user alone, with these folders inside, and locks it; closing the
    descriptor that is returned gives it back. `option` is what users know it by.
    """
    try:
        for path in (folder, *(folder / name for name in inner)):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(
            folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
    except OSError as error:
        raise QuireError(f"{option}: the folder {folder} can't be used: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise QuireError(
            f"{option}: another server uses the folder {folder}; give each one of its own"
        ) from None
    return lock
