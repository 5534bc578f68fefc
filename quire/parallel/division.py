"""Which rows of each parameter are whose.

Every matrix is divided by its outputs (rows) only, so each output is computed by one rank, over all
of its inputs and in the order in which one device alone would add: nothing is ever summed across
ranks. Attention is divided by heads, and where there are fewer key heads than ranks, several ranks
keep the same key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.errors import InvalidRequestError
from quire.kernels.ops import AttentionSpec, HeadShape
from quire.models.spec import LayerSpec, Mixer, ModelSpec, Parameter, mixer_names

_UNITS = (64, 16)
"""Rows are divided in runs of so many where there are enough of them: kernels work on whole tiles,
and some formats are computed with in runs of 16 rows only.
"""
_WHOLE = (
    "norm",
    "norm_bias",
    ".router.weight",
    ".router.bias",
    ".choice_bias",
    ".shared_gate.weight",
)
"""How the names end of parameters that every rank keeps: small ones that all of them need."""


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one rank: some key heads, and the query heads that look at them."""

    first: int
    first_kv: int
    shape: HeadShape

    @property
    def query(self) -> slice:
        """Its query heads among all."""
        return slice(self.first, self.first + self.shape.num_heads)

    @property
    def kv(self) -> slice:
        """Its key and value heads among all."""
        return slice(self.first_kv, self.first_kv + self.shape.num_kv_heads)


@dataclass(frozen=True, slots=True)
class Division:
    """A model divided among `size` ranks, as `rank` sees it."""

    spec: ModelSpec
    """Of the whole model."""
    rank: int
    size: int

    def __post_init__(self) -> None:
        num_heads = min(heads.num_heads for heads in self.spec.head_shapes)
        if self.size > num_heads:
            raise InvalidRequestError(
                "tensor_parallel_size",
                f"is {self.size}, but the model has only {num_heads} query heads to divide",
            )

    def rows(self, total: int, rank: int | None = None) -> slice:
        """A rank's share of so many rows."""
        fitting = [unit for unit in _UNITS if total % unit == 0 and total // unit >= self.size]
        unit = next(
            (unit for unit in fitting if total // unit % self.size == 0),
            fitting[-1] if fitting else 1,
        )
        share = _share(total // unit, self.size, self.rank if rank is None else rank)
        return slice(share.start * unit, share.stop * unit)

    def widths(self, total: int) -> tuple[int, ...]:
        """How many of so many rows each rank has."""
        return tuple(_length(self.rows(total, rank)) for rank in range(self.size))

    def heads(self, heads: HeadShape, rank: int | None = None) -> HeadShare:
        """A rank's share of the heads of a layer."""
        rank = self.rank if rank is None else rank
        group = heads.num_heads // heads.num_kv_heads
        if self.size <= heads.num_kv_heads:
            own = _share(heads.num_kv_heads, self.size, rank)
            shape = replace(heads, num_heads=_length(own) * group, num_kv_heads=_length(own))
            return HeadShare(own.start * group, own.start, shape)
        # Several ranks per key head, as evenly as possible; each takes some of the query heads that
        # look at it.
        sharers = [
            _share(self.size, heads.num_kv_heads, head) for head in range(heads.num_kv_heads)
        ]
        kv_head = next(head for head, ranks in enumerate(sharers) if rank < ranks.stop)
        ranks = sharers[kv_head]
        if _length(ranks) > group:
            raise InvalidRequestError(
                "tensor_parallel_size",
                f"is {self.size}, but each of the model's {heads.num_kv_heads} key heads has only {group} query heads "
                "to divide",
            )
        own = _share(group, _length(ranks), rank - ranks.start)
        shape = replace(heads, num_heads=_length(own), num_kv_heads=1)
        return HeadShare(kv_head * group + own.start, kv_head, shape)

    @property
    def has_equal_heads(self) -> bool:
        """Whether all ranks have as many."""
        return all(
            len({self.heads(heads, rank).shape for rank in range(self.size)}) == 1
            for heads in self.spec.head_shapes
        )

    def head_widths(self, heads: HeadShape) -> tuple[int, ...]:
        """How wide each rank's part of the queries is, and of what attention makes of them."""
        return tuple(
            self.heads(heads, rank).shape.num_heads * heads.head_dim for rank in range(self.size)
        )

    @property
    def local_spec(self) -> ModelSpec:
        """The model as this rank's decoder sees it: with its own heads."""
        return replace(
            self.spec, layers=tuple(self._local_layer(layer) for layer in self.spec.layers)
        )

    def _local_layer(self, layer: LayerSpec) -> LayerSpec:
        return layer.with_mixers(self._local_mixer)

    def _local_mixer(self, mixer: Mixer) -> Mixer:
        if self.size == 1:
            return mixer
        if not isinstance(mixer, AttentionSpec):
            raise InvalidRequestError(
                "tensor_parallel_size",
                "divides attention only: a model with recurrent layers runs on one device",
            )
        return replace(mixer, heads=self.heads(mixer.heads).shape)

    def _heads_of(self, name: str) -> HeadShape | None:
        """Of the attention whose parameter has this name; None if it belongs to none."""
        parts = name.split(".")
        if parts[0] != "layers":
            return None
        layer = self.spec.layers[int(parts[1])]
        found = dict(zip(mixer_names(layer), layer.mixers, strict=True)).get(parts[2])
        return found.heads if isinstance(found, AttentionSpec) else None

    def segments(self, name: str, parameter: Parameter) -> tuple[slice, ...]:
        """The rows of a parameter that this rank keeps: one run of each of the tensors stacked in
        it.
        """
        total = parameter.shape[-2] if len(parameter.shape) > 1 else parameter.shape[0]
        if name.endswith(_WHOLE):
            return (slice(0, total),)
        stacked = parameter.rows or (total,)
        starts = [sum(stacked[:part]) for part in range(len(stacked))]
        heads = self._heads_of(name)
        if heads is not None and ".qkv." in name:
            share = self.heads(heads)
            # queries alone, if another layer has the keys
            sides = (share.query, share.kv, share.kv)[: len(stacked)]
            runs: Sequence[slice] = [_times(own, heads.head_dim) for own in sides]
        elif heads is not None and name.endswith(".sinks"):
            runs = [self.heads(heads).query]
        else:
            runs = [self.rows(count) for count in stacked]
        return tuple(
            slice(start + run.start, start + run.stop)
            for start, run in zip(starts, runs, strict=True)
        )

    def parameter(self, name: str, parameter: Parameter) -> Parameter:
        """What this rank keeps of one."""
        counts = [_length(run) for run in self.segments(name, parameter)]
        axis = max(len(parameter.shape) - 2, 0)
        shape = (*parameter.shape[:axis], sum(counts), *parameter.shape[axis + 1 :])
        return replace(parameter, shape=shape, rows=tuple(counts) if parameter.rows else ())

    def gathered(self, name: str, parameter: Parameter) -> tuple[int, ...] | None:
        """How wide each rank's part of a product with this parameter is; None where it stays as it
        is: every rank has all of it, or needs its own part only (queries, keys and values).
        """
        if (
            name.endswith(_WHOLE)
            or ".qkv." in name
            or len(parameter.shape) < 2
            or name.endswith("_bias")
        ):
            return None
        total = parameter.shape[-2]
        if parameter.rows:  # gate and up become one
            total = parameter.rows[0]
        return self.widths(total)


def _share(total: int, parts: int, index: int) -> slice:
    """Part `index` of `total` things: the first parts get one more where they don't come out even."""
    each, more = divmod(total, parts)
    start = index * each + min(index, more)
    return slice(start, start + each + (index < more))


def _length(run: slice) -> int:
    return int(run.stop - run.start)


def _times(run: slice, factor: int) -> slice:
    return slice(run.start * factor, run.stop * factor)
