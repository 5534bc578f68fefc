"""An adapter's tensors for one module of a model, whatever file they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.checkpoints.checkpoint import Checkpoint
from quire.errors import ModelFormatError
from quire.models.pieces import Piece


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """In float32."""

    name: str
    pieces: Sequence[Piece]
    """Where in the decoder its weight lies."""
    a: Tensor
    """[rank, inputs]."""
    b: Tensor
    """[outputs, rank], in the order of the file."""
    magnitude: Tensor | None
    scale: float


def read_finite(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor, all of whose numbers must be finite."""
    tensor = checkpoint.read(name)
    if not bool(tensor.isfinite().all()):
        raise ModelFormatError(
            f"{checkpoint.tensors[name].file}: the tensor {name} has numbers that are infinite or NaN"
        )
    return tensor
