"""Weights in safetensors files: one file, or shards named by an index; plain numbers, or quantised
(`quantized_tensors.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from quire.checkpoints.cache_scales import read_cache
from quire.checkpoints.checkpoint import Checkpoint, TensorInfo, check_shape, tensor_error
from quire.checkpoints.fields import Fields
from quire.checkpoints.files import (
    FileStamp,
    file_stamp,
    open_checked,
    parse_json,
    quote,
    read_exact,
    read_json,
    safe_member,
)
from quire.checkpoints.quantization_config import read_cache_format, read_layout
from quire.checkpoints.quantized_tensors import joined
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.formats import FORMATS, PLAIN

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_SHARDS = 10_000
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MODELOPT_FILE = "hf_quant_config.json"

WEIGHT_DTYPES = tuple(format.name for format in PLAIN.values())
OTHER_DTYPES = frozenset(
    {
        "BOOL",
        "U8",
        "I8",
        "U16",
        "I16",
        "U32",
        "I32",
        "U64",
        "I64",
        "C64",
        "F4",
        "F6_E2M3",
        "F6_E3M2",
    }
    | {"F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"}
)
_QUANTIZED = {"I8": 1, "I32": 4, "I64": 8, "U8": 1, "F8_E4M3": 1}
"""Sizes of what holds quantised weights, where config.json says that they are."""


def open_safetensors(folder: Path) -> Checkpoint:
    """Opens a folder's weights: `model.safetensors`, else the shards of its index, else its only
    file. They must pass our own checks and those of the safetensors library.
    """
    config = read_settings(folder / "config.json")
    layout = read_layout(config)
    checkpoint = _open_files(folder, is_quantized=layout is not None)
    if layout is None:
        return checkpoint
    cache = read_cache(checkpoint, read_cache_format(config))
    return checkpoint.with_tensors(_only_known(joined(checkpoint.tensors, layout)), cache)


def read_settings(config: Path) -> Fields:
    """config.json; where it is silent on quantisation, with what earlier versions of ModelOpt wrote
    beside it.
    """
    beside = config.with_name(MODELOPT_FILE)
    values = read_json(config, may_be_infinite=True) if config.is_file() else {}
    if values.get("quantization_config") is None and beside.is_file():
        found = Fields(read_json(beside), str(beside)).part("quantization")
        values["quantization_config"] = {key: found.raw(key) for key in found.names()} | {
            "quant_method": "modelopt"
        }
    return Fields(values, str(config))


def _only_known(tensors: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    for info in tensors.values():
        if info.dtype in _QUANTIZED:
            raise _unsupported(info.file, info.name, info.dtype)
    return tensors


def _open_files(folder: Path, is_quantized: bool) -> Checkpoint:
    if (folder / SINGLE_FILE).is_file():
        return open_shards([safe_member(folder, SINGLE_FILE)], is_quantized)
    if (folder / INDEX_FILE).exists():
        return _open_indexed(folder, is_quantized)
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix == ".safetensors")
    if len(names) != 1:
        raise ModelFormatError(
            f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, got {len(names)} other .safetensors files"
        )
    return open_shards([safe_member(folder, names[0])], is_quantized)


def open_shards(paths: list[Path], is_quantized: bool) -> Checkpoint:
    """These files, checked."""
    tensors: dict[str, TensorInfo] = {}
    stamps: dict[Path, FileStamp] = {}
    for path in paths:
        found, stamps[path] = _read_header(path, is_quantized)
        for name, info in found.items():
            if name in tensors:
                raise ModelFormatError(
                    f"{path}: tensor {quote(name)} is also in {tensors[name].file.name}"
                )
            tensors[name] = info
    return Checkpoint("safetensors", tensors, stamps)


def _open_indexed(folder: Path, is_quantized: bool) -> Checkpoint:
    index = safe_member(folder, INDEX_FILE)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(
            f"{index}: expected a weight_map of tensor names to file names, got none"
        )
    shards: dict[str, Path] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise tensor_error(index, name, "the name of its file", quote(shard))
        if shard in shards:
            continue
        if len(shards) >= MAX_SHARDS:
            raise ModelFormatError(f"{index}: expected at most {MAX_SHARDS} files, got more")
        if not shard.endswith(".safetensors"):
            raise tensor_error(index, name, "a .safetensors file", quote(shard))
        shards[shard] = safe_member(folder, shard)
    checkpoint = open_shards(list(shards.values()), is_quantized)
    for name, shard in weight_map.items():
        info = checkpoint.tensors.get(name)
        if info is None or info.file != shards[shard]:
            got = "no such tensor" if info is None else f"it in {info.file.name}"
            raise tensor_error(shards[shard], name, f"it in this file (by {INDEX_FILE})", got)
    return checkpoint


def _read_header(path: Path, is_quantized: bool) -> tuple[dict[str, TensorInfo], FileStamp]:
    with open_checked(path) as file:
        stamp = file_stamp(file)
        size = stamp[1]
        if size < 8:
            raise ModelFormatError(
                f"{path}: the file is truncated: expected at least 8 bytes, got {size}"
            )
        header_bytes = int.from_bytes(read_exact(file, path, 0, 8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ModelFormatError(
                f"{path}: expected a header of at most {MAX_HEADER_BYTES} bytes, got {header_bytes}; "
                "not a safetensors file, or a broken one"
            )
        if header_bytes > size - 8:
            raise ModelFormatError(
                f"{path}: the file is truncated: expected a header of {header_bytes} bytes, got {size - 8}"
            )
        header = parse_json(bytes(read_exact(file, path, 8, header_bytes)), path)
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    tensors = {
        name: _check_entry(path, name, entry, data_start, size, is_quantized)
        for name, entry in header.items()
    }
    _check_layout(path, tensors, data_start, size)
    try:
        with safe_open(path, "pt"):
            # the library's own checks: what it refuses must fail here and not halfway through
            # loading
            pass
    except (SafetensorError, UnicodeError) as error:
        raise ModelFormatError(
            f"{path}: not a valid safetensors file: {quote(str(error), 200)}"
        ) from error
    return tensors, stamp


def _check_entry(
    path: Path, name: str, entry: object, data_start: int, size: int, is_quantized: bool
) -> TensorInfo:
    if not isinstance(entry, dict):
        raise tensor_error(path, name, "dtype, shape and data_offsets", quote(entry))
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or (dtype not in WEIGHT_DTYPES and dtype not in OTHER_DTYPES):
        raise tensor_error(path, name, f"a dtype such as {', '.join(WEIGHT_DTYPES)}", quote(dtype))
    if dtype in OTHER_DTYPES and not (is_quantized and dtype in _QUANTIZED):
        raise _unsupported(path, name, dtype)
    shape = _whole_numbers(entry.get("shape"))
    if shape is None:
        raise tensor_error(path, name, "a shape of whole numbers", quote(entry.get("shape")))
    check_shape(path, name, shape)
    offsets = _whole_numbers(entry.get("data_offsets"))
    if offsets is None or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise tensor_error(
            path, name, "data_offsets [begin, end]", quote(entry.get("data_offsets"))
        )
    if offsets[1] > size - data_start:
        raise tensor_error(
            path,
            name,
            f"its data within the file's {size - data_start} bytes",
            f"an end at {offsets[1]}",
        )
    num_bytes = offsets[1] - offsets[0]
    expected = math.prod(shape) * (_QUANTIZED.get(dtype) or FORMATS[dtype].num_bytes)
    if num_bytes != expected:
        raise tensor_error(
            path, name, f"{expected} bytes for {dtype} of shape {list(shape)}", f"{num_bytes} bytes"
        )
    return TensorInfo(name, shape, dtype, path, num_bytes, data_start + offsets[0])


def _unsupported(path: Path, name: str, dtype: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path}: tensor {quote(name)} is stored as {dtype}; Quire loads {', '.join(WEIGHT_DTYPES)} from "
        "safetensors: use a version of the model that is not quantised, or a GGUF of it"
    )


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    # `type(...) is int` and not isinstance: JSON's true would pass for 1.
    if isinstance(value, list) and all(type(number) is int for number in value):
        return tuple(value)
    return None


def _check_layout(
    path: Path, tensors: Mapping[str, TensorInfo], data_start: int, size: int
) -> None:
    """The format wants the data of all tensors side by side, with no overlap, hole or rest."""
    end = data_start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.num_bytes)):
        if info.offset != end:
            what = "overlapping data" if info.offset < end else "a hole"
            raise tensor_error(
                path,
                info.name,
                f"data from byte {end - data_start}",
                f"{info.offset - data_start}: {what}",
            )
        end = info.offset + info.num_bytes
    if end != size:
        raise ModelFormatError(f"{path}: expected {end} bytes by its header, got {size}")
