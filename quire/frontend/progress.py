"""Progress on the terminal: bars on stderr, only where somebody is looking."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Self

from rich import progress as rich_progress
from rich.console import Console
from rich.progress import MofNCompleteColumn, ProgressColumn, TextColumn

from quire.checkpoints.download import Progress as Report
from quire.outputs import RequestDelta

_TITLES = {
    "download": "Downloading",
    "load": "Loading weights",
    "quantize": "Quantising",
    "compile": "Compiling kernels (once) for",
}


class _Bars:
    """A rich progress display that goes away when it is done, and shows nothing when nobody looks."""

    def __init__(self, *columns: ProgressColumn) -> None:
        first, last = (
            (TextColumn("{task.description}"), rich_progress.BarColumn()),
            rich_progress.TimeRemainingColumn(),
        )
        self._progress = rich_progress.Progress(
            *first,
            *columns,
            last,
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        if not self._progress.disable:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        # rich before 14 ends even a display that shows nothing with an empty line.
        if not self._progress.disable:
            self._progress.stop()


class ModelBars(_Bars):
    """Bars for models; calling it with `download`, `load` or `quantize` gives the function to
    report to. When the CPU kernels have to be compiled meanwhile, that has a bar too.
    """

    def __init__(self, name: str) -> None:
        kinds = (
            rich_progress.TaskProgressColumn,
            rich_progress.DownloadColumn,
            rich_progress.TransferSpeedColumn,
        )
        super().__init__(*(kind() for kind in kinds))
        self._name = name
        self._compiling = self("compile")

    def __enter__(self) -> Self:
        from quire.process import native_library  # a command that only shows its help does without

        native_library.progress.append(self._compiling)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        from quire.process import native_library

        native_library.progress.remove(self._compiling)
        super().__exit__(*error)

    def __call__(self, activity: str) -> Report:
        task: rich_progress.TaskID | None = None

        def report(done: int, total: int | None) -> None:
            nonlocal task
            if task is None:
                task = self._progress.add_task(f"{_TITLES[activity]} {self._name}", total=total)
            self._progress.update(task, completed=done, total=total)

        return report


class GenerationBar(_Bars):
    """How many prompts are answered, and how many tokens a second that takes."""

    def __init__(self, num_prompts: int) -> None:
        super().__init__(
            MofNCompleteColumn(), TextColumn("prompts, {task.fields[rate]:.1f} tokens/s")
        )
        self._task = self._progress.add_task("Generating", total=num_prompts, rate=0.0)
        self._num_tokens = 0
        self._started = time.monotonic()

    def take(self, deltas: Iterable[RequestDelta]) -> None:
        """Counts what one step gave."""
        finished = 0
        for delta in deltas:
            self._num_tokens += len(delta.token_ids)
            finished += delta.output is not None
        rate = self._num_tokens / max(time.monotonic() - self._started, 1e-9)
        self._progress.update(self._task, advance=finished, rate=rate)


class BatchBar(_Bars):
    """How many requests of a batch are answered, how many tokens a second that takes, and the time
    left.
    """

    def __init__(self) -> None:
        super().__init__(
            MofNCompleteColumn(), TextColumn("requests, {task.fields[rate]:.1f} tokens/s")
        )
        self._task: rich_progress.TaskID | None = None
        self._started = 0.0

    def report(self, done: int, total: int, num_tokens: int) -> None:
        if self._task is None:
            self._started = time.monotonic()
            self._task = self._progress.add_task("Answering", total=total, completed=done, rate=0.0)
        rate = num_tokens / max(time.monotonic() - self._started, 1e-9)
        self._progress.update(self._task, completed=done, rate=rate)


class BenchmarkBar(_Bars):
    """How many parts of a benchmark are done, and which one is running."""

    def __init__(self, num_parts: int) -> None:
        super().__init__(MofNCompleteColumn(), TextColumn("{task.fields[part]}"))
        self._task = self._progress.add_task("Measuring", total=num_parts, part="")

    def begin(self, part: str) -> None:
        """Says what is running now."""
        self._progress.update(self._task, part=part)

    def advance(self) -> None:
        """One part is done."""
        self._progress.advance(self._task)


class TimeBar(_Bars):
    """How much of a time is over, and what is being done in it."""

    def __init__(self, title: str, seconds: float) -> None:
        super().__init__(TextColumn("{task.fields[part]}"))
        self._task = self._progress.add_task(title, total=seconds, part="")

    def show(self, part: str, spent: float) -> None:
        self._progress.update(self._task, completed=spent, part=part)


class PlayBar(_Bars):
    """How many plays of a what-if are done."""

    def __init__(self, num_plays: int) -> None:
        super().__init__(MofNCompleteColumn())
        self._task = self._progress.add_task("Playing on the virtual clock", total=num_plays)

    def show(self, done: int) -> None:
        self._progress.update(self._task, completed=done)
