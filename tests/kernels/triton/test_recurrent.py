"""Layers with a state in Triton: against a recurrence token by token in float64, and the same bits
however the tokens are divided into steps, in graphs or not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.backends.cuda import recurrent as cuda_recurrent
from quire.backends.triton.kernels import TritonKernels
from quire.errors import DeviceError
from quire.kernels.ops import PagedBatch
from quire.kernels.recurrent import ConvolutionCache, ConvolutionSpec, GatedNormSpec, RecurrentSpec
from tests.kernels.test_recurrent import BLOCK, Layer
from tests.kernels.test_recurrent import SPECS as ALL_SPECS
from tests.kernels.test_recurrent import WIDE as ALL_WIDE
from tests.kernels.triton.support import DEVICE, MARKS, ON_GPU, assert_close, random
from tests.long_runs import IS_LONG

pytestmark = MARKS
SPECS, WIDE = (
    {name: spec for name, spec in specs.items() if TritonKernels().has_kernels_for(spec)}
    for specs in (ALL_SPECS, ALL_WIDE)
)
LENGTHS = [1, 63, 64, 65, 150]
BOUNDS = [0, 1, 5, 17, 63, 64, 66, 79, 80, 129, 140]
if not ON_GPU:
    # The interpreter takes seconds for each program. So one prompt, cut where the other lengths end:
    # their tokens have the bits they have in it. Betas are those of `SMALL`; of wide heads two have
    # the same key.
    LENGTHS, BOUNDS = [150], [0, 1, 17, 63, 64, 65, 128]
    SPECS.pop("delta, betas up to 2")
    WIDE = {name: replace(spec, num_key_heads=1, num_value_heads=2) for name, spec in WIDE.items()}
if not (ON_GPU or IS_LONG):  # a card computes them otherwise: tests/kernels/cuda
    SPECS, WIDE = ({name: specs[name] for name in list(specs)[:1]} for specs in (SPECS, WIDE))

SMALL = {
    "delta": RecurrentSpec(1, 1, 8, 6, taps=4, beta_scale=2.0),
    "state space": RecurrentSpec(
        1, 1, 20, 8, taps=3, conv_bias=True, is_delta=False, time_limits=(0.001, 4.0)
    ),
}


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(before)


@pytest.fixture(scope="module")
def kernels() -> TritonKernels:
    return TritonKernels(torch.float32)


def by_steps(layer: Layer, bounds: Sequence[int]) -> Tensor:
    steps = itertools.pairwise(bounds)
    return torch.cat([layer.step([(0, first, end)])[0] for first, end in steps])


def assert_right_and_divisible(
    kernels: TritonKernels, spec: RecurrentSpec, length: int, bounds: Sequence[int]
) -> None:
    layer = Layer(kernels, spec, [length], seed=length)
    (found,) = layer.step([(0, 0, length)])
    torch.testing.assert_close(found.double(), layer.by_definition(0), atol=1e-4, rtol=1e-4)
    again = Layer(kernels, spec, [length], seed=length)
    assert torch.equal(by_steps(again, bounds), found)


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", SMALL.values(), ids=SMALL)
def test_it_is_what_the_recurrence_gives_and_may_be_divided(
    kernels: TritonKernels, spec: RecurrentSpec
) -> None:
    assert_right_and_divisible(kernels, spec, 17, [0, 15, 17])


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("length", LENGTHS)
def test_all_lengths_are(kernels: TritonKernels, spec: RecurrentSpec, length: int) -> None:
    bounds = [*(at for at in BOUNDS if at < length), length]
    assert_right_and_divisible(kernels, spec, length, bounds)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("spec", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32])
def test_wide_heads_are(kernels: TritonKernels, spec: RecurrentSpec, dtype: torch.dtype) -> None:
    length = 700 if ON_GPU else 70
    layer = Layer(kernels, spec, [length], dtype=dtype)
    (found,) = layer.step([(0, 0, length)])
    wanted = layer.by_definition(0)
    error = (found.double() - wanted).norm() / wanted.norm()  # inputs are rounded, so not by number
    assert error < (1e-5 if dtype == torch.float32 else 0.01)
    bounds = [0, *((3, 60, *range(61, 70)) if ON_GPU else (3, 61)), length]
    assert torch.equal(by_steps(Layer(kernels, spec, [length], dtype=dtype), bounds), found)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SMALL.values(), ids=SMALL)
@settings(deadline=None, max_examples=60 if ON_GPU else 3)
@given(data=st.data())
def test_bits_do_not_depend_on_how_tokens_are_divided_into_steps(
    kernels: TritonKernels, spec: RecurrentSpec, data: st.DataObject
) -> None:
    """Chunks of prompts that end anywhere, single tokens, drafts that are computed again, other
    sequences beside it.
    """
    length = data.draw(st.integers(1, 300 if ON_GPU else 90))
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
        # Drafts are refused behind the begin of the last chunk but one: the state of that is there.
        kept = (end // 64 - 1) * 64
        at = data.draw(st.integers(max(at + 1, kept) if ON_GPU else end, end))
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_long_prompts_give_states_that_go_on(kernels: TritonKernels) -> None:
    """Several chunks end in one step: of states and of the last inputs those of the last two stay,
    in places that the step may have read.
    """
    length = 64 * 5 + 3 if ON_GPU else 64 * 3 + 2
    spec = SMALL["delta"]
    layer = Layer(kernels, spec, [length])
    (whole,) = layer.step([(0, 0, length)])
    again = Layer(kernels, spec, [length])
    assert torch.equal(by_steps(again, [0, 65, length - 2, length]), whole)
    # drafts that crossed a chunk's end were refused: the chunk before is computed again
    assert torch.equal(layer.step([(0, length - 4, length)])[0], whole[-4:])


def graph_step(layer: Layer, rows: Tensor, positions: Tensor) -> Callable[[], Tensor]:
    """Rows as graphs have them: each is a sequence, and a negative one is padding."""
    count, kernels, spec = len(rows), layer.kernels, layer.spec
    known = rows >= 0
    blocks = layer.tables[rows.long().clamp_min(0), positions.long() // BLOCK].long()
    slots = torch.where(known, blocks * BLOCK + positions % BLOCK, -1)
    batch = PagedBatch(
        query_start=rows,
        context_lens=positions,
        block_tables=layer.tables,
        table_rows=rows,
        slot_mapping=slots,
        max_context_len=max(layer.lengths),
        state_tables=layer.states,
        token_rows=rows,
        positions=positions,
    )
    x = torch.stack([layer.inputs[max(i, 0)][at] for i, at in zip(rows, positions, strict=True)])
    gates = torch.stack([layer.gates[max(i, 0)][at] for i, at in zip(rows, positions, strict=True)])
    assert len(x) == count

    def compute() -> Tensor:
        cache = layer.cache
        mixed = kernels.convolve_(
            x, layer.conv_weight, layer.conv_bias, spec.convolution, cache.convolution, batch
        )
        return kernels.recur_(mixed, gates, layer.weights, spec, cache, batch)

    return compute


@pytest.mark.slow
@pytest.mark.parametrize("spec", SMALL.values(), ids=SMALL)
def test_rows_of_a_graph_find_those_before_them(
    kernels: TritonKernels, spec: RecurrentSpec
) -> None:
    """Tokens of a prompt, drafts and padding, each as a sequence of its own."""
    (first,) = Layer(kernels, spec, [70, 40]).step([(0, 0, 70)])
    (second,) = Layer(kernels, spec, [70, 40]).step([(1, 0, 40)])
    layer = Layer(kernels, spec, [70, 40])
    layer.step([(0, 0, 60), (1, 0, 37)])
    rows = torch.tensor([*[0] * 10, *[1] * 3, -1, -1]).int()
    positions = torch.tensor([*range(60, 70), 37, 38, 39, 0, 0]).int()
    compute = graph_step(layer, rows, positions)
    found = compute()
    assert torch.equal(found[:10], first[60:])
    assert torch.equal(found[10:13], second[37:])
    if not ON_GPU:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    captured.zero_()
    graph.replay()
    assert torch.equal(captured[:13], found[:13])


def test_a_neighbour_that_is_not_a_number_changes_nothing(kernels: TritonKernels) -> None:
    spec = SMALL["delta"]
    (expected,) = Layer(kernels, spec, [3, 4]).step([(0, 0, 3)])
    hurt = Layer(kernels, spec, [3, 4])
    hurt.inputs[1][:] = float("nan")
    assert torch.equal(hurt.step([(1, 0, 4), (0, 0, 3)])[1], expected)


def test_a_convolution_alone_reads_its_window_from_blocks(kernels: TritonKernels) -> None:
    spec = ConvolutionSpec(5, 3, silu=False)
    x, weight = random(20, 5, dtype=torch.float32, seed=1), random(5, 3, dtype=torch.float32)
    padded = torch.nn.functional.pad(x.double(), (0, 0, 2, 0))
    expected = sum(padded[tap : tap + 20] * weight[:, tap].double() for tap in range(3))
    assert isinstance(expected, Tensor)
    tables = torch.tensor([[2, 1]]).int()

    def steps(bounds: Sequence[int]) -> Tensor:
        cache = ConvolutionCache(torch.full((3, 1, BLOCK, 5), math.nan), None, 0)
        outputs = []
        for first, end in itertools.pairwise(bounds):
            at = torch.arange(first, end)
            batch = PagedBatch(
                query_start=torch.tensor([0, end - first]).int(),
                context_lens=torch.tensor([end]).int(),
                block_tables=tables,
                table_rows=torch.tensor([0]).int(),
                slot_mapping=tables[0].long()[at // BLOCK] * BLOCK + at % BLOCK,
                max_context_len=end,
            )
            outputs.append(kernels.convolve_(x[first:end], weight, None, spec, cache, batch))
        return torch.cat(outputs)

    assert_close(steps([0, 20]), expected)
    assert torch.equal(steps([0, 20]), steps([0, 1, 2, 3, 18, 20]))


@pytest.mark.parametrize("taps", [3, 4])
def test_a_convolution_of_many_rows_has_the_bits_of_few(kernels: TritonKernels, taps: int) -> None:
    """Many rows are computed in stretches, where they follow each other."""
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    spec = ConvolutionSpec(5, taps)
    lengths = [1030, 1, 9, 40]
    starts = torch.tensor([0, 0, 7, 130])
    x, weight = random(sum(lengths), 5, dtype=dtype, seed=1), random(5, taps, dtype=dtype)
    bias = random(5, dtype=dtype, seed=2)
    spec = replace(spec, bias=True)
    width = -(-max(lengths) // BLOCK)
    tables = (1 + torch.randperm(width * 4, device="cpu")).view(4, width).int().to(DEVICE)
    memory = random(1 + width * 4, 1, BLOCK, 5, dtype=dtype, seed=3)
    offsets = [0, *itertools.accumulate(lengths)]

    def convolved(parts: Sequence[tuple[int, int, int]], memory: Tensor) -> Tensor:
        """Rows `first` to `end`, counted from its first in `x`, of each of some sequences."""
        at = [starts[i] + torch.arange(first, end) for i, first, end in parts]
        batch = PagedBatch(
            query_start=torch.tensor([0, *itertools.accumulate(map(len, at))]).int(),
            context_lens=torch.tensor([int(one[-1]) + 1 for one in at]).int(),
            block_tables=tables,
            table_rows=torch.tensor([i for i, _, _ in parts]).int(),
            slot_mapping=torch.cat(
                [
                    tables[i].long()[one // BLOCK] * BLOCK + one % BLOCK
                    for (i, _, _), one in zip(parts, at, strict=True)
                ]
            ),
            max_context_len=max(int(one[-1]) + 1 for one in at),
        )
        rows = torch.cat([x[offsets[i] + first : offsets[i] + end] for i, first, end in parts])
        return kernels.convolve_(rows, weight, bias, spec, ConvolutionCache(memory, None, 0), batch)

    kept = memory.clone()
    whole = convolved([(i, 0, n) for i, n in enumerate(lengths)], kept).split(lengths)
    # what the many rows kept is what few rows read
    for i, first, end in ((0, 0, 2), (0, 15, 18), (0, 500, 509), (0, 1023, 1030), (2, 3, 9)):
        assert torch.equal(convolved([(i, first, end)], kept), whole[i][first:end]), (i, first)
    few = memory.clone()
    for i in (1, 2, 3):
        assert torch.equal(convolved([(i, 0, lengths[i])], few), whole[i])
    used = tables[1:].flatten().long()
    assert torch.equal(few[used], kept[used])


@pytest.mark.parametrize(
    "spec", [GatedNormSpec(4), GatedNormSpec(6, gate_first=True), GatedNormSpec(0)], ids=str
)
def test_norms_with_gates(kernels: TritonKernels, spec: GatedNormSpec) -> None:
    x, gate = (random(7, 24, dtype=torch.float32, seed=seed) for seed in (1, 2))
    weight = random(spec.group_size or 24, dtype=torch.float32, seed=3)
    silu, expected = torch.nn.functional.silu(gate.double()), x.double()
    expected = expected * silu if spec.gate_first else expected
    if spec.group_size:
        grouped = expected.unflatten(1, (-1, spec.group_size))
        expected = (grouped / (grouped.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1)
    expected = expected * weight.double().repeat(24 // len(weight))
    expected = expected if spec.gate_first else expected * silu
    found = kernels.gated_norm(x, gate, weight, 1e-5, spec)
    assert_close(found, expected, roundings=4)
    assert torch.equal(kernels.gated_norm(x[3:4], gate[3:4], weight, 1e-5, spec), found[3:4])


def test_their_steps_are_captured() -> None:
    kernels = TritonKernels()
    assert kernels.captures(SMALL["delta"])
    assert kernels.captures(ConvolutionSpec(8, 3))


def test_blocks_that_no_tile_fits_into_are_refused(kernels: TritonKernels) -> None:
    layer = Layer(kernels, SMALL["delta"], [2])
    layer.cache = replace(layer.cache, keys=layer.cache.keys[:, :, :8])
    with pytest.raises(DeviceError, match="block_size is 8, but must be a multiple of 16"):
        layer.step([(0, 0, 2)])


@pytest.mark.skipif(not ON_GPU, reason="columns of a program are those of the CUDA kernels")
@pytest.mark.parametrize("spec", WIDE.values(), ids=WIDE)
def test_columns_of_a_program_change_no_bit(
    kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, spec: RecurrentSpec
) -> None:
    """Of prompts; with 0 the kernel chooses. Tokens by themselves have the same bits."""
    length = 300
    expected = by_steps(Layer(kernels, spec, [length]), [0, 3, *range(4, 70), length])
    for columns in (0, *cuda_recurrent.WIDTHS):
        monkeypatch.setattr(cuda_recurrent, "columns_of_a_program", columns)
        assert torch.equal(Layer(kernels, spec, [length]).step([(0, 0, length)])[0], expected)
        layer = Layer(kernels, spec, [length])
        assert torch.equal(by_steps(layer, [0, 60, 130, length]), expected)
