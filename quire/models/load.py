"""Opens a model's files and fills a decoder from them, some tensors at a time, without a second copy of the model.

Names and shapes are checked and formats are chosen (`weight_plan.py`) before memory is asked for. What is kept as it is
stored is read straight into its place; other formats are expanded, or quantised, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.formats import Format
from quire.kernels.ops import Kernels
from quire.kernels.quantize import quantize
from quire.kernels.weights import Weight
from quire.models.checkpoint import Checkpoint
from quire.models.decoder import Decoder
from quire.models.families import read_config
from quire.models.files import no_weights_error, weight_kinds
from quire.models.gguf_file import read_gguf
from quire.models.gguf_spec import read_gguf_spec
from quire.models.names import Piece, gguf_pieces, huggingface_pieces
from quire.models.npy_checkpoint import open_npy
from quire.models.safetensors_checkpoint import open_safetensors
from quire.models.weight_plan import ModelFiles, WeightPlan, plan_weights

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes there are, first with none."""

_NUM_READERS = 4
"""Threads: copying out of the page cache, or decompressing, one alone is slower than memory or a GPU's bus."""


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
    quantization: str = "auto",
) -> Decoder:
    """A decoder with its weights on the device, in the formats that `plan_weights` chooses. `max_position` bounds the
    rope tables (default: the spec's)."""
    return load_planned(plan_weights(files, kernels, dtype, device, quantization), max_position, progress)


def load_planned(plan: WeightPlan, max_position: int | None = None, progress: Progress | None = None) -> Decoder:
    """A decoder with its weights on the device, in the formats of the plan."""
    loaded: dict[str, Weight] = {}
    room: dict[str, list[tuple[Tensor, ...]]] = {}
    for name in plan.parameters:
        loaded[name], room[name] = plan.make_room(name)
    _read_pieces(plan, room, progress or (lambda done, total: None))
    return Decoder(plan.files.spec, plan.kernels, loaded, plan.dtype, max_position)


def _read_pieces(plan: WeightPlan, room: dict[str, list[tuple[Tensor, ...]]], progress: Progress) -> None:
    """Several at once. What goes wrong with the first of them that fails is raised here."""
    pieces, checkpoint = plan.files.pieces, plan.files.checkpoint
    sizes = [checkpoint.tensors[piece.name].num_bytes for piece in pieces]
    done, total = 0, sum(sizes)
    progress(done, total)
    readers = ThreadPoolExecutor(_NUM_READERS, "weights")
    try:
        reads = readers.map(
            lambda piece: read_piece(checkpoint, piece, plan.format_of(piece), _targets(piece, room)), pieces
        )
        for size, _ in zip(sizes, reads, strict=True):
            done += size
            progress(done, total)
    finally:
        readers.shutdown(cancel_futures=True)


def _targets(piece: Piece, room: dict[str, list[tuple[Tensor, ...]]]) -> tuple[Tensor, ...]:
    targets = room[piece.parameter][piece.part or 0]
    return targets if piece.expert is None else tuple(target[piece.expert] for target in targets)


def read_piece(checkpoint: Checkpoint, piece: Piece, format: Format, targets: Sequence[Tensor]) -> None:
    """Fills the tensors of a part from a tensor of the checkpoint, its rows in the decoder's order."""
    heads = piece.interleaved_heads
    if not heads:
        _read_as(checkpoint, piece.name, format, targets)
        return
    rows = tuple(torch.empty_like(target) for target in targets)
    _read_as(checkpoint, piece.name, format, rows)
    for source, target in zip(rows, targets, strict=True):  # whatever the format, a row is a row
        pairs = source.view(heads, -1, 2, *source.shape[1:])
        target.copy_(pairs.transpose(1, 2).reshape(target.shape))


def _read_as(checkpoint: Checkpoint, name: str, format: Format, targets: Sequence[Tensor]) -> None:
    """With numbers, with what is stored, or with what is quantised on the way."""
    info = checkpoint.tensors[name]
    if format.dtype is not None:
        checkpoint.read_into(name, targets[0])
    elif info.format == format:
        checkpoint.read_stored_into(name, targets)
    else:
        for chunk, stored in checkpoint.chunks(name):
            made = quantize(format, info.format.expand(*stored).view(chunk.shape))
            if made is None:
                raise ModelFormatError(
                    f"{info.file}: the tensor {name} has numbers that are infinite, NaN or too large to be quantised: "
                    'load the model with quantization="none", or get its files again'
                )
            for target, part in zip(targets, made, strict=True):
                target[chunk.index].copy_(part)
