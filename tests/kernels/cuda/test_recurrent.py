"""The CUDA kernels of layers with a state, on a CPU: against a recurrence token by token in float64,
and the same bits by the kernels for few tokens and by those for many.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.ops import PagedBatch
from quire.kernels.recurrent import RecurrentSpec
from tests.kernels.test_recurrent import BLOCK, DELTA, SSD, Layer
from tests.long_runs import short_or_long

pytest.importorskip("triton", reason="Triton is not installed")

from quire.backends.cuda import recurrent  # isort: skip  (after the check for Triton)
from tests.kernels.cuda.emulation import EmulatedKernels  # isort: skip

ALIGNED = RecurrentSpec(1, 2, 12, 36, taps=4, beta_scale=2.0)
"""Vectors of whole 16 bytes; more columns than a program for prompts has."""
SPECS = {
    "delta": DELTA,
    "delta, aligned": ALIGNED,
    "state space": SSD,
    "state space, aligned": replace(SSD, key_dim=16, value_dim=8),
}
# Each takes the compiler some seconds.
QUICK = ("delta, aligned", "state space")
EACH_SPEC = pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, spec in SPECS.items()
    ],
)
WIDE_DELTA = RecurrentSpec(1, 1, 128, 128, taps=4)
LONG_KEYS = RecurrentSpec(1, 1, 256, 32, taps=4)
"""They leave room for 32 columns of a program for prompts only."""
WIDE_SSD = replace(SSD, num_key_heads=1, num_value_heads=1, key_dim=128, value_dim=64)
BOUNDS = [0, 1, 5, 17, 63, 64, 66, 79, 88, 89, 129, 140]


@pytest.fixture(scope="module")
def kernels() -> EmulatedKernels:
    return EmulatedKernels()


def by_steps(layer: Layer, bounds: Sequence[int]) -> Tensor:
    steps = itertools.pairwise(bounds)
    return torch.cat([layer.step([(0, first, end)])[0] for first, end in steps])


def launched(kernels: EmulatedKernels) -> set[str]:
    return {name for module in kernels.modules.values() for name in module.launched}


@EACH_SPEC
@pytest.mark.parametrize("length", [1, 8, 9, 63, 64, 65, 150])
@pytest.mark.few(4)
def test_it_is_what_the_recurrence_gives_and_may_be_divided(
    kernels: EmulatedKernels, spec: RecurrentSpec, length: int
) -> None:
    layer = Layer(kernels, spec, [length], seed=length)
    (found,) = layer.step([(0, 0, length)])
    torch.testing.assert_close(found.double(), layer.by_definition(0), atol=2e-5, rtol=2e-5)
    bounds = [*(at for at in BOUNDS if at < length), length]
    assert torch.equal(by_steps(Layer(kernels, spec, [length], seed=length), bounds), found)
    alone = Layer(kernels, spec, [length], seed=length)
    assert torch.equal(by_steps(alone, range(length + 1)), found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [(LONG_KEYS, torch.float32), (WIDE_DELTA, torch.bfloat16), (WIDE_SSD, torch.float16)],
    ids=["delta, float32", "delta, bfloat16", "state space, float16"],
)
def test_wide_heads_are(kernels: EmulatedKernels, spec: RecurrentSpec, dtype: torch.dtype) -> None:
    layer = Layer(kernels, spec, [140], dtype=dtype)
    (found,) = layer.step([(0, 0, 140)])
    wanted = layer.by_definition(0)
    error = (found.double() - wanted).norm() / wanted.norm()  # inputs are rounded, so not by number
    assert error < {torch.float32: 1e-6, torch.float16: 2e-3}.get(dtype, 0.01)
    again = Layer(kernels, spec, [140], dtype=dtype)
    assert torch.equal(by_steps(again, [0, 60, *range(61, 68), 128, 131, 140]), found)


@EACH_SPEC
@settings(max_examples=short_or_long(3, 60, quick=1), deadline=None)
@given(data=st.data())
def test_bits_do_not_depend_on_how_tokens_are_divided_into_steps(
    kernels: EmulatedKernels, spec: RecurrentSpec, data: st.DataObject
) -> None:
    """Prompts' parts that end anywhere, single tokens, drafts that are computed again, other
    sequences beside it.
    """
    length = data.draw(st.integers(1, 200))
    (expected,) = Layer(kernels, spec, [length, 150]).step([(0, 0, length)])
    layer = Layer(kernels, spec, [length, 150])
    found = torch.full_like(expected, float("nan"))
    at = other = 0
    while at < length:
        end = min(length, at + data.draw(st.sampled_from([1, 2, 5, 8, 9, 17, 64, 100])))
        parts = [(0, at, end)]
        if other < 150 and data.draw(st.booleans()):
            until = min(150, other + data.draw(st.sampled_from([1, 7, 30])))
            parts.insert(data.draw(st.integers(0, 1)), (1, other, until))
            other = until
        outputs = layer.step(parts)
        found[at:end] = outputs[[i for i, _, _ in parts].index(0)]
        # Drafts are refused behind the begin of the last chunk but one: the state of that is there.
        at = data.draw(st.integers(max(at + 1, (end // 64 - 1) * 64), end))
    assert torch.equal(found, expected)


@EACH_SPEC
def test_the_same_states_and_records_are_left(
    kernels: EmulatedKernels, spec: RecurrentSpec
) -> None:
    """Of a prompt of several chunks those of its last two, in places that the step may have read."""
    length = 64 * 5 + 3
    layer, again = (Layer(kernels, spec, [length]) for _ in range(2))
    (whole,) = layer.step([(0, 0, length)])
    assert torch.equal(by_steps(again, [0, 65, *range(66, 130), length - 2, length]), whole)
    for one, other in zip(_kept(layer), _kept(again), strict=True):
        assert torch.equal(one.nan_to_num(nan=-1.0), other.nan_to_num(nan=-1.0))
    # drafts that crossed a chunk's end were refused: the chunk before is computed again
    assert torch.equal(layer.step([(0, length - 4, length)])[0], whole[-4:])


def _kept(layer: Layer) -> list[Tensor]:
    cache = layer.cache
    assert cache.convolution.tail is not None
    carried = [memory for part in (cache.state, cache.convolution.tail) for _, memory in part.runs]
    return [cache.keys, cache.changes, cache.decays, *carried]


@EACH_SPEC
def test_neighbouring_parts_of_a_sequence_are_one_run(
    kernels: EmulatedKernels, spec: RecurrentSpec
) -> None:
    (expected,) = Layer(kernels, spec, [100]).step([(0, 0, 100)])
    for bounds in ([50, 52, 53, 56, 60], [20, 40, 41, 70, 100], [1, 63, 64, 65, 99]):
        layer = Layer(kernels, spec, [100])
        (begin,) = layer.step([(0, 0, bounds[0])])
        parts = layer.step([(0, first, end) for first, end in itertools.pairwise(bounds)])
        assert torch.equal(torch.cat([begin, *parts]), expected[: bounds[-1]])


@EACH_SPEC
def test_rows_of_a_graph_find_those_before_them(
    kernels: EmulatedKernels, spec: RecurrentSpec
) -> None:
    """Tokens of a prompt, drafts and padding, each as a sequence of its own."""
    (first,) = Layer(kernels, spec, [80, 40]).step([(0, 0, 80)])
    (second,) = Layer(kernels, spec, [80, 40]).step([(1, 0, 40)])
    layer = Layer(kernels, spec, [80, 40])
    layer.step([(0, 0, 60), (1, 0, 37)])
    rows = torch.tensor([*[0] * 20, *[1] * 3, -1, -1]).int()
    positions = torch.tensor([*range(60, 80), 37, 38, 39, 0, 0]).int()
    known = rows >= 0
    blocks = layer.tables[rows.long().clamp_min(0), positions.long() // BLOCK].long()
    batch = PagedBatch(
        query_start=rows,
        context_lens=positions,
        block_tables=layer.tables,
        table_rows=rows,
        slot_mapping=torch.where(known, blocks * BLOCK + positions % BLOCK, -1),
        max_context_len=80,
        state_tables=layer.states,
        token_rows=rows,
        positions=positions,
    )
    pairs = list(zip(rows, positions, strict=True))
    gates = torch.stack([layer.gates[max(i, 0)][at] for i, at in pairs])
    # the convolution's outputs: those of the steps above
    mixed = torch.zeros(25, spec.convolution.channels)
    for sequence, (start, end), target in ((0, (60, 80), 0), (1, (37, 40), 20)):
        mixed[target : target + end - start] = _mixed(layer, sequence)[start:end]
    found = kernels.recur_(mixed, gates, layer.weights, spec, layer.cache, batch)
    assert torch.equal(found[:20], first[60:])
    assert torch.equal(found[20:23], second[37:])


def _mixed(layer: Layer, sequence: int) -> Tensor:
    length = layer.lengths[sequence]
    other = Layer(layer.kernels, layer.spec, layer.lengths)
    kept: list[Tensor] = []
    convolve = layer.kernels.convolve_

    class Recording(EmulatedKernels):
        @staticmethod
        def convolve_(*arguments: object) -> Tensor:
            kept.append(convolve(*arguments))  # type: ignore[arg-type]
            return kept[-1]

    other.kernels = Recording()
    other.kernels.modules = layer.kernels.modules  # type: ignore[attr-defined]
    other.step([(sequence, 0, length)])
    return kept[0]


def test_a_neighbour_that_is_not_a_number_changes_nothing(kernels: EmulatedKernels) -> None:
    (expected,) = Layer(kernels, ALIGNED, [30, 70]).step([(0, 0, 30)])
    hurt = Layer(kernels, ALIGNED, [30, 70])
    hurt.inputs[1][:] = float("nan")
    assert torch.equal(hurt.step([(1, 0, 70), (0, 0, 30)])[1], expected)


def test_columns_of_a_lane_change_no_bit(
    kernels: EmulatedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for columns, name in ((0, "ahead"), (1, "1"), (2, "2"), (4, "4")):
        monkeypatch.setattr(recurrent, "columns_of_a_lane", columns)
        layer = Layer(kernels, ALIGNED, [70])
        found.append(by_steps(layer, [0, 60, 61, 64, 66, 67, 70]))
        assert f"few_tokens_{name}" in launched(kernels)
    assert all(torch.equal(one, found[0]) for one in found)
    assert torch.equal(found[0], Layer(kernels, ALIGNED, [70]).step([(0, 0, 70)])[0])


@pytest.mark.parametrize(
    "spec",
    [
        ALIGNED,
        pytest.param(SSD, id="state space"),
        pytest.param(WIDE_DELTA, marks=pytest.mark.slow),
        pytest.param(WIDE_SSD, marks=pytest.mark.slow),
    ],
)
def test_columns_of_a_program_change_no_bit(
    kernels: EmulatedKernels, monkeypatch: pytest.MonkeyPatch, spec: RecurrentSpec
) -> None:
    """Of prompts that begin and end within chunks; with 0 the kernel chooses."""
    found = []
    for columns in (0, *recurrent.WIDTHS):
        monkeypatch.setattr(recurrent, "columns_of_a_program", columns)
        layer = Layer(kernels, spec, [150, 140, 20])
        outputs = layer.step([(0, 0, 84), (1, 0, 64), (2, 0, 1)])
        outputs += layer.step([(2, 1, 20), (0, 84, 150), (1, 64, 140)])
        found.append([*outputs, *_kept(layer)])
    for other in found[1:]:
        for one, again in zip(found[0], other, strict=True):
            assert torch.equal(one.nan_to_num(nan=-1.0), again.nan_to_num(nan=-1.0))


def test_only_what_fits_is_chosen() -> None:
    most = 227 * 1024
    assert [recurrent.widest(one, most) for one in (WIDE_DELTA, LONG_KEYS)] == [128, 32]
    assert [recurrent.widest(WIDE_DELTA, kib * 1024) for kib in (163, 140)] == [64, 32]
