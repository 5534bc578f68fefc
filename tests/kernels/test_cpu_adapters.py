"""What adapters add to products, by the CPU's kernel: near float64, and with the same bits in any
company, on any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.low_rank import LowRank, LowRankPart, PlainTable
from quire.kernels.reference import ReferenceKernels

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INPUTS = 700
OUTPUTS = (130, 40, 33)


@pytest.fixture
def one_thread_after() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def low_rank(ranks: tuple[int, ...], dtype: torch.dtype, is_dora: bool) -> LowRank:
    parts, first, first_rank = [], 0, 0
    for outputs, rank in zip(OUTPUTS, ranks, strict=True):
        factor = torch.rand(outputs) + 0.5 if is_dora else None
        offset = torch.randn(outputs) if is_dora else None
        b = torch.randn(outputs, rank).to(dtype)
        parts.append(LowRankPart(first, first_rank, b, factor, offset))
        first, first_rank = first + outputs, first_rank + rank
    a = torch.randn(first_rank, INPUTS).to(dtype)
    return LowRank(a, torch.rand(first_rank) * 0.1, tuple(parts))


def exact(out: Tensor, x: Tensor, slots: Tensor, made: list[LowRank | None]) -> Tensor:
    """In float64."""
    expected = out.double()
    for row, slot in enumerate(slots.tolist()):
        one = made[slot] if slot >= 0 else None
        if one is None:
            continue
        inner = (one.a.double() @ x[row].double()) * one.scale.double()
        for part in one.parts:
            count, rank = part.b.shape
            columns = slice(part.first, part.first + count)
            added = part.b.double() @ inner[part.first_rank : part.first_rank + rank]
            expected[row, columns] += added
            if part.factor is not None and part.offset is not None:
                expected[row, columns] *= part.factor.double()
                expected[row, columns] += part.offset.double()
    return expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_different_adapters_have_the_bits_they_have_alone(
    dtype: str, one_thread_after: None
) -> None:
    torch.manual_seed(0)
    kernels, kind, rows = CpuKernels(), DTYPES[dtype], 37
    made = [low_rank((3, 16, 5), kind, False), low_rank((256, 1, 64), kind, True), None]
    table = kernels.low_rank_table(4)
    for slot, one in enumerate(made):
        table.put(slot, None if one is None else kernels.pack_low_rank(one))
    x, base = torch.randn(rows, INPUTS).to(kind), torch.randn(rows, sum(OUTPUTS)).to(kind)
    slots = torch.randint(-1, 3, (rows,), dtype=torch.int32)
    together = base.clone()
    kernels.add_low_rank_(together, x, slots, table)
    expected = exact(base, x, slots, made)
    error = (together.double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-6 if dtype == "float32" else 0.01)
    untouched = (slots < 0) | (slots == 2)
    assert torch.equal(together[untouched], base[untouched])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for row in range(rows):
            alone = base[row : row + 1].clone()
            kernels.add_low_rank_(alone, x[row : row + 1], slots[row : row + 1], table)
            assert torch.equal(alone[0], together[row])


def test_the_definition_agrees_with_float64_and_rows_never_meet() -> None:
    torch.manual_seed(1)
    kernels = ReferenceKernels()
    made = [low_rank((3, 16, 5), torch.float32, True), low_rank((2, 2, 2), torch.float32, False)]
    table = PlainTable(2)
    for slot, one in enumerate(made):
        table.put(slot, one)
    x, base = torch.randn(9, INPUTS), torch.randn(9, sum(OUTPUTS))
    slots = torch.tensor([0, 1, -1, 0, 0, 1, -1, 1, 0], dtype=torch.int32)
    x[3] = float("nan")  # a neighbour's
    found = base.clone()
    kernels.add_low_rank_(found, x, slots, table)
    expected = exact(base, x, slots, made)
    sound = torch.arange(9) != 3
    assert (found[sound].double() - expected[sound]).abs().max() < 1e-4
    assert found[3].isnan().all()


def test_an_empty_slot_adds_nothing_and_a_new_adapter_takes_its_place() -> None:
    torch.manual_seed(2)
    kernels = CpuKernels()
    table = kernels.low_rank_table(1)
    x, base = torch.randn(2, INPUTS), torch.randn(2, sum(OUTPUTS))
    slots = torch.zeros(2, dtype=torch.int32)
    found = []
    for seed in (1, 2, None):
        torch.manual_seed(seed or 0)
        one = None if seed is None else low_rank((2, 2, 2), torch.float32, False)
        table.put(0, None if one is None else kernels.pack_low_rank(one))
        out = base.clone()
        kernels.add_low_rank_(out, x, slots, table)
        found.append(out)
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[2], base)
