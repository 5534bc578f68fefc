"""A rank's part of a model's files: the rows it keeps, described as tensors of their own.

A run of rows lies in one piece of a file, so it is a tensor with another offset. The loader reads
those and nothing else, in whatever format they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.checkpoints.checkpoint import TensorInfo
from quire.models.pieces import Piece, RowOrder, RowRuns
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


def divide_files(files: ModelFiles, division: Division) -> ModelFiles:
    """The same files as `division.rank` reads them."""
    whole = files.parameters
    # so that what is wrong with the files is said of the files
    check_names_and_shapes(files, whole)
    tensors: dict[str, TensorInfo] = {}
    pieces: list[Piece] = []
    for piece in files.pieces:
        for own, info in _own_pieces(
            piece, files.checkpoint.tensors[piece.name], whole[piece.parameter], division
        ):
            tensors[info.name] = info
            pieces.append(own)
    parameters = {name: division.parameter(name, parameter) for name, parameter in whole.items()}
    return ModelFiles(
        division.local_spec, files.checkpoint.with_tensors(tensors), tuple(pieces), parameters
    )


def _own_pieces(
    piece: Piece, info: TensorInfo, parameter: Parameter, division: Division
) -> Iterator[tuple[Piece, TensorInfo]]:
    """What a rank reads of one tensor of the checkpoint."""
    if piece.stored_shape is not None:
        piece = replace(piece, stored_shape=None)
        info = replace(info, shape=piece.shape(parameter))
    runs = division.segments(piece.parameter, parameter)
    total = parameter.shape[-2] if len(parameter.shape) > 1 else parameter.shape[0]
    if sum(run.stop - run.start for run in runs) == total:
        yield piece, info
        return
    is_stack = len(parameter.shape) == 3 and piece.expert is None
    num_rows = info.shape[-1] if piece.is_turned else info.shape[1 if is_stack else 0]
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
        if piece.is_turned:
            yield from _turned(piece, info, part, RowRuns(_runs(stored), num_rows))
            continue
        first, count = min(stored), max(stored) - min(stored) + 1
        local = tuple(row - first for row in stored)
        order: RowOrder | RowRuns | None = None
        if count > len(local):  # what lies between them is read, and left out
            order = RowRuns(_runs(local), count)
        elif local != tuple(range(count)):
            order = PickedRows(0, 0, 0, False, rows=local)
        for expert in range(parameter.shape[0]) if is_stack else (piece.expert,):
            begin = first + (expert * num_rows if is_stack and expert is not None else 0)
            cut = _cut(info, begin, count, is_stack)
            yield replace(piece, name=cut.name, part=part, expert=expert, order=order), cut


def _turned(
    piece: Piece, info: TensorInfo, part: int | None, order: RowRuns
) -> Iterator[tuple[Piece, TensorInfo]]:
    """Of a tensor with inputs before outputs, a rank's outputs lie in no piece of the file: it
    reads all of them, a matrix at a time, and keeps its own.
    """
    is_stack = len(info.shape) == 3
    for expert in range(info.shape[0]) if is_stack else (piece.expert,):
        whole = info
        if is_stack and expert is not None:
            whole = _cut(info, expert * info.shape[1], info.shape[1], is_stack)
        yield replace(piece, name=whole.name, part=part, expert=expert, order=order), whole


def _runs(rows: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """First row and number of rows of those that follow each other."""
    found: list[list[int]] = []
    for row in rows:
        if found and row == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([row, 1])
    return tuple((first, count) for first, count in found)


def _alternates(order: RowOrder | RowRuns | None, num_rows: int) -> bool:
    """Whether rows of the tensors stacked in it come in turns."""
    return isinstance(order, RowOrder) and order.heads == 1 and order.head_dim == num_rows


def _range(run: slice, offset: int = 0) -> Sequence[int]:
    return range(run.start + offset, run.stop + offset)


def _cut(info: TensorInfo, first: int, count: int, is_stack: bool) -> TensorInfo:
    """Some rows of a tensor, counted through all matrices of a stack."""
    total = math.prod(info.shape[: 2 if is_stack else 1])
    each = info.num_bytes // total
    name = f"{info.name}[{first}:{first + count}]"
    if info.layout is not None:  # rows may be packed together: the checkpoint takes them apart
        shape = (count, info.shape[1])
        return replace(
            info, name=name, shape=shape, num_bytes=each * count, whole=info, first_row=first
        )
    return replace(
        info,
        name=name,
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
