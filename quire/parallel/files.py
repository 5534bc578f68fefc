"""A rank's part of a model's files: the rows it keeps, described as tensors of their own.

A run of rows lies in one piece of a file, so it is a tensor with another offset. The loader reads those and nothing
else, in whatever format they are stored. (Formats that mix rows are the exception.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.checkpoints.checkpoint import Checkpoint, Chunk, TensorInfo
from quire.models.names import Piece, RowOrder
from quire.models.spec import Parameter
from quire.models.weight_plan import ModelFiles, check_names_and_shapes
from quire.parallel.division import Division


@dataclass(frozen=True, slots=True)
class PickedRows(RowOrder):
    """An order that is told row by row."""

    rows: tuple[int, ...] = ()

    def index(self, num_rows: int) -> Tensor:
        assert num_rows == len(self.rows)
        return torch.tensor(self.rows)


class RowsCheckpoint(Checkpoint):
    """Some rows of some tensors of another one. Runs of rows are tensors at other places of its files; where rows don't
    lie one after the other in a file, a tensor is read as a whole and other ranks' rows are left out."""

    def __init__(self, whole: Checkpoint, tensors: Mapping[str, TensorInfo], read_whole: Mapping[str, Rows]) -> None:
        super().__init__(whole.kind, tensors, whole._stamps, whole.metadata)
        self._source = whole
        self._read_whole = read_whole

    def chunks(
        self, name: str, is_copied: bool = False, pin_memory: bool = False
    ) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        rows = self._read_whole.get(name)
        if rows is None:
            yield from super().chunks(name, is_copied, pin_memory)
            return
        inner = math.prod(self.tensors[name].shape[1:])
        for chunk, stored in self._source.chunks(rows.tensor):
            begin = chunk.start // inner
            first, end = max(rows.first, begin), min(rows.first + rows.count, begin + chunk.shape[0])
            if first < end:
                place = slice(first - rows.first, end - rows.first)
                own = Chunk((place,), place.start * inner, (end - first, *chunk.shape[1:]))
                yield own, tuple(part[first - begin : end - begin] for part in stored)


@dataclass(frozen=True, slots=True)
class Rows:
    """A run of a tensor's rows."""

    tensor: str
    first: int
    count: int


def divide_files(files: ModelFiles, division: Division) -> ModelFiles:
    """The same files as `division.rank` reads them."""
    whole = files.spec.parameters()
    check_names_and_shapes(files, whole)  # so that what is wrong with the files is said of the files
    tensors: dict[str, TensorInfo] = {}
    pieces: list[Piece] = []
    read_whole: dict[str, Rows] = {}
    for piece in files.pieces:
        stored = files.checkpoint.tensors[piece.name]
        for own, info, rows in _own_pieces(piece, stored, whole[piece.parameter], division):
            tensors[info.name] = info
            pieces.append(own)
            if rows is not None and mixes_rows(stored):
                read_whole[info.name] = rows
    parameters = {name: division.parameter(name, parameter) for name, parameter in whole.items()}
    checkpoint = RowsCheckpoint(files.checkpoint, tensors, read_whole)
    return ModelFiles(division.local_spec, checkpoint, tuple(pieces), parameters)


def mixes_rows(info: TensorInfo) -> bool:
    """Whether a tensor's rows, or their scales, don't lie one after the other in its file, as with AWQ and GPTQ."""
    return getattr(info, "layout", None) is not None


def _own_pieces(
    piece: Piece, info: TensorInfo, parameter: Parameter, division: Division
) -> Iterator[tuple[Piece, TensorInfo, Rows | None]]:
    """What a rank reads of one tensor of the checkpoint, and which rows that are, if not all."""
    runs = division.segments(piece.parameter, parameter)
    total = parameter.shape[-2] if len(parameter.shape) > 1 else parameter.shape[0]
    if sum(run.stop - run.start for run in runs) == total:
        yield piece, info, None
        return
    is_stack = len(parameter.shape) == 3 and piece.expert is None
    num_rows = info.shape[1] if is_stack else info.shape[0]
    selected: list[tuple[int | None, Sequence[int]]]
    if piece.part is not None:
        start = parameter.rows_of(piece.part).start
        selected = [(piece.part, _range(runs[piece.part], -start))]
    elif parameter.rows and not _alternates(piece.order, num_rows):
        selected = [(part, _range(run)) for part, run in enumerate(runs)]
    else:
        selected = [(None, [row for run in runs for row in _range(run)])]
    for part, rows in selected:
        stored = rows
        if piece.order is not None:
            stored = piece.order.index(num_rows)[torch.tensor(rows)].tolist()
        first = min(stored)
        assert max(stored) - first + 1 == len(stored), f"{piece.name}: rows of a rank lie in one piece"
        local = tuple(row - first for row in stored)
        order = None if local == tuple(range(len(local))) else PickedRows(0, 0, 0, False, rows=local)
        for expert in range(parameter.shape[0]) if is_stack else (piece.expert,):
            begin = first + (expert * num_rows if is_stack and expert is not None else 0)
            cut = _cut(info, begin, len(rows), is_stack)
            if mixes_rows(info):
                cut = replace(info, name=cut.name, shape=cut.shape)
            if is_stack and len(cut.shape) == 1:  # biases are matrices of one column
                cut = replace(cut, shape=(*cut.shape, 1))
            own = replace(piece, name=cut.name, part=part, expert=expert, order=order)
            yield own, cut, Rows(info.name, begin, len(rows))


def _alternates(order: RowOrder | None, num_rows: int) -> bool:
    """Whether rows of the tensors stacked in it come in turns."""
    return order is not None and order.heads == 1 and order.head_dim == num_rows


def _range(run: slice, offset: int = 0) -> Sequence[int]:
    return range(run.start + offset, run.stop + offset)


def _cut(info: TensorInfo, first: int, count: int, is_stack: bool) -> TensorInfo:
    """Some rows of a tensor, counted through all matrices of a stack."""
    total = math.prod(info.shape[: 2 if is_stack else 1])
    each = info.num_bytes // total
    return replace(
        info,
        name=f"{info.name}[{first}:{first + count}]",
        shape=(count, *info.shape[2 if is_stack else 1 :]),
        num_bytes=each * count,
        offset=info.offset + each * first,
        scales=None if info.scales is None else _cut_scales(info.scales, total, first, count),
    )


def _cut_scales(scales: TensorInfo, total: int, first: int, count: int) -> TensorInfo:
    """Those of the same rows, of which there are `total`."""
    each = scales.num_bytes // total
    name = f"{scales.name}[{first}:{first + count}]"
    return replace(scales, name=name, num_bytes=each * count, offset=scales.offset + each * first)
