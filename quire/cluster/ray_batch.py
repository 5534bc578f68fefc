"""A batch on a Ray cluster, by Ray Data. Requests are read and answers written where the command
runs, in their order, so a batch comes out the same, and goes on after an interruption, as it does
on one machine.

The dataset has a row for every few requests. One task, on this machine, reads the file as rows are
wanted; actors, each with an engine process beside it, answer them. When an actor is lost, or its
machine, Ray Data makes another one and has its rows answered again: with the same bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pyarrow as pa
import ray
import ray.exceptions
from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask, read_datasource
from ray.data.block import BlockMetadata

from quire.checkpoints.sources import resolve
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.server.batches.answers import BatchAnswers, EngineGoneError
from quire.server.batches.requests import BatchRequest, RequestFile
from quire.server.batches.run import AnswerAll, BatchJob, BatchProgress, server_config
from quire.server.config import ServerConfig
from quire.server.http_server import open_tokenizer
from quire.server.link.replicas.open import metrics_for, open_engines
from quire.server.logs import set_up_logging
from quire.server.service import GenerationService

_CONNECT_SECONDS = 10.0
_ROWS_AT_ONCE = 8
"""Rows that an actor answers at a time: when the last answers of one are slow, the engine has those
of the others.
"""


@contextlib.contextmanager
def cluster_at(address: str) -> Iterator[AnswerAll]:
    """Within, there is a connection to the cluster, and whatever answers a batch there."""
    try:
        _check_reachable(address)
        ray.init(address=address, logging_level="warning", log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:  # Ray's own ConnectionError is an OSError
        reason = str(error).strip().partition("\n")[0]
        raise QuireError(
            f"--ray {address}: there is no Ray cluster that can be reached: {reason}"
        ) from None
    try:
        yield _answer_on_ray
    finally:
        ray.shutdown()


def _answer_on_ray(
    job: BatchJob, requests: RequestFile, waiting: Iterator[BatchRequest], progress: BatchProgress
) -> None:
    num_gpus = _gpus_needed(job)
    engine = job.engine if num_gpus else {**job.engine, "device": "cpu"}
    config = replace(server_config(job), engine=dict(engine), replicas=1)
    at_once = 2 * EngineConfig.of(engine).limits(on_gpu=bool(num_gpus)).max_num_seqs
    if job.concurrency is not None:
        at_once = max(1, job.concurrency // job.replicas)
    num_rows = min(_ROWS_AT_ONCE, at_once)
    source = _Requests(requests, progress.summary.done, at_once // num_rows)
    with _quiet_context():
        rows = read_datasource(source, num_cpus=0.0).map_batches(
            _Answers,
            batch_size=1,
            batch_format="numpy",
            compute=ActorPoolStrategy(
                size=job.replicas,
                max_tasks_in_flight_per_actor=num_rows + 1,
                max_concurrent_calls_per_actor=num_rows,
            ),
            fn_constructor_args=(config,),
            num_cpus=1,
            num_gpus=num_gpus,
        )
        progress.report()
        started = time.monotonic()
        try:
            for row in rows.iter_rows():
                _take(row, progress)
        except ray.exceptions.RayError as error:
            raise QuireError(f"--ray: {_reason(error)}") from error
        progress.summary.seconds = time.monotonic() - started


def _take(row: dict[str, Any], progress: BatchProgress) -> None:
    if row["refusal"]:
        raise QuireError(row["refusal"])
    if row["is_gone"]:
        raise progress.engine_gone()
    progress.write(row["lines"], int(row["num_lines"]), int(row["num_failed"]))
    progress.summary.num_tokens += int(row["num_tokens"])
    progress.report()


def _gpus_needed(job: BatchJob) -> int:
    """Of each engine: none if the cluster has none, or the engine may use none."""
    engine = EngineConfig.of(job.engine)
    machines = [one.get("Resources", {}) for one in ray.nodes() if one["Alive"]]
    most = int(max((one.get("GPU", 0) for one in machines), default=0))
    if engine.device == "cpu" or (engine.device == "auto" and not most):
        return 0
    if engine.tensor_parallel_size > most:
        raise QuireError(
            f"--ray: an engine needs {engine.tensor_parallel_size} GPUs of one machine, and none of the cluster's "
            f"{len(machines)} has more than {most}"
        )
    return engine.tensor_parallel_size


@contextlib.contextmanager
def _quiet_context() -> Iterator[None]:
    """Within, datasets keep their order, divide between any two rows, and leave the terminal to our
    own bar.
    """
    context = DataContext.get_current()
    wanted = {
        "target_max_block_size": 1,
        "enable_progress_bars": False,
        "print_on_execution_start": False,
    }
    kept = {name: getattr(context, name) for name in wanted}
    kept_order = context.execution_options.preserve_order
    context.execution_options.preserve_order = True
    for name, value in wanted.items():
        setattr(context, name, value)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.execution_options.preserve_order = kept_order
        for name, value in kept.items():
            setattr(context, name, value)


class _Requests(Datasource):  # type: ignore[misc]
    """The requests of a file behind the first `num_done`, `size` to a row."""

    def __init__(self, requests: RequestFile, num_done: int, size: int) -> None:
        super().__init__()
        self._read = partial(
            _read_rows, requests.path.absolute(), requests.identity, num_done, size
        )

    @property
    def supports_distributed_reads(self) -> bool:
        """The file may be on this machine alone."""
        return False

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *args: Any, **kwargs: Any) -> list[ReadTask]:
        """One: whether an id was used before, only who has read all lines before it knows."""
        return [
            ReadTask(
                self._read,
                BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None),
            )
        ]


def _read_rows(path: Path, identity: str, num_done: int, size: int) -> Iterable[pa.Table]:
    requests = islice(RequestFile(path, identity), num_done, None)
    while some := list(islice(requests, size)):
        yield pa.table({"requests": pa.array([msgspec.msgpack.encode(some)], pa.binary())})


class _Answers:
    """An actor of Ray Data: answers rows with an engine of its own."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._starting = asyncio.Lock()
        self._answers: BatchAnswers | None = None

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        found = {
            "refusal": "",
            "is_gone": False,
            "lines": b"",
            "num_lines": 0,
            "num_failed": 0,
            "num_tokens": 0,
        }
        try:
            async with self._starting:
                if self._answers is None:
                    self._answers = BatchAnswers(await self._start())
            requests = msgspec.msgpack.decode(batch["requests"][0], type=list[BatchRequest])
            answers = await asyncio.gather(*(self._answers.answer(request) for request in requests))
            found["lines"] = b"".join([answer.line for answer in answers])
            found["num_lines"] = len(answers)
            found["num_failed"] = sum(answer.is_error for answer in answers)
            found["num_tokens"] = sum(answer.num_tokens for answer in answers)
        except QuireError as error:  # the user's: Ray must not wrap it
            found["refusal"] = str(error)
        except EngineGoneError:
            found["is_gone"] = True
        return {name: _column(value) for name, value in found.items()}

    async def _start(self) -> GenerationService:
        """The engine's process ends when this one does."""
        config = self._config
        set_up_logging("human", "warning", "server")
        metrics = metrics_for(config)
        client = open_engines(config, metrics, lambda: None)
        source = await asyncio.to_thread(resolve, config.model)
        ready, tokenizer = await asyncio.gather(
            client.start(), asyncio.to_thread(open_tokenizer, source, config)
        )
        return GenerationService(config, tokenizer, client, ready, metrics)


def _column(value: Any) -> Any:
    """Of one row. Bytes as an object: numpy's own take zeros from their end."""
    return np.array([value], object if isinstance(value, bytes | str) else None)


def _reason(error: BaseException) -> str:
    """The last line of what Ray says, which is the reason."""
    return str(error).strip().rpartition("\n")[2]


def _check_reachable(address: str) -> None:
    """Raises OSError if no server of Ray's kind answers there within seconds: Ray itself tries for
    minutes.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
    address = address.removeprefix("ray://")
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit()):
        return  # Ray knows at once what to say
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(_CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            raise OSError(
                f"something listens at {address}, but it does not speak as Ray does"
            ) from None
