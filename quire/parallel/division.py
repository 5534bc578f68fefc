"""Which rows of each parameter are whose.

Every matrix is divided by its outputs (rows) only, so each output is computed by one rank, over all
of its inputs and in the order in which one device alone would add: nothing is ever summed across
ranks. How a mixer is divided, it says itself (`share`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.errors import InvalidRequestError
from quire.kernels.ops import AttentionSpec
from quire.kernels.shares import MixerShare, length, rows_of
from quire.models.spec import POSITIONS, LayerSpec, Mixer, ModelSpec, Parameter, mixer_names

_WHOLE = (
    "norm",
    "norm_bias",
    ".router.weight",
    ".router.bias",
    ".choice_bias",
    ".shared_gate.weight",
    ".expert_scales",
    ".stream_scale",
    "_alpha",
    POSITIONS,
    "per_layer_embedding",
)
"""How the names end of parameters that every rank keeps: small ones that all of them need."""


@dataclass(frozen=True, slots=True)
class Division:
    """A model divided among `size` ranks, as `rank` sees it."""

    spec: ModelSpec
    """Of the whole model."""
    rank: int
    size: int

    def __post_init__(self) -> None:
        """Says at once what can't be divided."""
        mixers = dict.fromkeys(self.spec.mixers)
        for mixer in mixers:
            for rank in range(self.size):
                mixer.share(rank, self.size)
        has_states = any(not isinstance(mixer, AttentionSpec) for mixer in mixers)
        if has_states and not self.has_equal_mixers:
            # Layers that keep different things share blocks by their sizes, the same on all ranks.
            possible = ", ".join(str(size) for size in range(1, 257) if _is_even(self.spec, size))
            raise InvalidRequestError(
                "tensor_parallel_size",
                f"is {self.size}, with which the heads of attention don't come out even, as they "
                f"must beside recurrent layers and convolutions; possible: {possible}",
            )

    def rows(self, total: int, rank: int | None = None) -> slice:
        """A rank's share of so many rows."""
        return rows_of(total, self.size, self.rank if rank is None else rank)

    def widths(self, total: int) -> tuple[int, ...]:
        """How many of so many rows each rank has."""
        return tuple(length(self.rows(total, rank)) for rank in range(self.size))

    @property
    def has_equal_mixers(self) -> bool:
        """Whether those of all ranks are equally large."""
        return _is_even(self.spec, self.size)

    @property
    def local_spec(self) -> ModelSpec:
        """The model as this rank's decoder sees it: with its own part of every mixer."""
        return replace(
            self.spec, layers=tuple(self._local_layer(layer) for layer in self.spec.layers)
        )

    def _local_layer(self, layer: LayerSpec) -> LayerSpec:
        return layer.with_mixers(lambda mixer: mixer.share(self.rank, self.size).mixer)

    def _mixer_of(self, name: str) -> tuple[Mixer, LayerSpec, str] | None:
        """The mixer whose parameter has this name, its layer, and what it calls the parameter; None
        if it belongs to none.
        """
        parts = name.split(".")
        if parts[0] != "layers":
            return None
        layer = self.spec.layers[int(parts[1])]
        mixer = dict(zip(mixer_names(layer), layer.mixers, strict=True)).get(parts[2])
        return None if mixer is None else (mixer, layer, parts[3])

    def _own_rows(self, name: str) -> tuple[slice, ...] | None:
        """What the mixer with this parameter says about its rows, if it does."""
        found = self._mixer_of(name)
        if found is None:
            return None
        mixer, layer, own = found
        share: MixerShare[Mixer] = mixer.share(self.rank, self.size)
        runs = share.rows.get(own)
        if runs is not None and own == "qkv" and layer.reads_layer is not None:
            # another layer has the keys and values
            runs = (runs[0], runs[3]) if layer.gated_attention else runs[:1]
        return runs

    def segments(self, name: str, parameter: Parameter) -> tuple[slice, ...]:
        """The rows of a parameter that this rank keeps: one run of each of the tensors stacked in
        it.
        """
        total = parameter.shape[-2] if len(parameter.shape) > 1 else parameter.shape[0]
        runs: Sequence[slice] | None = self._own_rows(name)
        if runs is None and name.endswith(_WHOLE):
            return (slice(0, total),)
        if runs is not None and not parameter.rows:
            return tuple(runs)
        stacked = parameter.rows or (total,)
        starts = [sum(stacked[:part]) for part in range(len(stacked))]
        runs = [self.rows(count) for count in stacked] if runs is None else runs[: len(stacked)]
        return tuple(
            slice(start + run.start, start + run.stop)
            for start, run in zip(starts, runs, strict=True)
        )

    def parameter(self, name: str, parameter: Parameter) -> Parameter:
        """What this rank keeps of one."""
        counts = [length(run) for run in self.segments(name, parameter)]
        axis = max(len(parameter.shape) - 2, 0)
        shape = (*parameter.shape[:axis], sum(counts), *parameter.shape[axis + 1 :])
        return replace(parameter, shape=shape, rows=tuple(counts) if parameter.rows else ())

    def gathered(self, name: str, parameter: Parameter) -> tuple[int, ...] | None:
        """How wide each rank's part of a product with this parameter is; None where it stays as it
        is: every rank has all of it, or needs its own part only (what stands in front of a mixer).
        """
        if name.endswith((*_WHOLE, "_bias")) or len(parameter.shape) < 2:
            return None
        if self._own_rows(name) is not None:
            return None
        total = parameter.shape[-2]
        if parameter.rows:  # gate and up become one
            total = parameter.rows[0]
        return self.widths(total)

    def gathered_inputs(self, name: str) -> tuple[int, ...] | None:
        """How wide each rank's part is of what a product with this parameter takes; None where every
        rank has it whole.
        """
        found = self._mixer_of(name)
        if found is None or found[2] != "output" or not name.endswith(".weight"):
            return None
        mixer = found[0]
        return tuple(length(mixer.share(rank, self.size).output) for rank in range(self.size))


def _is_even(spec: ModelSpec, size: int) -> bool:
    """Whether every mixer can be divided so that all ranks have as much of it."""
    try:
        return all(
            len({mixer.share(rank, size).mixer for rank in range(size)}) == 1
            for mixer in dict.fromkeys(spec.mixers)
        )
    except InvalidRequestError:
        return False
