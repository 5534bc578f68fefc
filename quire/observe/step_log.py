"""Every step with its result, in order: a bounded ring in memory and, on request, a file of JSON
lines.

The file's schema is described in docs/step_log.md; `read_step_log` gives back the values that were
written. For whoever counts (metrics) and logs, a step is told in a few numbers (`StepSummary`).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from quire.engine import SchedulerConfig
from quire.errors import InvalidRequestError
from quire.observe.packed_entry import PackedEntry, UnpackedEntries, pack, unpack
from quire.observe.request_records import belongs_to
from quire.observe.row_costs import RowCosts
from quire.observe.step_lines import LineReader, LineWriter, build_record
from quire.step import AdmittedRequest, Finished, StepAdapters, StepLogEntry

logger = logging.getLogger(__name__)


class LoggedModel(NamedTuple):
    """The model that an engine computed with, and how."""

    name: str
    """As it was asked for; of a file or folder, where it was."""
    device: str
    """`cpu` or `cuda`."""
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1


class LoggedEngine(NamedTuple):
    """The settings of the engine that wrote a log."""

    depth: int
    config: SchedulerConfig
    costs: RowCosts = RowCosts()
    """Of the rows of its steps."""
    model: LoggedModel | None = None
    """Older logs don't say it."""


class StepLog:
    """The last `capacity` entries, or fewer if the prompts in them have more than `max_tokens`
    tokens. `listeners` are called with each one (metrics, a live page).

    What the ring holds is packed (`packed_entry`) and made anew for whoever looks; nothing is
    formatted unless there is a file. A file that can't be written any more never stops the engine:
    `file_error` says what happened, and the ring goes on.

    Scores (logprobs) and pooled vectors are left out: they are output, they say nothing about the
    engine, and the scores of one long prompt can take a hundred megabytes.
    """

    def __init__(
        self,
        capacity: int = 4096,
        path: Path | None = None,
        listeners: Sequence[Callable[[StepLogEntry], None]] = (),
        max_tokens: int = 2**20,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        """`engine`: its settings, which the first line of the file has beside its step."""
        self._ring: deque[PackedEntry] = deque()
        self._capacity = capacity
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._listeners = tuple(listeners)
        self._engine = engine
        self._writer = LineWriter()
        self.file_error: str | None = None
        try:
            self._file: TextIO | None = None if path is None else _open_to_append(path)
        except OSError as error:
            raise InvalidRequestError(
                "step_log", f"{path} can't be written: {error}; name another file"
            ) from error

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[StepLogEntry]:
        """As it is now; each entry is made when it is asked for."""
        return map(unpack, tuple(self._ring))

    def about(self, request_id: str) -> tuple[list[StepLogEntry], UnpackedEntries]:
        """The entries from a request's arrival to its end, and those before them: whoever asks
        about one request need not look at all steps, while the engine waits.
        """
        packed = list(self._ring)
        named = [index for index, one in enumerate(packed) if one.mentions(request_id)]
        for first in named:
            step = unpack(packed[first]).step
            records: tuple[AdmittedRequest | Finished, ...] = (*step.admitted, *step.finished)
            arrivals = [one.arrival for one in records if belongs_to(one.request_id, request_id)]
            if arrivals:
                break
        else:
            return [], UnpackedEntries(packed)
        while first and packed[first - 1].committed >= min(arrivals):
            first -= 1
        return [unpack(one) for one in packed[first : named[-1] + 1]], UnpackedEntries(
            packed[:first]
        )

    def append(self, entry: StepLogEntry) -> None:
        packed = pack(entry)
        self._ring.append(packed)
        self._num_tokens += packed.num_prompt_tokens
        while len(self._ring) > self._capacity or (
            self._num_tokens > self._max_tokens and len(self._ring) > 1
        ):
            self._num_tokens -= self._ring.popleft().num_prompt_tokens
        for listener in self._listeners:
            listener(entry)
        if self._file is not None:
            try:
                self._file.write(self._writer.encode(entry, self._engine) + "\n")
                self._engine = None
                self._file.flush()
            except OSError as error:
                self.file_error = f"step log stopped at step {entry.step.step_id}: {error}"
                logger.error(
                    "%s; the engine goes on without it: make room and start again", self.file_error
                )
                self.close()

    def close(self) -> None:
        """Closes the file; the ring stays readable."""
        file = self._file
        self._file = None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.file_error = self.file_error or f"step log could not be closed: {error}"


def _open_to_append(path: Path) -> TextIO:
    """A line that was cut off by the end of an earlier run gets its end, so that ours are lines of
    their own.
    """
    file = path.open("a+b")
    with contextlib.suppress(OSError):  # a pipe has no end to look at
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8")


_BAD_LINE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""All that a line of others may raise: wrong JSON, other fields, other types, nesting without end."""


def iter_step_log(path: Path) -> Iterator[StepLogEntry]:
    """The entries of a file, each when it is asked for, equal to those written (but for logits
    processors, which are code and stay out of it); says which line is wrong if one is. A last line
    without its end was cut off while it was written, and is left out.
    """
    for entry, _ in _entries(path):
        yield entry


def read_step_log(path: Path) -> list[StepLogEntry]:
    """All entries of a file, as objects: for a long log, `iter_step_log` takes less memory."""
    return list(iter_step_log(path))


def _entries(path: Path) -> Iterator[tuple[StepLogEntry, dict[str, Any] | None]]:
    """With the engine's settings where a line has them."""
    reader = LineReader()
    line = b"\n"
    wrong = ""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    entry = reader.decode(line.decode("utf-8"))
                except _BAD_LINE as error:
                    if wrong:
                        break
                    wrong = f"{path}, line {number}: {_cause(error)}"
                    continue
                if wrong:
                    if entry.step.step_id:
                        break
                    logger.warning("%s; it was cut off, and another run begins behind it", wrong)
                    wrong = ""
                yield entry, reader.engine
    except OSError as error:
        raise InvalidRequestError("step log", f"{path} can't be read: {error}") from error
    if wrong and line.endswith(b"\n"):
        raise InvalidRequestError("step log", wrong)
    if wrong:
        logger.warning("%s; the file ends there, in the middle of a line, which is left out", wrong)


def last_run(path: Path) -> tuple[UnpackedEntries, LoggedEngine | None]:
    """The entries of the engine that wrote to a file last (others may have done so before), and its
    settings. They are packed: a long log takes as many bytes as its file, not ten times as many.
    """
    packed: list[PackedEntry] = []
    found: dict[str, Any] | None = None
    for entry, engine in _entries(path):
        if entry.step.step_id == 0:
            packed.clear()
            found = None
        if not packed:
            found = engine
        packed.append(pack(entry))
    entries = UnpackedEntries(packed)
    if found is None:
        return entries, None
    try:
        return entries, _decode_engine(found)
    except _BAD_LINE as error:
        what = f"{path}: the engine's settings can't be read: {_cause(error)}"
        raise InvalidRequestError("step log", what) from error


def _decode_engine(found: dict[str, Any]) -> LoggedEngine:
    settings = dict(found)
    depth = settings.pop("depth")
    share = settings.pop("head_share", 0.0)  # which older ones have
    costs = build_record(RowCosts, settings.pop("costs", {"head_share": share}))
    named = settings.pop("model", None)
    model = None if named is None else build_record(LoggedModel, named)
    return LoggedEngine(depth, SchedulerConfig.from_settings(settings), costs, model)


def _cause(error: Exception) -> str:
    return "is nested too deeply" if isinstance(error, RecursionError) else str(error)


NO_ADAPTERS = StepAdapters(())


class StepSummary(NamedTuple):
    """What one step was, for counters and logs."""

    step_id: int
    now: float
    num_scheduled: int
    num_tokens: int
    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_preempted: int
    seconds: float
    """From its being scheduled to its results' arrival."""
    error: str | None = None
    num_drafts_checked: int = 0
    """Requests that had draft tokens checked."""
    num_draft_tokens: int = 0
    accepted: tuple[int, ...] = ()
    """How many of the first draft tokens were right, of the second ones, and so on."""
    gave_way: str | None = None
    """The target of time that this step could not keep."""
    adapters: StepAdapters = NO_ADAPTERS


def summarize(entry: StepLogEntry) -> StepSummary:
    step = entry.step
    drafted = [one for one in step.scheduled if one.draft_tokens]
    tokens = entry.result.tokens if entry.result is not None else {}
    lengths = [len(tokens.get(one.request_id, ())) - 1 for one in drafted]
    return StepSummary(
        step_id=step.step_id,
        now=step.now,
        num_scheduled=len(step.scheduled),
        num_tokens=step.num_tokens,
        num_waiting=step.num_waiting,
        num_running=step.num_running,
        num_free_blocks=step.num_free_blocks,
        num_preempted=len(step.preempted),
        seconds=entry.committed - step.now,
        error=entry.error,
        num_drafts_checked=len(drafted),
        num_draft_tokens=sum(len(one.draft_tokens) for one in drafted),
        accepted=tuple(
            sum(length > place for length in lengths) for place in range(max(lengths, default=0))
        ),
        gave_way=None if step.promise is None else step.promise.gave_way,
        adapters=step.adapters or NO_ADAPTERS,
    )


def describe_steps(steps: Iterable[StepSummary]) -> str:
    """For the log."""
    return json.dumps([step._asdict() for step in steps])
