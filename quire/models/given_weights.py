"""Weights that a caller gives, a trainer say, by the names that checkpoints have: as the decoder's
own, in the formats that it has them in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.checkpoints.checkpoint import Checkpoint, Chunk, StoredCache, TensorInfo, chunks_of
from quire.errors import ModelFormatError
from quire.kernels.formats import PLAIN
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.families import family_named
from quire.models.load import as_stored, reading
from quire.models.names import huggingface_pieces, ignored_names
from quire.models.pieces import Piece
from quire.models.spec import ModelSpec
from quire.models.weight_plan import ModelFiles, plan_weights

_PLAIN_NAMES = tuple(one.name for one in PLAIN.values())
_HERE = Path("the tensors given")
"""What errors say where they name a file."""


class GivenTensors(Checkpoint):
    """A checkpoint in memory."""

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        self._given = given
        infos = {
            name: TensorInfo(
                name, tuple(one.shape), PLAIN[one.dtype].name, _HERE, one.nbytes, offset=0
            )
            for name, one in given.items()
        }
        super().__init__("safetensors", infos, {})

    def with_tensors(
        self, tensors: Mapping[str, TensorInfo], cache: StoredCache | None = None
    ) -> Checkpoint:
        return GivenTensors({name: self._given[name] for name in tensors})

    def read_into(self, name: str, target: Tensor) -> None:
        target.copy_(self._given[name])

    def chunks(
        self, name: str, copied_to: torch.device | None = None
    ) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        tensor = self._given[name]
        for chunk in chunks_of(tuple(tensor.shape)):
            yield chunk, (tensor[chunk.index].contiguous(),)


def given_weights(
    decoder: Decoder, quantization: str, given: Iterable[tuple[str, Tensor]]
) -> dict[str, Weight]:
    """By the decoder's names. Raises ModelFormatError for a tensor that has no place or another
    shape, and where a tensor is missing that is kept as one matrix with others that are given.
    """
    return stored_weights(decoder, quantization, GivenTensors(checked_tensors(given)))


def stored_weights(
    decoder: Decoder,
    quantization: str,
    stored: Checkpoint,
    spec: ModelSpec | None = None,
    divide: Callable[[ModelFiles], ModelFiles] = lambda files: files,
) -> dict[str, Weight]:
    """`given_weights` from files: names, shapes and formats are checked before any is read. Where
    the decoder has a part of a model only, `spec` describes the whole and `divide` leaves of its
    files what this part reads.
    """
    files = divide(_files_of(decoder.spec if spec is None else spec, stored))
    plan = plan_weights(files, decoder.kernels, decoder.dtype, decoder.device, quantization)
    with reading(plan) as loaded:
        return {name: loaded.pop(name) for name in plan.parameters}


def check_tensors(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> None:
    """Raises ModelFormatError for a tensor of numbers that can't become weights, that has no place
    in the model, or another shape. More may come, of the same matrices, say.
    """
    _check_formats(tensors)
    pieces = [piece for piece in _pieces(spec, tensors) if piece.name in tensors]
    _check_known(spec, tensors, {piece.name for piece in pieces})
    parameters = spec.parameters()
    for piece in pieces:
        expected = piece.shape(parameters[piece.parameter])
        found = tensors[piece.name].shape
        # a choice bias may be a matrix of one row
        if found != expected and not (
            piece.parameter.endswith(".choice_bias") and found == (1, *expected)
        ):
            raise ModelFormatError(
                f"{piece.name} should have shape {list(expected)} in this model, but has {list(found)}"
            )


def _check_formats(tensors: Mapping[str, TensorInfo]) -> None:
    for name, info in tensors.items():
        if info.dtype not in _PLAIN_NAMES:
            raise ModelFormatError(
                f"{name} is {info.dtype}; weights are replaced with one of {', '.join(_PLAIN_NAMES)}"
            )


def _check_known(spec: ModelSpec, tensors: Mapping[str, TensorInfo], known: set[str]) -> None:
    unknown = sorted(tensors.keys() - known - ignored_names(spec, tensors.keys()))
    if unknown:
        raise ModelFormatError(
            f"{unknown[0]} has no place in this {spec.family} model"
            + (f", nor have {len(unknown) - 1} more" if unknown[1:] else "")
        )


def _files_of(spec: ModelSpec, stored: Checkpoint) -> ModelFiles:
    """What is in the files as parts of the model, whose matrices must be complete."""
    tensors = stored.tensors
    _check_formats(tensors)
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in _pieces(spec, tensors):
        pieces[piece.parameter].append(as_stored(piece, stored))
    touched = {
        parameter: own
        for parameter, own in pieces.items()
        if any(piece.name in tensors for piece in own)
    }
    for own in touched.values():
        missing = [piece.name for piece in own if piece.name not in tensors]
        if missing:
            there = next(piece.name for piece in own if piece.name in tensors)
            raise ModelFormatError(
                f"{there} is kept as one matrix with {', '.join(missing[:3])}: give them together"
            )
    known = {piece.name for own in touched.values() for piece in own}
    _check_known(spec, tensors, known)
    _check_head(spec, stored, pieces)
    parameters = {name: one for name, one in spec.parameters().items() if name in touched}
    return ModelFiles(
        spec,
        stored.with_tensors({name: tensors[name] for name in known}),
        tuple(piece for own in touched.values() for piece in own),
        parameters,
    )


def checked_tensors(given: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """By name, in dtypes that checkpoints have."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in given:
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ModelFormatError("weights are given as pairs of a name and a tensor")
        if name in tensors:
            raise ModelFormatError(f"{name} is given twice")
        if not tensor.is_floating_point():
            raise ModelFormatError(f"{name} must hold floating-point numbers, not {tensor.dtype}")
        plain = tensor.detach()
        tensors[name] = plain if plain.dtype in PLAIN else plain.float()
    return tensors


def _pieces(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> list[Piece]:
    """All that the model consists of, under the names that most of the given tensors have."""
    family = family_named(spec.family)
    found = [
        list(huggingface_pieces(spec, {*tensors, f"{prefix}.{family.embedding}.weight"}))
        for prefix in family.prefixes
    ]
    return max(found, key=lambda pieces: sum(piece.name in tensors for piece in pieces))


def _check_head(spec: ModelSpec, stored: Checkpoint, pieces: Mapping[str, list[Piece]]) -> None:
    """The head of a tied model is its embedding: another one would be lost without a word."""
    name = pieces["embedding"][0].name
    if not spec.tie_embeddings or "lm_head.weight" not in stored.tensors:
        return
    dtype = stored.tensors["lm_head.weight"].format.dtype
    head = stored.read("lm_head.weight").to(dtype)
    if name not in stored.tensors or not torch.equal(stored.read(name).to(dtype), head):
        raise ModelFormatError(
            "lm_head.weight differs from the embedding, or comes without it, and this model has one matrix for both"
        )
