"""Mixture of experts by Triton: routing, grouping and the whole, against definitions; each row
alone.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import reference
from quire.kernels.ops import Activation, ExpertWeights, MoeSpec
from quire.kernels.weights import Weight
from tests.kernels.triton.support import (
    DEVICE,
    DTYPES,
    MARKS,
    NAN,
    ON_GPU,
    ROW_COUNTS,
    assert_close,
    assert_rows_alone,
    drawn,
    in_graph,
    random,
)

from quire.backends.triton.grouping import group_pairs  # isort: skip  (after the check for Triton)
from quire.backends.triton.kernels import TritonKernels  # isort: skip
from quire.kernels.reference import ReferenceKernels  # isort: skip
from quire.backends.triton.moe import moe, route, tile_width  # isort: skip

pytestmark = MARKS


def ascending(
    router_logits: Tensor, spec: MoeSpec, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the reference chooses, in ascending order of the experts."""
    weights, chosen = reference.route(router_logits, spec, bias)
    chosen, order = chosen.sort(-1)
    return chosen, weights.gather(1, order)


def truth_of(
    x: Tensor, router_logits: Tensor, experts: ExpertWeights, spec: MoeSpec
) -> tuple[Tensor, Tensor]:
    """In float64, and the magnitude of what was added up for each number."""
    chosen, weights = ascending(router_logits, spec, experts.choice_bias)
    gate_up, down = experts.gate_up.tensor, experts.down.tensor
    truth = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    size = torch.zeros_like(truth)
    for row in range(len(x)):
        for expert, weight in zip(chosen[row].tolist(), weights[row].double(), strict=True):
            packed = gate_up[expert].double() @ x[row].double()
            packed += 0 if experts.gate_up_bias is None else experts.gate_up_bias[expert].double()
            gate, up = packed.chunk(2)
            if spec.activation is Activation.CLAMPED_SWIGLU:
                gate = gate.clamp(max=7)
                hidden = gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)
            else:
                hidden = gate * gate.sigmoid() * up
            added = 0 if experts.down_bias is None else experts.down_bias[expert].double()
            truth[row] += (down[expert].double() @ hidden + added) * weight
            size[row] += (down[expert].double().abs() @ hidden.abs() + 1) * weight
    return truth, size


def make_layer(
    rows: int,
    experts: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    biases: bool = False,
) -> tuple[Tensor, Tensor, ExpertWeights]:
    weights = ExpertWeights(
        Weight.dense(random(experts, 2 * intermediate, hidden, dtype=dtype, seed=2) * hidden**-0.5),
        Weight.dense(
            random(experts, hidden, intermediate, dtype=dtype, seed=3) * intermediate**-0.5
        ),
    )
    if biases:
        added = random(experts, 2 * intermediate + hidden, dtype=dtype, seed=4)
        gate_up, down = added.split_with_sizes((2 * intermediate, hidden), 1)
        choice = random(experts, dtype=dtype, seed=5)
        weights = ExpertWeights(*weights[:2], gate_up.contiguous(), down.contiguous(), choice)
    x, router_logits = (
        random(rows, hidden, dtype=dtype, seed=rows),
        random(rows, experts, dtype=dtype, seed=1) * 2,
    )
    return x, router_logits, weights


@pytest.mark.slow
@drawn
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 20),
    st.sampled_from([(8, 2, 64, 48), (4, 4, 72, 40), (60, 4, 40, 24), (3, 1, 136, 200)]),
    st.booleans(),
)
def test_outputs_are_those_of_float64(
    dtype: torch.dtype, rows: int, shape: tuple[int, int, int, int], normalize: bool
) -> None:
    experts, top_k, hidden, intermediate = shape
    spec = MoeSpec(experts, top_k, intermediate, normalize)
    layer = make_layer(rows, experts, hidden, intermediate, dtype)
    truth, size = truth_of(*layer, spec)
    assert_close(moe(*layer, spec), truth, roundings=3, size=size)
    layer = make_layer(rows, experts, hidden, intermediate, dtype, biases=True)
    spec = replace(
        spec, activation=Activation.CLAMPED_SWIGLU, sigmoid_scores=True, weight_scale=1.7
    )
    truth, size = truth_of(*layer, spec)
    assert_close(moe(*layer, spec), truth, roundings=5, size=size)


@pytest.mark.slow
@drawn
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 40 if ON_GPU else 3),
    st.booleans(),
    st.booleans(),
)
def test_experts_one_by_one_give_the_bits_of_one_launch(
    dtype: torch.dtype, rows: int, biases: bool, sigmoid: bool
) -> None:
    """So they are computed where a row of the step has an adapter for experts. (Of up to 128 inputs
    the compiler starts a sum in one launch at the bias; of more, numpy adds tiles of other sizes in
    another order.)
    """
    hidden, inner = (160, 144) if ON_GPU else (64, 48)
    spec = MoeSpec(8, 3, inner, True, sigmoid_scores=sigmoid, weight_scale=1.7)
    kernels, layer = TritonKernels(dtype), make_layer(rows, 8, hidden, inner, dtype, biases)
    assert torch.equal(ReferenceKernels.moe(kernels, *layer, spec), kernels.moe(*layer, spec))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "biases"),
    list(itertools.product(DTYPES, [False, True]))
    if ON_GPU
    else [(torch.float32, False), (torch.float16, True)],
    ids=str,
)
def test_a_row_is_alone(dtype: torch.dtype, biases: bool) -> None:
    experts, top_k = 8, 2
    # 40 and 150 rows take wider tiles.
    rows, counts = (max(ROW_COUNTS), (*ROW_COUNTS, 150)) if ON_GPU else (40, (1, 3))
    x, router_logits, weights = make_layer(rows, experts, 192, 96, dtype, biases)
    spec = MoeSpec(experts, top_k, 96, True, sigmoid_scores=biases)
    if dtype != torch.float32:
        widths = {tile_width(count * top_k, experts, dtype) for count in (*counts, rows)}
        assert widths == ({16, 32, 64, 128} if ON_GPU else {16, 32})
    assert_rows_alone(lambda x, logits: moe(x, logits, weights, spec), [x, router_logits], counts)


@pytest.mark.few(1)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (60, 4), (8, 2), (5, 5), (1, 1)])
def test_routing_is_that_of_the_reference(experts: int, top_k: int, normalize: bool) -> None:
    logits = random(6, experts, dtype=torch.float32, seed=experts)
    logits[1] = logits[1].round()  # many equal ones
    logits[2] = 0.0
    logits[3, 0] = 200.0  # the others' weights vanish and are equal
    plain = MoeSpec(experts, top_k, 0, normalize)
    bias = random(experts, dtype=torch.float32, seed=7).round()  # negative ones, and equal ones
    sigmoid = replace(plain, sigmoid_scores=True, weight_scale=2.5)
    for spec, added in ((plain, None), (sigmoid, None), (sigmoid, bias)):
        expert_ids, weights = route(logits, spec, added)
        chosen, expected = ascending(logits, spec, added)
        assert torch.equal(expert_ids.view(-1, top_k).long(), chosen)
        assert_close(weights.view(-1, top_k), expected.double(), roundings=16)


@pytest.mark.parametrize("spoilt", [[NAN], [float("inf")], [float("-inf")] * 8, [NAN] * 8])
def test_a_row_without_weights_gets_different_experts_all_the_same(spoilt: list[float]) -> None:
    logits = random(3, 8, dtype=torch.float32)
    logits[1, : len(spoilt)] = torch.tensor(spoilt, device=DEVICE)
    expert_ids, weights = route(logits, MoeSpec(8, 3, 0, True))
    chosen = expert_ids.view(3, 3)[1].tolist()
    assert chosen == sorted(set(chosen))
    assert 0 <= chosen[0] < chosen[-1] < 8
    assert weights.view(3, 3)[1].isnan().all()
    assert not weights.view(3, 3)[[0, 2]].isnan().any()


@pytest.mark.slow
@drawn
@given(
    st.sampled_from(
        [(2, 2), (3, 4), (17, 8), (64, 8), (65, 8), (256, 9), (512, 8), (600, 8), (8200, 8)]
    ),
    st.sampled_from([8, 9, 60, 128, 256, 257]),
    st.sampled_from([16, 32, 64, 128, 256]),
    st.booleans(),
)
def test_tiles_hold_every_pair_once_with_its_expert(
    shape: tuple[int, int], experts: int, width: int, crowded: bool
) -> None:
    rows, top_k = shape
    used = top_k if crowded else experts
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.stack(
        [torch.randperm(used, generator=generator)[:top_k].sort().values for _ in range(rows)]
    )
    expert_ids = chosen.flatten().int().to(DEVICE)
    tiles = group_pairs(expert_ids, experts, rows, width)
    found: list[list[int]] = [[] for _ in range(experts)]
    owners = tiles.experts.tolist()
    num_tiles = sum(owner >= 0 for owner in owners)
    assert owners == sorted(owners[:num_tiles]) + [-1] * (tiles.bound - num_tiles)
    *counts, total, first_counter, second_counter = tiles.counts.tolist()
    assert (total, first_counter, second_counter) == (num_tiles, 0, 0)
    for tile, (owner, count) in enumerate(zip(owners, counts, strict=True)):
        if owner >= 0:
            assert 1 <= count <= width
            found[owner] += tiles.order[tile * width : tile * width + count].tolist()
    for expert, pairs in enumerate(found):
        assert pairs == (expert_ids == expert).nonzero()[:, 0].tolist()


def test_no_rows() -> None:
    x, router_logits, experts = make_layer(1, 4, 32, 16, torch.float32)
    assert moe(x[:0], router_logits[:0], experts, MoeSpec(4, 2, 16, True)).shape == (0, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 64, 65, 2000])
def test_a_graph_gives_the_same_bits(rows: int) -> None:
    spec = MoeSpec(60, 4, 128, True)
    for biases in (False, True):
        layer = make_layer(rows, 60, 256, 128, torch.bfloat16, biases)
        assert torch.equal(in_graph(lambda: moe(*layer, spec)), moe(*layer, spec))  # noqa: B023
