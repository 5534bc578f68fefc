"""A decoder's weights by name: taken from their source once, replaced where they lie, given back
and taken again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from quire.errors import ModelFormatError
from quire.kernels.ops import Kernels
from quire.kernels.tensor_memory import TensorMemory
from quire.kernels.weights import Weight
from quire.models.linear import Embedding, ExpertsLinear, HeadLinear, Linear

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

    def __init__(
        self,
        kernels: Kernels,
        loaded: WeightSource,
        dtype: torch.dtype = torch.float32,
        num_positions: int = 0,
    ) -> None:
        """`dtype` and `num_positions` are those of constants: norms' weights, tables."""
        self._kernels = kernels
        self._loaded = loaded
        self._dtype = dtype
        self.num_positions = num_positions
        self.weights: dict[str, Weight] = {}
        """All that were taken, as the kernels packed them."""
        self.linears: dict[str, Linear | ExpertsLinear | HeadLinear | Embedding] = {}
        """The products made of them, and the embedding, by the names that adapters find them by."""
        self.missing: set[str] = set()
        """Those whose numbers are gone, since the decoder slept at level 2, or are of an earlier
        version than others', since an update failed halfway; and that were not replaced yet.
        """
        self.replaced = False
        """Whether some are others than those that were loaded."""
        self.formats: dict[str, str] = {}
        """By name, the formats that a weight was loaded in: only such a weight fits into its place."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        """By name, the shape that a weight was loaded in."""
        self._packed: set[str] = set()
        self._stacks: dict[str, tuple[int, bool]] = {}
        """By name of those that are packed head by head: how many heads, and whether they are turned."""
        self._memory: TensorMemory | None = None
        self.constants: dict[Hashable, Tensor] = {}
        """Tensors that are in no file: nobody replaces them."""

    def constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that is made once and shared by all who name it so, on the device of the weights
        that were taken.
        """
        if key not in self.constants:
            self.constants[key] = make().to(next(iter(self.weights.values())).device)
        return self.constants[key]

    def ones(self, size: int) -> Tensor:
        """The weights of a norm that has none."""
        return self.constant(("ones", size), lambda: torch.ones(size, dtype=self._dtype))

    def matrix(self, name: str, pack: bool = True) -> Weight:
        """A weight as the kernels want it laid out, unless `pack` says to leave it as it is."""
        loaded = self._loaded.pop(name)
        self.formats[name], self._shapes[name] = _form(loaded), loaded.shape
        if pack:
            self._packed.add(name)
        self.weights[name] = self._kernels.pack(self._as_packed(name, loaded)) if pack else loaded
        return self.weights[name]

    def vector(self, name: str) -> Tensor:
        return self.matrix(name, pack=False).tensor

    def optional_vector(self, name: str) -> Tensor | None:
        return self.vector(name) if name in self._loaded else None

    def linear(self, name: str) -> Linear:
        """A product with a weight, and with a bias where the model has one."""
        made = Linear(self.matrix(f"{name}.weight"), self.optional_vector(f"{name}.bias"))
        self.linears[name] = made
        return made

    def heads(self, name: str, num_heads: int, is_turned: bool = False) -> HeadLinear:
        """Products of each head with its rows of a matrix of plain numbers; if that is turned, with
        these rows transposed.
        """
        self._stacks[f"{name}.weight"] = num_heads, is_turned
        made = HeadLinear(self.matrix(f"{name}.weight"), num_heads, is_turned)
        self.linears[name] = made
        return made

    def _as_packed(self, name: str, loaded: Weight) -> Weight:
        """What the kernels pack of it."""
        if name not in self._stacks:
            return loaded
        num_heads, is_turned = self._stacks[name]
        stack = loaded.tensor.view(num_heads, -1, loaded.shape[1])
        return Weight.dense(stack.mT.contiguous() if is_turned else stack)

    def update(self, weights: Mapping[str, Weight]) -> None:
        """Replaces weights where they lie; what is captured or recorded computes with the new ones.

        All are checked first: with an unknown name, another shape or another format, nothing
        changes. After that they are replaced one by one. If that fails (for want of memory to pack
        one in), that one and those behind it are still the old ones: they are `missing`, unless
        none was replaced before, and the error names it.
        """
        if self._memory is not None:
            raise ModelFormatError(
                "weights can't be replaced while the model is asleep: wake it first"
            )
        for name, weight in weights.items():
            self._check(name, weight)
        self.replaced = True
        for done, (name, weight) in enumerate(weights.items()):
            try:
                if name in self._packed:
                    packed = self._as_packed(name, weight)
                    self._kernels.pack_into(self.weights[name], packed)
                else:
                    self.weights[name].copy_(weight)
            except Exception as error:
                if done:
                    self.missing.update(list(weights)[done:])
                raise ModelFormatError(
                    f"{name} could not be replaced, {done} of {len(weights)} weights were, before it: {error}"
                ) from error
            self.missing.discard(name)

    def _check(self, name: str, weight: Weight) -> None:
        if name not in self.weights:
            raise ModelFormatError(
                f"the model has no parameter {name}: it has {', '.join(list(self.weights)[:3])}, …"
            )
        if weight.shape != self._shapes[name]:
            shape = list(self._shapes[name])
            raise ModelFormatError(
                f"{name} has shape {list(weight.shape)}; in this model it is {shape}"
            )
        if (form := _form(weight)) != self.formats[name]:
            raise ModelFormatError(
                f"{name} is {form}; it was loaded, and can be replaced, as {self.formats[name]}"
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
