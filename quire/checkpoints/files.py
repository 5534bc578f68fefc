"""What every reader of model files needs: what a folder holds, safe paths, JSON within bounds,
whole reads.

Model folders come from strangers. Whatever is read here is checked for size before it is held in
memory, and every failure is a `ModelFormatError` naming the file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

from quire.errors import ModelFormatError, UnsupportedModelError

MAX_JSON_BYTES = 100_000_000
MAX_JSON_VALUES = 4_000_000
"""A header of a hundred thousand tensors has under a million; each costs some 60 bytes once parsed."""

_MAX_READ = 2**24
"""Bytes that are asked for at once; between two times Ctrl-C is heard."""

FileStamp = tuple[int, int, int]
"""Inode, size and time of change: tells whether a file is still the one that was checked."""


def is_gguf(path: Path) -> bool:
    """By its name."""
    return path.suffix.lower() == ".gguf"


def quote(value: object, limit: int = 100) -> str:
    """Something from a file, fit for a message: text quoted, control characters escaped, cut at
    `limit`.
    """
    text = repr(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit + 2 else text[:limit] + "…"


def file_stamp(file: BinaryIO) -> FileStamp:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def open_checked(path: Path, stamp: FileStamp | None = None) -> Iterator[BinaryIO]:
    """Opens a regular file unbuffered; with a stamp, only if the file is still the one it was taken
    from.
    """
    try:
        # Opening a pipe or a device could wait forever.
        if not path.is_file():
            raise ModelFormatError(f"{path}: is not a file; is the download complete?")
        with path.open("rb", buffering=0) as file:
            if stamp is not None and file_stamp(file) != stamp:
                raise ModelFormatError(
                    f"{path}: the file changed while it was being loaded; load it again"
                )
            yield file
    except OSError as error:
        raise ModelFormatError(f"{path}: can't be read: {error.strerror or error}") from error


def read_exact(file: BinaryIO, path: Path, offset: int, num_bytes: int) -> bytearray:
    """Exactly these bytes, or a `ModelFormatError`. The caller has bounded `num_bytes`."""
    data = bytearray(num_bytes)
    read_exact_into(file, path, offset, memoryview(data))
    return data


def read_exact_into(file: BinaryIO, path: Path, offset: int, target: memoryview) -> None:
    """Fills `target`, which is made of bytes, or raises a `ModelFormatError`. Other threads run
    meanwhile.
    """
    num_bytes = len(target)
    file.seek(offset)
    done = 0
    while done < num_bytes:
        count = file.readinto(target[done : done + _MAX_READ])  # type: ignore[attr-defined]
        if not count:
            raise ModelFormatError(
                f"{path}: the file is truncated: expected {num_bytes} bytes at offset {offset}, got {done}"
            )
        done += count


def safe_member(folder: Path, name: str) -> Path:
    """The file called `name` in `folder`; refuses names and links that lead out of it.

    Links into the blobs of the same Hugging Face cache entry are how that cache stores its
    snapshots and are followed.
    """
    # The Windows rules are the stricter ones: they also know backslashes and drive letters.
    plain = (
        name == PureWindowsPath(name).name and name not in {"", ".", ".."} and name.isprintable()
    )
    if not plain or len(os.fsencode(name)) > 255:
        raise ModelFormatError(
            f"{folder}: unsafe file name {quote(name)}: expected the plain name of a file in this folder"
        )
    path = folder / name
    try:
        real = path.resolve()
        home = folder.resolve()
        present = path.is_file()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, up to Python 3.12
        raise ModelFormatError(f"{path}: can't be read: {error}") from error
    if not any(real.is_relative_to(allowed) for allowed in (home, *_cache_blobs(home))):
        raise ModelFormatError(
            f"{path}: unsafe link: it leads out of its folder to {real}; put the file itself there"
        )
    if not present:
        raise ModelFormatError(f"{path}: the file is missing; is the download complete?")
    return path


def _cache_blobs(folder: Path) -> list[Path]:
    """`models--org--name/blobs` for a folder inside `models--org--name/snapshots/<revision>`."""
    return [
        parent.parent / "blobs"
        for parent in folder.parents
        if parent.name == "snapshots" and parent.parent.name.startswith("models--")
    ]


def read_json(
    path: Path, max_bytes: int = MAX_JSON_BYTES, *, may_be_infinite: bool = False
) -> dict[str, object]:
    """The JSON object in a file of at most `max_bytes`. `may_be_infinite`: numbers may be
    `Infinity`, which JSON does not have, but Python writes: models' settings have it.
    """
    return parse_json(_read_member(path, max_bytes, "JSON"), path, may_be_infinite)


def read_text(path: Path, max_bytes: int) -> str:
    """The text in a file of at most `max_bytes`."""
    try:
        return _read_member(path, max_bytes, "text").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFormatError(
            f"{path}: not valid UTF-8 at byte {error.start}; save it as UTF-8"
        ) from error


def _read_member(path: Path, max_bytes: int, what: str) -> bytes:
    with open_checked(safe_member(path.parent, path.name)) as file:
        size = file_stamp(file)[1]
        if size > max_bytes:
            raise ModelFormatError(
                f"{path}: expected at most {max_bytes} bytes of {what}, got {size}"
            )
        return bytes(read_exact(file, path, 0, size))


def parse_json(data: bytes, path: Path, may_be_infinite: bool = False) -> dict[str, object]:
    """A JSON object within bounds: no double keys, no NaN, not too many values, not too deep."""
    # Counted before parsing, since a parsed value takes far more memory than its text.
    num_values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if num_values > MAX_JSON_VALUES:
        raise ModelFormatError(
            f"{path}: expected at most {MAX_JSON_VALUES} JSON values, got {num_values}"
        )
    try:
        constant = _infinity if may_be_infinite else _no_constant
        value = json.loads(data, object_pairs_hook=_unique_keys, parse_constant=constant)
    except RecursionError as error:
        raise ModelFormatError(f"{path}: the JSON is nested too deeply") from error
    except ValueError as error:  # covers bad JSON, bad UTF-8 and absurdly long numbers
        raise ModelFormatError(f"{path}: not valid JSON: {quote(str(error), 200)}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{quote(key)} is there twice")
    return result


def _infinity(text: str) -> object:
    return float(text) if text == "Infinity" else _no_constant(text)


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not a JSON number")


def weight_kinds(folder: Path) -> frozenset[str]:
    """Which of safetensors, npy, gguf and pickle a folder's files are."""
    suffixes = {".safetensors": "safetensors", ".npy": "npy", ".gguf": "gguf"}
    suffixes |= dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), "pickle")
    try:
        names = [entry.name.lower() for entry in folder.iterdir()]
    except OSError as error:
        raise ModelFormatError(f"{folder}: can't be read: {error.strerror or error}") from error
    found = {suffixes[Path(name).suffix] for name in names if Path(name).suffix in suffixes}
    if any(name.endswith(".safetensors.index.json") for name in names):
        found.add("safetensors")
    return frozenset(found)


def no_weights_error(
    folder: Path, kinds: frozenset[str]
) -> ModelFormatError | UnsupportedModelError:
    """For a folder with neither safetensors nor npy: says what to do with what is there."""
    if "pickle" in kinds:
        return UnsupportedModelError(
            f"{folder}: the weights are PyTorch pickles (.bin, .pt), which can run code when opened, so "
            "Quire never reads them; convert them to safetensors (model.save_pretrained of transformers does)"
        )
    if "gguf" in kinds:
        names = ", ".join(
            sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() == ".gguf")
        )
        return UnsupportedModelError(f"{folder}: give the path of one of its .gguf files: {names}")
    return ModelFormatError(
        f"{folder}: no weights found: expected *.safetensors, a .gguf file, or .npy files with a config.json"
    )
