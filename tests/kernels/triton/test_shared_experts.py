"""A shared expert among the others: the bits of the operations one by one, each row alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.ops import Activation, ExpertWeights, MoeSpec, Router, SharedExpert
from quire.kernels.reference import ReferenceKernels
from quire.kernels.weights import Weight
from quire.models.spec import LayerSpec
from tests.kernels.triton.support import MARKS, NAN, ON_GPU, random

from quire.backends.triton.kernels import TritonKernels  # isort: skip  (after the check for Triton)
from quire.backends.triton import shared_experts  # isort: skip

pytestmark = MARKS
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
"""The interpreter cuts numbers off where the GPU rounds them to bfloat16."""

GATED = MoeSpec(6, 2, 48, True, shared_intermediate_size=48)
"""As Qwen3.5 has it."""
SIGMOID = replace(
    GATED,
    activation=Activation.GELU_TANH,
    shared_gate=False,
    sigmoid_scores=True,
    choice_bias=True,
    weight_scale=1.7,
)
"""As GLM-4.7-Flash has it, whose router is in float32."""
LARGE = MoeSpec(256, 8, 512, True, shared_intermediate_size=512)

Layer = tuple[Tensor, Router, ExpertWeights, MoeSpec, SharedExpert]


def dense(*shape: int, dtype: torch.dtype, seed: int) -> Weight:
    return Weight.dense(random(*shape, dtype=dtype, seed=seed) * shape[-1] ** -0.5)


def layer_of(spec: MoeSpec, hidden: int, rows: int) -> Layer:
    count, size = spec.num_experts, spec.intermediate_size
    wide = torch.float32 if spec.has_float32_router else DTYPE
    bias = random(count, dtype=torch.float32, seed=8) if spec.choice_bias else None
    experts = ExpertWeights(
        dense(count, 2 * size, hidden, dtype=DTYPE, seed=1),
        dense(count, hidden, size, dtype=DTYPE, seed=2),
        choice_bias=bias,
    )
    added = random(count, dtype=wide, seed=3) if spec.bias else None
    router = Router(dense(count, hidden, dtype=wide, seed=4), added)
    shared = SharedExpert(
        dense(2 * size, hidden, dtype=DTYPE, seed=5),
        dense(hidden, size, dtype=DTYPE, seed=6),
        dense(1, hidden, dtype=DTYPE, seed=7) if spec.shared_gate else None,
    )
    return random(rows, hidden, dtype=DTYPE, seed=rows), router, experts, spec, shared


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> TritonKernels:
    return TritonKernels(DTYPE)


def assert_joined(kernels: TritonKernels, layer: Layer) -> Tensor:
    """The layer's output, computed both ways."""
    assert shared_experts.joins(*layer) == (len(layer[0]) <= 256)
    found = kernels.routed_experts(*layer)
    assert torch.equal(found, ReferenceKernels.routed_experts(kernels, *layer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("spec", [GATED, SIGMOID], ids=["gate", "sigmoid"])
def test_bits_are_those_of_the_operations_one_by_one(
    spec: MoeSpec, rows: int, kernels: TritonKernels
) -> None:
    layer = layer_of(spec, 80, rows)
    found = assert_joined(kernels, layer)
    x, *others = layer
    assert torch.equal(kernels.routed_experts(x[-1:], *others), found[-1:])
    poisoned = x.clone()
    poisoned[:-1] = NAN
    assert torch.equal(kernels.routed_experts(poisoned, *others)[-1:], found[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("spec", [GATED, SIGMOID], ids=["gate", "sigmoid"])
def test_many_rows_and_experts_of_other_sizes_add_the_shared_one_in_the_sum(
    spec: MoeSpec, kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_experts, "joins", lambda *layer: False)
    for rows in (1, 3):
        x, router, experts, _, _ = layer_of(spec, 80, rows)
        wider = layer_of(replace(spec, intermediate_size=64), 80, rows)[-1]
        for shared in (layer_of(spec, 80, rows)[-1], wider):
            layer = x, router, experts, spec, shared
            expected = ReferenceKernels.routed_experts(kernels, *layer)
            assert torch.equal(kernels.routed_experts(*layer), expected)


@pytest.mark.skipif(not ON_GPU, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 33, 100, 256, 257, 3000])
@pytest.mark.parametrize(
    ("spec", "hidden"),
    [(LARGE, 2048), (replace(SIGMOID, num_experts=64, top_k=4, intermediate_size=1536), 2048)],
    ids=["Qwen3.5-35B-A3B", "GLM-4.7-Flash"],
)
def test_bits_of_true_shapes(spec: MoeSpec, hidden: int, rows: int, kernels: TritonKernels) -> None:
    spec = replace(spec, shared_intermediate_size=spec.intermediate_size)
    assert_joined(kernels, layer_of(spec, hidden, rows))


def test_other_layers_are_computed_by_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = x, router, experts, spec, shared = layer_of(GATED, 80, 2)
    assert shared_experts.joins(*layer)
    wider = replace(GATED, intermediate_size=96)
    others: list[Layer] = [
        (x.float(), router, experts, spec, shared),
        (x.expand(2, -1)[:0], router, experts, spec, shared),
        (x[:1].expand(257, -1), router, experts, spec, shared),
        (x, router, layer_of(wider, 80, 2)[2], spec, shared),
        (x, router, experts._replace(down_bias=x), spec, shared),
        (x, router, experts, replace(spec, num_groups=2), shared),
        (x, layer_of(SIGMOID, 80, 2)[1], experts, spec, shared),
    ]
    assert [shared_experts.joins(*one) for one in others] == [False] * len(others)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="the interpreter's models are too small for a card's kernels")
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2_moe"])
def test_a_model_has_the_same_logits_either_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.decoding import all_logits, make_caches, run_tokens
    from tests.random_models import SPECS, random_decoder

    def of_one_size(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.mlp, MoeSpec):
            return layer
        size = layer.mlp.shared_intermediate_size
        return replace(
            layer, mlp=replace(layer.mlp, num_groups=1, top_groups=1, intermediate_size=size)
        )

    given, tokens = SPECS[name], list(range(20))
    spec = replace(given, layers=tuple(map(of_one_size, given.layers)))
    joined, join = [], shared_experts.joins
    with monkeypatch.context() as patch:
        patch.setattr(shared_experts, "joins", lambda *layer: False)
        expected = all_logits(random_decoder(spec, TritonKernels(DTYPE), DTYPE), tokens)

    def noted(*layer: Any) -> bool:
        joined.append(join(*layer))
        return joined[-1]

    monkeypatch.setattr(shared_experts, "joins", noted)
    decoder = random_decoder(spec, TritonKernels(DTYPE), DTYPE)
    found = all_logits(decoder, tokens)
    assert torch.equal(found, expected)
    caches = make_caches(decoder, 4)
    run_tokens(decoder, caches, tokens[:-1], 0)
    assert torch.equal(run_tokens(decoder, caches, tokens, 19)[0], found[-1])
    assert all(joined)
    assert joined
