"""Progress on the terminal: bars on stderr, only where somebody is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Report = Callable[[int, int | None], None]
_TITLES = {"download": "Downloading", "load": "Loading weights"}


class ProgressBars:
    """Bars for downloads and loading. Does nothing when stderr is not a terminal.

    Use as a context manager; calling it with `download` or `load` gives the function to report to.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, activity: str) -> Report:
        task: TaskID | None = None

        def report(done: int, total: int | None) -> None:
            nonlocal task
            if task is None:
                task = self._progress.add_task(f"{_TITLES[activity]} {self._name}", total=total)
            self._progress.update(task, completed=done, total=total)

        return report


def say(message: str) -> None:
    """A line to the person at the terminal, on stderr so that output stays clean; dim where colours work."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(message, style="dim", markup=False)
