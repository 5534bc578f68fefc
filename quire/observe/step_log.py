"""Every step with its result, in order: a bounded ring in memory and, on request, a file of JSON lines.

The file's schema is described in docs/step_log.md; `read_step_log` gives back the values that were written. For whoever
counts (metrics) and logs, a step is told in a few numbers (`StepSummary`).
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

from quire.engine import SchedulerConfig
from quire.errors import InvalidRequestError
from quire.observe.packed_entry import PackedEntry, UnpackedEntries, pack, unpack
from quire.observe.request_records import belongs_to
from quire.observe.step_costs import StepCosts
from quire.sampling_params import ResolvedTokens, SamplingParams, StructuredOutput
from quire.step import Admission, BlockCopy, Finished, Preemption, ScheduledRequest, Step, StepLogEntry, StepResult

logger = logging.getLogger(__name__)

VERSION = 5
_RECORDS: Mapping[str, Callable[..., Any]] = {
    "scheduled": ScheduledRequest,
    "admitted": Admission,
    "preempted": Preemption,
    "finished": Finished,
    "copies": BlockCopy,
}
"""What a step has tuples of."""
_DEFAULT_PARAMS = SamplingParams()
_T = TypeVar("_T")


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
    costs: StepCosts = StepCosts()
    """Of the rows of its steps."""
    model: LoggedModel | None = None
    """Older logs don't say it."""


class StepLog:
    """The last `capacity` entries, or fewer if the prompts in them have more than `max_tokens` tokens. `listeners`
    are called with each one (metrics, a live page).

    What the ring holds is packed (`packed_entry`) and made anew for whoever looks; nothing is formatted unless there is
    a file. A file that can't be written any more never stops the engine: `file_error` says what happened, and the ring
    goes on.

    Scores (logprobs) and pooled vectors are left out: they are output, they say nothing about the engine, and
    the scores of one long prompt can take a hundred megabytes.
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
        self.file_error: str | None = None
        try:
            self._file: TextIO | None = None if path is None else path.open("a", encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError("step_log", f"{path} can't be written: {error}; name another file") from error

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[StepLogEntry]:
        """As it is now; each entry is made when it is asked for."""
        return map(unpack, tuple(self._ring))

    def about(self, request_id: str) -> tuple[list[StepLogEntry], UnpackedEntries]:
        """The entries from a request's arrival to its end, and those before them: whoever asks about one request need
        not look at all steps, while the engine waits."""
        packed = list(self._ring)
        named = [index for index, one in enumerate(packed) if one.mentions(request_id)]
        for first in named:
            step = unpack(packed[first]).step
            told: tuple[Admission | Finished, ...] = (*step.admitted, *step.finished)
            arrivals = [one.arrival for one in told if belongs_to(one.request_id, request_id)]
            if arrivals:
                break
        else:
            return [], UnpackedEntries(packed)
        while first and packed[first - 1].committed >= min(arrivals):
            first -= 1
        return [unpack(one) for one in packed[first : named[-1] + 1]], UnpackedEntries(packed[:first])

    def append(self, entry: StepLogEntry) -> None:
        packed = pack(entry)
        self._ring.append(packed)
        self._num_tokens += packed.num_prompt_tokens
        while len(self._ring) > self._capacity or (self._num_tokens > self._max_tokens and len(self._ring) > 1):
            self._num_tokens -= self._ring.popleft().num_prompt_tokens
        for listener in self._listeners:
            listener(entry)
        if self._file is not None:
            try:
                self._file.write(encode_entry(entry, self._engine) + "\n")
                self._engine = None
                self._file.flush()
            except OSError as error:
                self.file_error = f"step log stopped at step {entry.step.step_id}: {error}"
                logger.error("%s; the engine goes on without it: make room and start again", self.file_error)
                self.close()

    def close(self) -> None:
        """Closes the file; the ring stays readable."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.file_error = self.file_error or f"step log could not be closed: {error}"


_BAD_LINE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""All that a line of others may raise: wrong JSON, other fields, other types, nesting without end."""


def read_step_log(path: Path) -> list[StepLogEntry]:
    """The entries of a file, equal to those written (but for logits processors, which are code and stay out of
    it); says which line is wrong if one is."""
    entries = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequestError("step log", f"{path} can't be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(decode_entry(line.decode("utf-8")))
        except _BAD_LINE as error:
            raise InvalidRequestError("step log", f"{path}, line {number}: {_cause(error)}") from error
    return entries


def last_run(path: Path) -> tuple[list[StepLogEntry], LoggedEngine | None]:
    """The entries of the engine that wrote to a file last (others may have done so before), and its settings."""
    entries = read_step_log(path)
    first = max((index for index, entry in enumerate(entries) if entry.step.step_id == 0), default=0)
    with path.open("rb") as file:
        line = next(islice(file, first, None), b"{}")
    try:
        found = json.loads(line).get("engine")
        return entries[first:], None if found is None else _decode_engine(found)
    except _BAD_LINE as error:
        what = f"{path}, line {first + 1}: the engine's settings can't be read: {_cause(error)}"
        raise InvalidRequestError("step log", what) from error


def _decode_engine(found: dict[str, Any]) -> LoggedEngine:
    settings = dict(found)
    depth, share = settings.pop("depth"), settings.pop("head_share", 0.0)  # which older ones have
    costs = _build(StepCosts, settings.pop("costs", {"head_share": share}))
    named = settings.pop("model", None)
    model = None if named is None else _build(LoggedModel, named)
    return LoggedEngine(depth, SchedulerConfig.from_settings(settings), costs, model)


def _cause(error: Exception) -> str:
    return "is nested too deeply" if isinstance(error, RecursionError) else str(error)


def encode_entry(entry: StepLogEntry, engine: Mapping[str, Any] | None = None) -> str:
    """One line of the file, without its end."""
    step = _fields(entry.step) | {name: [_fields(one) for one in getattr(entry.step, name)] for name in _RECORDS}
    for item in step["admitted"]:
        item["params"] = encode_params(item["params"])
        item["resolved"] = _fields(item["resolved"])
    result: dict[str, Any] | None = None
    if entry.result is not None:
        done = entry.result
        result = {"step_id": done.step_id, "tokens": dict(done.tokens), "errors": dict(done.errors)}
        result["ended"] = sorted(done.ended)
        result["drafts"] = dict(done.drafts)
    line = {"version": VERSION, "step": step, "result": result, "error": entry.error, "committed": entry.committed}
    if entry.submitted is not None:
        line["submitted"] = entry.submitted
    if engine is not None:
        line["engine"] = dict(engine)
    return json.dumps(line, separators=(",", ":"))


def decode_entry(line: str) -> StepLogEntry:
    """The value one line stands for."""
    data = json.loads(line)
    if not isinstance(data, dict) or data.get("version") != VERSION:
        version = data.get("version") if isinstance(data, dict) else None
        raise ValueError(f"not a step log of version {VERSION} (found {version!r})")
    step = dict(data["step"])
    for item in step["admitted"]:
        item["params"] = decode_params(item["params"])
        item["resolved"] = _build(ResolvedTokens, item["resolved"])
    for name, kind in _RECORDS.items():
        step[name] = tuple(_build(kind, item) for item in step[name])
    result = None if data["result"] is None else _decode_result(data["result"])
    return StepLogEntry(Step(**step), result, data["error"], data["committed"], data.get("submitted"))


def encode_params(params: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from their defaults, in plain types; without logits processors: those are code."""
    given = _fields(params)
    del given["logits_processors"]
    if params.structured is not None:
        given["structured"] = _fields(params.structured)
    return {name: value for name, value in given.items() if value != getattr(_DEFAULT_PARAMS, name)}


def decode_params(fields: Mapping[str, Any]) -> SamplingParams:
    """The parameters that `encode_params` wrote, checked again."""
    given = dict(fields)
    if "structured" in given:
        given["structured"] = _build(StructuredOutput, given["structured"])
    return _build(SamplingParams, given)


def _decode_result(item: dict[str, Any]) -> StepResult:
    return StepResult(
        step_id=item["step_id"],
        tokens={request_id: tuple(tokens) for request_id, tokens in item["tokens"].items()},
        errors=item["errors"],
        ended=frozenset(item["ended"]),
        drafts={request_id: tuple(tokens) for request_id, tokens in item["drafts"].items()},
    )


def _fields(record: Any) -> dict[str, Any]:
    """Of a dataclass or a named tuple."""
    return {name: getattr(record, name) for name in getattr(record, "_fields", None) or record.__dataclass_fields__}


def _build(kind: Callable[..., _T], fields: dict[str, Any]) -> _T:
    """Lists become tuples again: no record holds a list."""
    return kind(**{key: _tuples(value) for key, value in fields.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


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
    num_guessed: int = 0
    """Requests that had guesses checked."""
    num_guesses: int = 0
    accepted: tuple[int, ...] = ()
    """How many of the first guesses were right, of the second ones, and so on."""


def summarize(entry: StepLogEntry) -> StepSummary:
    step = entry.step
    guessed = [one for one in step.scheduled if one.guesses]
    tokens = entry.result.tokens if entry.result is not None else {}
    lengths = [len(tokens.get(one.request_id, ())) - 1 for one in guessed]
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
        num_guessed=len(guessed),
        num_guesses=sum(len(one.guesses) for one in guessed),
        accepted=tuple(sum(length > place for length in lengths) for place in range(max(lengths, default=0))),
    )


def describe_steps(steps: Iterable[StepSummary]) -> str:
    """For the log."""
    return json.dumps([step._asdict() for step in steps])
