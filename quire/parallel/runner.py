"""Rank 0's runner: hands each step to the other ranks, then computes it as they do.

A step is the same value for all of them, and tokens are drawn from seed and position, so nothing
needs to be sent back.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from quire.checkpoints.checkpoint import Checkpoint
from quire.engine.core import Pending
from quire.errors import EngineError
from quire.kernels.weights import Weight
from quire.load import WeightReader
from quire.models.adapters import Adapter
from quire.models.parameters import SleepLevel
from quire.parallel.group import GroupError
from quire.parallel.messages import (
    AbandonUpdate,
    CommitUpdate,
    Computed,
    Done,
    LoadAdapter,
    Management,
    PrepareUpdate,
    Reload,
    RemoveAdapter,
    Sleep,
    Wake,
    checksum,
)
from quire.parallel.processes import RankProcesses
from quire.runner.adapters import AdapterSlots
from quire.runner.runner import LogitsObserver, Runner
from quire.step import Step, StepResult

UPDATE_SECONDS = 600.0
"""Within which every rank must have read or replaced its weights."""


class ParallelRunner:
    """Once a step fails on any rank, ranks are out of step with each other: all later ones fail
    with the same words.
    """

    def __init__(
        self,
        runner: Runner,
        weights: WeightReader,
        processes: RankProcesses,
        close: Callable[[bool], None],
    ) -> None:
        """`weights` reads rank 0's part of others; `close` ends the other ranks, in an orderly way
        if it is told so.
        """
        self._runner = runner
        self._weights = weights
        self._tickets = itertools.count(1)
        self._prepared: tuple[int, dict[str, Weight]] | None = None
        self._processes = processes
        self._close = close
        self._broken: str | None = None

    @property
    def observe_logits(self) -> LogitsObserver | None:
        return self._runner.observe_logits

    @observe_logits.setter
    def observe_logits(self, observer: LogitsObserver | None) -> None:
        self._runner.observe_logits = observer

    @property
    def broken(self) -> str | None:
        """Why it can compute nothing more."""
        return self._broken or self._processes.problem

    @property
    def broken_fd(self) -> int:
        return self._processes.broken_fd

    def submit(self, step: Step) -> Pending:
        self._check()
        with _uninterrupted():  # a rank that leaves in the middle is missed by the others
            try:
                self._processes.send(step)
                return _PendingStep(self._runner.submit(step), step.step_id, self)
            except Exception as error:
                raise self.fail(error) from error

    def computed(self, step_id: int, result: StepResult) -> None:
        self._processes.expect(Computed(step_id, checksum(result)))
        self._check()

    def fail(self, error: BaseException) -> GroupError:
        """Ends the group; what to raise for it."""
        if self._broken is None:
            self._broken = self._processes.explain(error)
            self._close(False)
        return GroupError(self._message())

    @property
    def is_asleep(self) -> bool:
        return self._runner.is_asleep

    def sleep(self, level: SleepLevel) -> None:
        """As `Runner.sleep`, on all ranks."""
        self._on_all_ranks(Sleep(level), lambda: self._runner.sleep(level))

    def wake(self) -> None:
        """As `Runner.wake`, on all ranks. One that lacks memory ends the group: the others can't go
        on without it.
        """
        self._on_all_ranks(Wake(), self._runner.wake)

    def reload(self) -> None:
        """Every rank reads its part of the model's files again."""
        ticket = next(self._tickets)
        self._change_weights(Reload(ticket), self._weights.reload, self._weights.decoder.weights)

    def prepare(self, stored: Checkpoint) -> dict[str, Weight]:
        """What `update` takes, read by every rank from files that all of them can open. In any
        thread, while steps go on; a preparation before it is forgotten. Whatever is wrong on one of
        them is raised, and nothing has changed.
        """
        self._check()
        ticket = next(self._tickets)
        self._processes.send(PrepareUpdate(ticket, stored))
        own: dict[str, Weight] = {}
        error: Exception | None = None
        try:
            own = self._weights.read(stored)
        except Exception as raised:
            error = raised
        answers = self._processes.answers(ticket, UPDATE_SECONDS)
        if error is None:
            error = _first_error(answers)
        if error is not None:
            self._processes.send(AbandonUpdate(ticket))
            raise error
        self._prepared = ticket, own
        return own

    def abandon(self) -> None:
        """Forgets what was prepared, and gives its memory back."""
        prepared = self._prepared
        self._prepared = None
        if prepared is not None and self.broken is None:
            self._processes.send(AbandonUpdate(prepared[0]))

    def update(self, weights: Mapping[str, Weight]) -> None:
        """As `Runner.update`, on all ranks, with what was prepared last. If it fails on some of
        them, those weights are `missing` which not all have.
        """
        prepared = self._prepared
        self._prepared = None
        if prepared is None or prepared[1] is not weights:
            raise EngineError("this update was not prepared, or another one was after it")
        ticket = next(self._tickets)
        message = CommitUpdate(ticket, prepared[0])
        self._change_weights(message, lambda: self._runner.update(weights), weights)

    def _change_weights(
        self, message: CommitUpdate | Reload, here: Callable[[], None], names: Iterable[str]
    ) -> None:
        """What changes these weights on all ranks, which answer it."""
        missing = self._weights.decoder.missing
        before = missing.copy()
        errors: list[Exception] = []

        def change() -> None:
            try:
                here()
            except Exception as error:
                errors.append(error)
            has_changed = not errors or missing != before
            answers = self._processes.answers(message.ticket, UPDATE_SECONDS)
            if has_changed or any(one.has_changed for one in answers.values()):
                failed = [one for one in answers.values() if one.error is not None]
                if errors and missing == before:  # here all of them are the old ones
                    missing.update(names)
                for one in failed:
                    missing.update(one.missing if one.has_changed else names)
            elsewhere = _first_error(answers)
            if not errors and elsewhere is not None:
                errors.append(elsewhere)

        self._on_all_ranks(message, change)
        if errors:
            raise errors[0]

    @property
    def adapters(self) -> AdapterSlots | None:
        """Those of rank 0; the others' slots hold the same."""
        return self._runner.adapters

    def read_adapter(self, folder: Path) -> Adapter:
        """Rank 0's part of it."""
        return self._runner.read_adapter(folder)

    def load_adapter(self, folder: Path, adapter: Adapter | None = None) -> Adapter:
        """As `Runner.load_adapter`: here first, where it fails alone, then on the other ranks."""
        self._check()
        adapter = self._runner.load_adapter(folder, adapter)
        self._on_all_ranks(LoadAdapter(folder.absolute(), adapter.digest), lambda: None)
        return adapter

    def remove_adapter(self, digest: str) -> None:
        self._on_all_ranks(RemoveAdapter(digest), lambda: self._runner.remove_adapter(digest))

    def _on_all_ranks(self, message: Management, here: Callable[[], None]) -> None:
        self._check()
        with _uninterrupted():
            try:
                self._processes.send(message)
                here()
            except Exception as error:
                raise self.fail(error) from error

    def release(self) -> None:
        """Ends the other ranks, and lets go of weights and cache."""
        self._broken = self._broken or "the engine was closed"
        self._runner.release()  # graphs with gathers in them before what gathers
        self._close(True)

    def _check(self) -> None:
        problem = self.broken
        if problem is not None:
            if self._broken is None:
                self._broken = problem
                self._close(False)
            raise GroupError(self._message())

    def _message(self) -> str:
        return f"{self._broken}. All ranks were ended, and this engine computes nothing more: start a new one"


def _first_error(answers: Mapping[int, Done]) -> EngineError | None:
    for rank, one in sorted(answers.items()):
        if one.error is not None:
            return EngineError(f"rank {rank}: {one.error}")
    return None


class _PendingStep:
    """A step on its way on rank 0, and on the others."""

    def __init__(self, pending: Pending, step_id: int, runner: ParallelRunner) -> None:
        self._pending = pending
        self._step_id = step_id
        self._runner = runner

    def result(self) -> StepResult:
        with _uninterrupted():
            try:
                result = self._pending.result()
            except Exception as error:
                raise self._runner.fail(error) from error
            self._runner.computed(self._step_id, result)
        return result


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Puts Ctrl-C off to the end, where this is the thread that it would interrupt."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])
