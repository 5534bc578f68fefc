"""Writes a model's quantised form as a folder in Hugging Face layout, in the layouts of `compressed.py`. Loading it
gives the same bits as quantising the original while it is loaded.

The folder appears whole or not at all. Tensors are quantised and written one by one, so memory is that of the largest.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quire.errors import QuireError, UnsupportedModelError
from quire.kernels.formats import PLAIN, Format
from quire.models.checkpoint import Checkpoint
from quire.models.compressed import quantization_config, to_compressed
from quire.models.files import read_json, safe_member
from quire.models.load import Progress, open_model, read_as
from quire.models.safetensors_checkpoint import INDEX_FILE, SINGLE_FILE
from quire.models.weight_plan import QUANTIZED, check_names_and_shapes, check_not_quantized, quantized_format

MAX_SHARD_BYTES = 2 * 10**9
_COPIED = {".json", ".jinja", ".txt", ".model"}
"""Settings, tokenizers and chat templates."""
_INTEGER_NAMES = {torch.int8: "I8", torch.int32: "I32", torch.int64: "I64"}


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a model."""

    before: int
    """Bytes of the weights."""
    after: int
    plain: tuple[str, ...]
    """Matrices that were not quantised: routers, and those whose rows are not whole blocks."""


@dataclass(slots=True)
class _Shard:
    """One file of tensors: which, and where in it."""

    sources: list[tuple[str, Format]] = field(default_factory=list)
    """Names in the checkpoint, and the formats to write them in."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """What is written, on the meta device."""
    offsets: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def header(self) -> bytes:
        """Fixes the offsets. Those of large numbers come first, so that all are aligned without holes."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in sorted(self.tensors.items(), key=lambda one: -one[1].element_size()):
            dtype = _INTEGER_NAMES.get(tensor.dtype) or PLAIN[tensor.dtype].name
            entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
            self.offsets[name] = end
            end += tensor.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def quantize_model(path: Path, out: Path, to: str, force: bool = False, progress: Progress | None = None) -> Written:
    """Writes the model in `path` (a folder of safetensors or `.npy` files) quantised `to` int8 or int4 as the folder
    `out`. With `force` it may replace a folder that was written like this before."""
    files = open_model(path)
    checkpoint, parameters = files.checkpoint, files.spec.parameters()
    check_not_quantized(files, to)
    if checkpoint.kind == "gguf":
        raise UnsupportedModelError(
            f'{path}: a GGUF file has no config.json to go by: load it with quantization="{to}", which quantises it '
            "meanwhile, or quantise the model's safetensors"
        )
    check_names_and_shapes(files, parameters)
    shards = [_Shard()]
    plain: list[str] = []
    for piece in files.pieces:
        info = checkpoint.tensors[piece.name]
        format = quantized_format(piece.parameter, info.shape, to) or info.format
        if format.dtype is not None and len(info.shape) > 1:
            plain.append(piece.name)
        made = _as_written(piece.name, format, format.empty(info.shape, "meta"))
        if shards[-1].nbytes + sum(one.nbytes for one in made.values()) > MAX_SHARD_BYTES and shards[-1].tensors:
            shards.append(_Shard())
        shards[-1].sources.append((piece.name, format))
        shards[-1].tensors |= made
    config = read_json(path / "config.json")
    config["quantization_config"] = quantization_config(QUANTIZED[to], [name.removesuffix(".weight") for name in plain])
    with _new_folder(path, out, force) as folder:
        for entry in sorted(path.iterdir()):
            if entry.suffix in _COPIED and entry.name not in ("config.json", INDEX_FILE):
                shutil.copyfile(safe_member(path, entry.name), folder / entry.name)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_shards(checkpoint, shards, folder, progress or (lambda done, total: None))
    before = sum(checkpoint.tensors[piece.name].num_bytes for piece in files.pieces)
    return Written(before, sum(shard.nbytes for shard in shards), tuple(plain))


def _as_written(name: str, format: Format, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What a file holds of a tensor in this format, by the names it has there."""
    made = {"": tensors[0]} if format.dtype is not None else to_compressed(*tensors)
    return {name + end: tensor for end, tensor in made.items()}


def _write_shards(checkpoint: Checkpoint, shards: list[_Shard], folder: Path, progress: Progress) -> None:
    total = sum(checkpoint.tensors[name].num_bytes for shard in shards for name, _ in shard.sources)
    weight_map: dict[str, str] = {}
    done = 0
    progress(done, total)
    for number, shard in enumerate(shards):
        file_name = SINGLE_FILE if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard.tensors, file_name)
        with (folder / file_name).open("wb") as file:
            file.write(header := shard.header())
            for name, format in shard.sources:
                _write_tensor(file, checkpoint, name, format, shard.offsets, len(header))
                done += checkpoint.tensors[name].num_bytes
                progress(done, total)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(shard.nbytes for shard in shards)}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _write_tensor(
    file: BinaryIO, checkpoint: Checkpoint, name: str, format: Format, offsets: dict[str, int], start: int
) -> None:
    tensors = format.empty(checkpoint.tensors[name].shape)
    read_as(checkpoint, name, format, tensors)
    for written, tensor in _as_written(name, format, tensors).items():
        file.seek(start + offsets[written])
        file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


@contextmanager
def _new_folder(path: Path, out: Path, force: bool) -> Iterator[Path]:
    """A folder beside `out` that takes its place at the end, and is gone if that isn't reached."""
    if out.exists() and not force:
        raise QuireError(f"{out}: is there already; choose another folder, or replace it with --force")
    if out.exists() and (not _is_ours(out) or path.resolve().is_relative_to(out.resolve())):
        raise QuireError(f"{out}: is not a folder that quire quantize wrote, so --force does not replace it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
            folder, old = Path(temporary) / "new", Path(temporary) / "old"
            folder.mkdir()
            yield folder
            if out.exists():
                out.rename(old)
            try:
                folder.rename(out)
            except OSError:
                if old.exists():
                    old.rename(out)
                raise
    except OSError as error:
        raise QuireError(f"{out}: can't be written: {error.strerror or error}") from error


def _is_ours(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and "quantization_config" in read_json(config)
