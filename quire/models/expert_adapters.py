"""Adapters of stacked experts: PEFT's `target_parameters`.

PEFT keeps one A and one B for all experts of a parameter: A's rows are expert after expert, in B's
columns the experts of a rank are together. Where a module has two such parameters, one wrapper lies
in the other, and names say how deep, not which parameter it is: that follows from the shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from quire.checkpoints.adapter_files import AdapterSettings
from quire.models.families import family_named
from quire.models.names import huggingface_pieces, stacked_expert_names
from quire.models.pieces import Piece
from quire.models.spec import ModelSpec

_WRAPPED = ".base_layer"
_SWAPPED_SINCE = (0, 19)
"""Before this version PEFT took a parameter's middle dimension for its inputs, always."""


class Stack(NamedTuple):
    """The experts of one layer's product, as PEFT names them."""

    name: str
    piece: Piece
    num_experts: int
    outputs: int
    inputs: int
    turned_for_peft: bool
    """See `Family`."""


class StackFit(NamedTuple):
    """What a pair of matrices belongs to."""

    stack: Stack
    a_has_outputs: bool
    """Whether A's columns are the product's outputs, and B's rows its inputs."""


def stacks_of(spec: ModelSpec, embeddings: Sequence[str]) -> dict[str, list[Stack]]:
    """By the name of a module, those of its parameters that are stacked experts. `embeddings` are
    the names that the embedding may have.
    """
    parameters = spec.parameters()
    found: dict[str, list[Stack]] = {}
    for names in stacked_expert_names(spec):
        for embedding in embeddings:
            for piece in huggingface_pieces(spec, {embedding, *names}):
                shape = parameters[piece.parameter].shape
                if piece.name not in names or len(shape) != 3 or piece.expert is not None:
                    continue
                turned = family_named(spec.family).turned_for_peft
                stack = Stack(piece.name, piece, *shape, turned)
                own = found.setdefault(piece.name.rpartition(".")[0], [])
                if stack not in own:
                    own.append(stack)
    return found


def unwrapped(module: str) -> str:
    """The module's name in the model, of which wrappers of parameters add to it."""
    while module.endswith(_WRAPPED):
        module = module.removesuffix(_WRAPPED)
    return module


def fitting(
    stacks: Sequence[Stack], settings: AdapterSettings, a: tuple[int, ...], b: tuple[int, ...]
) -> list[StackFit]:
    """What A and B of these shapes can belong to: one, unless the model has equal sizes and the
    adapter doesn't say which PEFT wrote it.
    """
    version, found = settings.peft_version, []
    for stack in stacks:
        ranks = stack.num_experts * settings.rank_of(stack.name)
        is_direct = (a, b) == ((ranks, stack.inputs), (stack.outputs, ranks))
        is_swapped = (a, b) == ((ranks, stack.outputs), (stack.inputs, ranks))
        if not stack.piece.is_turned and version is not None:
            is_new = version >= _SWAPPED_SINCE
            is_direct, is_swapped = is_direct and is_new, is_swapped and not is_new
        elif stack.piece.is_turned and is_direct and is_swapped:
            is_direct = stack.turned_for_peft or version is None or version < _SWAPPED_SINCE
            is_swapped = not is_direct
        found += [StackFit(stack, False)] * is_direct + [StackFit(stack, True)] * is_swapped
    return found


def by_expert(fit: StackFit, a: Tensor, b: Tensor) -> Iterator[tuple[Piece, Tensor, Tensor]]:
    """Each expert's place, A [rank, inputs] and B [outputs, rank]."""
    stack = fit.stack
    all_a = a.view(stack.num_experts, -1, a.shape[1])
    all_b = b.view(b.shape[0], -1, stack.num_experts)
    for expert in range(stack.num_experts):
        own_a, own_b = all_a[expert], all_b[:, :, expert]
        if fit.a_has_outputs:
            own_a, own_b = own_b.t(), own_a.t()
        yield (
            replace(stack.piece, expert=expert, is_turned=False),
            own_a.contiguous(),
            own_b.contiguous(),
        )
