"""Layers with a state, by the definition and in C++: against a recurrence token by token in float64,
and the same bits however the tokens are divided into steps.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.errors import DeviceError
from quire.kernels.layer_state import CarriedPart
from quire.kernels.ops import Kernels, PagedBatch
from quire.kernels.recurrent import (
    CHUNK,
    ConvolutionCache,
    ConvolutionSpec,
    GatedNormSpec,
    RecurrentCache,
    RecurrentSpec,
    RecurrentWeights,
)
from tests.kernels.cpu_support import (
    REFERENCE,
    VARIANTS,
    assert_close,
    is_best_again,
    variant_kernels,
)
from tests.long_runs import short_or_long

BLOCK = 16
DELTA = RecurrentSpec(2, 4, 8, 6, taps=4)
SSD = RecurrentSpec(1, 3, 5, 8, taps=4, conv_bias=True, is_delta=False, time_limits=(0.001, 4.0))
CHANNELS = RecurrentSpec(3, 3, 10, 6, taps=4, gate_rank=5)
"""Each channel of a key has a decay of its own."""
SPECS = {
    "delta": DELTA,
    "delta, betas up to 2": replace(DELTA, beta_scale=2.0),
    "state space": SSD,
    "decays of channels": CHANNELS,
    "decays of channels, shared keys": replace(CHANNELS, num_key_heads=1, value_dim=9),
}
WIDE = {
    "delta": RecurrentSpec(2, 4, 128, 128, taps=4),
    "state space": replace(SSD, num_key_heads=1, num_value_heads=6, key_dim=128, value_dim=64),
    "decays of channels": RecurrentSpec(2, 2, 128, 128, taps=4, gate_rank=128),
}
"""As large as heads of true models are: whole vectors, and work for several threads."""


@pytest.fixture(
    scope="module",
    params=[
        "definition",
        *(
            pytest.param(name, marks=[] if name == "best" else pytest.mark.slow)
            for name in VARIANTS
        ),
    ],
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The definition, and the C++ kernels in every variant this machine runs."""
    if request.param == "definition":
        return REFERENCE
    if is_best_again(request.param):
        pytest.skip("no AMX here: plain vectors are the best variant")
    try:
        return variant_kernels(request.param)
    except DeviceError as error:
        pytest.skip(str(error))


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device()) * scale


@dataclass
class Layer:
    """Random weights and inputs of some sequences, and a cache in which NaN is where nobody wrote."""

    kernels: Kernels
    spec: RecurrentSpec
    lengths: list[int]
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        spec, heads = self.spec, self.spec.num_value_heads
        channels = spec.convolution.channels
        self.conv_weight = random(channels, spec.taps, seed=self.seed + 1, scale=0.5)
        self.conv_bias = random(channels, seed=self.seed + 2) if spec.conv_bias else None
        self.weights = RecurrentWeights(
            random(heads, seed=self.seed + 3),
            random(spec.decay_size, seed=self.seed + 4),
            None if spec.is_delta else random(heads, seed=self.seed + 5),
        )
        self.inputs = [
            random(n, channels, seed=self.seed + 10 + i).to(self.dtype)
            for i, n in enumerate(self.lengths)
        ]
        self.gates, self.decay_gates = (
            [
                random(n, size, seed=self.seed + first + i, scale=scale).to(self.dtype)
                for i, n in enumerate(self.lengths)
            ]
            for size, first, scale in ((spec.num_gates, 30, 1.0), (spec.decay_size, 60, 3.0))
        )
        per_sequence = -(-max(self.lengths) // BLOCK)
        num_blocks = 1 + len(self.lengths) * per_sequence
        order = 1 + torch.randperm(
            num_blocks - 1, generator=torch.Generator().manual_seed(self.seed), device="cpu"
        )
        self.tables = (
            order.view(len(self.lengths), per_sequence).int().to(torch.get_default_device())
        )
        self.states = (
            1 + torch.arange(2 * len(self.lengths) * 2).view(2, len(self.lengths), 2).int()
        )
        self.clear(num_blocks)

    def clear(self, num_blocks: int) -> None:
        spec, nan = self.spec, float("nan")

        def side(heads: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            """With others' numbers between the blocks."""
            size = heads * BLOCK * math.prod(shape)
            blocks = torch.full((num_blocks, size + 12), nan, dtype=dtype)
            return blocks[:, :size].view(num_blocks, heads, BLOCK, *shape)

        num_states = 1 + self.states.numel()
        first = spec.num_value_heads // 2
        shape = (spec.key_dim, spec.value_dim)
        state = CarriedPart(
            (
                (0, torch.full((num_states, first, *shape), nan)),
                (1, torch.full((num_states, spec.num_value_heads - first, *shape), nan)),
            )
        )
        tail = CarriedPart(
            (
                (
                    1,
                    torch.full(
                        (num_states, spec.taps - 1, spec.convolution.channels),
                        nan,
                        dtype=self.dtype,
                    ),
                ),
            )
        )
        self.cache = RecurrentCache(
            ConvolutionCache(side(1, spec.convolution.channels, dtype=self.dtype), tail, 0),
            side(spec.num_key_heads, spec.key_dim),
            side(spec.num_value_heads, spec.value_dim),
            side(spec.num_value_heads, *spec.decay_shape),
            state,
            0,
        )

    def step(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """Computes (sequence, first position, end) of each part; the outputs of each."""
        counts = [end - first for _, first, end in parts]
        slots = torch.cat(
            [
                self.tables[i].long()[torch.arange(first, end) // BLOCK] * BLOCK
                + torch.arange(first, end) % BLOCK
                for i, first, end in parts
            ]
        )
        batch = PagedBatch(
            query_start=torch.tensor([0, *itertools.accumulate(counts)]).int(),
            context_lens=torch.tensor([end for _, _, end in parts]).int(),
            block_tables=self.tables,
            table_rows=torch.tensor([i for i, _, _ in parts]).int(),
            slot_mapping=slots,
            max_context_len=max(end for _, _, end in parts),
            state_tables=self.states,
        )
        x = torch.cat([self.inputs[i][first:end] for i, first, end in parts])
        gates, decay_gates = (
            torch.cat([one[i][first:end] for i, first, end in parts])
            for one in (self.gates, self.decay_gates)
        )
        mixed = self.kernels.convolve_(
            x,
            self.conv_weight,
            self.conv_bias,
            self.spec.convolution,
            self.cache.convolution,
            batch,
        )
        output = self.kernels.recur_(
            mixed,
            gates,
            self.weights,
            self.spec,
            self.cache,
            batch,
            *([decay_gates] if self.spec.gate_rank else ()),
        )
        return list(output.split(counts))

    def by_definition(self, index: int) -> Tensor:
        """Token by token, in float64, with one state."""
        spec = self.spec
        x, gates = self.inputs[index].double(), self.gates[index].double()
        padded = torch.nn.functional.pad(x, (0, 0, spec.taps - 1, 0))
        mixed = sum(
            padded[tap : tap + len(x)] * self.conv_weight[:, tap].double()
            for tap in range(spec.taps)
        )
        assert isinstance(mixed, Tensor)
        mixed = torch.nn.functional.silu(
            mixed if self.conv_bias is None else mixed + self.conv_bias.double()
        )
        query, key, value = mixed.split((spec.query_size, spec.query_size, spec.value_size), 1)
        shared = spec.num_value_heads // spec.num_key_heads
        query, key = (
            side.unflatten(1, (-1, spec.key_dim)).repeat_interleave(shared, 1)
            for side in (query, key)
        )
        value = value.unflatten(1, (-1, spec.value_dim))
        heads = spec.num_value_heads
        betas = gates if spec.gate_rank else gates[:, heads:]
        told = self.decay_gates[index].double() if spec.gate_rank else gates[:, :heads]
        steps = torch.nn.functional.softplus(told + self.weights.time_bias.double())
        steps = steps.unflatten(1, (heads, -1))
        if spec.is_delta:
            query, key = (
                side / (side.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for side in (query, key)
            )
            query = query / spec.key_dim**0.5
            beta = betas.sigmoid() * spec.beta_scale
        else:
            steps = steps.clamp(*spec.time_limits)
            beta = steps.squeeze(2)
        rates = self.weights.log_rate.double().exp().unsqueeze(1)
        state = torch.zeros(heads, spec.key_dim, spec.value_dim, dtype=torch.float64)
        outputs = []
        for q, k, v, decay, b in zip(query, key, value, -steps * rates, beta, strict=True):
            state = state * decay.exp().unsqueeze(2)
            said = (state * k.unsqueeze(2)).sum(1) if spec.is_delta else 0
            state = state + k.unsqueeze(2) * ((v - said) * b.unsqueeze(1)).unsqueeze(1)
            output = (state * q.unsqueeze(2)).sum(1)
            if self.weights.skip is not None:
                output = output + self.weights.skip.double().unsqueeze(1) * v
            outputs.append(output.flatten())
        return torch.stack(outputs)


@pytest.mark.few(8)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 200])
def test_chunks_give_what_the_recurrence_gives(
    kernels: Kernels, spec: RecurrentSpec, length: int
) -> None:
    layer = Layer(kernels, spec, [length], seed=length)
    (found,) = layer.step([(0, 0, length)])
    torch.testing.assert_close(found.double(), layer.by_definition(0), atol=2e-5, rtol=2e-5)


def test_what_fades_at_once_does_not_blur_what_is_near(kernels: Kernels) -> None:
    """Channels forget all at some tokens: e to the decays since a chunk's begin is no number then,
    and differences of their sums have no digits left.
    """
    layer = Layer(kernels, CHANNELS, [150])
    gates = layer.decay_gates[0]
    gates[:] = -4.0
    chosen = torch.rand(gates.shape, generator=torch.Generator().manual_seed(1), device="cpu")
    gates[chosen < 0.1] = 30_000.0
    gates[20] = 1e30
    (found,) = layer.step([(0, 0, 150)])
    expected = layer.by_definition(0)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("spec", WIDE.values(), ids=WIDE)
def test_wide_heads_give_what_the_recurrence_gives(kernels: Kernels, spec: RecurrentSpec) -> None:
    layer = Layer(kernels, spec, [130])
    found = torch.cat([layer.step([(0, 0, 100)])[0], layer.step([(0, 100, 130)])[0]])
    torch.testing.assert_close(found.double(), layer.by_definition(0), atol=1e-4, rtol=1e-4)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "spec", [*SPECS.values(), *WIDE.values()], ids=[*SPECS, *map("wide {}".format, WIDE)]
)
def test_bfloat16_is_as_close_as_the_definition_and_its_bits_are_fixed(
    kernels: Kernels, spec: RecurrentSpec
) -> None:
    layer = Layer(kernels, spec, [80], dtype=torch.bfloat16)
    (found,) = layer.step([(0, 0, 80)])
    (reference,) = Layer(REFERENCE, spec, [80], dtype=torch.bfloat16).step([(0, 0, 80)])
    assert_close(found, layer.by_definition(0), reference)
    again = Layer(kernels, spec, [80], dtype=torch.bfloat16)
    bounds = [0, 1, 5, 63, 64, 66, 79, 80]
    steps = [again.step([(0, first, end)])[0] for first, end in itertools.pairwise(bounds)]
    assert torch.equal(torch.cat(steps), found)


@pytest.mark.few(2)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("spec", WIDE.values(), ids=WIDE)
def test_bits_do_not_depend_on_the_number_of_threads(kernels: Kernels, spec: RecurrentSpec) -> None:
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        layer = Layer(kernels, spec, [70])
        found.append(torch.cat([layer.step([(0, 0, 66)])[0], layer.step([(0, 66, 70)])[0]]))
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_neighbouring_parts_of_a_sequence_in_one_step_are_computed_in_their_order(
    kernels: Kernels, spec: RecurrentSpec
) -> None:
    """As recorded steps divide draft tokens for attention."""
    (expected,) = Layer(kernels, spec, [70]).step([(0, 0, 70)])
    layer = Layer(kernels, spec, [70])
    (begin,) = layer.step([(0, 0, 60)])
    parts = layer.step([(0, 60, 62), (0, 62, 63), (0, 63, 66), (0, 66, 70)])
    assert torch.equal(torch.cat([begin, *parts]), expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@settings(max_examples=short_or_long(20, 20, quick=6), deadline=None)
@given(data=st.data())
def test_bits_do_not_depend_on_how_tokens_are_divided_into_steps(
    kernels: Kernels, spec: RecurrentSpec, data: st.DataObject
) -> None:
    """Chunks of prompts that end anywhere, single tokens, drafts that are computed again, other
    sequences beside it.
    """
    length = data.draw(st.integers(1, 200))
    whole = Layer(kernels, spec, [length, 150])
    (expected,) = whole.step([(0, 0, length)])
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
        # Some of them were drafts that are refused: they are computed again.
        at = data.draw(st.integers(at + 1, end))
    assert torch.equal(found, expected)


def test_a_step_leaves_the_states_of_the_last_two_chunks(kernels: Kernels) -> None:
    """So what is computed again from before a chunk's end finds the state it began with."""
    layer = Layer(kernels, DELTA, [3 * CHUNK + 5])
    layer.step([(0, 0, 3 * CHUNK + 5)])
    again = Layer(kernels, DELTA, [3 * CHUNK + 5])
    again.step([(0, 0, 2 * CHUNK)])
    expected = again.step([(0, 2 * CHUNK, 2 * CHUNK + 9)])[0]
    assert torch.equal(layer.step([(0, 2 * CHUNK, 2 * CHUNK + 9)])[0], expected)


def test_a_convolution_alone_reads_its_window_from_blocks(kernels: Kernels) -> None:
    spec = ConvolutionSpec(5, 3, silu=False)
    x, weight = random(40, 5, seed=1), random(5, 3, seed=2)
    expected = sum(
        torch.nn.functional.pad(x, (0, 0, 2, 0))[tap : tap + 40] * weight[:, tap]
        for tap in range(3)
    )
    tables = torch.tensor([[2, 1, 3]]).int()

    def steps(ends: list[int]) -> Tensor:
        cache = ConvolutionCache(torch.full((4, 1, BLOCK, 5), float("nan")), None, 0)
        outputs = []
        for first, end in itertools.pairwise([0, *ends]):
            places = torch.arange(first, end)
            batch = PagedBatch(
                query_start=torch.tensor([0, end - first]).int(),
                context_lens=torch.tensor([end]).int(),
                block_tables=tables,
                table_rows=torch.tensor([0]).int(),
                slot_mapping=tables[0].long()[places // BLOCK] * BLOCK + places % BLOCK,
                max_context_len=end,
            )
            outputs.append(kernels.convolve_(x[first:end], weight, None, spec, cache, batch))
        return torch.cat(outputs)

    assert isinstance(expected, Tensor)
    torch.testing.assert_close(steps([40]), expected)
    assert torch.equal(steps([40]), steps([1, 2, 3, 18, 40]))


def test_norms_with_gates(kernels: Kernels) -> None:
    x, gate, weight = random(7, 12, seed=1), random(7, 12, seed=2), random(4, seed=3)
    silu = torch.nn.functional.silu(gate.double())

    def normed(rows: Tensor, size: int) -> Tensor:
        grouped = rows.unflatten(1, (-1, size))
        return (grouped / (grouped.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1)

    first = kernels.gated_norm(x, gate, weight, 1e-5, GatedNormSpec(4))
    expected = normed(x.double(), 4) * weight.double().repeat(3) * silu
    torch.testing.assert_close(first.double(), expected, atol=1e-5, rtol=1e-5)
    plain = kernels.gated_norm(x, gate, weight, 1e-5, GatedNormSpec(4, sigmoid=True))
    expected = normed(x.double(), 4) * weight.double().repeat(3) * gate.double().sigmoid()
    torch.testing.assert_close(plain.double(), expected, atol=1e-5, rtol=1e-5)
    gated = kernels.gated_norm(x, gate, weight.repeat(3), 1e-5, GatedNormSpec(6, gate_first=True))
    expected = normed(x.double() * silu, 6) * weight.double().repeat(3)
    torch.testing.assert_close(gated.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_neighbour_that_is_not_a_number_changes_nothing(kernels: Kernels) -> None:
    layer = Layer(kernels, DELTA, [30, 70])
    (expected,) = layer.step([(0, 0, 30)])
    hurt = Layer(kernels, DELTA, [30, 70])
    hurt.inputs[1][:] = float("nan")
    assert torch.equal(hurt.step([(1, 0, 70), (0, 0, 30)])[1], expected)


@pytest.mark.parametrize(
    "spec", [DELTA, replace(DELTA, gate_rank=5)], ids=["delta", "decays of channels"]
)
def test_value_heads_divided_among_devices_have_the_same_bits(
    kernels: Kernels, spec: RecurrentSpec
) -> None:
    layer = Layer(kernels, spec, [100])
    (expected,) = layer.step([(0, 0, 100)])
    query, value = spec.query_size, spec.value_size
    for rank in range(2):
        half = replace(spec, num_key_heads=1, num_value_heads=2)
        own = Layer(kernels, half, [100])
        heads = slice(2 * rank, 2 * rank + 2)
        rows = torch.arange(spec.convolution.channels)
        sides = rows.split((query, query, value))
        mine = torch.cat([side.view(2, -1)[rank] for side in sides])
        own.conv_weight = layer.conv_weight[mine]
        own.inputs = [layer.inputs[0][:, mine]]
        own.weights = RecurrentWeights(
            layer.weights.log_rate[heads],
            layer.weights.time_bias.unflatten(0, (4, -1))[heads].flatten(),
        )
        own.gates = [layer.gates[0].unflatten(1, (-1, 4))[:, :, heads].flatten(1)]
        own.decay_gates = [layer.decay_gates[0].unflatten(1, (4, -1))[:, heads].flatten(1)]
        (found,) = own.step([(0, 0, 100)])
        assert torch.equal(found, expected.view(100, 2, -1)[:, rank])
