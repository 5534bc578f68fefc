"""A decoder's weights by name: taken from their source once, replaced where they lie, given back
and taken again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from torch import Tensor

from quire.errors import ModelFormatError
from quire.kernels.ops import Kernels
from quire.kernels.tensor_memory import TensorMemory
from quire.kernels.weights import Weight
from quire.models.linear import Linear

SleepLevel = Literal[1, 2]
"""1: weights are kept in host memory; 2: they are gone, and loaded again after waking."""


class WeightSource(Protocol):
    """Where a decoder takes its weights from, each once: a dict of them, or files that are being
    read.
    """

    def pop(self, name: str, /) -> Weight:
        """Hands a weight over: whoever packs it needs no second copy in memory."""

    def __contains__(self, name: object, /) -> bool: ...


class Parameters:
    """Hands loaded weights to a decoder by name, each packed for the kernels when it is taken, and
    then freed.

    A weight's memory is the decoder's from then on, and stays the same: graphs and recorded steps
    know its address.
    """

    def __init__(self, kernels: Kernels, loaded: WeightSource) -> None:
        self._kernels = kernels
        self._loaded = loaded
        self.weights: dict[str, Weight] = {}
        """All that were taken, as the kernels packed them."""
        self.missing: set[str] = set()
        """Those whose numbers are gone, since the decoder slept at level 2, and that were not
        replaced yet.
        """
        self._forms: dict[str, str] = {}
        """By name, the formats that a weight was loaded in: only such a weight fits into its place."""
        self._packed: set[str] = set()
        self._memory: TensorMemory | None = None

    def matrix(self, name: str, pack: bool = True) -> Weight:
        """A weight as the kernels want it laid out, unless `pack` says to leave it as it is."""
        loaded = self._loaded.pop(name)
        self._forms[name] = _form(loaded)
        if pack:
            self._packed.add(name)
        self.weights[name] = self._kernels.pack(loaded) if pack else loaded
        return self.weights[name]

    def vector(self, name: str) -> Tensor:
        return self.matrix(name, pack=False).tensor

    def optional_vector(self, name: str) -> Tensor | None:
        return self.vector(name) if name in self._loaded else None

    def linear(self, name: str) -> Linear:
        """A product with a weight, and with a bias where the model has one."""
        return Linear(self.matrix(f"{name}.weight"), self.optional_vector(f"{name}.bias"))

    def update(self, weights: Mapping[str, Weight]) -> None:
        """Replaces weights where they lie; what is captured or recorded computes with the new ones.

        All are checked first: with an unknown name, another shape or another format, nothing
        changes. After that they are replaced one by one. If that fails (for want of memory to pack
        one in), that one and those behind it are still the old ones, and the error names it.
        """
        if self._memory is not None:
            raise ModelFormatError(
                "weights can't be replaced while the model is asleep: wake it first"
            )
        for name, weight in weights.items():
            self._check(name, weight)
        for done, (name, weight) in enumerate(weights.items()):
            try:
                if name in self._packed:
                    self._kernels.pack_into(self.weights[name], weight)
                else:
                    self.weights[name].copy_(weight)
            except Exception as error:
                raise ModelFormatError(
                    f"{name} could not be replaced, {done} of {len(weights)} weights were, before it: {error}"
                ) from error
            self.missing.discard(name)

    def _check(self, name: str, weight: Weight) -> None:
        place = self.weights.get(name)
        if place is None:
            raise ModelFormatError(
                f"the model has no parameter {name}: it has {', '.join(list(self.weights)[:3])}, …"
            )
        if weight.shape != place.shape:
            raise ModelFormatError(
                f"{name} has shape {list(weight.shape)}; in this model it is {list(place.shape)}"
            )
        if (form := _form(weight)) != self._forms[name]:
            raise ModelFormatError(
                f"{name} is {form}; it was loaded, and can be replaced, as {self._forms[name]}"
            )

    def sleep(self, level: SleepLevel) -> None:
        """Gives the weights' memory back."""
        if self._memory is None:
            self._memory = TensorMemory(
                tensor
                for weight in self.weights.values()
                for part in weight.parts
                for tensor in part.tensors
            )
        self._memory.sleep(keep=level == 1)
        if level == 2:
            self.missing |= self.weights.keys()

    def wake(self) -> None:
        """Takes the memory again; after level 2 all weights are `missing`."""
        if self._memory is not None:
            self._memory.wake()
            self._memory = None


def _form(weight: Weight) -> str:
    """A loaded weight's formats, with the number of rows in each where there are several."""
    names = [f"{part.rows} rows of {part.format.name}" for part in weight.parts]
    return weight.parts[0].format.name if len(names) == 1 else ", ".join(names)
