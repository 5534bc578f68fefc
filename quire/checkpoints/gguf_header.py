"""The header of a GGUF file as it is written: metadata and the entries of its tensors. Versions 2,
3, little-endian.

The parser walks a mapping of the file and checks every count and length against the bytes that are
really there before it acts on it, so a broken or hostile file costs an error message and no more.
Needs no torch, so that a process which wants a model's tokenizer alone does without it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from quire.checkpoints.files import FileStamp, file_stamp, open_checked, quote
from quire.errors import ModelFormatError, UnsupportedModelError

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 256 * 2**20
MAX_TENSORS = 2**20
MAX_METADATA_PAIRS = 2**16
MAX_KEY_BYTES = 2**16 - 1
MAX_NAME_BYTES = 1024
MAX_STRING_BYTES = 2**26
MAX_ARRAY_ELEMENTS = 2**24
"""Over all arrays of a file together; the largest vocabularies need about a million."""
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY, _BOOL = 8, 9, 7
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class TensorEntry(NamedTuple):
    """A tensor as the header describes it, unchecked."""

    name: str
    shape: tuple[int, ...]
    """In torch's order, the row's length last."""
    type_id: int
    offset: int


class Header(NamedTuple):
    """One file's."""

    version: int
    metadata: dict[str, object]
    """Key to Python value: int, float, bool, str, or a list of them."""
    entries: list[TensorEntry]
    num_bytes: int
    stamp: FileStamp


def read_header(path: Path) -> Header:
    """Of one file, which may be a part of a model."""
    with open_checked(path) as file:
        stamp = file_stamp(file)
        size = stamp[1]
        if size < 24:
            raise ModelFormatError(
                f"{path}: the file is truncated: expected at least 24 bytes, got {size}"
            )
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as buffer:
            reader = _HeaderReader(path, buffer)
            version = _read_version(path, reader)
            num_tensors = reader.count("tensors", MAX_TENSORS, min_bytes=32)
            num_pairs = reader.count("metadata pairs", MAX_METADATA_PAIRS, min_bytes=13)
            metadata = _read_metadata(reader, num_pairs)
            entries = [_read_tensor_entry(reader) for _ in range(num_tensors)]
            return Header(version, metadata, entries, reader.position, stamp)


def _read_version(path: Path, reader: _HeaderReader) -> int:
    magic = reader.take(4, "the magic number")
    if magic != MAGIC:
        raise ModelFormatError(
            f"{path}: not a GGUF file: expected it to begin with {MAGIC!r}, got {magic!r}"
        )
    version = reader.u32("the version")
    if version in (2, 3):
        return version
    if version & 0xFFFF == 0 and version != 0:
        raise UnsupportedModelError(
            f"{path}: a big-endian GGUF file; Quire reads little-endian ones"
        )
    raise UnsupportedModelError(
        f"{path}: GGUF version {version}; Quire reads versions 2 and 3: convert the model again with current tools"
    )


def _read_metadata(reader: _HeaderReader, num_pairs: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for _ in range(num_pairs):
        key = reader.string("a metadata key", MAX_KEY_BYTES)
        if key in metadata:
            reader.fail(f"metadata key {quote(key)} is there twice")
        metadata[key] = reader.value(
            reader.u32(f"the type of {quote(key)}"), f"metadata {quote(key)}"
        )
    return metadata


def _read_tensor_entry(reader: _HeaderReader) -> TensorEntry:
    name = reader.string("a tensor's name", MAX_NAME_BYTES)
    num_dimensions = reader.u32("the number of dimensions")
    if num_dimensions > MAX_DIMENSIONS:
        expected = f"expected at most {MAX_DIMENSIONS} dimensions, got {num_dimensions} dimensions"
        reader.fail(f"tensor {quote(name)}: {expected}")
    # The file counts the row's length first; torch counts it last.
    shape = tuple(reader.u64("a dimension") for _ in range(num_dimensions))[::-1]
    return TensorEntry(name, shape, reader.u32("a tensor's type"), reader.u64("a tensor's offset"))


class _HeaderReader:
    """A position in a file's mapping, and reads that can't leave it."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.position = 0
        self._path = path
        self._buffer = buffer
        self._end = min(len(buffer), MAX_HEADER_BYTES)
        self._elements_left = MAX_ARRAY_ELEMENTS

    def fail(self, message: str) -> NoReturn:
        raise ModelFormatError(f"{self._path}: {message}")

    def _need(self, num_bytes: int, what: str) -> int:
        """Moves on by so many bytes, if they are there, and returns where they begin."""
        start = self.position
        if num_bytes > self._end - start:
            limit = (
                "the file's end" if self._end == len(self._buffer) else f"the limit of {self._end}"
            )
            self.fail(
                f"{what}: expected {num_bytes} bytes at {start}, got {self._end - start} up to {limit}: "
                "the file is truncated or broken"
            )
        self.position = start + num_bytes
        return start

    def take(self, num_bytes: int, what: str) -> bytes:
        start = self._need(num_bytes, what)
        return self._buffer[start : start + num_bytes]

    def u32(self, what: str) -> int:
        number: int = _U32.unpack_from(self._buffer, self._need(4, what))[0]
        return number

    def u64(self, what: str) -> int:
        number: int = _U64.unpack_from(self._buffer, self._need(8, what))[0]
        return number

    def count(self, what: str, limit: int, min_bytes: int) -> int:
        """A number of things that each take at least `min_bytes` of what is left of the file."""
        number = self.u64(f"the number of {what}")
        room = self._end - self.position
        if number > limit:
            self.fail(f"expected at most {limit} {what}, got {number}")
        if number * min_bytes > room:
            self.fail(
                f"{number} {what}: expected at least {number * min_bytes} bytes, got {room}: truncated"
            )
        return number

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self.u64(what)
        if length > limit:
            self.fail(f"{what}: expected a string of at most {limit} bytes, got {length}")
        return self._decode(self.take(length, what), what)

    def _decode(self, data: bytes, what: str) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.fail(f"{what}: expected UTF-8 text, got {quote(data)}")

    def value(self, type_id: int, what: str, depth: int = 0) -> object:
        if type_id == _STRING:
            return self.string(what)
        if type_id == _ARRAY:
            return self._array(what, depth + 1)
        if type_id not in _SCALARS:
            self.fail(f"{what}: expected a value type from 0 to 12, got {type_id}")
        return self._scalars(type_id, 1, what)[0]

    def _array(self, what: str, depth: int) -> list[object]:
        if depth > MAX_ARRAY_DEPTH:
            self.fail(f"{what}: arrays nested more than {MAX_ARRAY_DEPTH} deep")
        type_id = self.u32(what)
        min_bytes = struct.calcsize("<" + _SCALARS[type_id]) if type_id in _SCALARS else 8
        count = self.count(f"elements of {what}", self._elements_left, min_bytes)
        self._elements_left -= count
        if type_id == _STRING:
            return self._strings(count, what)
        if type_id in _SCALARS:
            return self._scalars(type_id, count, what)
        return [self.value(type_id, what, depth) for _ in range(count)]

    def _scalars(self, type_id: int, count: int, what: str) -> list[object]:
        code = "B" if type_id == _BOOL else _SCALARS[type_id]
        data = self.take(count * struct.calcsize("<" + code), what)
        numbers: list[object] = np.frombuffer(data, dtype=np.dtype(code).newbyteorder("<")).tolist()
        if type_id == _BOOL:
            if not set(data) <= {0, 1}:
                self.fail(f"{what}: expected a boolean 0 or 1, got {max(data)}")
            return [number == 1 for number in numbers]
        return numbers

    def _strings(self, count: int, what: str) -> list[object]:
        """The one loop that matters for speed: a vocabulary has some hundred thousand strings."""
        strings: list[object] = []
        buffer, position, end = self._buffer, self.position, self._end
        unpack: Callable[..., tuple[int]] = _U64.unpack_from
        start = position
        try:
            for _ in range(count):
                start = position + 8
                if start > end:
                    self.fail(f"{what}: the file is truncated in string {len(strings)} of {count}")
                position = start + unpack(buffer, position)[0]
                if position > end:
                    self.fail(
                        f"{what}: string {len(strings)} of {count}: must end by {end}, got {position}"
                    )
                strings.append(buffer[start:position].decode())
        except UnicodeDecodeError:
            self._decode(buffer[start:position], what)  # says which
        self.position = position
        return strings
