"""The modules of a GGUF adapter: tensors of llama.cpp's names, at the products they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.files import quote
from quire.checkpoints.gguf_adapter import scale_of
from quire.errors import ModelFormatError, UnsupportedModelError
from quire.kernels.low_rank import MAX_RANK
from quire.models.adapter_module import AdapterModule, read_finite
from quire.models.decoder import Decoder
from quire.models.families import family_named
from quire.models.linear import HeadLinear
from quire.models.names import gguf_pieces
from quire.models.pieces import Piece
from quire.models.spec import ModelSpec, Parameter

_SIDES = (".lora_a", ".lora_b")


def gguf_modules(
    checkpoint: Checkpoint, path: str, spec: ModelSpec, decoder: Decoder
) -> Iterator[AdapterModule]:
    """Every tensor of the file, checked, by the weight that it changes; of stacked experts one
    module for each.
    """
    _check_architecture(checkpoint, path, spec)
    places = _places(spec)
    pairs: dict[str, dict[str, str]] = {}
    for name, info in checkpoint.tensors.items():
        weight, side = name[:-7], name[-7:]
        if side not in _SIDES or weight not in places:
            raise ModelFormatError(
                f"{info.file}: the tensor {name} has no place in this model: adapters change products, such as "
                f"{next(iter(places), 'none')}.lora_a"
            )
        pairs.setdefault(weight, {})[side] = name
    parameters = spec.parameters()
    parameters.setdefault("head", Parameter((spec.vocab_size, spec.hidden_size)))
    for weight, own in pairs.items():
        pieces = places[weight]
        parameter, some = parameters[pieces[0].parameter], next(iter(own.values()))
        file = checkpoint.tensors[some].file
        for side in _SIDES:
            if side not in own:
                raise ModelFormatError(
                    f"{file}: beside the tensor {some} there is no {weight}{side}"
                )
        linear = pieces[0].parameter.removesuffix(".weight")
        product = decoder.linears.get(linear)
        is_odd = pieces[0].is_turned or pieces[0].has_middle or isinstance(product, HeadLinear)
        if product is None or is_odd:
            raise UnsupportedModelError(
                f"{file}: the tensor {some} changes {weight}, which is no product that Quire can adapt"
            )
        yield from _modules(checkpoint, weight, pieces, own, parameter)


def _modules(
    checkpoint: Checkpoint,
    weight: str,
    pieces: list[Piece],
    own: dict[str, str],
    parameter: Parameter,
) -> Iterator[AdapterModule]:
    name_a, name_b = (own[side] for side in _SIDES)
    info_a, info_b = checkpoint.tensors[name_a], checkpoint.tensors[name_b]
    *stack, outputs, inputs = pieces[0].shape(parameter)
    rank = info_a.shape[-2] if len(info_a.shape) > 1 else 0
    for info, shape in ((info_a, (*stack, rank, inputs)), (info_b, (*stack, outputs, rank))):
        if info.shape != shape:
            raise ModelFormatError(
                f"{info.file}: the tensor {info.name} has shape {list(info.shape)}; by this model and the rank of "
                f"{rank} it is {list(shape)}: is it for another model?"
            )
    if not 1 <= rank <= MAX_RANK:
        raise UnsupportedModelError(
            f"{info_a.file}: the tensor {name_a} has rank {rank}; Quire runs ranks from 1 to {MAX_RANK}"
        )
    scale = scale_of(checkpoint, str(info_a.file), rank)
    a, b = read_finite(checkpoint, name_a), read_finite(checkpoint, name_b)
    if not stack:
        yield AdapterModule(weight, pieces, a, b, None, scale)
        return
    for expert in range(stack[0]):
        placed = [replace(piece, expert=expert) for piece in pieces]
        yield AdapterModule(weight, placed, a[expert].clone(), b[expert].clone(), None, scale)


def _check_architecture(checkpoint: Checkpoint, path: str, spec: ModelSpec) -> None:
    family, found = family_named(spec.family), checkpoint.metadata.get("general.architecture")
    own = family.gguf
    if own is None:
        raise UnsupportedModelError(
            f"{path}: models of the family {spec.family} have no GGUF files in Quire: give the folder that PEFT wrote"
        )
    if found not in (own, *family.gguf_others):
        raise ModelFormatError(
            f"{path}: general.architecture is {quote(found)}, and this model's is {own!r}: the adapter is for another "
            "model"
        )


def _places(spec: ModelSpec) -> dict[str, list[Piece]]:
    """By the name of a tensor that is a matrix or a stack of them: where in the decoder it lies."""
    parameters = spec.parameters()
    found: dict[str, list[Piece]] = {}
    for piece in gguf_pieces(spec):
        parameter = parameters[piece.parameter]
        is_matrix = len(parameter.shape) > 1 and not parameter.is_vector
        if piece.name.endswith(".weight") and is_matrix and piece.parameter != "embedding":
            found.setdefault(piece.name, []).append(piece)
    found.setdefault("output.weight", [Piece("output.weight", "head")])
    return found
