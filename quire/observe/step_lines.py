"""Entries of the step log as lines of JSON, and back. Most of a long log are decodes, so these are
written in columns: a row's number and position, and only what is unusual beside it
(docs/step_log.md). Lines of version 5, which had an object for each request of each step, are read
as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quire.sampling_params import ResolvedTokens, SamplingParams, StructuredOutput
from quire.step import (
    AdmittedRequest,
    BlockCopy,
    Finished,
    Preemption,
    ScheduledRequest,
    Step,
    StepAdapters,
    StepLogEntry,
    StepPromise,
    StepResult,
)

VERSION = 6
_READ_VERSIONS = (5, 6)
_USUAL: dict[str, Any] = {
    "num_tokens": 1,
    "samples": True,
    "new_block_ids": (),
    "draft_tokens": (),
    "runs_ahead": False,
    "num_drafts": 0,
}
"""What a decode has; columns hold what differs from it, by place."""
_WRITTEN = {"draft_tokens": "guesses"}
"""Names in the log that differ from those in the code."""
_RECORDS: Mapping[str, Callable[..., Any]] = {
    "admitted": AdmittedRequest,
    "preempted": Preemption,
    "finished": Finished,
    "copies": BlockCopy,
}
"""What a step has tuples of, beside the requests that are scheduled."""
_NAMES_AGAIN = 1024
"""After so many lines the names of all rows are written again: the end of a file can be read from
there on.
"""
_DEFAULT_PARAMS = SamplingParams()
_T = TypeVar("_T")


class LineWriter:
    """Encodes entries in the order of their steps: names of rows stand in the line where they
    change.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._num_lines = 0

    def encode(self, entry: StepLogEntry, engine: Mapping[str, Any] | None = None) -> str:
        """One line of the file, without its end."""
        if self._num_lines % _NAMES_AGAIN == 0:
            self._names.clear()
        self._num_lines += 1
        step = fields_of(entry.step) | {
            name: [fields_of(one) for one in getattr(entry.step, name)] for name in _RECORDS
        }
        step["scheduled"] = self._columns(entry.step.scheduled)
        for name in ("promise", "adapters"):
            if step[name] is None:
                del step[name]
        for item in step["admitted"]:
            item["params"] = encode_params(item["params"])
            item["resolved"] = fields_of(item["resolved"])
        result: dict[str, Any] | None = None
        if entry.result is not None:
            done = entry.result
            tokens = _aligned_tokens(entry.step.scheduled, done.tokens)
            result = {"step_id": done.step_id, "tokens": tokens}
            extra = {
                "errors": dict(done.errors),
                "ended": sorted(done.ended),
                "drafts": dict(done.drafts),
            }
            result |= {name: value for name, value in extra.items() if value}
        line = {
            "version": VERSION,
            "step": step,
            "result": result,
            "error": entry.error,
            "committed": entry.committed,
        }
        if entry.submitted is not None:
            line["submitted"] = entry.submitted
        if engine is not None:
            line["engine"] = dict(engine)
        return json.dumps(line, separators=(",", ":"))

    def _columns(self, scheduled: Sequence[ScheduledRequest]) -> dict[str, Any]:
        names = self._names
        new = {one.row: one.request_id for one in scheduled if names.get(one.row) != one.request_id}
        names.update(new)
        columns: dict[str, Any] = {
            "rows": [one.row for one in scheduled],
            "starts": [one.start for one in scheduled],
        }
        if new:
            columns["names"] = new
        for name, usual in _USUAL.items():
            values = [getattr(one, name) for one in scheduled]
            unusual = {place: value for place, value in enumerate(values) if value != usual}
            if unusual:
                columns[_WRITTEN.get(name, name)] = unusual
        return columns


class LineReader:
    """Decodes lines, in their order."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self.engine: dict[str, Any] | None = None
        """The settings that the last line had beside its entry."""

    def decode(self, line: str | bytes) -> StepLogEntry:
        """The value one line stands for; raises ValueError, KeyError or TypeError if it stands for
        none.
        """
        try:
            data = json.loads(line)
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        version = data.get("version") if isinstance(data, dict) else None
        if version not in _READ_VERSIONS:
            known = " or ".join(map(str, _READ_VERSIONS))
            raise ValueError(f"not a step log of version {known} (found {version!r})")
        step = _mapping(data["step"])
        for item in step["admitted"]:
            item["params"] = decode_params(item["params"])
            item["resolved"] = build_record(ResolvedTokens, item["resolved"])
        for name, kind in _RECORDS.items():
            step[name] = tuple(build_record(kind, item) for item in step[name])
        if step.get("promise") is not None:
            step["promise"] = StepPromise(*step["promise"])
        if step.get("adapters") is not None:
            running, waiting, num_waiting = step["adapters"]
            step["adapters"] = StepAdapters(tuple(running), tuple(waiting), num_waiting)
        if version == 5:
            step["scheduled"] = tuple(
                build_record(ScheduledRequest, _renamed(item)) for item in step["scheduled"]
            )
        else:
            step["scheduled"] = self._scheduled(_mapping(step["scheduled"]))
        result = (
            None
            if data["result"] is None
            else _decode_result(_mapping(data["result"]), step["scheduled"])
        )
        self.engine = data.get("engine")
        return StepLogEntry(
            Step(**step), result, data["error"], data["committed"], data.get("submitted")
        )

    def _scheduled(self, columns: dict[str, Any]) -> tuple[ScheduledRequest, ...]:
        names = self._names
        rows = columns["rows"]
        names.update({int(row): name for row, name in columns.get("names", {}).items()})
        unknown = [row for row in rows if row not in names]
        if unknown:
            raise ValueError(f"row {unknown[0]} has no name: lines before this one are missing")
        given = []
        for name, usual in _USUAL.items():
            values = [usual] * len(rows)
            for place, value in columns.get(_WRITTEN.get(name, name), {}).items():
                values[int(place)] = tuple(value) if isinstance(value, list) else value
            given.append(values)
        return tuple(
            map(
                ScheduledRequest._make,
                zip([names[row] for row in rows], rows, columns["starts"], *given, strict=True),
            )
        )


def _aligned_tokens(
    scheduled: Sequence[ScheduledRequest], tokens: Mapping[str, tuple[int, ...]]
) -> Any:
    """Of the requests that sample, in their order: a number where there is one token. By name where
    that is not all.
    """
    sampling = [one.request_id for one in scheduled if one.samples]
    if len(sampling) != len(tokens) or not all(name in tokens for name in sampling):
        return dict(tokens)
    return [found[0] if len(found := tokens[name]) == 1 else found for name in sampling]


def _decode_result(item: dict[str, Any], scheduled: Sequence[ScheduledRequest]) -> StepResult:
    found = item["tokens"]
    if isinstance(found, list):
        sampling = [one.request_id for one in scheduled if one.samples]
        if len(sampling) != len(found):
            raise ValueError(
                f"{len(sampling)} requests sample, but there are tokens of {len(found)}"
            )
        tokens = {
            name: tuple(value) if isinstance(value, list) else (value,)
            for name, value in zip(sampling, found, strict=True)
        }
    else:
        tokens = {name: tuple(value) for name, value in found.items()}
    return StepResult(
        step_id=item["step_id"],
        tokens=tokens,
        errors=item.get("errors", {}),
        ended=frozenset(item.get("ended", ())),
        drafts={name: tuple(value) for name, value in item.get("drafts", {}).items()},
    )


def encode_params(params: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from their defaults, in plain types; without logits processors:
    those are code.
    """
    given = fields_of(params)
    del given["logits_processors"]
    if params.structured is not None:
        given["structured"] = fields_of(params.structured)
    return {name: value for name, value in given.items() if value != getattr(_DEFAULT_PARAMS, name)}


def decode_params(fields: Mapping[str, Any]) -> SamplingParams:
    """The parameters that `encode_params` wrote, checked again."""
    given = dict(fields)
    if "structured" in given:
        given["structured"] = build_record(StructuredOutput, given["structured"])
    return build_record(SamplingParams, given)


def _renamed(item: dict[str, Any]) -> dict[str, Any]:
    read = {written: name for name, written in _WRITTEN.items()}
    return {read.get(name, name): value for name, value in item.items()}


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {type(value).__name__}")
    return value


def fields_of(record: Any) -> dict[str, Any]:
    """Of a dataclass or a named tuple."""
    return {
        name: getattr(record, name)
        for name in getattr(record, "_fields", None) or record.__dataclass_fields__
    }


def build_record(kind: Callable[..., _T], fields: dict[str, Any]) -> _T:
    """Lists become tuples again: no record holds a list."""
    return kind(**{key: _tuples(value) for key, value in fields.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
