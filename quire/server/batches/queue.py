"""Works on the batches of a server, one after the other, behind its live requests.

A batch's request is started only while the engine has rows to spare, and batches never take more than half of them;
with `--policy priority` they also give way once they run. What is answered is on disk, so a restart goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from quire.errors import QuireError
from quire.server.batches.answers import BatchAnswer, BatchAnswers, EngineGoneError
from quire.server.batches.output import AnswerFile
from quire.server.batches.requests import BatchRequest, RequestFile
from quire.server.batches.store import BatchStore, StoredBatch, split_answers
from quire.server.service import GenerationService

logger = logging.getLogger(__name__)

_LEAST_IMPORTANT = 1_000_000
_PAUSE = 0.05
_SAVE_SECONDS = 1.0


class BatchQueue:
    """All batches that are not over, and the task that answers them."""

    def __init__(self, store: BatchStore, service: GenerationService) -> None:
        self.store = store
        self._service = service
        self._waiting: asyncio.Queue[StoredBatch] = asyncio.Queue()
        priority = _LEAST_IMPORTANT if service.ready.policy == "priority" else 0
        self._answers = BatchAnswers(service, priority)
        self._task: asyncio.Task[None] | None = None
        self._running: tuple[StoredBatch, asyncio.Task[None]] | None = None

    async def start(self) -> None:
        """Takes up what an earlier server has left."""
        for batch in await asyncio.to_thread(self.store.unfinished):
            self._waiting.put_nowait(batch)
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Leaves what is under way for the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self.store.close)

    async def add(self, batch: StoredBatch) -> None:
        await asyncio.to_thread(self.store.add_batch, batch)
        self._waiting.put_nowait(batch)

    async def cancel(self, batch: StoredBatch) -> None:
        """Ends a batch; what is answered already is kept."""
        if batch.is_over or batch.status == "cancelling":
            return
        batch.status, batch.cancelling_at = "cancelling", int(time.time())
        await asyncio.to_thread(self.store.save, batch)
        if self._running is not None and self._running[0] is batch:
            self._running[1].cancel()

    async def _work(self) -> None:
        while True:
            batch = await self._waiting.get()
            try:
                await self._run(batch)
            except EngineGoneError:
                return  # the server goes down
            except Exception as error:
                known = isinstance(error, QuireError | OSError)
                logger.error("batch %s failed: %s", batch.id, error, exc_info=None if known else error)
                message = str(error) if isinstance(error, QuireError) else "the server could not work on it"
                data = [{"code": "server_error", "message": message, "line": None, "param": None}]
                batch.errors = {"object": "list", "data": data}
                await self._end(batch, "failed")

    async def _run(self, batch: StoredBatch) -> None:
        path = self.store.work_path(batch)
        source = await asyncio.to_thread(self.store.file, batch.owner, batch.input_file_id)
        requests = RequestFile(self.store.path_of(source), batch.id)
        answers = await asyncio.to_thread(AnswerFile, path, False)
        try:
            if batch.status != "cancelling":
                batch.status, batch.in_progress_at = "in_progress", batch.in_progress_at or int(time.time())
                batch.total = await asyncio.to_thread(requests.count)
                work = asyncio.create_task(self._answer(batch, requests, answers))
                self._running = batch, work
                try:
                    await asyncio.shield(asyncio.gather(work, return_exceptions=True))
                except asyncio.CancelledError:  # the server goes down
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                    raise
                finally:
                    self._running = None
                if not work.cancelled() and (error := work.exception()) is not None:
                    raise error
            await asyncio.to_thread(self._finish, batch, answers.part)
            await self._end(batch, "cancelled" if batch.status == "cancelling" else "completed")
        finally:
            answers.close()
            if batch.is_over:
                await asyncio.to_thread(answers.part.unlink, missing_ok=True)

    async def _answer(self, batch: StoredBatch, requests: RequestFile, answers: AnswerFile) -> None:
        waiting = iter(requests)
        done, failed = await asyncio.to_thread(answers.resume, waiting)
        batch.completed, batch.failed = done - failed, failed
        await asyncio.to_thread(self.store.save, batch)
        try:
            async with asyncio.TaskGroup() as tasks:
                await _InOrder(batch, answers, done, self).answer_all(waiting, tasks)
        except* (EngineGoneError, QuireError) as group:
            raise group.exceptions[0] from None

    async def answer_one(self, batch: StoredBatch, request: BatchRequest) -> BatchAnswer:
        if request.problem is None and request.url != batch.endpoint:
            request = replace(request, problem=f"url: the batch is for {batch.endpoint}, not {request.url[:128]!r}")
        return await self._answers.answer(request)

    def has_room(self, num_own: int) -> bool:
        """Whether the engine has a row that no live request wants, and batches have not half of them."""
        rows = self._service.ready.max_num_seqs
        return num_own < max(1, rows // 2) and self._service.admission.num_answers < rows

    def _finish(self, batch: StoredBatch, answers: Path) -> None:
        """Makes files of the answers for the client."""
        output, errors = self.store.new_upload(), self.store.new_upload()
        batch.completed, batch.failed = split_answers(answers, output, errors)
        for path, count, field in ((output, batch.completed, "output"), (errors, batch.failed, "error")):
            if count:
                name = f"{batch.id}_{field}.jsonl"
                # One id for all tries: after a restart this may come again.
                own = f"file-{batch.id.removeprefix('batch_')}-{field}"
                stored = self.store.add_file(batch.owner, name, "batch_output", path, own)
                setattr(batch, f"{field}_file_id", stored.id)
            else:
                path.unlink()

    async def _end(self, batch: StoredBatch, status: str) -> None:
        batch.status, batch.ended_at = status, int(time.time())
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self.store.save, batch)


class _InOrder:
    """Answers come in any order and are written in the requests'."""

    def __init__(self, batch: StoredBatch, answers: AnswerFile, done: int, queue: BatchQueue) -> None:
        self._batch = batch
        self._answers = answers
        self._queue = queue
        self._finished: dict[int, BatchAnswer] = {}
        self._next = done
        self._num_running = 0
        self._changed = asyncio.Event()
        self._saved = time.monotonic()

    async def answer_all(self, waiting: Iterator[BatchRequest], tasks: asyncio.TaskGroup) -> None:
        for request in waiting:
            while not self._queue.has_room(self._num_running + len(self._finished)):
                self._changed.clear()
                with contextlib.suppress(TimeoutError):  # live requests come and go without a word
                    await asyncio.wait_for(self._changed.wait(), _PAUSE)
            self._num_running += 1
            tasks.create_task(self._answer(request))

    async def _answer(self, request: BatchRequest) -> None:
        try:
            self._finished[request.number] = await self._queue.answer_one(self._batch, request)
        finally:
            self._num_running -= 1
            self._changed.set()
        lines = []
        while self._next in self._finished:
            answer = self._finished.pop(self._next)
            lines.append(answer.line)
            self._batch.failed += answer.is_error
            self._batch.completed += not answer.is_error
            self._next += 1
        if not lines:
            return
        # Small, and into the system's memory: the disk is not waited for but every few seconds.
        self._answers.write(b"".join(lines))
        if time.monotonic() - self._saved > _SAVE_SECONDS:
            self._saved = time.monotonic()
            if await asyncio.to_thread(lambda: self._queue.store.room) < 0:
                raise QuireError("the folder of --batches is full")
            await asyncio.to_thread(self._queue.store.save, self._batch)
