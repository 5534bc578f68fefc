"""Writes a model's quantised form as a folder in Hugging Face layout, in the layouts of
`compressed.py`. Loading it gives the same bits as quantising the original while it is loaded.

The folder appears whole or not at all. Tensors are quantised and written one by one, so memory is
that of the largest.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.checkpoints.checkpoint import Checkpoint, TensorInfo
from quire.checkpoints.compressed import quantization_config, to_compressed
from quire.checkpoints.files import read_json, safe_member
from quire.checkpoints.safetensors_checkpoint import INDEX_FILE, SINGLE_FILE
from quire.errors import QuireError, UnsupportedModelError
from quire.kernels.formats import PLAIN, Format
from quire.models.gguf_spec import config_of
from quire.models.load import Progress, open_model, read_piece
from quire.models.model_config import read_config
from quire.models.names import huggingface_pieces
from quire.models.pieces import Piece
from quire.models.spec import ModelSpec
from quire.models.weight_plan import (
    QUANTIZED,
    ModelFiles,
    check_names_and_shapes,
    check_not_quantized,
    quantized_format,
)
from quire.process.temporary_folders import temporary_folder

MAX_SHARD_BYTES = 2 * 10**9
_COPIED = {".json", ".jinja", ".txt", ".model"}
"""Settings, tokenizers and chat templates."""
_INTEGER_NAMES = {
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a model."""

    before: int
    """Bytes of the weights."""
    after: int
    plain: tuple[str, ...]
    """Matrices that were not quantised: routers, and those whose rows are not whole blocks."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the checkpoint and what is written of it."""

    piece: Piece
    info: TensorInfo
    format: Format
    """To write it in."""
    targets: tuple[Piece, ...]
    """By the names they get; several where experts come stacked and leave one by one."""

    def written(self, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """What a file holds of the tensor, by the names it has there, from the tensors of a part."""
        found: dict[str, Tensor] = {}
        for target in self.targets:
            is_one = target.expert is not None and self.piece.expert is None
            own = tuple(tensor[target.expert] for tensor in tensors) if is_one else tensors
            made = {"": own[0]} if self.format.dtype is not None else to_compressed(*own)
            found |= {target.name + end: tensor for end, tensor in made.items()}
        return found


@dataclass(slots=True)
class _Shard:
    """One file of tensors: which, and where in it."""

    sources: list[_Source] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """What is written, on the meta device."""
    offsets: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, source: _Source, made: dict[str, Tensor]) -> None:
        self.sources.append(source)
        self.tensors |= made
        self.nbytes += sum(tensor.nbytes for tensor in made.values())

    def header(self) -> bytes:
        """Fixes the offsets. Those of large numbers come first, so that all are aligned without
        holes.
        """
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in sorted(self.tensors.items(), key=lambda one: -one[1].element_size()):
            dtype = _INTEGER_NAMES.get(tensor.dtype) or PLAIN[tensor.dtype].name
            entries[name] = {
                "dtype": dtype,
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.nbytes],
            }
            self.offsets[name] = end
            end += tensor.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def quantize_model(
    path: Path,
    out: Path,
    to: str,
    force: bool = False,
    progress: Progress | None = None,
    write_tokenizer: Callable[[Checkpoint, Path], None] | None = None,
) -> Written:
    """Writes the model in `path` quantised `to` int8, int4 or fp8 as the folder `out`. With `force`
    it may replace a folder that was written like this before. `write_tokenizer` writes the
    tokenizer of a GGUF file, or of a folder of .npy files that has none, whose tokens are bytes.
    """
    files = open_model(path)
    spec, checkpoint, is_folder = files.spec, files.checkpoint, files.checkpoint.kind != "gguf"
    check_not_quantized(files, to)
    if spec.cache.format or spec.cache.scales:
        raise UnsupportedModelError(
            f"{path}: it has scales for the keys and values of its cache, which the new folder would lack: quantise "
            "the model that it was made of"
        )
    check_names_and_shapes(files, spec.parameters())
    config = (
        read_json(path / "config.json", may_be_infinite=True)
        if is_folder
        else config_of(checkpoint, str(path))
    )
    sources = list(_sources(files, to))
    plain = [
        source
        for source in sources
        if source.format.dtype is not None and len(source.info.shape) > 1
    ]
    names = [target.name for source in plain for target in source.targets]
    config["quantization_config"] = quantization_config(
        QUANTIZED[to], [name.removesuffix(".weight") for name in names]
    )
    shards = _in_shards(sources)
    with _new_folder(path, out, force) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if is_folder:
            _copy_settings(path, folder)
        else:
            _check_config(files.spec, folder, path)
        lacks_tokenizer = checkpoint.kind == "npy" and not (folder / "tokenizer.json").exists()
        if write_tokenizer is not None and (lacks_tokenizer or not is_folder):
            write_tokenizer(checkpoint, folder)
        _write_shards(checkpoint, shards, folder, progress or (lambda done, total: None))
    before = sum(source.info.num_bytes for source in sources)
    return Written(before, sum(shard.nbytes for shard in shards), tuple(names))


def _sources(files: ModelFiles, to: str) -> Iterator[_Source]:
    """All tensors the model needs, under Hugging Face's names."""
    renamed: dict[tuple[str, int | None], list[Piece]] = {}
    if files.checkpoint.kind == "gguf":
        for target in huggingface_pieces(files.spec, ()):
            renamed.setdefault((target.parameter, target.part), []).append(target)
    for piece in files.pieces:
        info = files.checkpoint.tensors[piece.name]
        if piece.is_turned:
            raise UnsupportedModelError(
                f"{info.file}: the tensor {piece.name} has inputs before outputs, and blocks are "
                'written along inputs only; load it with quantization="int8" or "int4" instead'
            )
        format = quantized_format(piece.parameter, info.shape, to) or info.format
        if not renamed:  # rows stay in the checkpoint's order
            yield _Source(replace(piece, order=None), info, format, (piece,))
            continue
        targets = tuple(renamed.get((piece.parameter, piece.part), ()))
        orders = {target.order for target in targets}
        if orders != {None} and orders != {piece.order}:
            raise UnsupportedModelError(
                f"{info.file}: has no form in Hugging Face layout; quantise its safetensors"
            )
        yield _Source(
            piece if orders == {None} else replace(piece, order=None), info, format, targets
        )


def _in_shards(sources: list[_Source]) -> list[_Shard]:
    shards = [_Shard()]
    for source in sources:
        made = source.written(source.format.empty(source.info.shape, "meta"))
        if (
            shards[-1].nbytes + sum(one.nbytes for one in made.values()) > MAX_SHARD_BYTES
            and shards[-1].tensors
        ):
            shards.append(_Shard())
        shards[-1].add(source, made)
    return shards


def _copy_settings(path: Path, folder: Path) -> None:
    for entry in sorted(path.iterdir()):
        if entry.suffix in _COPIED and entry.name not in ("config.json", INDEX_FILE):
            shutil.copyfile(safe_member(path, entry.name), folder / entry.name)


def _check_config(spec: ModelSpec, folder: Path, path: Path) -> None:
    if read_config(folder / "config.json") != spec:
        raise UnsupportedModelError(
            f"{path}: its settings can't be written as a config.json; quantise its safetensors"
        )


def _write_shards(
    checkpoint: Checkpoint, shards: list[_Shard], folder: Path, progress: Progress
) -> None:
    total = sum(source.info.num_bytes for shard in shards for source in shard.sources)
    weight_map: dict[str, str] = {}
    done = 0
    progress(done, total)
    for number, shard in enumerate(shards):
        file_name = (
            SINGLE_FILE
            if len(shards) == 1
            else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        )
        weight_map |= dict.fromkeys(shard.tensors, file_name)
        with (folder / file_name).open("wb") as file:
            file.write(header := shard.header())
            for source in shard.sources:
                tensors = source.format.empty(source.info.shape)
                read_piece(checkpoint, source.piece, source.format, tensors)
                for name, tensor in source.written(tensors).items():
                    file.seek(len(header) + shard.offsets[name])
                    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                done += source.info.num_bytes
                progress(done, total)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
            "weight_map": weight_map,
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def _new_folder(path: Path, out: Path, force: bool) -> Iterator[Path]:
    """A folder beside `out` that takes its place at the end, and is gone if that isn't reached."""
    if out.exists() and not force:
        raise QuireError(
            f"{out}: is there already; choose another folder, or replace it with --force"
        )
    if out.exists() and (not _is_ours(out) or path.resolve().is_relative_to(out.resolve())):
        raise QuireError(
            f"{out}: is not a folder that quire quantize wrote, so --force does not replace it"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(f".{out.name}-", out.parent) as temporary:
            folder, old = temporary / "new", temporary / "old"
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
