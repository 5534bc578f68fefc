"""Plays of a what-if on all cores, each in a process of its own, where one core alone would take
long.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Self

from quire.process.granted import granted_cores, num_cores
from quire.tools.what_if.recorded import RecordedRequest
from quire.tools.what_if.step_times import StepTimes
from quire.tools.what_if.what_if import Play, PlayResult, play_once

_WORTH = 3.0
"""Seconds: what takes less is done sooner here than a process is started."""
_given: list[tuple[Sequence[RecordedRequest], StepTimes]] = []
"""To a process, when it is started."""


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes that are started here don't hear of Ctrl-C before they have begun: halfway through
    their imports they would show where they were.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(requests: Sequence[RecordedRequest], times: StepTimes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for all of them, and one says so
    _given.append((requests, times))


def _play(one: Play) -> PlayResult:
    return play_once(*_given[0], one)


class Players:
    """Plays what it is given, in order; `show` hears after each how many were played."""

    def __init__(
        self,
        requests: Sequence[RecordedRequest],
        times: StepTimes,
        expected: int,
        show: Callable[[int], None] = lambda done: None,
        cores: int | None = None,
    ) -> None:
        """`expected`: how many plays there will be in all, about."""
        self._requests = requests
        self._times = times
        self._expected = expected
        self._show = show
        if cores is None:
            cores = min(num_cores(), granted_cores(Path("/")), expected)
        self._cores = cores
        self._pool: ProcessPoolExecutor | None = None
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=error[0] is None, cancel_futures=True)

    def __call__(self, plays: Sequence[Play]) -> list[PlayResult]:
        found: list[PlayResult] = []
        while len(found) < len(plays) and self._pool is None:
            began = perf_counter()
            found.append(play_once(self._requests, self._times, plays[len(found)]))
            self._note()
            left = (perf_counter() - began) * (self._expected - self._done)
            if self._cores > 1 and left > _WORTH:
                # Not forked: what this process has besides, threads and open engines, is nothing
                # for them.
                self._pool = ProcessPoolExecutor(
                    self._cores,
                    multiprocessing.get_context("spawn"),
                    _begin,
                    (self._requests, self._times),
                )
        if self._pool is not None:
            with _uninterrupted():
                coming = self._pool.map(_play, plays[len(found) :])
            for one in coming:
                found.append(one)
                self._note()
        return found

    def _note(self) -> None:
        self._done += 1
        self._show(self._done)
