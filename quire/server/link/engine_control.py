"""What administrators have an engine do between two steps: pause, sleep, take other weights.

An update is begun, given its parts, prepared and committed. Parts are checked, names and shapes, and
then gathered in memory by a thread: files are read, or a trainer's broadcasts received. A thread
prepares them, too: it converts all of them to what the model computes with. Meanwhile the engine
goes on. Only the commit, between two steps, replaces the old weights; whatever goes wrong before it
leaves these.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.assemble import Engine
from quire.backends.select import device_of
from quire.errors import CapacityError, EngineError, InvalidRequestError, QuireError
from quire.kernels.weights import Weight
from quire.parallel.packs import packs
from quire.server.link.messages import Control, Described
from quire.server.link.weight_receiver import Place, WeightReceiver
from quire.server.link.weight_updates import Job, Update, announced, open_inside, open_shared

logger = logging.getLogger(__name__)

UPDATE_SECONDS = 600.0
"""After which an update that nobody goes on with is forgotten."""
Record = dict[str, Any]


class EngineController:
    """Each action returns what is told of it; one that has to wait is tried again after each step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._core = engine.core
        self._waiting: list[tuple[Control, Callable[[], Record | None]]] = []
        self._update: Update | None = None
        self._job: Job | None = None
        self._receiver: WeightReceiver | None = None
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._resumes_awake = False
        """Whether the pause was begun by `sleep`, and ends with it."""

    def take(self, command: Control) -> None:
        """Begins an action."""
        action: Callable[..., Callable[[], Record | None]] = getattr(self, f"_{command.action}")
        try:
            self._waiting.append((command, action(**command.arguments)))
        except Exception as error:
            self._waiting.append((command, _raises(error)))

    @property
    def wake_fd(self) -> int:
        """Readable when a thread is done."""
        return self._woken

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wakes, b"!")

    @property
    def has_update(self) -> bool:
        """Whether one is under way, and would be forgotten after a while."""
        return self._update is not None

    def poll(self) -> list[Described]:
        """The answers to actions that are done."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        if self._update is not None and self._job is None and self._is_late(self._update):
            logger.warning("an update of weights took too long and was forgotten")
            self._forget()
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
        """Whatever was begun before is forgotten: the pool of engines says when it is over."""
        self._forget()
        self._update = Update(time.monotonic())
        return self._describe

    def _add_files(
        self, backend: str, folder: str | None, path: str
    ) -> Callable[[], Record | None]:
        update = self._current()
        is_shared = backend == "shared_memory"
        found = open_shared(path) if is_shared else open_inside(Path(folder or ""), path)
        update.check(self._engine.spec, found.tensors)
        return self._gather(update, lambda: update.gathered.copy(found, lambda: update.is_wanted))

    def _join_group(
        self,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        backend: str,
        timeout: float,
    ) -> Callable[[], Record | None]:
        """Takes part in a trainer's process group, and leaves the one before."""
        decoder = self._engine.decoder
        self._check_idle()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        device, collectives = str(decoder.device), device_of(decoder.device).collectives
        if backend == "auto":
            backend = collectives
        if backend == "nccl" and collectives != "nccl":
            raise InvalidRequestError(
                "init_info.backend",
                f"nccl works between GPUs, and the model is on {device}: use gloo",
            )
        place = Place(address, port, rank, world_size, backend, device, timeout)
        job = self._begin(lambda: WeightReceiver(place))

        def proceed() -> Record | None:
            if not job.is_done:
                return None
            self._end(job)
            self._receiver = job.result()
            return {**self._describe(), "backend": backend}

        return proceed

    def _receive(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], packed_bytes: int | None
    ) -> Callable[[], Record | None]:
        update = self._current()
        receiver = self._receiver
        if receiver is None or receiver.is_broken:
            raise EngineError(
                "the engine takes part in no trainer's group, or in a broken one: init_weight_transfer_engine first"
            )
        infos = announced(names, dtypes, shapes)
        update.check(self._engine.spec, infos)

        def receive() -> None:
            gathered = update.gathered
            start = gathered.end
            try:
                placed = [
                    gathered.reserve(one.name, one.dtype, one.shape) for one in infos.values()
                ]
                sizes = [one.num_bytes for one in placed]
                few = [slice(place, place + 1) for place in range(len(sizes))]
                if packed_bytes is not None:
                    few = list(packs(sizes, packed_bytes))
                runs = [(placed[one][0].offset, sum(sizes[one])) for one in few]
                receiver.receive(gathered, runs)
            except BaseException:
                gathered.cut(start)
                raise
            gathered.add(*placed)

        return self._gather(update, receive)

    def _gather(self, update: Update, work: Callable[[], None]) -> Callable[[], Record | None]:
        self._check_idle()
        job = self._begin(work)

        def proceed() -> Record | None:
            update.touched = time.monotonic()
            if not job.is_done:
                return None
            self._end(job)
            job.result()
            if not update.is_wanted:
                raise EngineError("the update was forgotten meanwhile")
            update.num_parts += 1
            return {**self._describe(), "tensors": len(update.gathered.names)}

        return proceed

    def _check_update(self, version: int) -> Callable[[], Record]:
        """Whether it could be prepared and committed now."""
        self._current()
        self._check_idle()
        self._core.next_version(version)
        self._check_drained()
        if self._engine.runner.is_asleep:
            raise EngineError("the engine is asleep: wake it up before its weights are replaced")
        return self._describe

    def _prepare_update(self) -> Callable[[], Record | None]:
        update = self._current()
        self._check_idle()
        checkpoint = update.gathered.checkpoint()
        # a GPU is used by one thread only
        on_cpu = self._engine.decoder.device.type == "cpu"
        job = self._begin(lambda: self._engine.stored_weights(checkpoint), in_thread=on_cpu)

        def proceed() -> Record | None:
            update.touched = time.monotonic()
            if not job.is_done:
                return None
            self._end(job)
            weights: dict[str, Weight] = job.result()
            if self._update is not update:
                raise EngineError("the update was forgotten meanwhile")
            update.weights = weights
            update.gathered.close()
            is_complete = weights.keys() >= self._engine.decoder.weights.keys()
            return {**self._describe(), "is_complete": is_complete}

        return proceed

    def _commit_update(self, version: int) -> Callable[[], Record]:
        update = self._current()
        if update.weights is None:
            raise EngineError("the update was not prepared")
        self._core.next_version(version)
        self._check_drained()
        began = time.monotonic()
        count = len(update.weights)
        try:
            self._engine.update_weights(update.weights, version)
        finally:
            self._forget()
        seconds = time.monotonic() - began
        logger.info("%d weights were replaced in %.2f s: version %d", count, seconds, version)
        return lambda: {**self._describe(), "weights": count, "seconds": round(seconds, 4)}

    def _abandon_update(self) -> Callable[[], Record]:
        self._forget()
        return self._describe

    def _check_drained(self) -> None:
        if not self._core.is_drained:
            raise EngineError("requests are being answered: pause the engine first")

    def _check_idle(self) -> None:
        if self._job is not None:
            raise EngineError("another part of an update is on its way: wait for its answer")

    def _begin(self, work: Callable[[], Any], in_thread: bool = True) -> Job:
        self._job = Job(work, self._notify, in_thread)
        return self._job

    def _end(self, job: Job) -> None:
        if self._job is job:
            self._job = None

    def _forget(self) -> None:
        """Gives back what an update has gathered. A transfer that is under way is broken off: its
        group is of no more use.
        """
        update = self._update
        self._update = None
        if update is None:
            return
        update.is_wanted = False
        update.weights = None
        self._engine.abandon_weights()
        if self._job is not None and self._receiver is not None:
            self._receiver.close()
            self._receiver.is_broken = True

    def _current(self) -> Update:
        update = self._update
        if update is None:
            raise EngineError("no update is under way: start one first")
        if self._is_late(update):
            self._forget()
            raise EngineError("the update took too long and was forgotten: start another")
        return update

    def _is_late(self, update: Update) -> bool:
        return time.monotonic() - update.touched > UPDATE_SECONDS

    def close(self) -> None:
        """Ends what an update has begun."""
        self._forget()
        if self._receiver is not None:
            self._receiver.close()


def _raises(error: Exception) -> Callable[[], Record]:
    def proceed() -> Record:
        raise error

    return proceed


def _told(action: str, error: Exception) -> Record:
    """What went wrong, without saying where files lie."""
    if isinstance(error, InvalidRequestError):
        return {"error": str(error), "status": 400, "field": error.field}
    if isinstance(error, (EngineError, CapacityError)):
        return {"error": str(error), "status": 409}
    logger.error("%s: %s", action, error, exc_info=not isinstance(error, QuireError))
    if isinstance(error, QuireError):
        shown = re.sub(r"(/[^\s/:]+)+/", "", str(error))
        return {"error": shown, "status": 400, "field": "update_info"}
    return {"error": "it could not be done; the server's log says why", "status": 500}
