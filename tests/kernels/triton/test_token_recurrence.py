"""A candidate for the recurrence on a GPU, by the tests of the kernels in use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.recurrent import RecurrentSpec
from quire.tools.bench.gpu.token_recurrence import TokenRecurrence
from tests.kernels.test_recurrent import Layer
from tests.kernels.triton.support import MARKS, ON_GPU, drawn
from tests.kernels.triton.test_recurrent import (
    SMALL,
    SPECS,
    WIDE,
    _on_device,  # noqa: F401
    assert_right_and_divisible,
    by_steps,
    graph_step,
)

pytestmark = [*MARKS, pytest.mark.slow]


@pytest.fixture
def kernels() -> TokenRecurrence:
    return TokenRecurrence(torch.float32)


@pytest.mark.parametrize("spec", (SPECS if ON_GPU else SMALL).values())
@pytest.mark.parametrize("length", [1, 63, 64, 65, 150] if ON_GPU else [66])
def test_all_lengths_are_right_and_may_be_divided(
    kernels: TokenRecurrence, spec: RecurrentSpec, length: int
) -> None:
    bounds = [0, 1, 5, 17, 63, 64, 66, 79, 80, 129, 140]
    bounds = [*(at for at in bounds if at < length), length]
    assert_right_and_divisible(kernels, spec, length, bounds)


@pytest.mark.skipif(not ON_GPU, reason="takes the interpreter minutes")
@pytest.mark.parametrize("spec", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_heads_are(kernels: TokenRecurrence, spec: RecurrentSpec, dtype: torch.dtype) -> None:
    length = 700
    layer = Layer(kernels, spec, [length], dtype=dtype)
    (found,) = layer.step([(0, 0, length)])
    wanted = layer.by_definition(0)
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.01)
    bounds = [0, 3, 60, *range(61, 70), length]
    assert torch.equal(by_steps(Layer(kernels, spec, [length], dtype=dtype), bounds), found)


@pytest.mark.skipif(not ON_GPU, reason="takes the interpreter minutes")
@pytest.mark.parametrize("spec", SMALL.values(), ids=SMALL)
@drawn
@given(data=st.data())
def test_bits_do_not_depend_on_how_tokens_are_divided_into_steps(
    spec: RecurrentSpec, data: st.DataObject
) -> None:
    kernels = TokenRecurrence(torch.float32)
    length = data.draw(st.integers(1, 300))
    (expected,) = Layer(kernels, spec, [length, 150]).step([(0, 0, length)])
    layer = Layer(kernels, spec, [length, 150])
    found = torch.full_like(expected, float("nan"))
    at = other = 0
    while at < length:
        end = min(length, at + data.draw(st.sampled_from([1, 2, 5, 17, 64, 100])))
        parts = [(0, at, end)]
        if other < 150 and data.draw(st.booleans()):
            until = min(150, other + data.draw(st.sampled_from([1, 30])))
            parts.insert(data.draw(st.integers(0, 1)), (1, other, until))
            other = until
        outputs = layer.step(parts)
        found[at:end] = outputs[[i for i, _, _ in parts].index(0)]
        at = end
    assert torch.equal(found, expected)


@pytest.mark.parametrize("spec", list(SMALL.values())[: 2 if ON_GPU else 1])
def test_rows_of_a_graph_find_those_before_them(
    kernels: TokenRecurrence, spec: RecurrentSpec
) -> None:
    (first,) = Layer(kernels, spec, [70, 40]).step([(0, 0, 70)])
    (second,) = Layer(kernels, spec, [70, 40]).step([(1, 0, 40)])
    layer = Layer(kernels, spec, [70, 40])
    layer.step([(0, 0, 60), (1, 0, 37)])
    rows = torch.tensor([*[0] * 10, *[1] * 3, -1, -1]).int()
    positions = torch.tensor([*range(60, 70), 37, 38, 39, 0, 0]).int()
    found = graph_step(layer, rows, positions)()
    assert torch.equal(found[:10], first[60:])
    assert torch.equal(found[10:13], second[37:])
