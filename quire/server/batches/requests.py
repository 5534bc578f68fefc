"""The requests of a batch: lines of JSON, or rows of a Parquet file.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import InvalidRequestError, QuireError

_MAX_ID = 512
_MAX_LINE = 16 * 2**20
"""Bytes; a line is in memory as a whole."""
BAD_JSON = (msgspec.DecodeError, ValueError, RecursionError)
"""All that reading JSON of others may raise: also for text that is no UTF-8, nesting, and numbers
that are too long.
"""
_COLUMNS = ("custom_id", "method", "url", "body")
"""Of a Parquet file."""


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line."""

    number: int
    """From 0."""
    id: str
    """Of its answer: says which request, and under which options, it is an answer to."""
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    problem: str | None = None
    """Why it is no request."""

    @property
    def answer_id(self) -> str:
        return f"batch_req_{self.id}"


class RequestFile:
    """Reads a file of requests in its order, as often as somebody wants to, a line at a time."""

    def __init__(self, path: Path, identity: str) -> None:
        """`identity` stands for all else that answers depend on."""
        self.path = path
        self.identity = identity
        self._is_parquet = path.suffix.lower() == ".parquet"
        if not os.path.isfile(path):  # False, too, for what can't be a path
            raise InvalidRequestError("REQUESTS", f"there is no file {path}")
        if self._is_parquet:
            import_pyarrow(path)

    def count(self) -> int:
        """How many there are."""
        if self._is_parquet:
            return int(_open_parquet(self.path).metadata.num_rows)
        return sum(1 for _ in self._raw_lines())

    def __iter__(self) -> Iterator[BatchRequest]:
        seen: set[bytes] = set()
        """Digests of the ids so far: there may be millions."""
        for number, raw in enumerate(self._raw_lines()):
            request = self._read(number, raw)
            if request.custom_id is not None:
                digest = hashlib.blake2b(request.custom_id.encode(), digest_size=8).digest()
                if digest in seen:
                    problem = f"custom_id: {request.custom_id!r} was used on an earlier line"
                    request = BatchRequest(number, request.id, request.custom_id, problem=problem)
                seen.add(digest)
            yield request

    def _read(self, number: int, raw: bytes) -> BatchRequest:
        name = hashlib.sha256(b"%s\0%d\0%s" % (self.identity.encode(), number, raw)).hexdigest()[
            :24
        ]
        if len(raw) > _MAX_LINE:
            return BatchRequest(
                number, name, None, problem=f"line {number + 1}: has more than {_MAX_LINE} bytes"
            )
        try:
            line = msgspec.json.decode(raw, type=_Line)
            body = msgspec.json.encode(line.body)
        except BAD_JSON as error:  # which a wrong type is, too
            return BatchRequest(
                number, name, _custom_id(raw), problem=f"line {number + 1}: {_cause(error)}"
            )
        problem = None
        if not 0 < len(line.custom_id) <= _MAX_ID:
            problem = f"line {number + 1}: custom_id must have 1 to {_MAX_ID} characters"
            return BatchRequest(number, name, None, problem=problem)
        if line.method != "POST":
            problem = f"method: must be POST, not {line.method[:64]!r}"
        return BatchRequest(number, name, line.custom_id, line.url, body, problem)

    def _raw_lines(self) -> Iterator[bytes]:
        if self._is_parquet:
            yield from _parquet_lines(self.path)
            return
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise InvalidRequestError(
                "REQUESTS", f"{self.path} can't be read: {error.strerror}"
            ) from None
        with file:
            while raw := file.readline(_MAX_LINE + 1):
                last = raw
                # too long: its end is of no interest
                while len(last) > _MAX_LINE and not last.endswith(b"\n"):
                    last = file.readline(_MAX_LINE + 1)
                if stripped := raw.strip():
                    yield stripped


def _custom_id(raw: bytes) -> str | None:
    """Of a line that is wrong otherwise, if it has one."""
    try:
        found = msgspec.json.decode(raw)
    except BAD_JSON:
        return None
    name = found.get("custom_id") if isinstance(found, dict) else None
    return name if isinstance(name, str) and len(name) <= _MAX_ID else None


def _cause(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "is not UTF-8"
    return "is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _parquet_lines(path: Path) -> Iterator[bytes]:
    """Rows with the columns custom_id, url, body (JSON text or a struct) and perhaps method; others
    don't matter.
    """
    file = _open_parquet(path)
    columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
    try:
        for batch in file.iter_batches(columns=columns):
            for row in batch.to_pylist():
                yield _parquet_line(row)
    except (OSError, ValueError) as error:  # pyarrow's own errors are such
        raise InvalidRequestError("REQUESTS", f"{path} can't be read as Parquet: {error}") from None


def _parquet_line(row: dict[str, Any]) -> bytes:
    """A row that can't be written as JSON is a line that can't be read: it says so when its turn
    comes.
    """
    try:
        row["body"] = _parquet_body(row.get("body"))
        return msgspec.json.encode({key: value for key, value in row.items() if value is not None})
    except (TypeError, OverflowError, *BAD_JSON):
        return msgspec.json.encode(
            {"custom_id": str(row.get("custom_id")), "body": "a value that JSON does not have"}
        )


def _parquet_body(body: Any) -> Any:
    """What is no JSON stays text, which is no body: its line says so."""
    if not isinstance(body, str | bytes):
        return _without_nulls(body)
    try:
        return msgspec.json.decode(body, type=msgspec.Raw)
    except BAD_JSON:
        return body


def _open_parquet(path: Path) -> Any:
    try:
        return import_pyarrow(path).ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are such
        raise InvalidRequestError("REQUESTS", f"{path} can't be read as Parquet: {error}") from None


def _without_nulls(value: Any) -> Any:
    """A struct has all fields that any row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def import_pyarrow(path: Path) -> Any:
    """pyarrow.parquet, or an error that says how to get it."""
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise QuireError(
            f"{path}: Parquet files need pyarrow: pip install 'quire[parquet]', or use .jsonl"
        ) from None
