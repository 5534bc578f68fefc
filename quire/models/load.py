"""Opens a model's files and fills a decoder from them, some tensors at a time, without a second
copy of the model.

Names and shapes are checked and formats are chosen (`weight_plan.py`) before memory is allocated. A
tensor that is kept in its stored format is read straight into its place; others are expanded or
quantised, some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.files import no_weights_error, weight_kinds
from quire.checkpoints.gguf_file import read_gguf
from quire.checkpoints.npy_checkpoint import open_npy
from quire.checkpoints.safetensors_checkpoint import open_safetensors
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.formats import Format
from quire.kernels.quantize import quantize
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.families import family_named
from quire.models.gguf_spec import read_gguf_spec
from quire.models.model_config import read_config
from quire.models.names import gguf_pieces, huggingface_pieces
from quire.models.parameters import WeightSource
from quire.models.pieces import Piece, RowRuns
from quire.models.spec import ModelSpec
from quire.models.weight_plan import ModelFiles, WeightPlan
from quire.process.life import sign_of_life

Progress = Callable[[int, int], None]
"""Called with the number of bytes read so far (0 at first) and of all bytes."""

_NUM_READERS = 4
"""Threads that read: a single one copies or expands more slowly than memory or a GPU's bus can take
it.
"""
_AHEAD_BYTES = 16 * 2**20


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a `.gguf` file, a folder with safetensors (single or sharded), or a folder of `.npy`
    files.
    """
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
        spec = read_gguf_spec(checkpoint, str(path))
        pieces = tuple(gguf_pieces(spec, names))
        checkpoint = with_flat_vectors(checkpoint, pieces, spec)
    else:
        spec = read_config(path / "config.json")
        if spec.tie_embeddings and has_own_head(spec, checkpoint):
            spec = replace(spec, tie_embeddings=False)
        _check_constants(spec, checkpoint)
        found = huggingface_pieces(spec, names)
        pieces = tuple(as_stored(one, checkpoint) for one in found)
    return ModelFiles(replace(spec, cache=checkpoint.cache), checkpoint, pieces)


def _check_constants(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Tensors that stand for numbers which the kernels have built in."""
    for suffix, built_in in family_named(spec.family).constants.items():
        for name in checkpoint.tensors:
            if name.endswith(suffix) and (checkpoint.read(name) != built_in).any():
                raise UnsupportedModelError(
                    f"{checkpoint.tensors[name].file}: {name} is not {built_in}, the only value that is computed."
                )


def has_own_head(spec: ModelSpec, checkpoint: Checkpoint) -> bool:
    """Whether a tied model's files hold another head than its embedding: then that one counts."""
    tensors = checkpoint.tensors
    pieces = huggingface_pieces(replace(spec, tie_embeddings=False), tensors.keys())
    names = {piece.parameter: piece.name for piece in pieces}
    head, embedding = names["head"], names["embedding"]
    if head not in tensors or embedding not in tensors:
        return False
    if tensors[head].shape != tensors[embedding].shape:
        return True
    pairs = zip(checkpoint.chunks(head), checkpoint.chunks(embedding), strict=True)
    return not all(
        torch.equal(one, other)
        for (_, own), (_, tied) in pairs
        for one, other in zip(own, tied, strict=True)
    )


def as_stored(piece: Piece, checkpoint: Checkpoint) -> Piece:
    """Blocks of a quantised format lie with outputs before inputs in all files; vectors of choice
    biases and rates may have further dimensions of one.
    """
    info = checkpoint.tensors.get(piece.name)
    if piece.parameter.endswith((".choice_bias", ".log_rate")) and info is not None:
        sizes = [size for size in info.shape if size != 1]
        is_padded = len(info.shape) > 1 and len(sizes) < 2
        return replace(piece, stored_shape=info.shape if is_padded else None)
    if not piece.is_turned or info is None or info.format.dtype is not None:
        return piece
    return replace(piece, is_turned=False)


def with_flat_vectors(
    checkpoint: Checkpoint, pieces: Iterable[Piece], spec: ModelSpec
) -> Checkpoint:
    """GGUF files have some vectors of state spaces as a column, and their norms as a row for each
    group; and the one row of a shared expert's gate as a vector.
    """
    parameters, tensors = spec.parameters(), dict(checkpoint.tensors)
    for piece in pieces:
        name, info = piece.parameter.rpartition(".")[2], tensors.get(piece.name)
        if info is None or info.format.dtype is None:
            continue
        (size, *others) = parameters[piece.parameter].shape
        if piece.parameter.endswith(".shared_gate.weight") and info.shape == tuple(others):
            tensors[piece.name] = replace(info, shape=(1, *info.shape))
        elif not others and name in ("log_rate", "skip", "norm") and math.prod(info.shape) == size:
            tensors[piece.name] = replace(info, shape=(size,))
    return checkpoint.with_tensors(tensors)


def load_planned(
    plan: WeightPlan,
    max_position: int | None = None,
    progress: Progress | None = None,
    wrap_source: Callable[[WeightSource], WeightSource] = lambda source: source,
) -> Decoder:
    """A decoder with its weights on the device, in the formats of the plan; `max_position` is the
    decoder's. Ranks of tensor parallelism, which take parts of the weights, have a `wrap_source`.
    """
    with reading(plan, progress) as loaded:
        return Decoder(plan.files.spec, plan.kernels, wrap_source(loaded), plan.dtype, max_position)


@contextmanager
def reading(plan: WeightPlan, progress: Progress | None = None) -> Iterator[WeightSource]:
    """The weights of a plan, read from its files as they are asked for, and ahead of that."""
    with ThreadPoolExecutor(_NUM_READERS, "weights") as readers:
        try:
            yield _Reading(plan, readers, progress or (lambda done, total: None))
        finally:
            readers.shutdown(wait=False, cancel_futures=True)


class _Reading:
    """The `WeightSource` of a decoder: reads its parameters from the files, ahead of the one it
    asks for. On a GPU all are read ahead; on a CPU, where each is packed and then freed, only
    enough to keep the reading threads busy.
    """

    def __init__(self, plan: WeightPlan, readers: ThreadPoolExecutor, progress: Progress) -> None:
        self._plan = plan
        self._readers = readers
        self._progress = progress
        self._pieces: dict[str, list[Piece]] = {name: [] for name in plan.parameters}
        for piece in plan.files.pieces:
            self._pieces[piece.parameter].append(piece)
        tensors = plan.files.checkpoint.tensors
        self._sizes = {
            name: sum(tensors[one.name].num_bytes for one in own)
            for name, own in self._pieces.items()
        }
        self._started: dict[str, tuple[Weight, list[Future[None]]]] = {}
        self._most_ahead = _AHEAD_BYTES if plan.device.type == "cpu" else sum(self._sizes.values())
        self._done, self._total = 0, sum(self._sizes.values())
        progress(0, self._total)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces or name in self._started

    def pop(self, name: str) -> Weight:
        """The parameter, once it is read; errors in reading it are raised here."""
        if name in self._pieces:
            self._start(name)
        ahead = sum(self._sizes[one] for one in self._started)
        for other in list(self._pieces):
            if ahead > self._most_ahead:
                break
            self._start(other)
            ahead += self._sizes[other]
        weight, reads = self._started.pop(name)
        for read in reads:
            read.result()
        self._done += self._sizes[name]
        self._progress(self._done, self._total)
        sign_of_life()
        return weight

    def _start(self, name: str) -> None:
        weight, room = self._plan.make_room(name)
        checkpoint, reads = self._plan.files.checkpoint, []
        for piece in self._pieces.pop(name):
            targets = room[piece.part or 0]
            if piece.expert is not None:
                targets = tuple(target[piece.expert] for target in targets)
            reads.append(
                self._readers.submit(
                    read_piece, checkpoint, piece, self._plan.format_of(piece), targets
                )
            )
        self._started[name] = weight, reads


def read_piece(
    checkpoint: Checkpoint, piece: Piece, format: Format, targets: Sequence[Tensor]
) -> None:
    """Fills the tensors of a weight's part from one tensor of the checkpoint, with rows in the
    decoder's order.
    """
    if targets[0].dim() > len(checkpoint.tensors[piece.name].shape):  # biases of experts
        targets = tuple(target.squeeze(-1) for target in targets)
    order = piece.order
    if piece.has_middle:
        targets = tuple(target.unsqueeze(1) for target in targets)
    if piece.stored_shape is not None:
        targets = tuple(target.view(piece.stored_shape) for target in targets)
    if piece.stack:
        targets = tuple(target.view(piece.stack, -1, target.shape[1]) for target in targets)
    if piece.is_turned:
        _read_turned(checkpoint, piece, format, targets)
        return
    if order is None:
        _read_as(checkpoint, piece.name, format, targets)
        if piece.added:
            targets[0].add_(piece.added)
        if piece.is_rate:
            _take_logarithm(checkpoint, piece.name, targets[0])
        return
    if isinstance(order, RowRuns):
        rows = tuple(target.new_empty(order.total, *target.shape[1:]) for target in targets)
    else:
        rows = tuple(torch.empty_like(target) for target in targets)
    _read_as(checkpoint, piece.name, format, rows)
    for source, target in zip(rows, targets, strict=True):  # whatever the format, a row is a row
        target.copy_(
            source.index_select(order.axis, order.index(source.shape[order.axis]).to(source.device))
        )
    if piece.is_rate:
        _take_logarithm(checkpoint, piece.name, targets[0])


def _take_logarithm(checkpoint: Checkpoint, name: str, rates: Tensor) -> None:
    if not bool(((rates < 0) & rates.isfinite()).all()):
        raise ModelFormatError(
            f"{checkpoint.tensors[name].file}: the tensor {name} should have negative numbers, the rates at which "
            "states decay, but has others"
        )
    rates.neg_().log_()


def _read_turned(
    checkpoint: Checkpoint, piece: Piece, format: Format, targets: Sequence[Tensor]
) -> None:
    """Fills `targets` from a tensor [experts, in, out] or [in, out]."""
    numbers = checkpoint.read(piece.name).mT
    if piece.order is not None:
        axis = piece.order.axis
        numbers = numbers.index_select(axis, piece.order.index(numbers.shape[axis]))
    made = (numbers,) if format.dtype is not None else quantize(format, numbers.contiguous())
    if made is None:
        raise _not_finite(checkpoint, piece.name)
    for target, part in zip(targets, made, strict=True):
        target.copy_(part)


def _not_finite(checkpoint: Checkpoint, name: str) -> ModelFormatError:
    return ModelFormatError(
        f"{checkpoint.tensors[name].file}: the tensor {name} has numbers that are infinite, NaN or too large to be "
        'quantised: load the model with quantization="none", or get its files again'
    )


def _read_as(checkpoint: Checkpoint, name: str, format: Format, targets: Sequence[Tensor]) -> None:
    """Fills `targets` with plain numbers, with the stored blocks as they are, or with numbers
    quantised here.
    """
    info = checkpoint.tensors[name]
    if format.dtype is not None:
        checkpoint.read_into(name, targets[0])
    elif info.format == format:
        checkpoint.read_stored_into(name, targets)
    else:
        for chunk, stored in checkpoint.chunks(name):
            made = quantize(format, info.format.expand(*stored).view(chunk.shape))
            if made is None:
                raise _not_finite(checkpoint, name)
            for target, part in zip(targets, made, strict=True):
                target[chunk.index].copy_(part)
