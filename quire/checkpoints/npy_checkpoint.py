"""The teaching format: a folder with one `.npy` file per weight, named like the Hugging Face
tensor.

The header of a `.npy` file is a Python dictionary in text. It is matched against the one form that
numpy writes for plain arrays and never evaluated, so a file of pickled objects is refused by its
header.
"""

from __future__ import annotations

import re
from pathlib import Path

from quire.checkpoints.checkpoint import Checkpoint, TensorInfo, check_shape, tensor_error
from quire.checkpoints.files import (
    FileStamp,
    file_stamp,
    open_checked,
    quote,
    read_exact,
    safe_member,
)
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.formats import FORMATS

MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 2**16
NOT_WEIGHTS = frozenset({"test_tokens", "test_logits"})
"""What `scripts/export_npy.py` puts beside the weights."""

_DTYPES = {"<f4": "F32", "<f2": "F16"}
_ITEM = (
    r"\s*(?:'descr'\s*:\s*'(?P<descr{0}>[^']*)'"
    r"|'fortran_order'\s*:\s*(?P<order{0}>True|False)"
    r"|'shape'\s*:\s*\((?P<shape{0}>[\d\s,]*)\))\s*"
)
_HEADER = re.compile(r"\{" + ",".join(_ITEM.format(i) for i in range(3)) + r",?\s*\}\s*")


def open_npy(folder: Path) -> Checkpoint:
    """Opens every `.npy` file of a folder but the test vectors."""
    tensors: dict[str, TensorInfo] = {}
    stamps: dict[Path, FileStamp] = {}
    for entry in sorted(folder.iterdir()):
        if entry.suffix == ".npy" and entry.stem not in NOT_WEIGHTS:
            path = safe_member(folder, entry.name)
            tensors[entry.stem], stamps[path] = _read_header(path, entry.stem)
    return Checkpoint("npy", tensors, stamps)


def _read_header(path: Path, name: str) -> tuple[TensorInfo, FileStamp]:
    with open_checked(path) as file:
        stamp = file_stamp(file)
        size = stamp[1]
        start = bytes(read_exact(file, path, 0, min(size, 12)))
        if len(start) < 10 or start[:6] != MAGIC or start[6] not in (1, 2, 3):
            raise ModelFormatError(f"{path}: not a .npy file: expected {MAGIC!r}, got {start!r}")
        length_bytes = 2 if start[6] == 1 else 4
        header_bytes = int.from_bytes(start[8 : 8 + length_bytes], "little")
        data_start = 8 + length_bytes + header_bytes
        if header_bytes > MAX_HEADER_BYTES or data_start > size:
            raise ModelFormatError(
                f"{path}: expected a header of at most {MAX_HEADER_BYTES} bytes within the {size} bytes of "
                f"the file, got {header_bytes}: the file is truncated or broken"
            )
        header = bytes(read_exact(file, path, 8 + length_bytes, header_bytes)).decode("latin-1")
    dtype, shape = _parse_header(path, name, header)
    check_shape(path, name, shape)
    expected = FORMATS[dtype].nbytes(shape)
    if size - data_start != expected:
        raise tensor_error(
            path,
            name,
            f"{expected} bytes for {dtype} of shape {list(shape)}",
            f"{size - data_start} bytes",
        )
    return TensorInfo(name, shape, dtype, path, expected, data_start), stamp


def _parse_header(path: Path, name: str, header: str) -> tuple[str, tuple[int, ...]]:
    match = _HEADER.fullmatch(header)
    found = {}
    for key, text in match.groupdict().items() if match else ():
        if text is not None:
            found[key[:-1]] = text
    if len(found) != 3:
        raise tensor_error(
            path, name, "a header with descr, fortran_order and shape", quote(header)
        )
    descr = found["descr"]
    if descr not in _DTYPES:
        why = f"is stored as {quote(descr)}"
        if "O" in descr:
            why = "holds Python objects, which Quire never unpickles"
        raise UnsupportedModelError(
            f"{path}: tensor {quote(name)} {why}: save it as little-endian float32 or float16"
        )
    if found["order"] == "True":
        got = "Fortran order: save np.ascontiguousarray(…)"
        raise tensor_error(path, name, "rows stored one after the other", got)
    sizes = [size.strip() for size in found["shape"].split(",")]
    if sizes[-1] == "":  # a trailing comma, or no dimensions at all
        sizes.pop()
    if not all(re.fullmatch(r"[0-9]{1,18}", size) for size in sizes):
        raise tensor_error(path, name, "a shape of whole numbers", quote(found["shape"]))
    return _DTYPES[descr], tuple(int(size) for size in sizes)
