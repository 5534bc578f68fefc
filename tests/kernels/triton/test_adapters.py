"""What adapters add to products, by Triton: near float64, and with the same bits in any company."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import UnsupportedModelError
from quire.kernels.low_rank import LowRank, LowRankPart, LowRankTable
from quire.kernels.ops import Activation
from quire.kernels.weights import Weight
from quire.models.linear import EmbeddingPair, TrainedRows
from tests.kernels.test_cpu_adapters import exact
from tests.kernels.triton.support import (
    DEVICE,
    DTYPES,
    MARKS,
    NAN,
    ON_GPU,
    ROW_COUNTS,
    assert_close,
    assert_rows_alone,
    in_graph,
    random,
)

# isort: skip  (after the check)
from quire.backends.triton.adapter_table import MAX_RANKS, TritonTable  # isort: skip
from quire.backends.triton import adapters  # isort: skip
from quire.backends.triton.adapters import MANY_ROWS, outputs_are_exact  # isort: skip
from quire.backends.triton.grouping import Tiles  # isort: skip
from quire.backends.triton.kernels import TritonKernels  # isort: skip

pytestmark = MARKS
KERNELS = TritonKernels()
SHAPES = {
    "small": (1100, (70, 33, 5)),
    "qkv": (4096, (4096, 1024, 1024)),
    "gate and up": (4096, (12_288, 12_288)),
    "down": (12_288, (4096,)),
}
RANKS = ((3, 16, 5), (40, 1, 17), (0, 8, 0))
"""Of the parts of three adapters; 0: the adapter has no such part."""


def low_rank(
    shape: str, ranks: tuple[int, ...], dtype: torch.dtype, is_dora: bool, seed: int
) -> LowRank:
    inputs, outputs = SHAPES[shape]
    parts, first, first_rank = [], 0, 0
    for number, (count, rank) in enumerate(zip(outputs, ranks, strict=False)):
        if rank:
            b = random(count, rank, dtype=dtype, seed=seed + number)
            part = LowRankPart(first, first_rank, b)
            if is_dora:
                factor = random(count, dtype=torch.float32, seed=seed + 10) * 0.1 + 1
                offset = random(count, dtype=torch.float32, seed=seed + 11)
                part = part._replace(factor=factor, offset=offset)
            parts.append(part)
        first, first_rank = first + count, first_rank + rank
    a = random(first_rank, inputs, dtype=dtype, seed=seed + 20) * inputs**-0.5
    scale = random(first_rank, dtype=torch.float32, seed=seed + 21).abs()
    return LowRank(a.to(dtype), scale, tuple(parts))


@dataclass
class Rows:
    x: Tensor
    base: Tensor
    slots: Tensor
    made: list[LowRank | None]
    table: TritonTable

    def added(self, rows: Tensor) -> Tensor:
        """The outputs of some of the rows, computed together."""
        out = self.base[rows].clone()
        KERNELS.add_low_rank_(out, self.x[rows], self.slots[rows], self.table)
        return out


def make(shape: str, rows: int, dtype: torch.dtype) -> Rows:
    inputs, outputs = SHAPES[shape]
    made: list[LowRank | None] = [
        low_rank(shape, ranks, dtype, number == 1, 100 * number)
        for number, ranks in enumerate(RANKS)
        if any(ranks[: len(outputs)])
    ]
    table = KERNELS.low_rank_table(5)
    assert isinstance(table, TritonTable)
    for slot, one in enumerate(made):
        assert one is not None
        table.put(slot, KERNELS.pack_low_rank(one))
    made += [None] * (5 - len(made))
    source = torch.Generator().manual_seed(0)
    slots = torch.randint(-1, 4, (rows,), generator=source).int().to(DEVICE)
    x = random(rows, inputs, dtype=dtype, seed=1)
    return Rows(x, random(rows, sum(outputs), dtype=dtype, seed=2), slots, made, table)


CASES = [
    pytest.param("small", dtype, marks=[] if dtype == torch.float16 else [pytest.mark.slow])
    for dtype in DTYPES
]
if ON_GPU:
    CASES = [pytest.param(shape, dtype) for shape in SHAPES for dtype in DTYPES]


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_rows_of_different_adapters_have_the_bits_they_have_alone(
    shape: str, dtype: torch.dtype
) -> None:
    count = 300 if ON_GPU else 20
    rows = make(shape, count, dtype)
    everyone = torch.arange(count, device=DEVICE)
    together = rows.added(everyone)
    expected = exact(rows.base.cpu(), rows.x.cpu(), rows.slots.cpu(), on_cpu(rows.made))
    error = (together.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 0.01}[dtype]
    untouched = (rows.slots < 0) | torch.tensor(
        [slot >= 0 and rows.made[slot] is None for slot in rows.slots.tolist()], device=DEVICE
    )
    assert untouched.any()
    assert torch.equal(together[untouched], rows.base[untouched])
    for some in (everyone[:1], everyone[-1:], everyone[3:12], everyone.flip(0)):
        assert torch.equal(rows.added(some), together[some])
    rows.x[1::2] = NAN
    assert torch.equal(rows.added(everyone)[::2], together[::2])


GATED_RANKS = ((3, 17), (5, 0), (0, 40), (256, 64))
"""Of gate and up of four adapters; the second is a DoRA."""


def gated_table(inputs: int, inner: int, dtype: torch.dtype) -> LowRankTable:
    table = KERNELS.low_rank_table(5)
    for slot, ranks in enumerate(GATED_RANKS):
        parts, first_rank = [], 0
        for number, rank in enumerate(ranks):
            if rank:
                b = random(inner, rank, dtype=dtype, seed=slot + number)
                part = LowRankPart(number * inner, first_rank, b)
                if slot == 1:
                    factor = random(inner, dtype=torch.float32, seed=slot)
                    part = part._replace(factor=factor, offset=factor * 2)
                parts.append(part)
            first_rank += rank
        a = random(first_rank, inputs, dtype=dtype, seed=slot) * inputs**-0.5
        scale = random(first_rank, dtype=torch.float32, seed=slot)
        table.put(slot, KERNELS.pack_low_rank(LowRank(a.to(dtype), scale, tuple(parts))))
    return table


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else [torch.float16], ids=str)
def test_gates_of_products_with_adapters_are_those_of_their_outputs(dtype: torch.dtype) -> None:
    """On a GPU one kernel adds and gates: also rows whose adapter adds nothing to a half, and rows
    without any.
    """
    inputs, inner = 130, 72
    kernels = TritonKernels(dtype)
    table = gated_table(inputs, inner, dtype)
    weight = kernels.pack(Weight.dense(random(2 * inner, inputs, dtype=dtype, seed=9)))
    for count in (1, 40, 600) if ON_GPU else (1, 9):
        x = random(count, inputs, dtype=dtype, seed=3)
        slots = (torch.arange(count, device=DEVICE) % 6 - 1).flip(0).int()
        for activation in Activation if ON_GPU else (Activation.SILU, Activation.GELU):
            found = kernels.adapted_linear_gated(x, weight, None, activation, slots, table)
            added = kernels.adapted_linear(x, weight, None, slots, table)
            assert torch.equal(found, kernels.gate(added, activation)), (count, activation)
            alone = [
                kernels.adapted_linear_gated(
                    x[row : row + 1], weight, None, activation, slots[row : row + 1], table
                )
                for row in (0, count // 2, count - 1)
            ]
            assert torch.equal(found[[0, count // 2, count - 1]], torch.cat(alone))
            has_none = slots < 0
            plain = kernels.linear_gated(x, weight, None, activation)
            assert torch.equal(found[has_none], plain[has_none])


@pytest.mark.parametrize("odd", [1, 7, 127, 129, 1000] if ON_GPU else [1, 65])
def test_any_number_of_outputs_and_any_ranks_have_the_bits_they_have_alone(odd: int) -> None:
    """Outputs behind the last, and between two parts, stay as they are."""
    dtype, inputs, gap = torch.float16, 33, 3
    count = 48 if ON_GPU else 5
    table = KERNELS.low_rank_table(8)
    ranks = ((1, 256), (2, 15), (31, 16), (100, 7), (255, 1))
    for slot, (first, second) in enumerate(ranks):
        parts = (
            LowRankPart(0, 0, random(odd, first, dtype=dtype, seed=slot)),
            LowRankPart(odd + gap, first, random(odd, second, dtype=dtype, seed=slot + 9)),
        )
        a = random(first + second, inputs, dtype=dtype, seed=slot + 20)
        scale = random(first + second, dtype=torch.float32, seed=slot) * 0.1
        table.put(slot, KERNELS.pack_low_rank(LowRank(a, scale, parts)))
    slots = (torch.arange(count, device=DEVICE) % 6 - 1).int()
    x = random(count, inputs, dtype=dtype, seed=1)
    base = random(count, 2 * odd + 2 * gap, dtype=dtype, seed=2)

    def added(rows: Tensor) -> Tensor:
        out = base[rows].clone()
        KERNELS.add_low_rank_(out[:, : 2 * odd + gap], x[rows], slots[rows], table)
        return out

    everyone = torch.arange(count, device=DEVICE)
    together = added(everyone)
    for row in range(count):
        assert torch.equal(added(everyone[row : row + 1]), together[row : row + 1]), row
    untouched = together == base
    assert untouched[:, odd : odd + gap].all()
    assert untouched[:, 2 * odd + gap :].all()
    assert not untouched[slots >= 0].all()
    assert untouched[slots < 0].all()


def test_many_rows_have_the_bits_of_few() -> None:
    """Programs that add all segments themselves, with wider tiles."""
    rows = make("small", 12, torch.float16)
    few = rows.added(torch.arange(12, device=DEVICE))
    again = torch.arange(12, device=DEVICE).repeat(MANY_ROWS // 12 + 1)
    assert len(again) > MANY_ROWS
    if not ON_GPU:  # the interpreter is slow: most have no adapter
        rows.slots[1:] = -1
        few = rows.added(torch.arange(12, device=DEVICE))
        again = torch.cat((again[:24], torch.ones_like(again)))
    assert torch.equal(rows.added(again), few[again])


OWN_ROWS = [torch.float16]
if ON_GPU:
    OWN_ROWS = DTYPES


@pytest.mark.parametrize("dtype", OWN_ROWS, ids=str)
@pytest.mark.parametrize("rank", [1, 3, 16, 33, 256] if ON_GPU else [1, 33])
def test_pairs_of_the_embedding_have_the_bits_they_have_alone(
    rank: int, dtype: torch.dtype
) -> None:
    """Their second matrix is float32, also in a model of half precision."""
    kernels, hidden, vocab = TritonKernels(dtype), 200, 50
    a = random(vocab, rank, dtype=dtype, seed=1).cpu()
    b = random(hidden, rank, dtype=torch.float32, seed=2).cpu()
    factor = random(hidden, dtype=torch.float32, seed=3).cpu()
    pair = EmbeddingPair(a, kernels.pack(Weight.dense(b)), 0.5, factor).to(DEVICE)
    count = max(ROW_COUNTS)
    tokens = torch.arange(count, device=DEVICE) * 7 % vocab
    known = random(count, hidden, dtype=dtype, seed=4)

    def looked_up(some_tokens: Tensor, some: Tensor) -> Tensor:
        return pair.looked_up(kernels, some_tokens, some)

    assert_rows_alone(looked_up, [tokens, known])
    changes = 0.5 * a[tokens.cpu()].double() @ b.double().t()
    truth = (known.cpu().double() + changes) * factor.double()
    size = (known.cpu().double().abs() + changes.abs()) * factor.double().abs()
    assert_close(looked_up(tokens, known).cpu(), truth, size=size)


@pytest.mark.parametrize("dtype", OWN_ROWS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 33, 4003, None] if ON_GPU else [7, None])
def test_own_rows_of_the_head_have_the_bits_they_have_alone(
    num_tokens: int | None, dtype: torch.dtype
) -> None:
    """Some tokens' rows, or all of an odd number; and those of the copy are the head's own products."""
    kernels, hidden, vocab = TritonKernels(dtype), 256, 4099 if ON_GPU else 131
    matrix = random(vocab, hidden, dtype=dtype, seed=1)
    listed = None if num_tokens is None else torch.arange(num_tokens) * (vocab // num_tokens)
    rows = matrix if listed is None else matrix[listed.to(DEVICE)]
    own = TrainedRows(kernels.pack(Weight.dense(rows.cpu())), listed).to(DEVICE)
    count = max(ROW_COUNTS)
    x = random(count, hidden, dtype=dtype, seed=2)
    known = random(count, vocab, dtype=dtype, seed=3)

    def multiplied(some: Tensor, scores: Tensor) -> Tensor:
        return own.multiplied(kernels, some, scores)

    assert_rows_alone(multiplied, [x, known])
    found = multiplied(x, known)
    if listed is None:
        head = kernels.pack(Weight.dense(matrix))
        assert torch.equal(found, kernels.linear(x, head))
    else:
        others = torch.ones(vocab, dtype=torch.bool)
        others[listed] = False
        assert torch.equal(found[:, others.to(DEVICE)], known[:, others.to(DEVICE)])
        truth = x.cpu().double() @ rows.cpu().double().t()
        size = x.cpu().double().abs() @ rows.cpu().double().abs().t()
        assert_close(found.cpu()[:, listed], truth, size=size)


def test_a_slot_takes_another_adapter_and_none() -> None:
    rows = make("small", 6, torch.float16)
    everyone = torch.arange(6, device=DEVICE)
    rows.slots.fill_(2)
    before = rows.added(everyone)
    first, last = rows.made[0], rows.made[2]
    assert first is not None
    assert last is not None
    rows.table.put(2, KERNELS.pack_low_rank(first))
    after = rows.added(everyone)
    rows.slots.fill_(0)
    assert torch.equal(rows.added(everyone), after)
    rows.table.put(0, None)
    assert torch.equal(rows.added(everyone), rows.base)
    rows.table.put(0, KERNELS.pack_low_rank(last))
    assert torch.equal(rows.added(everyone), before)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_kernel_with_other_bits_is_noticed_before_it_is_used(
    is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the comparison that is made when a model is loaded; one number of a gated row is wrong."""
    tables = []

    class KeptTable(TritonTable):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            tables.append(self)

    def add_products(
        out: Tensor, sums: Tensor, tiles: Tiles, slots: Tensor, activation: Activation | None
    ) -> Tensor:
        assert slots is tables[-1].slots
        adapters._expand_plainly_(out, sums, tiles, tables[-1])
        if activation is None:
            return out
        gated = KERNELS.gate(out, activation)
        gated[-1, -1] += is_wrong
        return gated

    monkeypatch.setattr(adapters, "TritonTable", KeptTable)
    monkeypatch.setattr(adapters, "add_products", add_products, raising=False)
    assert adapters._same_outputs(DEVICE, torch.float16) is not is_wrong


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_kernel_in_registers_is_used_and_has_the_bits_of_the_other(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make("qkv", 100, dtype)
    everyone = torch.arange(100, device=DEVICE)
    assert outputs_are_exact(rows.x.device, dtype)
    found = rows.added(everyone)
    monkeypatch.setattr("quire.backends.triton.adapters.outputs_are_exact", lambda *_: False)
    assert torch.equal(rows.added(everyone), found)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_programs_that_take_other_numbers_of_blocks_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = make("qkv", 100, torch.bfloat16)
    everyone = torch.arange(100, device=DEVICE)
    expected = rows.added(everyone)
    where = "quire.backends.triton.adapter_outputs.num_multiprocessors"
    for number in (1, 7, 10_000):
        monkeypatch.setattr(where, lambda _, number=number: number)
        assert torch.equal(rows.added(everyone), expected)


def test_rows_are_grouped_once_a_step() -> None:
    slots = torch.tensor([2, -1, 0, 2], dtype=torch.int32, device=DEVICE)
    tiles = KERNELS._row_tiles.of(slots, 5)
    assert KERNELS._row_tiles.of(slots, 5) is tiles
    other = slots.clone()
    assert KERNELS._row_tiles.of(other, 5) is not tiles


def test_more_ranks_than_there_is_room_for_are_refused() -> None:
    a, b = torch.zeros(MAX_RANKS + 1, 8), torch.zeros(4, MAX_RANKS + 1)
    with pytest.raises(UnsupportedModelError, match="smaller rank"):
        KERNELS.pack_low_rank(LowRank(a, torch.ones(MAX_RANKS + 1), (LowRankPart(0, 0, b),)))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("shape", ["qkv", "down"])
def test_a_graph_finds_what_was_put_into_slots_later(shape: str) -> None:
    rows = make(shape, 32, torch.bfloat16)
    everyone = torch.arange(32, device=DEVICE)
    x, base, slots = rows.x, rows.base, rows.slots

    def added() -> Tensor:
        out = base.clone()
        KERNELS.add_low_rank_(out, x, slots[:], rows.table)  # each step has a tensor of its own
        return out

    expected = rows.added(everyone)
    assert torch.equal(in_graph(added), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = added()
    other = rows.made[0]
    assert other is not None
    rows.table.put(1, KERNELS.pack_low_rank(other))
    slots.copy_(slots.flip(0))
    graph.replay()
    assert torch.equal(out, rows.added(everyone))


def on_cpu(made: list[LowRank | None]) -> list[LowRank | None]:
    def moved(part: LowRankPart) -> LowRankPart:
        factor, offset = part.factor, part.offset
        if factor is None or offset is None:
            return part._replace(b=part.b.cpu())
        return part._replace(b=part.b.cpu(), factor=factor.cpu(), offset=offset.cpu())

    return [
        None if one is None else LowRank(one.a.cpu(), one.scale.cpu(), tuple(map(moved, one.parts)))
        for one in made
    ]
