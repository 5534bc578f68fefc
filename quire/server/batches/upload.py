"""Uploads: multipart/form-data, written to the disk as it comes and taken apart there."""

from __future__ import annotations

import mmap
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from pathlib import Path

from quire.server.errors import ApiError

_MAX_HEADERS = 8192
_MAX_FIELD = 4096
_MOST_PARTS = 32


@dataclass(frozen=True, slots=True)
class Form:
    """A form with one file."""

    fields: dict[str, str]
    filename: str
    file: slice
    """Where in the upload its bytes are."""


async def receive(chunks: AsyncIterator[bytes], path: Path, most_bytes: int) -> None:
    """Writes what comes to a file, which is gone if it is too much."""
    received = 0
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(number, "wb") as file:
            async for chunk in chunks:
                received += len(chunk)
                if received > most_bytes:
                    message = f"there is room for {max(most_bytes, 0)} more bytes of files here: delete some"
                    raise ApiError(413, message, code="no_room")
                file.write(chunk)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def read_form(path: Path, content_type: str) -> Form:
    """Finds the parts of a form in a file."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise ApiError(415, "send the file as multipart/form-data, with the fields purpose and file")
    if not path.stat().st_size:
        raise _malformed()
    fields: dict[str, str] = {}
    filename, place = "", None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for name, found, start, end in _parts(data, boundary.encode("latin-1", "replace")):
            if name == "file":
                filename, place = found or "file", slice(start, end)
            elif end - start <= _MAX_FIELD:
                fields[name] = data[start:end].decode("utf-8", "replace")
    if place is None:
        raise ApiError(400, "file: is missing", field="file", code="missing_required_parameter")
    return Form(fields, filename[:255], place)


def keep_only(path: Path, place: slice, target: Path) -> None:
    """Copies a part of a file."""
    with path.open("rb") as source, target.open("wb") as file:
        offset = place.start
        while offset < place.stop:
            file.flush()
            sent = os.sendfile(file.fileno(), source.fileno(), offset, place.stop - offset)
            if not sent:
                raise OSError("the upload ends early")
            offset += sent


def _parts(data: mmap.mmap, boundary: bytes) -> Iterator[tuple[str, str | None, int, int]]:
    """Name, file name, begin and end of each."""
    delimiter = b"--" + boundary
    at = data.find(delimiter)
    for _ in range(_MOST_PARTS):
        if at < 0:
            raise _malformed()
        at += len(delimiter)
        if data[at : at + 2] == b"--":
            return
        headers_end = data.find(b"\r\n\r\n", at, at + _MAX_HEADERS)
        end = data.find(b"\r\n" + delimiter, max(headers_end + 2, 0))
        if data[at : at + 2] != b"\r\n" or headers_end < 0 or end < 0:
            raise _malformed()
        headers = BytesHeaderParser().parsebytes(data[at + 2 : headers_end + 2])
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise _malformed()
        yield name, headers.get_filename(), min(headers_end + 4, end), end
        at = end + 2
    raise ApiError(400, f"the form has more than {_MOST_PARTS} parts", code="invalid_form")


def _malformed() -> ApiError:
    return ApiError(400, "the body is not a well-formed multipart/form-data", code="invalid_form")
