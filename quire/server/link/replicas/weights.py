"""Pauses, sleep and other weights for all engines of a pool at once.

An update changes all engines or none: each of them prepares it, and only when all are ready they
commit it. One that is lost on the way, or comes back with the weights of its files, gets no requests
until an update has replaced all of its weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quire.errors import InvalidRequestError
from quire.server.errors import ApiError
from quire.server.link.engine_client import EngineClient, unavailable

logger = logging.getLogger(__name__)

UPDATE_SECONDS = 600.0
"""After which an update that nobody goes on with is forgotten."""
_LOST = "engine_unavailable"

Record = dict[str, Any]
Answers = dict[int, Record | ApiError]


class _Update:
    """Which engines take part in an update, by their numbers: the processes that began it."""

    def __init__(self, processes: dict[int, object]) -> None:
        self.processes = processes
        self.touched = time.monotonic()
        self.is_adding = False
        self.is_finishing = False


class PoolWeights:
    """What engines of a pool have in common: their version, whether they are paused or asleep."""

    def __init__(
        self, present: Callable[[], Sequence[EngineClient]], on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called when another version is served."""
        self._present = present
        self._on_change = on_change
        self.version = 0
        """Of the weights that answer requests: engines with others are left out."""
        self._of_files: set[str] = set()
        """Fingerprints of engines that started: with the weights of the model's files."""
        self._damaged: set[object] = set()
        """Processes of engines in which an update has failed halfway."""
        self._is_paused = False
        self._sleep_level: int | None = None
        self._update: _Update | None = None
        self._tasks: set[asyncio.Task[Record]] = set()
        self._changing: set[asyncio.Task[Record]] = set()
        """Those that pause engines, say: none may take effect while an update is finished."""

    # What becomes of engines

    def joined(self, engine: EngineClient) -> None:
        """An engine has started: it does what the others do, before its first request."""
        if engine.ready is not None:
            self._of_files.add(engine.ready.fingerprint)
        if self._sleep_level is not None:
            engine.order("sleep", level=self._sleep_level, mode="abort")
        elif self._is_paused:
            engine.order("pause", mode="keep")
        self.settle()
        if engine.weights_version != self.version:
            logger.error(
                "an engine has started with the weights of its files (version 0), others have version %d: it gets no "
                "requests until an update has replaced all of its weights",
                self.version,
            )

    def settle(self) -> None:
        """An engine came, left or has other weights: where none is left with the version that was
        served, the newest one is.
        """
        live = self._live()
        if live and not any(self.serves(one) for one in live):
            sound = [one for one in live if one.process not in self._damaged]
            if not sound:  # they tell requests what they lack
                self._damaged.clear()
            self.version = max(one.weights_version for one in sound or live)
            self._on_change()

    def serves(self, engine: EngineClient) -> bool:
        """Whether it has the weights that answer requests."""
        return engine.weights_version == self.version and engine.process not in self._damaged

    def may_come(self, fingerprint: str | None) -> bool:
        """Whether there may be another engine of this fingerprint: those that start have the weights
        of the model's files, and get requests only where nobody has others.
        """
        is_served = any(self.serves(one) for one in self._live())
        return fingerprint in self._of_files and (not self.version or not is_served)

    def _live(self) -> dict[EngineClient, int]:
        """Those that can be asked, with their numbers."""
        return {engine: engine.number for engine in self._present() if engine.state == "ready"}

    # What administrators ask

    async def control(self, action: str, seconds: float, **arguments: Any) -> Record:
        update = self._update
        if update is not None and update.is_finishing and action != "state":
            raise _conflict("an update is being finished: wait for it")
        # whoever asked may leave in the middle
        task = asyncio.ensure_future(self._control(action, seconds, arguments))
        if action not in ("state", "finish_update"):
            self._changing.add(task)
            task.add_done_callback(self._changing.discard)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _control(self, action: str, seconds: float, arguments: Record) -> Record:
        match action:
            case "pause":
                self._is_paused = True
            case "sleep" if self._sleep_level is None:
                return await self._sleep(seconds, **arguments)
            case "resume":
                return await self._resume(seconds)
            case "wake_up":
                return await self._wake_up(seconds)
            case "join_group":
                return await self._join_group(seconds, **arguments)
            case "start_update":
                return await self._start_update(seconds)
            case "add_files" | "receive":
                return await self._add(action, seconds, arguments)
            case "finish_update":
                return await self._finish(seconds, **arguments)
        return self._told(await self._ask(self._live(), action, seconds, **arguments))

    async def _sleep(self, seconds: float, level: int, mode: str) -> Record:
        live = self._live()
        self._sleep_level = level
        answers = await self._ask(live, "sleep", seconds, level=level, mode=mode)
        if live and not any(isinstance(one, dict) for one in answers.values()):
            self._sleep_level = None
            self._order_new(live, "wake_up")
        return self._told(answers)

    async def _resume(self, seconds: float) -> Record:
        """Engines without requests may refuse: weights may be missing there."""
        live = self._live()
        was_paused, self._is_paused = self._is_paused, False  # nor are those that join meanwhile
        answers = await self._ask(live, "resume", seconds)
        if was_paused and not any(isinstance(one, dict) for one in answers.values()):
            self._is_paused = True
            self._order_new(live, "pause", mode="keep")
        return self._told(answers, only_serving=True)

    def _order_new(self, known: dict[EngineClient, int], action: str, **arguments: Any) -> None:
        """Of those that joined while the others failed to do something, which then holds for none."""
        for engine in self._live():
            if engine not in known:
                engine.order(action, **arguments)

    async def _wake_up(self, seconds: float) -> Record:
        self._sleep_level = None
        return self._told(await self._ask(self._live(), "wake_up", seconds), only_serving=True)

    async def _join_group(self, seconds: float, **place: Any) -> Record:
        live = self._live()
        needed = place["rank"] + len(self._present())
        if place["world_size"] < needed:
            raise InvalidRequestError(
                "init_info.world_size",
                f"is {place['world_size']}, but with rank_offset {place['rank']} and the ranks of this server "
                f"(/get_world_size) it is {needed} at least",
            )
        if len(live) < len(self._present()):
            raise unavailable()
        asked = {
            number: engine.control(
                "join_group", seconds, **{**place, "rank": place["rank"] + index}
            )
            for index, (engine, number) in enumerate(live.items())
        }
        return self._told(await _gather(asked))

    async def _start_update(self, seconds: float) -> Record:
        update = self._update
        if update is not None and (
            update.is_adding or time.monotonic() - update.touched < UPDATE_SECONDS
        ):
            raise _conflict("an update is under way: finish it first, or finish it with abort")
        live = self._live()
        self._update = _Update({number: engine.process for engine, number in live.items()})
        answers = await self._ask(live, "start_update", seconds)
        if not any(isinstance(one, dict) for one in answers.values()):
            self._update = None
        return self._told(answers)

    def _taking_part(self, update: _Update) -> dict[EngineClient, int]:
        """Engines that have all parts of an update."""
        found = {
            engine: number
            for engine, number in self._live().items()
            if update.processes.get(number) is engine.process
        }
        if not found:
            self._update = None
            raise _conflict("the engines were lost that had begun the update: start another one")
        return found

    def _current(self) -> _Update:
        update = self._update
        if update is None:
            raise _conflict("no update is under way: start one first")
        return update

    async def _add(self, action: str, seconds: float, arguments: Record) -> Record:
        update = self._current()
        engines = self._taking_part(update)
        _check_nothing_comes(update)
        update.is_adding = True
        try:
            answers = await self._ask(engines, action, seconds, **arguments)
        finally:
            update.is_adding = False
            update.touched = time.monotonic()
        errors = [one for one in answers.values() if _is_refusal(one)]
        if errors and any(isinstance(one, dict) for one in answers.values()):
            await self._abandon(update)
            logger.error("an update was forgotten: some engines have taken a part of it, some not")
        if not errors:
            self._leave_out(update, answers)
        return self._told(answers)

    def _leave_out(self, update: _Update, answers: Answers) -> None:
        """Engines that were lost take part no more."""
        for number, answer in answers.items():
            if isinstance(answer, ApiError):
                update.processes.pop(number, None)

    async def _abandon(self, update: _Update) -> None:
        live = self._live()
        await self._ask(live, "abandon_update", UPDATE_SECONDS)
        if self._update is update:
            self._update = None

    async def _finish(self, seconds: float, version: int | None, abort: bool) -> Record:
        update = self._current()
        if abort:
            await self._abandon(update)
            return self._told(await self._ask(self._live(), "state", seconds))
        engines = self._taking_part(update)
        _check_nothing_comes(update)
        if update.is_finishing:
            raise _conflict("an update is being finished: wait for it")
        if self._changing:
            raise _conflict("engines are being paused, resumed or the like: wait for that answer")
        # one in which an update failed halfway may have a higher version than those that serve
        least = 1 + max(self.version, *(one.weights_version for one in engines))
        target = least if version is None else version
        if not least <= target < 2**63:
            raise InvalidRequestError(
                "weight_version", f"must be a whole number from {least} to 2**63-1, not {target}"
            )
        update.is_finishing = True
        try:
            return await self._commit(update, engines, target, seconds)
        finally:
            update.is_finishing = False

    async def _commit(
        self, update: _Update, engines: dict[EngineClient, int], version: int, seconds: float
    ) -> Record:
        answers = await self._ask(engines, "check_update", seconds, version=version)
        self._raise_refusals(answers)
        answers = await self._ask(engines, "prepare_update", seconds)
        prepared = {
            engine: number
            for engine, number in engines.items()
            if isinstance(answer := answers[number], dict)
            # what it lacks of an earlier version must come with this one
            and (answer["is_complete"] or self.serves(engine))
        }
        try:
            self._raise_refusals(answers)
            if not prepared:
                raise unavailable("the engines were lost while they read the update; start another")
        except ApiError:
            await self._abandon(update)
            raise
        pauses = not self._is_paused
        try:
            if pauses:  # a request may have come since it was looked: all or none must commit
                self._is_paused = True
                self._raise_refusals(await self._ask(prepared, "pause", seconds, mode="wait"))
            answers = await self._ask(prepared, "commit_update", seconds, version=version)
            return self._committed(update, answers, version)
        finally:
            await self._abandon(update)
            if pauses:
                self._is_paused = False
                await self._ask(self._live(), "resume", seconds)

    def _committed(self, update: _Update, answers: Answers, version: int) -> Record:
        """Engines that have committed answer requests from now on, and no others."""
        for number, answer in answers.items():
            if isinstance(answer, dict):
                self._damaged.discard(update.processes[number])
            else:
                self._damaged.add(update.processes[number])
        done = [one for one in answers.values() if isinstance(one, dict)]
        if not done:
            self.settle()
            return self._told(answers)
        self.version = version
        self.settle()  # those that have committed may be lost by now
        self._on_change()
        serving = {one.number for one in self._live() if self.serves(one)}
        left_out = sorted({one.number for one in self._present()} - serving)
        if not left_out:
            return done[0]
        logger.error(
            "weights have version %d, but not on engines %s: they get no requests until an update has replaced all of "
            "their weights",
            version,
            ", ".join(map(str, left_out)),
        )
        return {**done[0], "left_out": left_out}

    async def _ask(
        self, engines: dict[EngineClient, int], action: str, seconds: float, **arguments: Any
    ) -> Answers:
        return await _gather(
            {
                number: engine.control(action, seconds, **arguments)
                for engine, number in engines.items()
            }
        )

    def _raise_refusals(self, answers: Answers) -> None:
        for answer in answers.values():
            if _is_refusal(answer):
                assert isinstance(answer, ApiError)
                raise answer

    def _told(self, answers: Answers, only_serving: bool = False) -> Record:
        """What the first engine says, or what one of them refuses. Those that are lost say nothing,
        unless all are.
        """
        if not answers:
            raise unavailable()
        said = {number: one for number, one in answers.items() if isinstance(one, dict)}
        if only_serving:
            serving = {number for one, number in self._live().items() if self.serves(one)}
            answers = {
                number: one for number, one in answers.items() if number in serving
            } or answers
        self._raise_refusals(answers)
        if not said:
            raise _first(one for one in answers.values() if isinstance(one, ApiError))
        found = next(iter(said.values()))
        return {**found, "weights_version": self.version}


async def _gather(asked: dict[int, Any]) -> Answers:
    found = await asyncio.gather(*asked.values(), return_exceptions=True)
    answers: Answers = {}
    for number, answer in zip(asked, found, strict=True):
        if isinstance(answer, BaseException) and not isinstance(answer, ApiError):
            raise answer
        answers[number] = answer
    return answers


def _is_refusal(answer: Record | ApiError) -> bool:
    """Of an engine that lives."""
    return isinstance(answer, ApiError) and answer.code != _LOST


def _check_nothing_comes(update: _Update) -> None:
    if update.is_adding:
        raise _conflict("another part of the update is on its way: wait for its answer")


def _first(errors: Iterable[ApiError]) -> ApiError:
    return next(iter(errors))


def _conflict(message: str) -> ApiError:
    return ApiError(409, message, code="conflict")
