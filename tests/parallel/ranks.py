"""Ranks as threads of this process, with real gloo between them; and random weights divided among
them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from quire.backends.select import pick_device
from quire.kernels.ops import Kernels
from quire.kernels.weights import Part, Weight
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.parallel.division import Division
from quire.parallel.group import Group
from quire.parallel.kernels import DividedSource, parallel_kernels

T = TypeVar("T")
SECONDS = 60.0


class Ranks:
    """So many threads that can gather."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._threads = ThreadPoolExecutor(size)
        store = c10d.HashStore()
        self.groups = self._all(
            lambda rank: Group(store, rank, size, pick_device("cpu"), False, SECONDS)
        )

    def run(self, compute: Callable[[Group], T]) -> list[T]:
        """What each rank computes."""
        return self._all(lambda rank: compute(self.groups[rank]))

    def _all(self, compute: Callable[[int], T]) -> list[T]:
        running = [self._threads.submit(compute, rank) for rank in range(self.size)]
        return [one.result(SECONDS) for one in running]


def whole_weights(
    spec: ModelSpec,
    dtype: torch.dtype,
    quantize: Callable[[Tensor], Weight] | None = None,
    seed: int = 0,
) -> dict[str, Weight]:
    """Random ones, large enough that answers wander."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Weight] = {}
    for name, parameter in spec.parameters().items():
        value = torch.randn(parameter.shape, generator=generator)
        value = 1 + 0.1 * value if "norm" in name else value * (2.0 / parameter.shape[-1] ** 0.5)
        is_matrix = len(parameter.shape) > 1 and "router" not in name and "bias" not in name
        is_matrix = is_matrix and not parameter.stays_plain
        plain = value if parameter.keep_float32 else value.to(dtype)
        weights[name] = quantize(value) if quantize and is_matrix else Weight.dense(plain)
    return weights


def divided(weights: dict[str, Weight], division: Division) -> dict[str, Weight]:
    """A rank's rows of them."""
    found: dict[str, Weight] = {}
    for name, parameter in division.spec.parameters().items():
        runs, own = division.segments(name, parameter), division.parameter(name, parameter)
        axis = max(len(own.shape) - 2, 0)
        (part,) = weights[name].parts
        tensors = tuple(
            torch.cat([tensor.narrow(axis, run.start, run.stop - run.start) for run in runs], axis)
            for tensor in part.tensors
        )
        found[name] = Weight(own.shape, (Part(part.format, tensors, own.shape[axis]),))
    return found


def rank_decoder(
    spec: ModelSpec, weights: dict[str, Weight], kernels: Kernels, dtype: torch.dtype, group: Group
) -> Decoder:
    division = Division(spec, group.rank, group.size)
    source = DividedSource(divided(weights, division), division)
    return Decoder(division.local_spec, parallel_kernels(kernels, group, division), source, dtype)
