"""A rank's kernels: each operation of the protocol is decided on, none goes through by accident."""

from __future__ import annotations

from typing import Protocol

import pytest
import torch
from torch import Tensor

from quire.kernels.ops import ExpertWeights, Kernels, MoeSpec
from quire.kernels.reference import ReferenceKernels
from quire.parallel.division import Division
from quire.parallel.group import Group
from quire.parallel.kernels import DividedSource, ParallelKernels
from tests.parallel.ranks import Ranks, divided, whole_weights
from tests.random_models import SPECS

SPEC = SPECS["qwen3_moe"]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return Ranks(2)


class MoreKernels(Kernels, Protocol):
    def dot_product(self, x: Tensor, y: Tensor) -> Tensor: ...


def operations(protocol: type) -> set[str]:
    own = [kind for kind in protocol.__mro__ if kind.__module__ not in ("typing", "builtins")]
    return {name for kind in own for name in vars(kind) if not name.startswith("_")}


def undecided(protocol: type, kernels: object) -> set[str]:
    """Operations that are not named once: taken over by `__init__`, or a method."""
    taken_over, methods = set(vars(kernels)), set(vars(type(kernels)))
    return {name for name in operations(protocol) if (name in taken_over) == (name in methods)}


def test_each_operation_is_named_once(ranks: Ranks) -> None:
    kernels = ranks.run(
        lambda group: ParallelKernels(ReferenceKernels(), group, Division(SPEC, group.rank, 2))
    )[0]
    assert {"linear", "rms_norm", "record", "keep_between_"} <= operations(Kernels)
    assert undecided(Kernels, kernels) == set()


def test_an_operation_that_the_protocol_gains_is_missed(ranks: Ranks) -> None:
    kernels = ranks.run(
        lambda group: ParallelKernels(ReferenceKernels(), group, Division(SPEC, group.rank, 2))
    )[0]
    assert undecided(MoreKernels, kernels) == {"dot_product"}
    assert not hasattr(kernels, "gate")  # ReferenceKernels has it, the protocol does not


def test_what_stands_between_an_experts_products_is_whole(ranks: Ranks) -> None:
    weights = whole_weights(SPEC, torch.float32)
    moe = SPEC.layers[1].mlp
    assert isinstance(moe, MoeSpec)
    x = torch.randn(5, SPEC.hidden_size, generator=torch.Generator().manual_seed(1))
    router_logits = x[:, : moe.num_experts].contiguous()
    factors = torch.arange(1.0, moe.intermediate_size + 1)
    gate_up, down = "layers.1.mlp.gate_up", "layers.1.mlp.down"

    def scaled(hidden: Tensor) -> Tensor:
        return hidden * factors

    def compute(group: Group) -> Tensor:
        division = Division(SPEC, group.rank, group.size)
        kernels = ParallelKernels(ReferenceKernels(), group, division)
        source = DividedSource(divided(weights, division), division)
        experts = ExpertWeights(kernels.pack(source.pop(gate_up)), kernels.pack(source.pop(down)))
        return kernels.moe(x, router_logits, experts, moe, scaled)

    expected = ReferenceKernels().moe(
        x, router_logits, ExpertWeights(weights[gate_up], weights[down]), moe, scaled
    )
    for found in ranks.run(compute):
        assert torch.allclose(found, expected, atol=1e-5)
