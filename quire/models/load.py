"""Fills a decoder's parameters from a checkpoint, some tensors at a time, without a second copy of the model.

All names and shapes are checked against the files before memory is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from quire.errors import ModelFormatError
from quire.kernels.ops import Kernels
from quire.models.checkpoint import Checkpoint, open_checkpoint
from quire.models.decoder import Decoder
from quire.models.families import read_config
from quire.models.gguf_checkpoint import GgufCheckpoint
from quire.models.gguf_spec import read_gguf_spec
from quire.models.names import Piece, gguf_pieces, huggingface_pieces, ignored_names
from quire.models.spec import ModelSpec

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


def open_model(path: Path) -> ModelFiles:
    """Opens a folder in Hugging Face layout, a `.gguf` file or a folder of `.npy` files."""
    checkpoint = open_checkpoint(path)
    names = checkpoint.tensors.keys()
    if isinstance(checkpoint, GgufCheckpoint):

        def rope_factors() -> tuple[float, ...]:
            return tuple(checkpoint.read("rope_freqs.weight").tolist())

        spec = read_gguf_spec(checkpoint.metadata, names, rope_factors, str(path))
        pieces = gguf_pieces(spec, names)
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
    """A decoder with its weights on the device. `max_position` bounds the rope table (default: the spec's)."""
    decoder = Decoder(files.spec, kernels, dtype)
    parameters = dict(decoder.named_parameters())
    _check_names_and_shapes(files, parameters)
    for name, parameter in parameters.items():
        # Not empty_like: of a tensor without memory it would first import a library of symbolic mathematics.
        memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        parameters[name] = nn.Parameter(memory, requires_grad=False)
        _set_parameter(decoder, name, parameters[name])
    _read_pieces(files, parameters, progress or (lambda done, total: None))
    del parameters  # the decoder alone holds them now, so each unpacked weight goes as its packed one comes
    decoder.finish_loading(max_position or files.spec.max_position, device)
    return decoder


def _read_pieces(files: ModelFiles, parameters: Mapping[str, nn.Parameter], progress: Progress) -> None:
    """Several at once. What goes wrong with the first of them that fails is raised here."""
    sizes = [files.checkpoint.tensors[piece.name].num_bytes for piece in files.pieces]
    done, total = 0, sum(sizes)
    progress(done, total)
    targets = [parameters[piece.parameter].data[piece.index or ...] for piece in files.pieces]
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


def _check_names_and_shapes(files: ModelFiles, parameters: dict[str, nn.Parameter]) -> None:
    infos = files.checkpoint.tensors
    some_file = next(iter(infos.values())).file if infos else "the checkpoint"
    for piece in files.pieces:
        parameter = parameters[piece.parameter]
        expected = tuple(parameter[piece.index].shape if piece.index else parameter.shape)
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


def _set_parameter(decoder: Decoder, path: str, parameter: nn.Parameter) -> None:
    owner, _, name = path.rpartition(".")
    setattr(decoder.get_submodule(owner), name, parameter)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
