"""A rank's own process: `python -m quire.parallel.rank`, started by rank 0.

It loads its part of the model and computes the steps it is handed, one after the other. When rank 0
is gone, however it went, so is this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from quire.constrain import GrammarCompiler
from quire.errors import EngineError, QuireError
from quire.kernels.weights import Weight
from quire.load import WeightReader, load_model
from quire.parallel.group import Group, GroupError
from quire.parallel.messages import (
    AbandonUpdate,
    Alive,
    CommitUpdate,
    Computed,
    Done,
    Failed,
    Hello,
    LoadAdapter,
    Management,
    PrepareUpdate,
    Reload,
    RemoveAdapter,
    Sleep,
    Task,
    Wake,
    checksum,
    frame,
    receive,
)
from quire.parallel.share import RankShare, rank_config, rank_device
from quire.process import life
from quire.process.child import end_with_parent, ignore_terminal_signals
from quire.runner.runner import Runner
from quire.runner.step_outputs import PendingStep
from quire.runner.worker import start_worker
from quire.step import Step

_QUIET_SECONDS = 0.05
"""Without a further step, after which results that nobody needs to wait for are read."""

Inbox = queue.SimpleQueue[Step | Management]


def main() -> int:
    ignore_terminal_signals()
    end_with_parent()
    connection = socket.socket(fileno=os.dup(0))
    task: Task = receive(connection)
    logging.basicConfig(
        level=logging.WARNING, format=f"rank {task.rank}: %(levelname)s: %(message)s"
    )
    inbox: Inbox = queue.SimpleQueue()
    connection.sendall(frame(Hello()))

    def tell() -> None:
        with contextlib.suppress(OSError):  # whoever takes in steps notices that rank 0 is gone
            connection.sendall(frame(Alive()))

    life.listeners.append(life.Heartbeat(tell))
    threading.Thread(target=_take_steps, args=(connection, inbox), daemon=True).start()
    try:
        _work(task, inbox, connection)
    except Exception as error:
        is_known = isinstance(error, QuireError)
        if not is_known:
            logging.getLogger(__name__).exception("the rank failed")
        connection.sendall(frame(Failed(_in_words(error), isinstance(error, GroupError))))
    # What other threads or libraries still wait for does not matter any more.
    connection.close()
    os._exit(1)


def _take_steps(connection: socket.socket, inbox: Inbox) -> None:
    """Also notices, whatever the rank is doing, that rank 0 is gone."""
    try:
        while True:
            inbox.put(receive(connection))
    except (EOFError, OSError):
        os._exit(0)


def _work(task: Task, inbox: Inbox, connection: socket.socket) -> None:
    size = task.config.tensor_parallel_size
    device, is_shared = rank_device(task.config.device, task.rank, size)
    torch.set_num_threads(task.num_threads)
    device.make_current()
    config = rank_config(task.config, device, is_shared)
    group = Group.meet(Path(task.folder), task.rank, size, device, is_shared, task.start_seconds)
    share = RankShare(group)
    loaded = load_model(task.source, config, device, share)
    grammars = GrammarCompiler(loaded.tokenizer, loaded.spec.vocab_size, loaded.eos_token_ids)
    worker = start_worker(
        loaded.decoder,
        config,
        grammars,
        draft=loaded.draft,
        agree=share.agree,
        loader=loaded.adapters,
    )
    group.seconds = task.step_seconds
    life.listeners.clear()  # from here on steps are its life, and their results use the connection
    sender = _Sender(connection)
    weights = _Weights(loaded.replacing, worker.runner, sender)
    _compute(worker.runner, worker.depth, inbox, sender, weights)


class _Sender:
    """The way to rank 0, for two threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Computed | Done) -> None:
        with self._lock:
            self._connection.sendall(frame(message))


class _Weights:
    """What rank 0 has done to this rank's weights, each answered by what came of it."""

    def __init__(self, reader: WeightReader, runner: Runner, sender: _Sender) -> None:
        self._reader = reader
        self._runner = runner
        self._sender = sender
        self._preparing: threading.Thread | None = None
        self._prepared: tuple[int, dict[str, Weight]] | None = None

    def prepare(self, message: PrepareUpdate) -> None:
        """In a thread: steps go on meanwhile."""
        self._wait()
        self._prepared = None
        self._preparing = threading.Thread(target=self._read, args=(message,), daemon=True)
        self._preparing.start()

    def _read(self, message: PrepareUpdate) -> None:
        try:
            self._prepared = message.ticket, self._reader.read(message.stored)
        except Exception as error:
            self._sender.send(Done(message.ticket, _in_words(error)))
        else:
            self._sender.send(Done(message.ticket))

    def abandon(self, message: AbandonUpdate) -> None:
        self._wait()
        if self._prepared is not None and self._prepared[0] == message.prepared:
            self._prepared = None

    def commit(self, message: CommitUpdate) -> None:
        self._wait()
        prepared = self._prepared
        self._prepared = None

        def update() -> None:
            if prepared is None or prepared[0] != message.prepared:
                raise EngineError("this update was not prepared here")
            self._runner.update(prepared[1])

        self._do(message.ticket, update)

    def reload(self, message: Reload) -> None:
        self._wait()
        self._do(message.ticket, self._reader.reload)

    def _do(self, ticket: int, action: Callable[[], None]) -> None:
        decoder = self._reader.decoder
        missing = decoder.missing.copy()
        error = None
        try:
            action()
        except Exception as raised:
            error = _in_words(raised)
        has_changed = error is None or decoder.missing != missing
        self._sender.send(Done(ticket, error, frozenset(decoder.missing), has_changed))

    def _wait(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"


def _compute(runner: Runner, depth: int, inbox: Inbox, sender: _Sender, weights: _Weights) -> None:
    """Steps as they come, as many in flight as rank 0 has."""
    pending: deque[tuple[int, PendingStep]] = deque()

    def read_oldest() -> None:
        step_id, oldest = pending.popleft()
        sender.send(Computed(step_id, checksum(oldest.result())))

    while True:
        try:
            step = inbox.get(timeout=_QUIET_SECONDS if pending else None)
        except queue.Empty:
            read_oldest()
            continue
        if not isinstance(step, Step):
            while pending:
                read_oldest()
            _manage(runner, step, weights)
            continue
        pending.append((step.step_id, runner.submit(step)))
        while len(pending) >= depth:
            read_oldest()


def _manage(runner: Runner, message: Management, weights: _Weights) -> None:
    match message:
        case Sleep():
            runner.sleep(message.level)
        case Wake():
            runner.wake()
        case Reload():
            weights.reload(message)
        case PrepareUpdate():
            weights.prepare(message)
        case CommitUpdate():
            weights.commit(message)
        case AbandonUpdate():
            weights.abandon(message)
        case LoadAdapter():
            found = runner.load_adapter(message.folder).digest
            if found != message.digest:
                raise EngineError(f"{message.folder}: the adapter was changed while it was read")
        case RemoveAdapter():
            runner.remove_adapter(message.digest)


if __name__ == "__main__":
    sys.exit(main())
