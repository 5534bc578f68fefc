"""`--processes N`: tests in N processes, which are forked when all tests have been collected.

Each of pytest-xdist's workers would import and collect all of them itself: ten seconds of a core,
four times over, in each of our commands. Here a process has what its parent had, and runs tests from
its own stretch of the list; when that is done, it takes half of what the slowest one has left.
Reports go to the parent, which shows them as it would its own.

`make test` gives out files (tests/selection.py says which of them belong together), `--each` single
tests: for those of which one takes a minute.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.selection import LONG, worker_group

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("processes")
    group.addoption(
        "--processes", type=int, default=1, metavar="N", help="run tests in N processes"
    )
    group.addoption("--each", action="store_true", help="give them single tests instead of files")


class Stretches:
    """Which units are left to whom; in memory that all processes share."""

    def __init__(self, sizes: Sequence[int], num_processes: int, num_first: int = 0) -> None:
        """`sizes`: tests of each unit. The first `num_first` units are taken in turn; of the others
        everybody begins with about as many tests.
        """
        total, before = sum(sizes[num_first:]), 0
        starts = [num_first]
        for place, size in enumerate(sizes[num_first:], num_first):
            while len(starts) < num_processes and before >= len(starts) * total / num_processes:
                starts.append(place)
            before += size
        starts += [len(sizes)] * (num_processes + 1 - len(starts))
        context = multiprocessing.get_context("fork")
        self._bounds = context.Array("l", [*itertools.chain(*itertools.pairwise(starts))])
        self._num_first = num_first
        self._num_taken = context.Value("l", 0, lock=False)
        """Of the first units; under the lock of the bounds."""

    def take(self, process: int) -> int | None:
        """The next unit for it; None: nothing is left."""
        with self._bounds.get_lock():
            if self._num_taken.value < self._num_first:
                self._num_taken.value += 1
                return self._num_taken.value - 1
            bounds: Any = self._bounds.get_obj()
            if bounds[2 * process] == bounds[2 * process + 1]:
                left = [bounds[at + 1] - bounds[at] for at in range(0, len(bounds), 2)]
                slowest = max(range(len(left)), key=left.__getitem__)
                if not left[slowest]:
                    return None
                end = bounds[2 * slowest + 1]
                begin = end - (left[slowest] + 1) // 2
                bounds[2 * slowest + 1] = begin
                bounds[2 * process], bounds[2 * process + 1] = begin, end
            unit: int = bounds[2 * process]
            bounds[2 * process] += 1
            return unit


def units_of(
    items: Sequence[pytest.Item], *, each: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """The tests' places in the list, by unit: those that are taken first, and the others."""
    if each:
        found: tuple[list[list[int]], list[list[int]]] = ([], [])
        for place, item in enumerate(items):
            found[item.nodeid.partition("::")[0] not in LONG].append([place])
        return found
    units: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        units.setdefault(worker_group(item.nodeid.partition("::")[0]), []).append(place)
    return [], list(units.values())


class Processes:
    """A plugin of the process that was started: it runs no test itself."""

    def __init__(self, config: pytest.Config, begin: Callable[[], None]) -> None:
        """Every process begins with a call of `begin`."""
        self._count: int = config.option.processes
        self._each: bool = config.option.each
        self._begin = begin

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly:
            return None
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False  # files take turns
        first, units = units_of(session.items, each=self._each)
        begun = self._run(session, first + units, len(first))
        while len(begun) < len(session.items):  # a process died with tests that it had taken
            left = [[place for place in unit if place not in begun] for unit in first + units]
            begun |= self._run(session, [unit for unit in left if unit], 0)
        return True

    def _run(self, session: pytest.Session, units: list[list[int]], num_first: int) -> set[int]:
        """The tests that have begun when all processes have ended."""
        context = multiprocessing.get_context("fork")
        stretches = Stretches([len(unit) for unit in units], self._count, num_first)
        running: dict[Connection, _Running] = {}
        begun: set[int] = set()
        try:
            for number in range(self._count):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_tests,
                    args=(session, number, units, stretches, theirs, self._begin),
                )
                process.start()
                theirs.close()
                running[ours] = _Running(number, process, begun)
            while running:
                for pipe in cast(list[Connection], wait(list(running))):
                    if not self._receive(session, pipe, running[pipe]):
                        del running[pipe]
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for one in running.values():
                one.process.terminate()
            for one in running.values():
                one.process.join()
        return begun

    def _receive(self, session: pytest.Session, pipe: Connection, one: _Running) -> bool:
        """What a process says; False: it has ended."""
        hook = session.config.hook
        try:
            kind, data = pipe.recv()
        except (EOFError, OSError):
            one.process.join()
            if one.test is not None:
                hook.pytest_runtest_logreport(report=self._crash(session, one))
            return False
        if kind == "begin":
            one.test = data
            one.begun.add(data)
        elif kind == "end":
            one.test = None
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=data)
        else:
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            # as pytest-xdist's reports: the terminal then names no file, since they take turns
            name = f"process {one.number}"
            report.node = SimpleNamespace(
                gateway=SimpleNamespace(id=name), _workerinfocache=f"[{name}]"
            )
            hook.pytest_runtest_logreport(report=report)
        return True

    @staticmethod
    def _crash(session: pytest.Session, one: _Running) -> pytest.TestReport:
        item = session.items[cast(int, one.test)]
        code = one.process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"{item.nodeid}: the process of this test ended with {how}",
            when="call",
        )


class _Running:
    def __init__(self, number: int, process: Any, begun: set[int]) -> None:
        self.number = number
        self.process = process
        self.begun = begun
        self.test: int | None = None


class _Sender:
    """What a process with tests has instead of a terminal."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config = config
        self._pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: Any
    ) -> None:
        said = warnings.WarningMessage(
            str(warning_message.message),  # whatever it is, this can be sent
            warning_message.category,
            warning_message.filename,
            warning_message.lineno,
        )
        self._pipe.send(
            (
                "warning",
                {"warning_message": said, "when": when, "nodeid": nodeid, "location": location},
            )
        )


def _run_tests(
    session: pytest.Session,
    number: int,
    units: list[list[int]],
    stretches: Stretches,
    pipe: Connection,
    begin: Callable[[], None],
) -> None:
    """The whole life of a process."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    begin()
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:  # its files are the parent's, too
        capture.stop_global_capturing()
        capture.start_global_capturing()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Sender(config, pipe))

    def places() -> Iterator[int]:
        while (unit := stretches.take(number)) is not None:
            yield from units[unit]

    # One ahead, as a fixture lives until a test that does not need it.
    for place, following in itertools.pairwise(itertools.chain(places(), [None])):
        assert place is not None
        pipe.send(("begin", place))
        item = session.items[place]
        nextitem = None if following is None else session.items[following]
        config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        pipe.send(("end", place))
    config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
