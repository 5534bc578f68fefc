"""What administrators have an engine do between two steps: pause, sleep, take other weights.

An update is begun, given its files, and finished. Until then files are only looked at: names,
shapes and sizes are checked, no tensor is read. At its end all of them are read and converted, and
only then the old weights are replaced; whatever goes wrong before leaves these.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.assemble import Engine
from quire.checkpoints.checkpoint import Checkpoint, TensorInfo
from quire.checkpoints.files import FileStamp
from quire.checkpoints.safetensors_checkpoint import open_safetensors, open_shards
from quire.errors import EngineError, InvalidRequestError, QuireError
from quire.server.link.messages import Control, Described

logger = logging.getLogger(__name__)

UPDATE_SECONDS = 600.0
"""After which an update that nobody goes on with is forgotten."""
MAX_PATHS = 1000
"""Of one update."""
SHARED_MEMORY = Path("/dev/shm")
_SHARED_NAME = re.compile(r"quire-[A-Za-z0-9._-]{1,200}")

Record = dict[str, Any]


class _Update:
    """Files whose weights will replace the present ones."""

    def __init__(self, now: float) -> None:
        self.touched = now
        self.checkpoints: list[Checkpoint] = []

    def add(self, checkpoint: Checkpoint) -> None:
        if len(self.checkpoints) >= MAX_PATHS:
            raise InvalidRequestError("update_info", f"an update has at most {MAX_PATHS} parts")
        for name in checkpoint.tensors:
            if any(name in one.tensors for one in self.checkpoints):
                raise InvalidRequestError("update_info", f"{name} came before in this update")
        self.checkpoints.append(checkpoint)

    def joined(self) -> Checkpoint:
        tensors: dict[str, TensorInfo] = {}
        stamps: dict[Path, FileStamp] = {}
        for one in self.checkpoints:
            tensors |= one.tensors
            stamps |= {info.file: one.stamp_of(info.file) for info in one.tensors.values()}
        return Checkpoint("safetensors", tensors, stamps)


class EngineController:
    """Each action returns what is told of it; one that has to wait is tried again after each step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._core = engine.core
        self._waiting: list[tuple[Control, Callable[[], Record | None]]] = []
        self._update: _Update | None = None
        self._resumes_awake = False
        """Whether the pause was begun by `sleep`, and ends with it."""

    def take(self, command: Control) -> None:
        """Begins an action."""
        action: Callable[..., Callable[[], Record | None]] = getattr(self, f"_{command.action}")
        try:
            self._waiting.append((command, action(**command.arguments)))
        except Exception as error:
            self._waiting.append((command, _raises(error)))

    def poll(self) -> list[Described]:
        """The answers to actions that are done."""
        waiting, self._waiting = self._waiting, []
        answers = []
        for command, proceed in waiting:
            try:
                record = proceed()
            except Exception as error:
                record = _told(command.action, error)
            if record is None:
                self._waiting.append((command, proceed))
            else:
                answers.append(Described(command.ticket, record))
        return answers

    @property
    def has_idle_requests(self) -> bool:
        """Whether requests wait for the end of a pause: their clients hear that the engine lives."""
        return self._core.is_paused and bool(self._core.scheduler.table.requests)

    def _state(self) -> Callable[[], Record]:
        return self._describe

    def _describe(self) -> Record:
        return {
            "is_paused": self._core.is_paused,
            "is_sleeping": self._engine.runner.is_asleep,
            "weights_version": self._engine.weights_version,
        }

    def _pause(self, mode: Any) -> Callable[[], Record | None]:
        self._core.pause(mode, time.monotonic())
        self._resumes_awake = False
        return lambda: self._describe() if self._core.is_drained else None

    def _resume(self) -> Callable[[], Record]:
        self._core.resume()
        self._resumes_awake = False
        return self._describe

    def _sleep(self, level: int, mode: Any) -> Callable[[], Record | None]:
        was_paused = self._core.is_paused
        if self._engine.runner.is_asleep:
            raise EngineError("the engine is asleep already: wake it up first")
        if not was_paused:
            self._core.pause(mode, time.monotonic())
            self._resumes_awake = True

        def proceed() -> Record | None:
            if not self._core.is_drained:
                return None
            try:
                self._engine.sleep(level)
            except BaseException:
                self._end_own_pause()
                raise
            return self._describe()

        return proceed

    def _wake_up(self) -> Callable[[], Record]:
        self._engine.wake_up()
        self._end_own_pause()
        return self._describe

    def _end_own_pause(self) -> None:
        if self._resumes_awake and self._core.refusal is None:
            self._core.resume()
            self._resumes_awake = False

    def _reset_prefix_cache(self) -> Callable[[], Record]:
        self._core.reset_prefix_cache(time.monotonic())
        return self._describe

    def _start_update(self) -> Callable[[], Record]:
        now = time.monotonic()
        if self._update is not None and now - self._update.touched < UPDATE_SECONDS:
            raise EngineError("an update is under way: finish it first, or finish it with abort")
        self._update = _Update(now)
        return self._describe

    def _add_files(self, backend: str, folder: str | None, path: str) -> Callable[[], Record]:
        update = self._current()
        is_shared = backend == "shared_memory"
        update.add(_open_shared(path) if is_shared else _open_inside(Path(folder or ""), path))
        update.touched = time.monotonic()
        return self._describe

    def _finish_update(self, version: int | None, abort: bool) -> Callable[[], Record]:
        update = self._current()
        if abort:
            self._update = None
            return self._describe
        self._core.next_version(version)
        if not self._core.is_drained:
            raise EngineError("requests are being answered: pause the engine first")
        self._update = None  # whatever comes of it
        began = time.monotonic()
        weights = self._engine.stored_weights(update.joined())
        self._engine.update_weights(weights, version)
        seconds = time.monotonic() - began
        version = self._engine.weights_version
        logger.info(
            "%d weights were replaced in %.2f s: version %d", len(weights), seconds, version
        )
        return lambda: {**self._describe(), "weights": len(weights), "seconds": round(seconds, 4)}

    def _current(self) -> _Update:
        update = self._update
        if update is None:
            raise EngineError("no update is under way: start one first")
        if time.monotonic() - update.touched > UPDATE_SECONDS:
            self._update = None
            raise EngineError("the update took too long and was forgotten: start another")
        return update


def _open_inside(root: Path, path: str) -> Checkpoint:
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


def _open_shared(name: str) -> Checkpoint:
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


def _raises(error: Exception) -> Callable[[], Record]:
    def proceed() -> Record:
        raise error

    return proceed


def _told(action: str, error: Exception) -> Record:
    """What went wrong, without saying where files lie."""
    if isinstance(error, InvalidRequestError):
        return {"error": str(error), "status": 400, "field": error.field}
    if isinstance(error, EngineError):
        return {"error": str(error), "status": 409}
    logger.error("%s: %s", action, error, exc_info=not isinstance(error, QuireError))
    if isinstance(error, QuireError):
        shown = re.sub(r"(/[^\s/:]+)+/", "", str(error))
        return {"error": shown, "status": 400, "field": "update_info"}
    return {"error": "it could not be done; the server's log says why", "status": 500}
