"""Opens GGUF files: metadata, and where the tensors lie.

Every offset, shape and size is checked against the bytes that are really there (`gguf_header` does
so with what it reads). A model split into several files (`NAME-00001-of-00003.gguf`) is read as
one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from quire.checkpoints.checkpoint import TensorInfo, check_shape, tensor_error
from quire.checkpoints.files import FileStamp, quote, safe_member
from quire.checkpoints.gguf_header import read_header
from quire.checkpoints.gguf_types import OTHER_TYPES, TYPE_NAMES
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.formats import FORMATS

MAX_ALIGNMENT = 2**20
DEFAULT_ALIGNMENT = 32
MAX_PARTS = 1024


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF model's header: one file, or the parts of a split model taken together."""

    path: Path
    version: int
    metadata: dict[str, object]
    """Key to Python value: int, float, bool, str, or a list of them."""
    tensors: dict[str, TensorInfo]
    """Shapes in torch's order, the row's length last."""
    stamps: dict[Path, FileStamp] = field(repr=False)


def read_gguf(path: Path) -> GgufFile:
    """Reads and checks the header of a GGUF file, and of its other parts if it is one of several."""
    first = _read_part(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise ModelFormatError(
            f"{path}: split.count: expected at most {MAX_PARTS} files, got {quote(count)}"
        )
    return first if count <= 1 else _join_parts(path, count)


def _join_parts(path: Path, count: int) -> GgufFile:
    match = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})(\.gguf)", path.name, re.IGNORECASE)
    if match is None or int(match[2]) != count:
        raise ModelFormatError(
            f"{path}: one of the {count} files of a split model: expected a name like "
            f"NAME-00001-of-{count:05d}.gguf, got {quote(path.name)}; give the files their names back"
        )
    parts = []
    tensors: dict[str, TensorInfo] = {}
    for number in range(count):
        part = _read_part(
            safe_member(path.parent, f"{match[1]}-{number + 1:05d}-of-{count:05d}{match[3]}")
        )
        got = part.metadata.get("split.no"), part.metadata.get("split.count")
        if got != (number, count):
            raise ModelFormatError(
                f"{part.path}: expected split.no {number} of split.count {count}, got {quote(got)}"
            )
        for name, info in part.tensors.items():
            if name in tensors:
                other = tensors[name].file.name
                raise ModelFormatError(f"{part.path}: tensor {quote(name)} is also in {other}")
            tensors[name] = info
        parts.append(part)
    first = parts[0]
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelFormatError(
            f"{path}: expected {quote(expected)} tensors in all parts, got {len(tensors)}"
        )
    stamps = {part.path: part.stamps[part.path] for part in parts}
    return GgufFile(first.path, first.version, first.metadata, tensors, stamps)


def _read_part(path: Path) -> GgufFile:
    header = read_header(path)
    metadata = header.metadata
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        type(alignment) is not int
        or not 1 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise ModelFormatError(
            f"{path}: general.alignment: expected a power of two, got {quote(alignment)}"
        )
    data_start = -(-header.num_bytes // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset in header.entries:
        if name in tensors:
            raise ModelFormatError(f"{path}: tensor {quote(name)} is there twice")
        if offset % alignment:
            raise tensor_error(
                path, name, f"an offset aligned to {alignment}", f"misaligned {offset}"
            )
        tensors[name] = _check_tensor(
            path, name, shape, type_id, data_start + offset, header.stamp[1]
        )
    _check_overlaps(path, tensors)
    return GgufFile(path, header.version, metadata, tensors, {path: header.stamp})


def _check_tensor(
    path: Path, name: str, shape: tuple[int, ...], type_id: int, start: int, size: int
) -> TensorInfo:
    if type_id in OTHER_TYPES:
        raise UnsupportedModelError(
            f"{path}: tensor {quote(name)} is stored as {OTHER_TYPES[type_id]}; Quire loads "
            f"{', '.join(TYPE_NAMES.values())}: use a version of the model in one of those"
        )
    dtype = TYPE_NAMES.get(type_id)
    if dtype is None:
        raise tensor_error(
            path, name, f"a type among {', '.join(TYPE_NAMES.values())}", f"number {type_id}"
        )
    check_shape(path, name, shape)
    layout = FORMATS[dtype]
    row = shape[-1] if shape else 1
    if row % layout.num_elements:
        raise tensor_error(
            path, name, f"rows of a multiple of {layout.num_elements} for {dtype}", str(row)
        )
    num_bytes = layout.nbytes(shape)
    if start + num_bytes > size:
        got = f"data from byte {start} to {start + num_bytes}: a truncated file or a wrong offset or shape"
        raise tensor_error(
            path, name, f"its {num_bytes} bytes within the file of {size} bytes", got
        )
    return TensorInfo(name, shape, dtype, path, num_bytes, start)


def _check_overlaps(path: Path, tensors: dict[str, TensorInfo]) -> None:
    for before, info in pairwise(sorted(tensors.values(), key=lambda info: info.offset)):
        end = before.offset + before.num_bytes
        if info.offset < end:
            got = f"{info.offset}: overlaps {quote(before.name)}"
            raise tensor_error(path, info.name, f"data from byte {end} on", got)
