"""Runs a batch from one file to another, with engines of its own, here or elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import quire
from quire.checkpoints.sources import ModelSource, resolve
from quire.config import EngineConfig
from quire.errors import EngineError, QuireError
from quire.frontend.progress import ModelBars
from quire.server.batches.answers import BatchAnswer, BatchAnswers, EngineGoneError
from quire.server.batches.output import AnswerFile
from quire.server.batches.requests import BatchRequest, RequestFile
from quire.server.config import ServerConfig
from quire.server.http_server import open_tokenizer
from quire.server.link.replicas.open import metrics_for, open_engines
from quire.server.logs import set_up_logging
from quire.server.service import GenerationService

_AHEAD = 8
"""Times the requests under way that may be answered before an earlier one is: their answers wait in
memory.
"""
_UNLIMITED = 10**9
_DECIDING = (
    "dtype",
    "quantization",
    "kernels",
    "kv_cache_dtype",
    "device",
    "max_model_len",
    "acceptance",
)
"""Engine options that answers may depend on."""

Report = Callable[[int, int, int], None]
"""Told how many requests are answered, how many there are, and the tokens of the answers since the
run began.
"""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """What to answer, with what, and where to."""

    requests: Path
    answers: Path
    model: str
    engine: dict[str, object]
    served_model_names: tuple[str, ...] = ()
    seed: int = 0
    concurrency: int | None = None
    """Requests under way at a time; None: twice what the engine runs at once."""
    restart: bool = False
    """Forget what an earlier run has done."""
    any_order: bool = False
    """Answers are written as they come, so that none waits for those of earlier requests."""
    replicas: int = 1
    """Engines that share the work; the answers are the same with any number."""


@dataclass(slots=True)
class BatchSummary:
    """What became of it."""

    total: int
    resumed: int
    """Answered by an earlier run."""
    done: int
    failed: int
    num_tokens: int = 0
    seconds: float = 0.0


class BatchProgress:
    """Writes answers as their turn comes, and tells how far the batch is."""

    def __init__(self, answers: AnswerFile, summary: BatchSummary, report: Report) -> None:
        self._answers = answers
        self._report = report
        self.summary = summary

    def write(self, lines: bytes, num_lines: int, num_failed: int) -> None:
        """The answers to the next requests."""
        try:
            self._answers.write(lines)
        except OSError as error:
            done = self.summary.done
            total = self.summary.total
            raise QuireError(
                f"the answers can't be written: {error.strerror}; {done} of {total} requests are answered, and the "
                "same command goes on from there"
            ) from None
        self.summary.done += num_lines
        self.summary.failed += num_failed

    def report(self, num_ahead: int = 0) -> None:
        """`num_ahead`: answers whose turn has not come."""
        summary = self.summary
        self._report(summary.done + num_ahead, summary.total, summary.num_tokens)

    def engine_gone(self) -> EngineError:
        done = self.summary.done
        total = self.summary.total
        return EngineError(
            f"the engine could not be started again; {done} of {total} requests are answered, and the same command "
            "goes on from there"
        )


AnswerAll = Callable[[BatchJob, RequestFile, Iterator[BatchRequest], BatchProgress], None]
"""Answers those of the file's requests that the iterator still has."""


def run_batch(job: BatchJob, report: Report, answer_all: AnswerAll | None = None) -> BatchSummary:
    """Answers what is not answered yet; returns when all is. `answer_all` does it elsewhere than
    here.
    """
    options = EngineConfig(**job.engine)  # type: ignore[arg-type]
    deciding = {name: getattr(options, name) for name in _DECIDING}
    identity = json.dumps(
        [quire.__version__, job.model, job.served_model_names, job.seed, deciding]
    )
    requests = RequestFile(job.requests, identity)
    if os.path.exists(job.answers) and os.path.samefile(job.answers, job.requests):
        raise QuireError(f"{job.answers}: requests and answers are the same file")
    answers = AnswerFile(job.answers, job.restart)
    try:
        waiting = iter(requests)
        if job.any_order:
            done, failed, waiting = answers.resume_in_any_order(requests)
        else:
            done, failed = answers.resume(waiting)
        summary = BatchSummary(requests.count(), done, done, failed)
        if answers.is_complete:
            return summary
        if done < summary.total:
            set_up_logging("human", "warning", "server")
            (answer_all or _answer_here)(
                job, requests, waiting, BatchProgress(answers, summary, report)
            )
        answers.complete()
        return summary
    finally:
        answers.close()


def server_config(job: BatchJob) -> ServerConfig:
    """Of the service that answers: nobody is turned away, and nothing takes too long."""
    return ServerConfig(
        model=job.model,
        engine=dict(job.engine),
        replicas=job.replicas,
        served_model_names=job.served_model_names,
        max_queued_requests=_UNLIMITED,
        max_queued_tokens=_UNLIMITED,
        request_seconds=float(_UNLIMITED),
        queue_seconds=float(_UNLIMITED),
        log_level="warning",
    )


def _answer_here(
    job: BatchJob, requests: RequestFile, waiting: Iterator[BatchRequest], progress: BatchProgress
) -> None:
    with ModelBars(job.model) as bars:
        source = resolve(job.model, progress=bars("download"))
    asyncio.run(_Run(job, source, progress).run(waiting))


class _Run:
    """An engine, and requests on their way through it."""

    def __init__(self, job: BatchJob, source: ModelSource, progress: BatchProgress) -> None:
        self._source = source
        self._progress = progress
        self._concurrency = job.concurrency
        self._any_order = job.any_order
        self._config = server_config(job)
        self._finished: dict[int, BatchAnswer] = {}
        """Whose turn to be written has not come."""
        self._next = progress.summary.done
        self._room = asyncio.Event()

    async def run(self, waiting: Iterator[BatchRequest]) -> None:
        metrics = metrics_for(self._config)
        client = open_engines(self._config, metrics, lambda: None)
        try:
            opening = asyncio.to_thread(open_tokenizer, self._source, self._config)
            ready, tokenizer = await asyncio.gather(client.start(), opening)
            service = GenerationService(self._config, tokenizer, client, ready, metrics)
            self._progress.report()
            started = time.monotonic()
            await self._answer_all(service, waiting, self._concurrency or 2 * ready.max_num_seqs)
            self._progress.summary.seconds = time.monotonic() - started
        finally:
            await client.stop()

    async def _answer_all(
        self, service: GenerationService, waiting: Iterator[BatchRequest], at_once: int
    ) -> None:
        free = asyncio.Semaphore(at_once)
        answers = BatchAnswers(service)

        async def answer(request: BatchRequest) -> None:
            try:
                self._take(request.number, await answers.answer(request))
            finally:
                free.release()

        try:
            async with asyncio.TaskGroup() as tasks:
                for request in waiting:
                    while not self._any_order and request.number - self._next >= _AHEAD * at_once:
                        self._room.clear()
                        await self._room.wait()
                    await free.acquire()
                    tasks.create_task(answer(request))
        except ExceptionGroup as group:
            if group.subgroup(EngineGoneError) is not None:
                raise self._progress.engine_gone() from None
            foreseen = group.subgroup(QuireError)
            if foreseen is None:
                raise
            raise foreseen.exceptions[0] from None

    def _take(self, number: int, answer: BatchAnswer) -> None:
        self._finished[number] = answer
        self._progress.summary.num_tokens += answer.num_tokens
        turn = []
        if self._any_order:
            turn.append(self._finished.pop(number))
        while self._next in self._finished:
            turn.append(self._finished.pop(self._next))
            self._next += 1
        if turn:
            self._progress.write(
                b"".join([one.line for one in turn]), len(turn), sum(one.is_error for one in turn)
            )
            self._room.set()
        self._progress.report(len(self._finished))
