"""Uploads: multipart/form-data, taken apart as it comes. The file's bytes go to the disk, all else
has to be short.

python-multipart finds the parts; what their headers say is read here, strictly: a name that can be
read in two ways is refused, and so is whatever would change what the file means (another charset,
an encoding of the part).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from quire.errors import InvalidRequestError
from quire.server.batches.store import Upload
from quire.server.errors import ApiError

_MAX_FIELD = 4096
_MAX_NAME = 255
_MOST_PARTS = 32
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PARAMETER = re.compile(rf';[ \t]*({_TOKEN})=(?:"((?:[^"\\]|\\.)*)"|({_TOKEN}))[ \t]*')
_KIND = re.compile(rf"[ \t]*({_TOKEN}(?:/{_TOKEN})?)[ \t]*")
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_PERCENT = re.compile(r"(?:[!#$&+.^_`|~0-9A-Za-z-]|%[0-9A-Fa-f]{2})*")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_PLAIN_ENCODINGS = ("binary", "8bit", "7bit")

# It warns of every malformed body; the client is told, and the access log has a line.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


class FormReader:
    """Feed it a body piece by piece: the part "file" is written to an upload, the others are
    `fields`.
    """

    def __init__(self, content_type: str, upload: Upload) -> None:
        """Raises ApiError for a content type that is no form's."""
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Of the file; None as long as there was none."""
        self._upload = upload
        self._num_parts = 0
        self._headers: dict[str, str] = {}
        self._header = [b"", b""]
        self._name = ""
        self._value = b""
        self._is_complete = False
        self._parser = MultipartParser(
            _boundary(content_type),
            {
                "on_part_begin": self._begin_part,
                "on_header_begin": self._begin_header,
                "on_header_field": self._take_header_name,
                "on_header_value": self._take_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Raises ApiError for what is no form, OSError if the disk fails."""
        try:
            self._parser.write(data)
        except FormParserError:
            raise _malformed() from None

    def finish(self) -> str:
        """All has come. The file's name."""
        if not self._is_complete:
            raise _malformed()
        if self.filename is None:
            raise ApiError(400, "file: is missing", field="file", code="missing_required_parameter")
        return self.filename

    # The parser's

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            raise ApiError(400, f"the form has more than {_MOST_PARTS} parts", code="invalid_form")
        self._headers = {}
        self._name = ""
        self._value = b""

    def _begin_header(self) -> None:
        self._header = [b"", b""]

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]

    def _end_header(self) -> None:
        name = self._header[0].decode("ascii", "replace").lower()
        try:
            value = self._header[1].decode()
        except UnicodeDecodeError:
            raise _bad_header(name, "is not UTF-8") from None
        if name in self._headers:
            raise _bad_header(name, "is there twice")
        if _CONTROL.search(value):
            raise _bad_header(name, "has control characters")
        self._headers[name] = value

    def _end_headers(self) -> None:
        kind, parameters = _parse(
            "content-disposition", self._headers.get("content-disposition", "")
        )
        if kind != "form-data" or not parameters.get("name"):
            raise _bad_header("content-disposition", 'must be form-data; name="…"')
        encoding = self._headers.get("content-transfer-encoding", "binary").strip().lower()
        if encoding not in _PLAIN_ENCODINGS:
            raise _bad_header(
                "content-transfer-encoding", f"must be one of {', '.join(_PLAIN_ENCODINGS)}"
            )
        self._name = parameters["name"]
        is_known = self._name in self.fields or (self._name == "file" and self.filename is not None)
        if is_known:
            raise InvalidRequestError(self._name[:64], "is there twice in the form")
        if self._name == "file":
            self.filename = _filename(parameters)

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._upload.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD:
            raise InvalidRequestError(self._name[:64], f"has more than {_MAX_FIELD} bytes")

    def _end_part(self) -> None:
        if self._name != "file":
            try:
                self.fields[self._name] = self._value.decode()
            except UnicodeDecodeError:
                raise InvalidRequestError(self._name[:64], "is not UTF-8") from None

    def _end(self) -> None:
        self._is_complete = True


def _boundary(content_type: str) -> bytes:
    kind, _, _ = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise ApiError(
            415, "send the file as multipart/form-data, with the fields purpose and file"
        )
    boundary = _parse("content-type", content_type)[1].get("boundary", "")
    if not _BOUNDARY.fullmatch(boundary):
        raise _bad_header(
            "content-type", "must have a boundary of 1 to 70 letters, digits and '()+_,-./:=?"
        )
    return boundary.encode("ascii")


def _parse(header: str, value: str) -> tuple[str, dict[str, str]]:
    """A header's value and its parameters, all of it or none."""
    kind = _KIND.match(value)
    place = kind.end() if kind is not None else 0
    parameters: dict[str, str] = {}
    while place < len(value):
        found = _PARAMETER.match(value, place)
        if found is None or found[1].lower() in parameters:
            raise _bad_header(header, "can't be read")
        quoted = None if found[2] is None else re.sub(r'\\(["\\])', r"\1", found[2])
        parameters[found[1].lower()] = found[3] if quoted is None else quoted
        place = found.end()
    return (kind[1].lower() if kind is not None else ""), parameters


def _filename(parameters: Mapping[str, str]) -> str:
    name = parameters.get("filename", "")
    extended = parameters.get("filename*")
    if extended is not None:
        charset, _, rest = extended.partition("'")
        _, quote, encoded = rest.partition("'")
        if charset.lower() != "utf-8" or not quote or not _PERCENT.fullmatch(encoded):
            raise InvalidRequestError(
                "filename*", "must be utf-8''NAME, with %XX for other characters"
            )
        try:
            name = unquote_to_bytes(encoded).decode()
        except UnicodeDecodeError:
            raise InvalidRequestError("filename*", "is not UTF-8") from None
    if len(name) > _MAX_NAME or _CONTROL.search(name):
        raise InvalidRequestError(
            "filename", f"must have at most {_MAX_NAME} characters, and no control characters"
        )
    return name or "file"


def _bad_header(name: str, why: str) -> ApiError:
    return ApiError(400, f"the form's header {name[:64]} {why}", code="invalid_form")


def _malformed() -> ApiError:
    return ApiError(400, "the body is not a well-formed multipart/form-data", code="invalid_form")
