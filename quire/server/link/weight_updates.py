"""Weights that an engine is given while it goes on: where they come from, what they may be, and the
thread that gathers or prepares them.
"""

from __future__ import annotations

import math
import os
import re
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.checkpoints.checkpoint import Checkpoint, TensorInfo
from quire.checkpoints.files import quote
from quire.checkpoints.memory_file import MemoryFile
from quire.checkpoints.safetensors_checkpoint import open_safetensors, open_shards
from quire.errors import EngineError, InvalidRequestError
from quire.kernels.formats import PLAIN
from quire.kernels.weights import Weight
from quire.models.given_weights import check_tensors
from quire.models.spec import ModelSpec

MAX_PARTS = 1000
"""Of one update."""
SHARED_MEMORY = Path("/dev/shm")
_SHARED_NAME = re.compile(r"quire-[A-Za-z0-9._-]{1,200}")


class Job:
    """Something that a thread does, unless it must be done here."""

    def __init__(
        self, work: Callable[[], Any], notify: Callable[[], None], in_thread: bool = True
    ) -> None:
        self._work = work
        self._notify = notify
        self._result: Any = None
        self._error: Exception | None = None
        self.is_done = False
        if in_thread:
            threading.Thread(target=self._run, name="weights", daemon=True).start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error
        self.is_done = True
        self._notify()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class Update:
    """Weights that will replace the present ones."""

    def __init__(self, now: float) -> None:
        self.touched = now
        self.num_parts = 0
        self.gathered = MemoryFile()
        self.is_wanted = True
        self.weights: dict[str, Weight] | None = None
        """Once they are prepared."""

    def check(self, spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> None:
        """Raises for tensors that came before, or that the model has no place for."""
        if self.weights is not None:
            raise EngineError("the update is being finished: start another")
        if self.num_parts >= MAX_PARTS:
            raise InvalidRequestError("update_info", f"an update has at most {MAX_PARTS} parts")
        for name in tensors:
            if name in self.gathered.names:
                raise InvalidRequestError("update_info", f"{name} came before in this update")
        check_tensors(spec, {**self.gathered.checkpoint().tensors, **tensors})


def announced(
    names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> dict[str, TensorInfo]:
    """Tensors that a trainer is about to broadcast."""
    known = {str(dtype).removeprefix("torch."): format for dtype, format in PLAIN.items()}
    found: dict[str, TensorInfo] = {}
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if name in found:
            raise InvalidRequestError("update_info.names", f"has {quote(name)} twice")
        format = known.get(dtype)
        if format is None:
            raise InvalidRequestError(
                "update_info.dtype_names", f"has {quote(dtype)}; there are {', '.join(known)}"
            )
        num_bytes = math.prod(shape) * format.num_bytes
        found[name] = TensorInfo(name, tuple(shape), format.name, Path(), num_bytes, 0)
    return found


def open_inside(root: Path, path: str) -> Checkpoint:
    """A folder or file inside of the folder that the operator named, links followed."""
    parts = Path(path)
    if "\0" in path or parts.is_absolute() or ".." in parts.parts:
        raise InvalidRequestError("update_info.path", "must lead to a place in --weights-dir")
    try:
        found = (root / parts).resolve(strict=True)
        is_inside = found.is_relative_to(root.resolve(strict=True))
    except (OSError, RuntimeError):
        is_inside = False
    if not is_inside:
        raise InvalidRequestError(
            "update_info.path", "there is nothing of that name in --weights-dir"
        )
    if found.is_dir():
        return open_safetensors(found)
    return open_shards([found], False)


def open_shared(name: str) -> Checkpoint:
    """A safetensors file in shared memory, which this user made."""
    if not _SHARED_NAME.fullmatch(name):
        raise InvalidRequestError(
            "update_info.name", "must be quire- and up to 200 letters, digits, dots or dashes"
        )
    path = SHARED_MEMORY / name
    try:
        found = path.lstat()
    except OSError:
        raise InvalidRequestError(
            "update_info.name", "there is no shared memory of that name"
        ) from None
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise InvalidRequestError("update_info.name", "is no shared memory of this user")
    return open_shards([path], False)
