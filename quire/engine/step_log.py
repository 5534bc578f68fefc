"""Every step with its result, in order: a bounded ring in memory and, on request, a file of JSON lines.

The file's schema is described in docs/step_log.md; `read_step_log` gives back the values that were written.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.step import (
    Admission,
    BlockCopy,
    Finished,
    Preemption,
    ScheduledRequest,
    Step,
    StepResult,
)

VERSION = 1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StepLogEntry:
    """A step that is over: `result` if it succeeded, `error` if it failed."""

    step: Step
    result: StepResult | None
    error: str | None
    committed: float
    """When its result was there; `step.now` says when it was scheduled."""


class StepLog:
    """The last `capacity` entries. `listeners` are called with each one (metrics, a live page).

    The ring holds references only; nothing is formatted unless there is a file. A file that can't be
    written any more never stops the engine: `file_error` says what happened, and the ring goes on.
    """

    def __init__(
        self,
        capacity: int = 4096,
        path: Path | None = None,
        listeners: Sequence[Callable[[StepLogEntry], None]] = (),
    ) -> None:
        self._ring: deque[StepLogEntry] = deque(maxlen=capacity)
        self._listeners = tuple(listeners)
        self._file: TextIO | None = None if path is None else path.open("a", encoding="utf-8")
        self.file_error: str | None = None

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[StepLogEntry]:
        return iter(self._ring)

    def append(self, entry: StepLogEntry) -> None:
        self._ring.append(entry)
        for listener in self._listeners:
            listener(entry)
        if self._file is not None:
            try:
                self._file.write(encode_entry(entry) + "\n")
                self._file.flush()
            except OSError as error:
                self.file_error = f"step log stopped at step {entry.step.step_id}: {error}"
                self.close()

    def close(self) -> None:
        """Closes the file; the ring stays readable."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.file_error = self.file_error or f"step log could not be closed: {error}"


def read_step_log(path: Path) -> list[StepLogEntry]:
    """The entries of a file, equal to those written; says which line is wrong if one is."""
    entries = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                entries.append(decode_entry(line))
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidRequestError("step log", f"{path}, line {number}: {error}") from error
    return entries


def encode_entry(entry: StepLogEntry) -> str:
    """One line of the file, without its end."""
    step = {
        field.name: getattr(entry.step, field.name)
        for field in dataclasses.fields(entry.step)
        if field.name not in ("scheduled", "copies", "admitted", "preempted", "finished")
    }
    step["scheduled"] = [item._asdict() for item in entry.step.scheduled]
    step["admitted"] = [dataclasses.asdict(item) for item in entry.step.admitted]
    step["preempted"] = [dataclasses.asdict(item) for item in entry.step.preempted]
    step["finished"] = [dataclasses.asdict(item) for item in entry.step.finished]
    step["copies"] = [item._asdict() for item in entry.step.copies]
    result = None
    if entry.result is not None:
        tokens = {request_id: list(tokens) for request_id, tokens in entry.result.tokens.items()}
        result = {"step_id": entry.result.step_id, "tokens": tokens, "errors": dict(entry.result.errors)}
    line = {"version": VERSION, "step": step, "result": result, "error": entry.error}
    line["committed"] = entry.committed
    return json.dumps(line, separators=(",", ":"))


def decode_entry(line: str) -> StepLogEntry:
    """The value one line stands for."""
    data = json.loads(line)
    if not isinstance(data, dict) or data.get("version") != VERSION:
        version = data.get("version") if isinstance(data, dict) else None
        raise ValueError(f"not a step log of version {VERSION} (found {version!r})")
    step = dict(data["step"])
    for name, kind in (
        ("scheduled", ScheduledRequest),
        ("preempted", Preemption),
        ("finished", Finished),
        ("copies", BlockCopy),
    ):
        step[name] = tuple(_build(kind, item) for item in step[name])
    admitted = [{**item, "params": _build(SamplingParams, item["params"])} for item in step["admitted"]]
    step["admitted"] = tuple(_build(Admission, item) for item in admitted)
    result = None
    if data["result"] is not None:
        tokens = {request_id: tuple(tokens) for request_id, tokens in data["result"]["tokens"].items()}
        result = StepResult(data["result"]["step_id"], tokens, data["result"]["errors"])
    return StepLogEntry(Step(**step), result, data["error"], data["committed"])


def _build(kind: Callable[..., _T], fields: dict[str, Any]) -> _T:
    """Lists become tuples again: no record holds a list."""
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})
