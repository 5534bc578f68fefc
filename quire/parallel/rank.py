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
from pathlib import Path

import torch

from quire.constrain import GrammarCompiler
from quire.errors import EngineError, QuireError
from quire.load import load_model
from quire.parallel.group import Group, GroupError
from quire.parallel.messages import (
    Alive,
    Computed,
    Failed,
    Hello,
    LoadAdapter,
    Management,
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
        message = str(error) if is_known else f"{type(error).__name__}: {error}"
        connection.sendall(frame(Failed(message, isinstance(error, GroupError))))
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
    _compute(worker.runner, worker.depth, inbox, connection)


def _compute(runner: Runner, depth: int, inbox: Inbox, connection: socket.socket) -> None:
    """Steps as they come, as many in flight as rank 0 has."""
    pending: deque[tuple[int, PendingStep]] = deque()

    def read_oldest() -> None:
        step_id, oldest = pending.popleft()
        connection.sendall(frame(Computed(step_id, checksum(oldest.result()))))

    while True:
        try:
            step = inbox.get(timeout=_QUIET_SECONDS if pending else None)
        except queue.Empty:
            read_oldest()
            continue
        if not isinstance(step, Step):
            while pending:
                read_oldest()
            _manage(runner, step)
            continue
        pending.append((step.step_id, runner.submit(step)))
        while len(pending) >= depth:
            read_oldest()


def _manage(runner: Runner, message: Management) -> None:
    match message:
        case Sleep():
            runner.sleep(1)
        case Wake():
            runner.wake()
        case LoadAdapter():
            found = runner.load_adapter(message.folder).digest
            if found != message.digest:
                raise EngineError(f"{message.folder}: the adapter was changed while it was read")
        case RemoveAdapter():
            runner.remove_adapter(message.digest)


if __name__ == "__main__":
    sys.exit(main())
