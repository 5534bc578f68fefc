"""Weight: a matrix in whatever formats and layout it is kept, under its logical shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from quire.kernels.formats import PLAIN, Format


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a weight's rows (outputs), all in one format."""

    format: Format
    tensors: tuple[Tensor, ...]
    """Plain numbers: one tensor [..., rows, in]. GGUF's blocks: one uint8 [..., rows, bytes of a
    row]. INT8, FP8 and INT4: codes, float32 scales, and for INT4 zero points.
    """
    rows: int


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix [out, in], a stack of them [experts, out, in] or a vector, as checkpoints make them
    and `Kernels.pack` brings them into a backend's layout. A packed matrix such as query, key and
    value may consist of parts in different formats, one after the other along the output.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @classmethod
    def dense(cls, tensor: Tensor) -> Weight:
        """Plain numbers, kept as they are."""
        return cls.of(PLAIN[tensor.dtype], tuple(tensor.shape), tensor)

    @classmethod
    def of(cls, format: Format, shape: tuple[int, ...], *tensors: Tensor) -> Weight:
        """All of it in one format."""
        return cls(shape, (Part(format, tensors, shape[-2] if len(shape) > 1 else 1),))

    @classmethod
    def stacked(cls, weights: Iterable[Weight]) -> Weight:
        """Matrices with the same inputs as one matrix, which has the outputs of all of them."""
        weights = tuple(weights)
        *outer, _, size = weights[0].shape
        shape = (*outer, sum(weight.shape[-2] for weight in weights), size)
        return cls(shape, tuple(part for weight in weights for part in weight.parts))

    # Cached, as kernels ask for these at every call. (cached_property works despite `frozen`.)

    @cached_property
    def format(self) -> Format | None:
        """The format all of it is in; None where parts differ."""
        return self.parts[0].format if len(self.parts) == 1 else None

    @cached_property
    def tensor(self) -> Tensor:
        """The tensor of a weight that has only one."""
        if len(self.parts) != 1 or len(self.parts[0].tensors) != 1:
            raise ValueError(f"a weight of {len(self.parts)} parts is not one tensor")
        return self.parts[0].tensors[0]

    @cached_property
    def is_dense(self) -> bool:
        """Whether it is one tensor of plain numbers."""
        return self.format is not None and self.format is PLAIN.get(self.parts[0].tensors[0].dtype)

    @cached_property
    def experts(self) -> tuple[Weight, ...]:
        """The matrices of a stack."""
        return tuple(
            type(self)(
                self.shape[1:],
                tuple(Part(p.format, tuple(t[i] for t in p.tensors), p.rows) for p in self.parts),
            )
            for i in range(self.shape[0])
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors)

    @property
    def device(self) -> torch.device:
        return self.parts[0].tensors[0].device

    def to(self, device: torch.device) -> Weight:
        """The same numbers on a device; itself, if it lies there."""
        if self.device == device:
            return self
        parts = (replace(p, tensors=tuple(t.to(device) for t in p.tensors)) for p in self.parts)
        return replace(self, parts=tuple(parts))

    def copy_(self, other: Weight) -> None:
        """Takes over the numbers of a weight with the same layout, into the memory that this one
        has. With another layout it raises ValueError, and nothing has changed.
        """
        if other.layout != self.layout:
            raise ValueError(
                f"a weight laid out as {other.layout} does not fit into one as {self.layout}"
            )
        for part, new in zip(self.parts, other.parts, strict=True):
            for tensor, numbers in zip(part.tensors, new.tensors, strict=True):
                tensor.copy_(numbers)

    @property
    def layout(self) -> tuple[object, ...]:
        """What weights must have in common for one to lie where the other does."""
        parts = (
            (p.format.name, p.rows, *((t.dtype, tuple(t.shape)) for t in p.tensors))
            for p in self.parts
        )
        return (self.shape, *parts)

    def split(self, bias: Tensor | None = None) -> list[tuple[Weight, Tensor | None]]:
        """Each part as a weight of its own, with its part of the bias."""
        rows = [part.rows for part in self.parts]
        biases = [None] * len(rows) if bias is None else bias.split_with_sizes(rows)
        weights = (
            type(self)((*self.shape[:-2], part.rows, self.shape[-1]), (part,))
            for part in self.parts
        )
        return list(zip(weights, biases, strict=True))
