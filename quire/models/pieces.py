"""Pieces: which part of a decoder's parameter a tensor of a checkpoint fills, and how its rows are
rearranged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.models.spec import Parameter


@dataclass(frozen=True, slots=True)
class RowOrder:
    """How to reorder the rows of a tensor for the decoder, whose rope pairs dimension i of a head
    with dimension i + head_dim / 2. A checkpoint's rope may pair neighbours, or rotate only the
    first dimensions. Queries and keys are reordered alike, so their products don't change. Also
    sorts experts whose gate and up rows alternate.
    """

    heads: int
    """How many heads are reordered, from the first row on; rows after them keep their place."""
    head_dim: int
    rotated: int
    """How many rows of a head are rotated, the first ones."""
    interleaved: bool
    """Whether the checkpoint pairs neighbours."""
    axis: int = 0
    """The tensor's dimension that has the rows."""

    def index(self, num_rows: int) -> Tensor:
        """For each row of the decoder, the checkpoint's row that it is taken from."""
        turned, others = torch.arange(self.rotated), torch.arange(self.rotated, self.head_dim)
        pairs = turned.view(-1, 2).t() if self.interleaved else turned.view(2, -1)
        head = torch.cat((pairs, others.view(2, -1)), 1).flatten()
        rows = torch.arange(num_rows)
        changed = self.heads * self.head_dim
        rows[:changed] = rows[:changed].view(self.heads, -1)[:, head].flatten()
        return rows


@dataclass(frozen=True, slots=True)
class LastRowsOrder(RowOrder):
    """The same for heads whose last rows are rotated; others keep their place."""

    def index(self, num_rows: int) -> Tensor:
        heads = torch.arange(num_rows).view(self.heads, self.head_dim)
        kept, turned = heads.split_with_sizes((self.head_dim - self.rotated, self.rotated), 1)
        pairs = turned.reshape(self.heads, -1, 2).mT.flatten(1) if self.interleaved else turned
        return torch.cat((kept, pairs), 1).flatten()


@dataclass(frozen=True, slots=True)
class RowRuns:
    """Some rows of a tensor, in runs: what a checkpoint packs in one tensor otherwise than the
    decoder does.
    """

    runs: tuple[tuple[int, int], ...]
    """First row and number of rows of each."""
    total: int
    """Rows of the tensor."""
    axis: int = 0

    def index(self, num_rows: int) -> Tensor:
        return torch.cat([torch.arange(first, first + count) for first, count in self.runs])


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the checkpoint and where it goes."""

    name: str
    """Its name in the checkpoint."""
    parameter: str
    """The decoder's parameter, by its dotted path."""
    part: int | None = None
    """Which of several tensors stacked in one parameter it is (query 0, key 1, value 2); None: it
    fills all rows.
    """
    expert: int | None = None
    """Which expert of a stack it is; None: it has all experts, or the parameter has none."""
    order: RowOrder | RowRuns | None = None
    """How its rows are rearranged, or which are taken; None: all as they are."""
    has_middle: bool = False
    """Whether in the checkpoint there is a dimension of one between rows and columns (of
    convolutions).
    """
    stored_shape: tuple[int, ...] | None = None
    """Its shape in the checkpoint, if that has further dimensions of one; None: as the others say."""
    is_turned: bool = False
    """Whether in the checkpoint columns come before rows."""
    stack: int = 0
    """How many matrices, each with as many of its rows, it is in the checkpoint; 0: one."""
    added: float = 0.0
    """Added to its numbers."""
    is_rate: bool = False
    """Whether the checkpoint has rates, which are negative, and the decoder the logarithms of what
    they are without the sign.
    """

    def index(self, parameter: Parameter) -> tuple[int | slice, ...]:
        """The part of the parameter that it fills."""
        rows = slice(None) if self.part is None else parameter.rows_of(self.part)
        if len(parameter.shape) < 3:
            return (rows,)
        return slice(None) if self.expert is None else self.expert, rows

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """The shape that it must have in the checkpoint."""
        if self.stored_shape is not None:
            return self.stored_shape
        shape = list(parameter.shape)
        if self.part is not None:
            shape[-2 if len(shape) > 1 else -1] = parameter.rows[self.part]
        if isinstance(self.order, RowRuns):
            shape[-2 if len(shape) > 1 else -1] = self.order.total
        if self.has_middle:
            shape.insert(1, 1)
            return tuple(shape)
        if parameter.is_vector:
            shape.pop()
        if self.stack:
            shape[:1] = (self.stack, shape[0] // self.stack)
        if self.is_turned:
            shape[-2:] = shape[:-3:-1]
        return tuple(shape if self.expert is None else shape[1:])
