"""Where two models part: the first weight that differs, and the first stage of a forward pass that
does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from quire.checkpoints.checkpoint import TensorInfo
from quire.kernels.reference import ReferenceKernels
from quire.models.load import load_planned, read_piece
from quire.models.pieces import Piece
from quire.models.spec import LayerSpec, ModelSpec
from quire.models.weight_plan import ModelFiles, WeightPlan, plan_weights
from quire.tools.inspect.activations import trace

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Two tensors that should be the same."""

    where: str
    """A decoder's parameter (`layers.0.attention.qkv.weight`) or a stage (`layers.0.mlp`)."""
    names: tuple[str, str]
    """In the files; empty for a stage."""
    largest: float
    """Between two values at the same place."""
    first: tuple[int, ...]
    """The first place where they differ; none where they have different sizes."""
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    """Values from there on."""
    hint: str = ""

    def __str__(self) -> str:
        files = "" if not self.names[0] else f" ({' and '.join(dict.fromkeys(self.names))})"
        shown = [
            ", ".join(f"{value:.6g}" for value in values) for values in (self.ours, self.theirs)
        ]
        how = (
            f"differs from {list(self.first)} on, by {self.largest:.3g} at most"
            if self.first
            else "has other sizes"
        )
        text = f"{self.where}{files} {how}: "
        return f"{text}{shown[0]} here, {shown[1]} there" + (f". {self.hint}" if self.hint else "")


def spec_differences(ours: ModelSpec, theirs: ModelSpec) -> list[str]:
    """Settings that are not the same, one line each: of the layers, the first that differs."""
    lines = [
        f"{one.name}: {getattr(ours, one.name)!r} here, {getattr(theirs, one.name)!r} there"
        for one in fields(ModelSpec)
        if one.name != "layers" and not _same(getattr(ours, one.name), getattr(theirs, one.name))
    ]
    if ours.num_layers != theirs.num_layers:
        lines.append(f"layers: {ours.num_layers} here, {theirs.num_layers} there")
    for i, (own, other) in enumerate(zip(ours.layers, theirs.layers, strict=False)):
        found = list(_layer_differences(i, own, other)) if own != other else []
        if found:
            lines += found
            break
    return lines


def _same(ours: Any, theirs: Any) -> bool:
    """Files may hold a number in float32: 1e-05 is 9.99999975e-06 there."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)


def _layer_differences(number: int, own: LayerSpec, other: LayerSpec) -> Iterator[str]:
    def parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if hasattr(value, "__dataclass_fields__"):
            for one in fields(value):
                yield from parts(getattr(value, one.name), f"{path}.{one.name}")
        else:
            yield path, value

    theirs = dict(parts(other, f"layers.{number}"))
    for path, value in parts(own, f"layers.{number}"):
        if not _same(theirs.get(path), value):
            yield f"{path}: {value!r} here, {theirs.get(path)!r} there"


def first_weight_difference(
    ours: ModelFiles, theirs: ModelFiles, tolerance: float
) -> TensorDifference | None:
    """The first parameter, in the order of a forward pass, whose values differ by more than
    `tolerance` times its largest one. Compared as plain numbers, whatever the files store.
    """
    for difference in _shape_differences(ours, theirs):
        return difference
    plans = [_plan(files) for files in (ours, theirs)]
    names = plans[0].parameters
    ordered = sorted(names, key=lambda name: (name in ("final_norm", "head"), name != "embedding"))
    for name in ordered:
        if name not in plans[1].parameters:
            continue
        own, their = (_read(plan, name) for plan in plans)
        if own.shape != their.shape:
            where = f"{name} {list(own.shape)} here, {list(their.shape)} there"
            return TensorDifference(where, ("", ""), math.inf, (), (), ())
        for piece, other in _pairs(ours, theirs, name):
            index = piece.index(names[name])
            found = _difference(name, (piece.name, other.name), own[index], their[index], tolerance)
            if found is not None:
                return found
    return None


def first_stage_difference(
    ours: ModelFiles, theirs: ModelFiles, token_ids: Sequence[int], tolerance: float
) -> TensorDifference | None:
    """Where two models' answers to the same tokens begin to differ: both are loaded in float32 for
    it.
    """
    first, second = (load_planned(_plan(files)) for files in (ours, theirs))
    for own, other in zip(trace(first, token_ids), trace(second, token_ids), strict=False):
        if own.values.shape != other.values.shape or own.name != other.name:
            where = f"{own.name} {list(own.values.shape)}"
            return TensorDifference(
                where, ("", ""), math.inf, (), (), (), f"There it is {list(other.values.shape)}."
            )
        found = _difference(own.name, ("", ""), own.values, other.values, tolerance)
        if found is not None:
            return found
    return None


def _plan(files: ModelFiles) -> WeightPlan:
    return plan_weights(files, ReferenceKernels(), torch.float32, torch.device("cpu"), "none")


def _read(plan: WeightPlan, name: str) -> Tensor:
    """One parameter as plain numbers."""
    weight, room = plan.make_room(name)
    for piece in plan.files.pieces:
        if piece.parameter == name:
            targets = room[piece.part or 0]
            if piece.expert is not None:
                targets = tuple(target[piece.expert] for target in targets)
            read_piece(plan.files.checkpoint, piece, plan.format_of(piece), targets)
    return weight.tensor


def _pairs(ours: ModelFiles, theirs: ModelFiles, name: str) -> Iterator[tuple[Piece, Piece]]:
    """The tensors that fill a parameter, ours beside theirs; where one file stacks what the other
    does not, the first stands for all.
    """
    own = [piece for piece in ours.pieces if piece.parameter == name]
    other = {
        (piece.part, piece.expert): piece for piece in theirs.pieces if piece.parameter == name
    }
    for piece in own:
        yield piece, other.get((piece.part, piece.expert), next(iter(other.values())))


def _shape_differences(ours: ModelFiles, theirs: ModelFiles) -> Iterator[TensorDifference]:
    """Tensors of another shape: such a file can't even be loaded."""
    parameters = ours.spec.parameters()
    for name in parameters:
        for piece, other in (
            _pairs(ours, theirs, name)
            if any(one.parameter == name for one in theirs.pieces)
            else ()
        ):
            infos = [
                files.checkpoint.tensors.get(one.name)
                for files, one in ((ours, piece), (theirs, other))
            ]
            own, their = infos
            if own is None or their is None or piece.part != other.part:
                continue
            if own.shape != their.shape:
                hint = (
                    "The shapes are each other's transpose: one of the files stores it transposed"
                )
                is_transposed = own.shape == their.shape[::-1]
                yield TensorDifference(
                    f"{name} {list(own.shape)} here, {list(their.shape)} there",
                    (piece.name, other.name),
                    math.inf,
                    (),
                    _first_values(ours, own),
                    _first_values(theirs, their),
                    hint if is_transposed else "",
                )


def _first_values(files: ModelFiles, info: TensorInfo) -> tuple[float, ...]:
    return tuple(files.checkpoint.read(info.name).float().flatten()[:_SHOWN].tolist())


def _difference(
    where: str, names: tuple[str, str], ours: Tensor, theirs: Tensor, tolerance: float
) -> TensorDifference | None:
    gap = (ours.float() - theirs.float()).abs()
    gap = torch.where(ours.isnan() & theirs.isnan(), 0.0, gap.nan_to_num(nan=math.inf))
    finite = ours[ours.isfinite()]
    limit = tolerance * max(float(finite.abs().max()) if finite.numel() else 0.0, 1e-30)
    if not bool((gap > limit).any()):
        return None
    flat = int((gap.flatten() > limit).nonzero()[0])
    place = tuple(int(one) for one in torch.unravel_index(torch.tensor(flat), ours.shape))
    own, other = (values.flatten()[flat : flat + _SHOWN].tolist() for values in (ours, theirs))
    hint = _hint(ours.float(), theirs.float(), limit) if names[0] else ""
    return TensorDifference(where, names, float(gap.max()), place, tuple(own), tuple(other), hint)


def _hint(ours: Tensor, theirs: Tensor, limit: float) -> str:
    """What would explain it, if anything simple does."""

    def same(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and bool(((a - b).abs() <= limit).all())

    if ours.dim() == 2 and same(ours, theirs.t()):
        return "A transpose explains it: one of the files stores this matrix the other way round"
    if (
        ours.dim() == 2
        and same(ours.sort(0).values, theirs.sort(0).values)
        and same(ours.sum(1).sort().values, theirs.sum(1).sort().values)
    ):
        return "They are the same rows in another order, such as rope's two ways to pair dimensions"
    if same(ours, -theirs):
        return "Only the sign differs"
    if same(ours, theirs + 1) or same(ours + 1, theirs):
        return "They differ by one: some norms store their weight minus one"
    return ""
