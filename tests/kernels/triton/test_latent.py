"""Latent attention by Triton: against float64, and the same bits however a step is divided."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.latent import LatentSpec, latent_heads
from quire.kernels.ops import HeadShape, Int32Array, LatentNorm, LayerCache
from quire.kernels.reference import ReferenceKernels
from quire.kernels.weights import Weight
from tests.kernels.triton.support import (
    DEVICE,
    DTYPES,
    MARKS,
    NAN,
    ON_GPU,
    assert_close,
    in_graph,
    random,
)

# isort: skip  (after the check)
from quire.backends.triton.attention_work import shorten_attention_work_  # isort: skip
from quire.backends.triton.kernels import TritonKernels  # isort: skip
from quire.backends.triton.latent_attention import latent_attention  # isort: skip
from quire.backends.triton.latent_work import (  # isort: skip
    BESIDE_ALL,
    BESIDE_SINGLE,
    MAX_LATENT_PARTIALS,
    SINGLE_HEADS,
    latent_decode_lists,
    latent_work,
    small_rows,
)

if ON_GPU:
    from quire.backends.triton import (
        prompt_latent,
        single_latent,
        small_batch_latent,
        small_batches,
    )

pytestmark = MARKS
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="this kernel is for Hopper")
KERNELS = TritonKernels()
SPECS = {
    "small": LatentSpec(latent_heads(3, 24, 8), 0.3, nope_dim=10, rope_dim=8, value_dim=6),
    "many heads": LatentSpec(latent_heads(70, 40, 16), 0.2, nope_dim=16, rope_dim=16, value_dim=16),
    "glm": LatentSpec(latent_heads(20, 512, 64), 0.06, nope_dim=192, rope_dim=64, value_dim=256),
    "v2-lite": LatentSpec(latent_heads(16, 512, 64), 0.07, nope_dim=128, rope_dim=64, value_dim=128),
    "32 heads": LatentSpec(latent_heads(32, 512, 64), 0.06, nope_dim=64, rope_dim=64, value_dim=64),
    "v3": LatentSpec(latent_heads(128, 512, 64), 0.07, nope_dim=128, rope_dim=64, value_dim=128),
    "mistral4": LatentSpec(latent_heads(33, 256, 64), 0.07, nope_dim=64, rope_dim=64, value_dim=128),
}  # fmt: skip
TRUE = ("glm", "v2-lite", "v3")
FP8_SCALE = 0.037


def lists_of_single_queries(lengths: list[int], heads: HeadShape) -> dict[str, Int32Array]:
    ones, rows = np.ones(len(lengths), np.int32), np.arange(len(lengths), dtype=np.int32)
    return latent_work(ones, np.array(lengths, np.int32), rows, heads, 132, True)


def is_small(lengths: list[int], heads: HeadShape) -> bool:
    return "small" in lists_of_single_queries(lengths, heads)


@dataclass
class Sequences:
    """Random queries of some sequences whose latents lie in randomly placed blocks; what belongs to
    nobody is NaN.
    """

    spec: LatentSpec
    query: Tensor
    cache: LayerCache
    tables: Tensor
    queries: list[int]
    lengths: list[int]

    def work(self, programs: int) -> Tensor:
        sizes = (self.queries, self.lengths, range(len(self.queries)))
        arrays = [np.array(each, np.int32) for each in sizes]
        lists = latent_work(arrays[0], arrays[1], arrays[2], self.spec.heads, programs)
        return torch.from_numpy(lists["decode"]).to(DEVICE)

    def attend(self, programs: int = 132, work: Tensor | None = None) -> Tensor:
        listed = self.work(programs) if work is None else work
        longest = max(self.lengths)
        return latent_attention(
            self.query, self.cache, self.tables, listed, self.spec, longest, programs
        )

    def small_work(self) -> Tensor:
        lists = lists_of_single_queries(self.lengths, self.spec.heads)
        return torch.from_numpy(lists["small"]).to(DEVICE)

    def attend_small(self, programs: int = 132, work: Tensor | None = None) -> Tensor:
        """By the kernels for few single queries."""
        listed = self.small_work() if work is None else work
        longest = max(self.lengths)
        return small_batch_latent.small_batch_latent(
            self.query, self.cache, self.tables, listed, self.spec, longest, programs
        )

    def single_work(self, programs: int = 132) -> Tensor:
        ones, rows = np.ones(len(self.lengths), np.int32), np.arange(len(self.lengths))
        arrays = ones, np.array(self.lengths, np.int32), rows.astype(np.int32)
        lists = latent_work(*arrays, self.spec.heads, programs, has_single=True)
        return torch.from_numpy(lists["single"]).to(DEVICE)

    def attend_single(self, programs: int = 132, work: Tensor | None = None) -> Tensor:
        """By the kernel for many single queries; twice as many programs share a multiprocessor."""
        listed = self.single_work(programs) if work is None else work
        longest = max(self.lengths)
        return single_latent.single_latent(
            self.query, self.cache, self.tables, listed, self.spec, longest, programs
        )

    def prompts_work(self, programs: int = 132) -> Tensor:
        sizes = (self.queries, self.lengths, range(len(self.queries)))
        arrays = [np.array(each, np.int32) for each in sizes]
        heads = self.spec.heads
        lists = latent_work(arrays[0], arrays[1], arrays[2], heads, programs, True, True)
        return torch.from_numpy(lists["prompts"]).to(DEVICE)

    def attend_prompts(self, programs: int = 132, work: Tensor | None = None) -> Tensor:
        """By the kernel for prompts."""
        listed = self.prompts_work(programs) if work is None else work
        assert prompt_latent.takes_cache(self.query, self.cache)
        longest = max(self.lengths)
        return prompt_latent.prompt_latent(
            self.query, self.cache, self.tables, listed, self.spec, longest, programs
        )

    def latents(self, i: int) -> Tensor:
        blocks = self.tables[i].long()
        stored = self.cache.keys.view(torch.uint8) if self.is_fp8 else self.cache.keys
        numbers = stored[blocks].view(self.cache.keys.dtype).double() * self.cache.fp8_scales[0]
        return numbers.flatten(0, 2)[: self.lengths[i]]

    @property
    def is_fp8(self) -> bool:
        return self.cache.keys.dtype.itemsize == 1

    def truth(self) -> Tensor:
        found = []
        for i, query in enumerate(self.query.double().split_with_sizes(self.queries)):
            latents, count = self.latents(i), self.queries[i]
            scores = torch.einsum("qhd,td->hqt", query, latents) * self.spec.scale
            ends = torch.arange(len(latents) - count, len(latents), device=DEVICE)
            hidden = torch.arange(len(latents), device=DEVICE) > ends.unsqueeze(1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            found.append(torch.einsum("hqt,tv->qhv", weights, latents[:, : self.spec.rank]))
        return torch.cat(found)

    def single(self, i: int, row: int) -> Sequences:
        """One query of one sequence, by itself."""
        first = sum(self.queries[:i]) + row
        length = self.lengths[i] - self.queries[i] + row + 1
        alone = self.query[first : first + 1].clone()
        tables = self.tables[i : i + 1]
        return replace(self, query=alone, tables=tables, queries=[1], lengths=[length])


def make(
    spec: LatentSpec,
    lengths: list[int],
    queries: list[int],
    dtype: torch.dtype,
    is_fp8: bool = False,
    block_size: int = 16,
) -> Sequences:
    size = spec.heads.head_dim
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1))
    keys = random(len(order), 1, block_size, size, dtype=dtype, seed=2)
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    owned = torch.zeros(len(order), block_size, dtype=torch.bool)
    blocks = iter(order.tolist())
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        tables[i, :count] = torch.tensor(list(itertools.islice(blocks, count)))
        for token in range(length):
            owned[int(tables[i, token // block_size]), token % block_size] = True
    keys = keys.masked_fill(~owned.to(DEVICE)[:, None, :, None], NAN)
    scale = 1.0
    if is_fp8:
        keys, scale = (keys / FP8_SCALE).to(torch.float8_e4m3fn), FP8_SCALE
    cache = LayerCache(keys, keys[..., : spec.rank], None, None, (scale, scale))
    query = random(sum(queries), spec.heads.num_heads, size, dtype=dtype, seed=3)
    return Sequences(spec, query, cache, tables.to(DEVICE), queries, lengths)


def close(found: Tensor, sequences: Sequences) -> None:
    """To a few roundings of weights and outputs: sums of many weights that are rounded."""
    truth = sequences.truth()
    assert not found.isnan().any()
    error = (found.double() - truth).abs().max().item()
    unit = torch.finfo(found.dtype).eps
    largest = max(sequences.latents(i).abs().max().item() for i in range(len(sequences.queries)))
    assert error <= largest * max(unit, 1e-6) * 2


CASES = [
    pytest.param("small", torch.float16, False),
    pytest.param("glm", torch.float16, False, marks=pytest.mark.slow),
    pytest.param("small", torch.float16, True, marks=pytest.mark.slow),
    pytest.param("many heads", torch.float16, False, marks=pytest.mark.slow),
    pytest.param("small", torch.float32, False, marks=pytest.mark.slow),
]
if ON_GPU:
    CASES = [
        pytest.param(name, dtype, is_fp8)
        for name in SPECS
        for dtype in DTYPES
        for is_fp8 in (False, True)
        if not (is_fp8 and dtype == torch.float32)
    ]


@pytest.mark.parametrize(("name", "dtype", "is_fp8"), CASES)
def test_a_row_has_the_same_bits_in_any_division_and_company(
    name: str, dtype: torch.dtype, is_fp8: bool
) -> None:
    lengths, queries = [5, 600, 513], [2, 1, 24 if name == "small" else 4]
    sequences = make(SPECS[name], lengths, queries, dtype, is_fp8)
    whole, divided = sequences.work(1), sequences.work(132)
    assert whole[0, 1] == 0
    assert divided[0, 1] > 0
    together = sequences.attend(1, whole)
    close(together, sequences)
    assert torch.equal(sequences.attend(132, divided), together)
    assert torch.equal(sequences.attend(2, divided), together)  # programs take several items
    first = 0
    for i, count in enumerate(queries):
        for row in {0, count - 1}:
            alone = sequences.single(i, row).attend()
            assert torch.equal(alone[0], together[first + row]), (i, row)
        first += count


@pytest.mark.slow
@pytest.mark.parametrize("kind", DTYPES[-1:])
def test_splits_that_one_program_merges_have_the_bits_of_splits_of_many(kind: torch.dtype) -> None:
    """More splits than a program keeps: it merges some of them before it goes on."""
    length = 512 * 7 + 3 if kind != torch.float32 else 1100
    sequences = make(SPECS["small"], [length], [2], kind)
    expected = sequences.attend(132)
    close(expected, sequences)
    assert torch.equal(sequences.attend(1), expected)


def test_a_list_made_for_longer_sequences_is_corrected() -> None:
    """Draft tokens that were wrong shorten sequences after their work was divided, here to fewer
    splits.
    """
    sequences = make(SPECS["small"], [510, 300, 511], [1, 2, 3], torch.float16)
    expected = sequences.attend()
    told = replace(sequences, lengths=[515, 300, 514])
    work = told.work(132)
    assert work[0, 1] > 0
    lag = torch.tensor([5, 0, 3], dtype=torch.int32, device=DEVICE)
    shorten_attention_work_({"decode": work}, lag)
    found = latent_attention(
        sequences.query, sequences.cache, sequences.tables, work, sequences.spec, 600, 132
    )
    assert torch.equal(found, expected)


def test_lists_cover_every_row_and_split_once() -> None:
    source = np.random.default_rng(0)
    for heads, programs in itertools.product((3, 20, 128), (1, 7, 132)):
        shape = latent_heads(heads, 512, 64)
        queries = source.integers(1, 90, 40).astype(np.int32)
        lengths = queries + source.integers(0, 9000, 40).astype(np.int32)
        rows = np.arange(40, dtype=np.int32)
        work = latent_work(queries, lengths, rows, shape, programs)["decode"]
        assert work[0, 1] <= MAX_LATENT_PARTIALS
        items = work[1 : 1 + work[0, 0]].tolist()
        seen = set()
        places: dict[int, tuple[int, int]] = {}
        for partial, first_split, _, count, length, sequence, end_split, first in items:
            assert (count, length) == (queries[sequence], lengths[sequence])
            last = min((first + 63) // heads, count - 1)
            splits = -(-(length - count + last + 1) // 512)
            assert end_split <= splits
            for split in range(first_split, end_split):
                assert (sequence, first, split) not in seen
                seen.add((sequence, first, split))
                if (first_split, end_split) != (
                    0,
                    splits,
                ):  # waits in memory, in a place of its own
                    assert places.setdefault(partial + split, (sequence, first)) == (
                        sequence,
                        first,
                    )
        for sequence, (count, length) in enumerate(zip(queries, lengths, strict=True)):
            for first in range(0, int(count) * heads, 64):
                last = min((first + 63) // heads, int(count) - 1)
                splits = -(-(int(length) - int(count) + last + 1) // 512)
                seen -= {(sequence, first, split) for split in range(splits)}
        assert not seen
        ones = np.ones(40, np.int32)
        single = latent_work(ones, lengths, rows, shape, programs)["decode"]
        assert len(single) - 1 <= latent_decode_lists(1, 40, 9100, shape)["decode"]


def test_the_list_of_many_single_queries_covers_every_split_once() -> None:
    """For two programs on a multiprocessor."""
    source = np.random.default_rng(0)
    shape, rows = latent_heads(20, 512, 64), np.arange(40, dtype=np.int32)
    ones, lengths = np.ones(40, np.int32), source.integers(1, 9000, 40).astype(np.int32)
    ((name, work),) = latent_work(ones, lengths, rows, shape, 66, has_single=True).items()
    as_decode = latent_work(ones, lengths, rows, shape, 132)["decode"]
    assert name == "single"
    assert np.array_equal(work[:, :7], as_decode[:, :7])
    assert (work[1:, 7] == 1).all()  # what the step writes
    found = [
        (row, split)
        for _, first, row, _, _, _, end, _ in work[1:].tolist()
        for split in range(first, end)
    ]
    assert sorted(found) == [
        (row, split) for row in range(40) for split in range(-(-int(lengths[row]) // 512))
    ]


def test_the_list_of_single_queries_covers_every_head_and_split_once() -> None:
    source = np.random.default_rng(0)
    for heads in (3, 16, 20, 33, 128):
        shape, rows = latent_heads(heads, 512, 64), np.arange(9, dtype=np.int32)
        lengths = source.integers(1, 2500, 9).astype(np.int32)
        ((name, work),) = latent_work(np.ones_like(rows), lengths, rows, shape, 132, True).items()
        items = work[1:].tolist()
        assert (name, len(items)) == ("small", work[0, 0])
        assert len(items) <= latent_decode_lists(9, 9, 2500, shape, True)["small"]
        found, places = set(), set()
        for partial, split, query, new, length, row, end, first_head in items:
            assert (query, new, length, end) == (row, 1, lengths[row], split + 1)
            found |= {(row, split, first_head + head) for head in range(small_rows(heads))}
            if length > 512:
                places.add(partial + split)
        assert len(places) == work[0, 1] == sum(length > 512 for *_, length, _, _, _ in items)
        expected = {
            (row, split, head)
            for row in range(9)
            for split in range(-(-int(lengths[row]) // 512))
            for head in range(heads)
        }
        assert {one for one in found if one[2] < heads} == expected


def test_the_list_is_chosen_by_the_work() -> None:
    """Single queries, while they have few splits; and graphs know of it."""
    glm = latent_heads(20, 512, 64)

    def kind(lengths: list[int], heads: int, count: int = 1) -> str:
        rows = np.arange(len(lengths), dtype=np.int32)
        shape, counts = latent_heads(heads, 512, 64), np.full_like(rows, count)
        lists = latent_work(counts, np.array(lengths, np.int32), rows, shape, 132, True)
        ((name, work),) = lists.items()
        most = latent_decode_lists(len(lengths), len(lengths), max(lengths), shape, True)
        assert count > 1 or len(work) - 1 <= most[name]
        return name

    most, more = BESIDE_ALL.most, BESIDE_ALL.most_of_long
    assert kind([64] * most, 20) == kind([9] * (most // 4), 128) == "small"
    assert kind([200] * (most // 4), 20) == kind([200] * (most // 4 - 1) + [256], 20) == "small"
    assert kind([64] * (most + 1), 20) == kind([9] * (most // 4 + 1), 128) == "decode"
    assert kind([200] * (most // 4) + [1], 20) == kind([20], 20, count=2) == "decode"
    assert kind([64 * more], 20) == kind([64] * (more - 9) + [513], 20) == "small"
    assert kind([512] * (more // 8 - 1) + [640 - 128], 20) == "decode"  # none has several splits
    assert kind([64 * more + 1], 20) == kind([64] * (more - 8) + [513], 20) == "decode"
    assert latent_decode_lists(1, 1, 8192, glm, True) == {"small": 16}
    assert latent_decode_lists(4, 8, 200, glm, True) == {"small": 8}
    assert set(latent_decode_lists(33, 64, 200_000, glm, True)) == {"small", "decode"}
    assert set(latent_decode_lists(64, 64, 512, glm, True)) == {"small", "decode"}
    assert set(latent_decode_lists(most + 1, 2 * most, 512, glm, True)) == {"decode"}
    assert set(latent_decode_lists(more - 7, more, 513, glm, True)) == {"decode"}
    assert set(latent_decode_lists(more - 8, more, 513, glm, True)) == {"small", "decode"}
    assert set(latent_decode_lists(1, 1, 8192, glm)) == {"decode"}


def test_many_single_queries_have_a_list_of_their_own() -> None:
    """From more items than fit the kernels for few; and graphs know of it."""

    def kind(lengths: list[int], has_small: bool = True, count: int = 1) -> str:
        rows = np.arange(len(lengths), dtype=np.int32)
        counts, sizes = np.full_like(rows, count), np.array(lengths, np.int32)
        lists = latent_work(counts, sizes, rows, glm, 132, has_small, True, True)
        ((name, work),) = lists.items()
        most = latent_decode_lists(len(lengths), len(lengths), max(lengths), glm, has_small, True)
        assert count > 1 or len(work) - 1 <= most[name]
        return name

    glm, most, more = latent_heads(20, 512, 64), BESIDE_SINGLE.most, BESIDE_SINGLE.most_of_long
    assert kind([512] * most) == kind([8192, 8192]) == kind([9] * (most - 2) + [513]) == "small"
    assert kind([512 * more]) == kind([1] * (more - 17) + [8193]) == "small"
    assert kind([1] * (most + 1)) == kind([8192, 8192, 1]) == "single"
    assert kind([512 * more + 1]) == kind([1] * (more - 16) + [8193]) == "single"
    assert kind([9] * (most - 1) + [513]) == kind([1], has_small=False) == "single"
    assert (kind([300], count=3), kind([300], count=4)) == ("decode", "prompts")
    assert latent_decode_lists(1, 1, 8192, glm, True, True) == {"small": 16}
    assert latent_decode_lists(1, 64, 512, glm, True, True) == {"small": most, "single": 64}
    assert set(latent_decode_lists(1, 1, 200_000, glm, True, True)) == {"small", "single"}
    assert latent_decode_lists(2, 2, 16_384, glm, True, True)["small"] == more
    assert set(latent_decode_lists(more - 16, 64, 8193, glm, True, True)) == {"small", "single"}
    assert set(latent_decode_lists(more - 15, 64, 8193, glm, True, True)) == {"single"}
    assert set(latent_decode_lists(most + 1, 64, 512, glm, True, True)) == {"single"}
    assert set(latent_decode_lists(1, 1, 512, glm, False, True)) == {"single"}
    assert latent_decode_lists(most, most, 512, glm, True, True) == {"small": most}


@pytest.mark.parametrize("has_single", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_graphs_have_room_for_every_step(seed: int, has_single: bool) -> None:
    """And for little more: a list as long as they expect can be met."""
    random = np.random.default_rng(seed)
    for heads in (20, 128):
        shape = latent_heads(heads, 512, 64)
        for _ in range(200):
            count, longest = (
                int(random.integers(1, 700)),
                int(random.choice([300, 512, 2000, 60_000])),
            )
            lengths = random.integers(1, random.integers(2, longest + 2), count).clip(max=longest)
            rows = np.arange(count, dtype=np.int32)
            arguments = np.ones_like(rows), lengths.astype(np.int32), rows, shape, 132, True
            ((name, work),) = latent_work(*arguments, has_single=has_single).items()
            fewest = int(random.integers(1, count + 1))
            lists = latent_decode_lists(fewest, count, longest, shape, True, has_single)
            assert len(work) - 1 <= lists[name]
    assert latent_decode_lists(8, 8, 60_000, shape, True)["small"] == 32 + (640 - 32) // 8


def test_the_list_says_which_keys_the_step_writes() -> None:
    """Draft tokens that are checked as single queries are keys for those behind them."""
    lengths, rows = np.array([40, 700, 701, 702], np.int32), np.array([3, 0, 0, 0], np.int32)
    heads = latent_heads(20, 512, 64)
    expected = {(3, 40, 1), (0, 700, 1), (0, 701, 2), (0, 702, 3)}
    for has_small, name, place in ((True, "small", 3), (False, "single", 7)):
        lists = latent_work(
            np.ones_like(rows), lengths, rows, heads, 132, has_small, has_single=True
        )
        items = lists[name][1:].tolist()
        assert {(item[5], item[4], item[place]) for item in items} == expected


LENGTHS = (1, 31, 32, 33, 63, 64, 65, 128, 200, 511, 512, 513, 545, 1024, 1025, 5000)


@on_gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*TRUE, "mistral4"])
def test_single_queries_have_the_bits_of_the_kernel_for_all(
    name: str, dtype: torch.dtype, is_fp8: bool, seed: int
) -> None:
    """Any lengths, by many programs and by few, twice, as splits are counted; also where a weight's
    reference is raised.
    """
    source = np.random.default_rng(seed)
    lengths = source.choice(LENGTHS, source.integers(1, 17)).tolist()
    while not is_small(lengths, SPECS[name].heads):
        lengths.pop()
    sequences = make(SPECS[name], lengths, [1] * len(lengths), dtype, is_fp8)
    if seed == 2:
        sequences = replace(sequences, query=sequences.query * 30)
    expected = sequences.attend()
    assert not expected.isnan().any()
    for programs in (132, 132, 3):
        assert torch.equal(sequences.attend_small(programs), expected)


@on_gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["glm", "v2-lite", "32 heads"])
def test_many_single_queries_have_the_bits_of_the_kernel_for_all(
    name: str, dtype: torch.dtype, is_fp8: bool, seed: int
) -> None:
    """Any lengths, by programs that have whole sequences and by those that share them, twice, as
    splits are counted; also where a weight's reference is raised.
    """
    source = np.random.default_rng(seed)
    lengths = source.choice(LENGTHS, (3, 40, 300)[seed]).tolist()
    sequences = make(SPECS[name], lengths, [1] * len(lengths), dtype, is_fp8)
    if seed == 1:
        sequences = replace(sequences, query=sequences.query * 30)
    expected = sequences.attend()
    assert not expected.isnan().any()
    work = {programs: sequences.single_work(programs) for programs in (1, 132)}
    assert work[132][0, 1] > 0
    assert (work[1][1:, 6] - work[1][1:, 1]).max() > 1
    for listed in work.values():
        for programs in (132, 132, 3):
            assert torch.equal(sequences.attend_single(programs, listed), expected)


@on_gpu
@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_single_queries_see_what_the_kernel_before_has_written(
    is_fp8: bool, is_small: bool
) -> None:
    """In a graph, where kernels start early: three draft tokens of each sequence are written by the
    kernel before, over NaN, each time others.
    """
    spec, drafts, lengths = SPECS["glm"], 3, [66, 3, 200, 514, 1100]
    long = make(spec, lengths, [1] * 5, torch.bfloat16, is_fp8)
    rows = 5 * drafts
    owner = np.repeat(np.arange(5, dtype=np.int32), drafts)
    ends = np.repeat(np.array(lengths), drafts) - drafts + 1 + np.tile(np.arange(drafts), 5)
    ones = np.ones(rows, np.int32)
    arguments = ones, ends.astype(np.int32), owner, spec.heads, 132
    kinds = [
        latent_work(*arguments, has_small=is_small, has_single=True),
        latent_work(*arguments),
    ]
    early, decode = (torch.from_numpy(next(iter(kind.values()))).to(DEVICE) for kind in kinds)
    assert early[1:, 3 if is_small else 7].max() == drafts
    by_early = small_batch_latent.small_batch_latent if is_small else single_latent.single_latent
    blocks = long.tables.cpu()[owner, (ends - 1) // 16]
    slots = (blocks * 16 + torch.from_numpy((ends - 1) % 16)).to(DEVICE)
    key_up = Weight.dense(random(20, 512, 192, dtype=torch.bfloat16, seed=2) / 14)
    norm = LatentNorm(torch.ones(512, dtype=torch.bfloat16, device=DEVICE), 1e-6)
    angles = torch.ones(1, 32, device=DEVICE)
    cos_sin = torch.cat((angles, torch.zeros_like(angles)), 1)
    positions = torch.zeros(rows, dtype=torch.long, device=DEVICE)
    packed, latent = (
        torch.zeros(rows, *size, dtype=torch.bfloat16, device=DEVICE)
        for size in ((20, 256), (576,))
    )

    def attend(work: Tensor, function: Callable[..., Tensor]) -> Tensor:
        plain, rotated = packed.split_with_sizes((192, 64), 2)
        query = KERNELS.latent_queries_(
            plain, rotated, key_up, latent, norm, positions, cos_sin, long.cache, slots
        )
        return function(query, long.cache, long.tables, work, spec, 1100, 132)

    attend(early, by_early)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(early, by_early)
    for turn in range(4):
        packed.copy_(random(rows, 20, 256, dtype=torch.bfloat16, seed=10 + turn))
        latent.copy_(random(rows, 576, dtype=torch.bfloat16, seed=20 + turn))
        expected = attend(decode, latent_attention)
        assert not expected.isnan().any()
        bytes_of = long.cache.keys.view(torch.uint8).view(-1, 576 * long.cache.keys.itemsize)
        bytes_of[slots] = 255  # NaN
        graph.replay()
        assert torch.equal(found, expected), turn


@on_gpu
def test_single_queries_of_sequences_that_turn_out_shorter() -> None:
    sequences = make(SPECS["glm"], [510, 300, 511, 2000], [1] * 4, torch.bfloat16)
    told = replace(sequences, lengths=[515, 300, 514, 2060])
    work = told.small_work()
    lag = torch.tensor([5, 0, 3, 60], dtype=torch.int32, device=DEVICE)
    shorten_attention_work_({"small": work}, lag)
    assert torch.equal(sequences.attend_small(132, work), sequences.attend())
    for programs in (1, 132):
        work = told.single_work(programs)
        shorten_attention_work_({"single": work}, lag)
        assert torch.equal(sequences.attend_single(132, work), sequences.attend())


@on_gpu
def test_they_are_for_half_precision_and_whole_pieces() -> None:
    assert small_batch_latent.takes(latent_heads(20, 512, 64), torch.bfloat16)
    assert not small_batch_latent.takes(latent_heads(20, 512, 64), torch.float32)
    assert not small_batch_latent.takes(latent_heads(20, 40, 24), torch.bfloat16)
    assert small_batches.latents_are_exact(DEVICE, torch.bfloat16)
    assert small_batches.latents_are_exact(DEVICE, torch.float16)
    assert single_latent.takes(latent_heads(20, 512, 64), torch.bfloat16)
    assert not single_latent.takes(latent_heads(33, 512, 64), torch.bfloat16)
    assert small_batches.single_latents_are_exact(DEVICE, torch.bfloat16)
    assert small_batches.single_latents_are_exact(DEVICE, torch.float16)
    assert set(KERNELS.decode_lists(1, 1, 512, latent_heads(20, 512, 64))) == {"small"}
    assert set(KERNELS.decode_lists(64, 64, 512, latent_heads(20, 512, 64))) == {"single"}


PROMPTS = (
    [(40, 40)],
    [(64, 64), (1, 9), (65, 700), (2, 513)],
    [(130, 130), (7, 2000), (33, 512), (1, 1), (127, 1151)],
    [(300, 1500), (513, 513)],
    [(3, 5000), (20, 640), (1, 3000), (1, 20)],
)
"""(queries, length) of sequences: whole tiles and ragged ones, cached prefixes, decode steps beside."""


@on_hopper
@pytest.mark.parametrize("case", range(len(PROMPTS)))
@pytest.mark.parametrize("spread", [1, 30, 300])
@pytest.mark.parametrize("name", [*TRUE, "mistral4"])
def test_prompts_have_the_bits_of_the_kernel_for_all(name: str, spread: int, case: int) -> None:
    """By many programs, by few, and with items divided. Where scores are far apart a weight's
    reference is raised within a split, which is left to the kernel for all. What belongs to nobody
    is NaN.
    """
    queries, lengths = [list(each) for each in zip(*PROMPTS[case], strict=True)]
    block_size = (16, 32, 64)[case % 3]
    sequences = make(SPECS[name], lengths, queries, torch.bfloat16, block_size=block_size)
    sequences = replace(sequences, query=sequences.query * spread)
    expected = sequences.attend()
    assert not expected.isnan().any()
    for programs in (132, 132, 1, 2, 7):
        found = sequences.attend_prompts(programs)
        assert torch.equal(found, expected), programs
    divided = sequences.work(132)
    assert torch.equal(sequences.attend_prompts(132, divided), expected)


@on_hopper
def test_few_items_of_prompts_are_left_to_the_kernel_for_all() -> None:
    """The kernel for prompts computes what it can: outputs are there before the other one runs."""
    sequences = make(SPECS["glm"], [2048] * 3, [2048] * 3, torch.bfloat16)
    work = sequences.prompts_work()
    assert work[0, 1] == 0  # no item is divided
    out = torch.full((3 * 2048, 20, 512), NAN, dtype=torch.bfloat16, device=DEVICE)
    left: list[Tensor] = []

    def skipped(*arguments: Any, out: Tensor, failed: Tensor) -> Tensor:
        left.append(failed)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_latent, "latent_attention", skipped)
        out = sequences.attend_prompts(132, work)
    assert left[0].numel() == 2 * (len(work) - 1)
    assert not left[0].any()
    assert torch.equal(out, sequences.attend())


@on_hopper
def test_prompts_that_turn_out_shorter() -> None:
    """By wrong draft tokens before them."""
    sequences = make(SPECS["glm"], [510, 300, 511, 1900], [30, 40, 3, 64], torch.bfloat16)
    told = replace(sequences, lengths=[515, 300, 514, 1960])
    lag = torch.tensor([5, 0, 3, 60], dtype=torch.int32, device=DEVICE)
    for programs in (1, 132):
        work = told.prompts_work(programs)
        shorten_attention_work_({"prompts": work}, lag)
        assert torch.equal(sequences.attend_prompts(132, work), sequences.attend())


@on_hopper
def test_prompts_in_a_graph() -> None:
    sequences = make(SPECS["glm"], [700, 33, 1500], [64, 33, 5], torch.bfloat16)
    work = sequences.prompts_work()
    found = in_graph(lambda: sequences.attend_prompts(132, work))
    assert torch.equal(found, sequences.attend())


def test_the_list_of_prompts_is_for_tiles_full_of_one_sequence() -> None:
    glm = latent_heads(20, 512, 64)

    def lists(queries: list[int], lengths: list[int]) -> dict[str, Int32Array]:
        rows = np.arange(len(queries), dtype=np.int32)
        arrays = np.array(queries, np.int32), np.array(lengths, np.int32), rows
        return latent_work(*arrays, glm, 132, True, True)

    assert set(lists([1] * 500, [300] * 500)) == {"decode"}
    assert set(lists([1, 1], [300, 9])) == {"small"}
    assert set(lists([3, 3], [300, 9])) == {"decode"}
    assert set(lists([1, 4], [300, 9])) == {"prompts"}
    # the kernel for prompts takes whole tiles: more of them than other kernels would
    whole = lists([512], [16384])["prompts"]
    assert (whole[0, 0], whole[0, 1]) == (160, 0)
    assert lists([16], [16384])["prompts"][0, 1] > 0
    many = latent_heads(128, 512, 64)
    rows, lengths = np.zeros(1, np.int32), np.array([5000], np.int32)
    assert set(latent_work(rows + 1, lengths, rows, many, 132, False, True)) == {"decode"}


@on_hopper
def test_kernels_for_prompts_are_for_bfloat16() -> None:
    assert small_batches.latent_prompts_are_exact(DEVICE)
    assert prompt_latent.takes(latent_heads(20, 512, 64), torch.bfloat16)
    assert not prompt_latent.takes(latent_heads(20, 512, 64), torch.float16)
    assert not prompt_latent.takes(latent_heads(20, 40, 24), torch.bfloat16)
    fp8 = make(SPECS["glm"], [100], [100], torch.bfloat16, True)
    assert not prompt_latent.takes_cache(fp8.query, fp8.cache)
    kernels = TritonKernels(torch.bfloat16)
    counts, rows = np.array([100], np.int32), np.zeros(1, np.int32)
    assert set(kernels.attention_work(counts, counts, rows, fp8.spec.heads)) == {"prompts"}


HEADS_COUNTS = (1, 17, 300, 2048) if ON_GPU else (1, 17)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "size", "inner"),
    [(20, 512, 192), (20, 256, 512)] if ON_GPU else [(3, 40, 72), (2, 32, 192)],
)
def test_each_head_is_multiplied_with_its_own_matrix_as_linear_does_it(
    heads: int, size: int, inner: int, dtype: torch.dtype
) -> None:
    from quire.backends.triton.linear import linear

    weight = Weight.dense(random(heads, size, inner, dtype=dtype))
    x = random(max(HEADS_COUNTS), heads, inner + 64, dtype=dtype, seed=1)[..., :inner]
    whole = KERNELS.linear_heads(x, weight)
    truth = torch.einsum("rhi,hoi->rho", x.double(), weight.tensor.double())
    size = (x.double().abs().amax() * inner**0.5).expand_as(truth)
    # float32 numbers are added one by one: the largest error of millions of sums is some units
    assert_close(whole, truth, 8 if dtype == torch.float32 else 2, size)
    if ON_GPU or inner % 64:  # the interpreter's order of sums depends on a tile's shape
        for head, one in enumerate(weight.tensor):
            assert torch.equal(whole[:, head], linear(x[:, head], one))
    packed = TritonKernels(dtype)
    packed.pack(weight)  # may choose cuBLAS for many rows
    for count in HEADS_COUNTS:
        assert torch.equal(KERNELS.linear_heads(x[:count], weight), whole[:count])
        assert torch.equal(packed.linear_heads(x[:count], weight), whole[:count])


# The interpreter loses the carry where a number is rounded up to a power of two in FP8.
@pytest.mark.parametrize("is_fp8", [False, True] if ON_GPU else [False])
@pytest.mark.parametrize("dtype", DTYPES[-1:] if not ON_GPU else DTYPES)
@pytest.mark.parametrize("name", ["small", pytest.param("glm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_rope", [True, False])
def test_a_latent_is_normed_rotated_and_stored_once(
    has_rope: bool, name: str, dtype: torch.dtype, is_fp8: bool
) -> None:
    spec, rows = SPECS[name], 4
    heads, rank, rope = spec.heads.num_heads, spec.rank, spec.rope_dim
    kind = torch.float8_e4m3fn if is_fp8 else dtype
    keys = torch.full((3, 1, 16, rank + rope), NAN, device=DEVICE).to(kind)
    scale = FP8_SCALE if is_fp8 else 1.0
    cache = LayerCache(keys, keys[..., :rank], None, None, (scale, scale))
    wide = random(rows, rank + rope + 8, dtype=dtype)
    latent, absorbed = wide[:, : rank + rope], random(rows, heads, rank, dtype=dtype, seed=1)
    rotated = random(rows, heads, rope + 16, dtype=dtype, seed=2)[..., 16:]
    norm = LatentNorm(random(rank, dtype=dtype, seed=3), 1e-6)
    angles = random(50, rope // 2, dtype=torch.float32, seed=4)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.tensor([3, 49, 0, 7], device=DEVICE)
    slots = torch.tensor([17, 2, -1, 33], device=DEVICE)
    table = cos_sin if has_rope else None
    arguments = absorbed, rotated, latent, norm, positions, table
    query = KERNELS.latent_to_cache_(*arguments, cache, slots)
    expected_keys = keys.clone().to(torch.float32).to(kind)
    expected_cache = replace(cache, keys=expected_keys, values=expected_keys[..., :rank])
    expected = ReferenceKernels().latent_to_cache_(*arguments, expected_cache, slots.clamp(min=0))
    tolerance = {torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.06}[dtype]
    torch.testing.assert_close(query, expected, atol=tolerance, rtol=tolerance)
    for slot in (17, 2, 33):
        place = (slot // 16, 0, slot % 16)
        got, wanted = keys.float()[place] * scale, expected_keys.float()[place] * scale
        bound = 0.13 if is_fp8 else tolerance
        torch.testing.assert_close(got, wanted, atol=bound, rtol=bound)
    assert keys.float()[0, 0, 0].isnan().all()  # nobody's
    for row in range(rows):
        one = [part[row : row + 1] for part in (absorbed, rotated, latent)]
        alone = KERNELS.latent_to_cache_(
            *one, norm, positions[row : row + 1], table, cache, slots[row : row + 1]
        )
        assert torch.equal(alone[0], query[row])


@pytest.mark.few(1)
@pytest.mark.parametrize("is_fp8", [False, True] if ON_GPU else [False])
@pytest.mark.parametrize("rows", [1, 3, 17, 128, 129, 256, 257] if ON_GPU else [1, 17])
@pytest.mark.parametrize("name", TRUE if ON_GPU else ("two tiles",))
def test_queries_in_one_launch_have_the_bits_of_two(name: str, rows: int, is_fp8: bool) -> None:
    spec = replace(SPECS["small"], heads=latent_heads(4, 48, 8), nope_dim=16)
    spec, dtype = SPECS.get(name, spec), DTYPES[-1]
    heads, rank, rope = spec.heads.num_heads, spec.rank, spec.rope_dim
    packed = random(rows, heads, spec.query_dim, dtype=dtype, seed=1)
    plain, rotated = packed.split_with_sizes((spec.nope_dim, rope), 2)
    key_up = Weight.dense(random(heads, rank, spec.nope_dim, dtype=dtype, seed=2))
    latent = random(rows, rank + rope + 8, dtype=dtype, seed=3)[:, : rank + rope]
    norm = LatentNorm(random(rank, dtype=dtype, seed=4), 1e-6)
    angles = random(300, rope // 2, dtype=torch.float32, seed=5)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.arange(rows, device=DEVICE)
    slots = torch.arange(rows, device=DEVICE) + 16
    slots[-1] = -1
    kind = torch.float8_e4m3fn if is_fp8 else dtype
    found, expected = (
        torch.full((rows // 16 + 2, 1, 16, rank + rope), 7.0, device=DEVICE).to(kind)
        for _ in range(2)
    )
    scales = (FP8_SCALE,) * 2 if is_fp8 else (1.0, 1.0)

    def queries(function: Callable[..., Tensor], keys: Tensor) -> Tensor:
        cache = LayerCache(keys, keys[..., :rank], None, None, scales)
        arguments = plain, rotated, key_up, latent, norm, positions, cos_sin, cache, slots
        return function(*arguments)

    def by_two(*arguments: Any) -> Tensor:
        return ReferenceKernels.latent_queries_(KERNELS, *arguments)

    if rows > 256:  # by cuBLAS, and then by our own kernel
        both, own = TritonKernels(dtype), queries(KERNELS.latent_queries_, found)
        both.pack(key_up)
        assert torch.equal(queries(both.latent_queries_, found), own)
    assert torch.equal(queries(KERNELS.latent_queries_, found), queries(by_two, expected))
    assert torch.equal(found.float(), expected.float())
    assert (found.float()[0] == torch.tensor(7.0).to(kind).float().item()).all()


@on_gpu
@pytest.mark.parametrize("name", TRUE)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_graph_gives_the_same_bits(name: str, is_fp8: bool) -> None:
    sequences = make(SPECS[name], [700, 33, 5000], [1, 1, 1], torch.bfloat16, is_fp8)
    work, small = sequences.work(132), sequences.small_work()
    expected = sequences.attend(132, work)
    assert torch.equal(in_graph(lambda: sequences.attend(132, work)), expected)
    assert torch.equal(in_graph(lambda: sequences.attend_small(132, small)), expected)
    if sequences.spec.heads.num_heads <= SINGLE_HEADS:
        single = sequences.single_work()
        assert torch.equal(in_graph(lambda: sequences.attend_single(132, single)), expected)


@on_gpu
@pytest.mark.parametrize("name", TRUE)
def test_prompts_have_the_bits_of_single_queries(name: str) -> None:
    """6,000 tokens at once, and every so manieth of them alone and by many programs."""
    sequences = make(SPECS[name], [6000], [6000], torch.bfloat16)
    whole = sequences.attend()
    for row in range(0, 6000, 397):
        single = sequences.single(0, row)
        for programs in (1, 132):
            assert torch.equal(single.attend(programs)[0], whole[row]), row
        assert torch.equal(single.attend_small()[0], whole[row]), row
        if single.spec.heads.num_heads <= SINGLE_HEADS:
            assert torch.equal(single.attend_single()[0], whole[row]), row


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_latent.py has this")
def test_a_model_has_the_references_logits() -> None:
    from tests.decoding import all_logits, make_caches, run_tokens
    from tests.random_models import SPECS as MODELS
    from tests.random_models import random_decoder

    spec, tokens = MODELS["deepseek_v3"], list(range(20))
    expected = all_logits(random_decoder(spec, ReferenceKernels(), torch.float32), tokens)
    decoder = random_decoder(spec, TritonKernels(torch.float32), torch.float32)
    found = all_logits(decoder, tokens)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    caches = make_caches(decoder, 4)
    run_tokens(decoder, caches, tokens[:-1], 0)
    assert torch.equal(run_tokens(decoder, caches, tokens, 19)[0], found[-1])
