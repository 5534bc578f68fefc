"""Works on the batches of a server, behind its live requests: those of a key one after the other,
those of several keys beside each other, so that none waits for another's.

A batch's request is started only while the engine has rows to spare, and batches never take more
than half of them; with `--policy priority` or `fair` they also give way once they run. What is answered is on
disk, so a restart goes on from there. Where there is no room for an answer, in the key's share or
on the disk, the batch waits until there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import ParamSpec, TypeVar

from quire.errors import InvalidRequestError
from quire.server.batches.answers import BatchAnswer, BatchAnswers, EngineGoneError
from quire.server.batches.entries import StoredBatch
from quire.server.batches.requests import BatchRequest, RequestFile
from quire.server.batches.room import NoRoomError
from quire.server.batches.store import BatchStore
from quire.server.batches.work import WorkFiles
from quire.server.errors import ApiError
from quire.server.service import GenerationService
from quire.server.tasks import in_thread

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LEAST_IMPORTANT = 1_000_000
_PAUSE = 0.05
_SAVE_SECONDS = 1.0
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 2.0
"""Seconds until it is tried again whether there is room."""


class BatchQueue:
    """All batches that are not over, and the tasks that answer them."""

    def __init__(self, store: BatchStore, service: GenerationService) -> None:
        self.store = store
        self._service = service
        priority = _LEAST_IMPORTANT if service.ready.policy != "fcfs" else 0
        self._answers = BatchAnswers(service, priority)
        self._waiting: dict[str, deque[StoredBatch]] = {}
        """By key, as long as one of its batches runs."""
        self._running: dict[str, asyncio.Task[None]] = {}
        """What answers a batch, by its id."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_requests = 0
        """Of all batches, that the engine works on."""

    async def start(self) -> None:
        """Takes up what an earlier server has left."""
        for batch in await asyncio.to_thread(self.store.unfinished):
            self._enqueue(batch)

    async def stop(self) -> None:
        """Leaves what is under way for the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.store.close)

    async def add(self, batch: StoredBatch) -> None:
        await asyncio.to_thread(self.store.add_batch, batch)
        self._enqueue(batch)

    async def cancel(self, batch: StoredBatch) -> None:
        """Ends a batch; what is answered already is kept."""
        if batch.is_over or batch.outcome is not None or batch.status == "cancelling":
            return
        batch.status = "cancelling"
        batch.cancelling_at = int(time.time())
        with contextlib.suppress(OSError):  # it ends all the same, unless the server does first
            await asyncio.to_thread(self.store.save, batch)
        if batch.id in self._running:
            self._running[batch.id].cancel()
            return
        waiting = self._waiting.get(batch.owner, deque())
        if batch in waiting:  # those before it may wait for long
            waiting.remove(batch)
            self._begin(self._run(batch))

    def _enqueue(self, batch: StoredBatch) -> None:
        if batch.owner in self._waiting:
            self._waiting[batch.owner].append(batch)
        else:
            self._waiting[batch.owner] = deque([batch])
            self._begin(self._work(batch.owner))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, owner: str) -> None:
        """Answers the batches of a key."""
        waiting = self._waiting[owner]
        while waiting:
            await self._run(waiting.popleft())
        del self._waiting[owner]

    async def _run(self, batch: StoredBatch) -> None:
        """From its first request to its end; a server that goes down leaves it as it is."""
        outcome = "completed"
        if batch.outcome is None:
            answering = self._running[batch.id] = asyncio.create_task(self._answer(batch))
            try:
                await _wait_for(answering)
            except EngineGoneError:
                return  # the server goes down
            except Exception as error:
                outcome = "failed"
                batch.fail(_message_for_client(error))
                is_known = isinstance(error, InvalidRequestError | OSError | ApiError)
                logger.error(
                    "batch %s failed: %s", batch.id, error, exc_info=None if is_known else error
                )
            finally:
                del self._running[batch.id]
        if batch.status == "cancelling":
            outcome = "cancelled"
        await _when_there_is_room(
            f"batch {batch.id} can't be ended", self.store.end_batch, batch, outcome
        )

    async def _answer(self, batch: StoredBatch) -> None:
        source = self.store.file(batch.owner, batch.input_file_id)
        requests = RequestFile(self.store.path_of(source), batch.id)
        total = await in_thread(requests.count)
        batch.total = total
        is_cancelled = batch.status == "cancelling"
        if not is_cancelled:
            batch.status = "in_progress"
            batch.in_progress_at = batch.in_progress_at or int(time.time())
        opened: list[WorkFiles] = []

        def open_work() -> None:
            """Keeps what it opens: a batch may be cancelled before that is known here."""
            opened.append(self.store.open_work(batch))

        try:
            await _when_there_is_room(f"batch {batch.id} can't begin", open_work)
            (work,) = opened
            waiting = await in_thread(work.resume, iter(requests))
            if not is_cancelled:
                await _InOrder(batch, work, self).answer_all(waiting)
            await in_thread(work.sync)
        finally:
            for work in opened:
                # Also of one that is cancelled: what it shows is what its files have.
                batch.completed = work.output.num_lines
                batch.failed = work.errors.num_lines
                await in_thread(work.close)

    async def answer_one(self, batch: StoredBatch, request: BatchRequest) -> BatchAnswer:
        if request.problem is None and request.url != batch.endpoint:
            request = replace(
                request,
                problem=f"url: the batch is for {batch.endpoint}, not {request.url[:128]!r}",
            )
        self._num_requests += 1
        try:
            return await self._answers.answer(request, batch.owner)
        finally:
            self._num_requests -= 1

    def has_room(self, num_own: int) -> bool:
        """Whether the engine has a row that no live request wants, and batches have not half of
        them. `num_own`: a batch's requests, those included whose answers wait to be written.
        """
        rows = self._service.ready.max_num_seqs
        most = max(1, rows // 2)
        return (
            num_own < most
            and self._num_requests < most
            and self._service.admission.num_answers < rows
        )


class _InOrder:
    """Answers come in any order and are written in the requests'."""

    def __init__(self, batch: StoredBatch, work: WorkFiles, queue: BatchQueue) -> None:
        self._batch = batch
        self._work = work
        self._queue = queue
        self._finished: dict[int, BatchAnswer] = {}
        self._next = work.output.num_lines + work.errors.num_lines
        self._num_running = 0
        self._is_all_started = False
        self._changed = asyncio.Event()
        self._saved = 0.0

    async def answer_all(self, waiting: Iterator[BatchRequest]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_all())
                while (request := await in_thread(next, waiting, None)) is not None:
                    while not self._queue.has_room(self._num_running + len(self._finished)):
                        await self._wait()
                    self._num_running += 1
                    tasks.create_task(self._answer(request))
                self._is_all_started = True
                self._changed.set()
        except ExceptionGroup as group:
            raise _first_of(group) from None

    async def _wait(self) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):  # live requests come and go without a word
            await asyncio.wait_for(self._changed.wait(), _PAUSE)

    async def _answer(self, request: BatchRequest) -> None:
        try:
            self._finished[request.number] = await self._queue.answer_one(self._batch, request)
        finally:
            self._num_running -= 1
            self._changed.set()

    async def _write_all(self) -> None:
        """Writes answers whose turn has come, until there are no more to come."""
        while True:
            turn: list[BatchAnswer] = []
            while self._next + len(turn) in self._finished:
                turn.append(self._finished[self._next + len(turn)])
            if turn:
                await self._write(turn)
            elif self._is_all_started and not self._num_running and not self._finished:
                return
            else:
                await self._wait()

    async def _write(self, answers: list[BatchAnswer]) -> None:
        """They count as unwritten, so that no more requests are started than may wait, until they
        are there.
        """
        await _when_there_is_room(f"batch {self._batch.id} waits", self._work.write, answers)
        for number in range(self._next, self._next + len(answers)):
            del self._finished[number]
        self._next += len(answers)
        self._changed.set()
        self._batch.completed = self._work.output.num_lines
        self._batch.failed = self._work.errors.num_lines
        if time.monotonic() - self._saved > _SAVE_SECONDS:
            self._saved = time.monotonic()
            with contextlib.suppress(OSError):  # the counts are found again by counting
                await in_thread(self._queue.store.save, self._batch)


async def _when_there_is_room(
    what: str, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Calls it beside the event loop, again and again while disk or share are full."""
    pause = _FIRST_WAIT
    is_said = False
    while True:
        try:
            return await in_thread(function, *args, **kwargs)
        except (NoRoomError, OSError) as error:
            if not is_said:
                why = error.message if isinstance(error, NoRoomError) else error.strerror
                logger.warning("%s: %s; it goes on when there is room", what, why)
            is_said = True
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_WAIT)


async def _wait_for(answering: asyncio.Task[None]) -> None:
    """Until a batch is answered, cancelled by its client, or fails (raises); all of it ends if this
    is cancelled.
    """
    try:
        await asyncio.shield(asyncio.gather(answering, return_exceptions=True))
    except asyncio.CancelledError:  # the server goes down
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        raise
    if not answering.cancelled() and (error := answering.exception()) is not None:
        raise error


def _first_of(group: ExceptionGroup[Exception]) -> Exception:
    """The one that says most: without an engine everything fails."""
    gone = group.subgroup(EngineGoneError)
    found: Exception = group if gone is None else gone
    while isinstance(found, ExceptionGroup):
        found = found.exceptions[0]
    return found


def _message_for_client(error: Exception) -> str:
    """What the batch's client sees: no path of this machine."""
    if isinstance(error, ApiError):
        return error.message
    if isinstance(error, InvalidRequestError | FileNotFoundError):
        return "the input file is gone"
    return "the server could not go on with it; its log says why"
