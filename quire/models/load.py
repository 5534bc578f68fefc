"""Opens a model's files and fills a decoder from them, some tensors at a time, without a second copy of the model.

All names and shapes are checked against the files before memory is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.ops import Kernels
from quire.kernels.weights import Weight
from quire.models.checkpoint import Checkpoint
from quire.models.decoder import Decoder
from quire.models.families import read_config
from quire.models.files import no_weights_error, weight_kinds
from quire.models.gguf_file import read_gguf
from quire.models.gguf_spec import read_gguf_spec
from quire.models.names import Piece, gguf_pieces, huggingface_pieces, ignored_names
from quire.models.npy_checkpoint import open_npy
from quire.models.safetensors_checkpoint import open_safetensors
from quire.models.spec import ModelSpec, Parameter

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes there are, first with none."""

_NUM_READERS = 4
"""Threads: copying out of the page cache, or decompressing, one alone is slower than memory or a GPU's bus."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """An opened model: its spec is known, its weights are still on disk."""

    spec: ModelSpec
    checkpoint: Checkpoint
    pieces: tuple[Piece, ...]


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a `.gguf` file, a folder with safetensors (single or sharded), or a folder of `.npy` files."""
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModelError(
                f"{path}: a single file must be a .gguf; for safetensors give the folder with its config.json"
            )
        header = read_gguf(path)
        return Checkpoint("gguf", header.tensors, header.stamps, header.metadata)
    if not path.is_dir():
        raise ModelFormatError(f"{path}: there is no such file or folder")
    kinds = weight_kinds(path)
    if "safetensors" in kinds:
        return open_safetensors(path)
    if "npy" in kinds:
        return open_npy(path)
    raise no_weights_error(path, kinds)


def open_model(path: Path) -> ModelFiles:
    """Opens a folder in Hugging Face layout, a `.gguf` file or a folder of `.npy` files."""
    checkpoint = open_checkpoint(path)
    names = checkpoint.tensors.keys()
    if checkpoint.kind == "gguf":

        def rope_factors() -> tuple[float, ...]:
            return tuple(checkpoint.read("rope_freqs.weight").tolist())

        spec = read_gguf_spec(checkpoint.metadata, names, rope_factors, str(path))
        pieces = gguf_pieces(spec)
    else:
        spec = read_config(path / "config.json")
        pieces = huggingface_pieces(spec, names)
    return ModelFiles(spec, checkpoint, tuple(pieces))


def load_decoder(
    files: ModelFiles,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """A decoder with its weights on the device, all of them as plain numbers. `max_position` bounds the rope tables
    (default: the spec's)."""
    parameters = files.spec.parameters()
    _check_names_and_shapes(files, parameters)
    loaded = {
        name: Weight.dense(torch.empty(parameter.shape, dtype=dtype, device=device))
        for name, parameter in parameters.items()
    }
    _read_pieces(files, parameters, loaded, progress or (lambda done, total: None))
    return Decoder(files.spec, kernels, loaded, dtype, max_position)


def _read_pieces(
    files: ModelFiles, parameters: dict[str, Parameter], loaded: dict[str, Weight], progress: Progress
) -> None:
    """Several at once. What goes wrong with the first of them that fails is raised here."""
    sizes = [files.checkpoint.tensors[piece.name].num_bytes for piece in files.pieces]
    done, total = 0, sum(sizes)
    progress(done, total)
    targets = [loaded[piece.parameter].tensor[piece.index(parameters[piece.parameter])] for piece in files.pieces]
    readers = ThreadPoolExecutor(_NUM_READERS, "weights")
    try:
        reads = readers.map(partial(_read_piece, files.checkpoint), files.pieces, targets)
        for size, _ in zip(sizes, reads, strict=True):
            done += size
            progress(done, total)
    finally:
        readers.shutdown(cancel_futures=True)


def _read_piece(checkpoint: Checkpoint, piece: Piece, target: Tensor) -> None:
    if not piece.interleaved_heads:
        checkpoint.read_into(piece.name, target)
        return
    rows = torch.empty_like(target)
    checkpoint.read_into(piece.name, rows)
    heads = piece.interleaved_heads
    half = target.shape[0] // heads // 2
    pairs = rows.view(heads, half, 2, *target.shape[1:])
    target.copy_(pairs.transpose(1, 2).reshape(target.shape))


def _check_names_and_shapes(files: ModelFiles, parameters: dict[str, Parameter]) -> None:
    infos = files.checkpoint.tensors
    some_file = next(iter(infos.values())).file if infos else "the checkpoint"
    for piece in files.pieces:
        expected = piece.shape(parameters[piece.parameter])
        info = infos.get(piece.name)
        if info is None:
            raise ModelFormatError(
                f"{some_file}: the tensor {piece.name} of shape {_shape(expected)} is missing"
                f" (the files hold {len(infos)} tensors)"
            )
        if info.shape != expected:
            raise ModelFormatError(
                f"{info.file}: the tensor {piece.name} should have shape {_shape(expected)}"
                f" by the model's configuration, but has {_shape(info.shape)}"
            )
    known = {piece.name for piece in files.pieces} | ignored_names(files.spec, infos.keys())
    unexpected = sorted(infos.keys() - known)
    if unexpected:
        info = infos[unexpected[0]]
        more = f" (and {len(unexpected) - 1} more)" if len(unexpected) > 1 else ""
        raise ModelFormatError(
            f"{info.file}: the tensor {info.name} of shape {_shape(info.shape)} has no place in a"
            f" {files.spec.family} model with this configuration{more}"
        )


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
