"""Paged attention by Triton: against float64, and the same bits however a sequence's queries are
computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

# isort: skip  (after the check)
from quire.kernels.ops import AttentionSpec, HeadShape, LayerCache, PagedBatch
from tests import decoding
from tests.kernels.triton.support import DEVICE, DTYPES, MARKS, NAN, ON_GPU, drawn, in_graph, random

from quire.backends.triton.attention import decode_attention, prefill_attention  # isort: skip
from quire.backends.triton import attention_work as module  # isort: skip
from quire.backends.triton.kernels import TritonKernels  # isort: skip

pytestmark = MARKS
KERNELS = TritonKernels()
DIMS = [64, 80, 96, 128, 256] if ON_GPU else [64, 80]
LONG = 3000 if ON_GPU else 1100
"""Several splits of 512."""


def make(
    lengths: list[int],
    queries: list[int],
    shape: HeadShape,
    dtype: torch.dtype,
    seed: int = 0,
    block_size: int = 16,
) -> tuple[Tensor, LayerCache, PagedBatch]:
    """Sequences with random contents in randomly placed blocks; what belongs to nobody is NaN."""
    counts = [-(-length // block_size) for length in lengths]
    order = 1 + torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed))
    sides = random(
        2,
        int(order.max()) + 1,
        shape.num_kv_heads,
        block_size,
        shape.head_dim,
        dtype=dtype,
        seed=seed,
    )
    tables = torch.zeros(len(lengths) + 1, max(counts), dtype=torch.int32)
    taken = 0
    owned = torch.zeros(sides.shape[1], block_size, dtype=torch.bool)
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        tables[i, :count] = order[taken : taken + count].int()
        taken += count
        for token in range(length):
            owned[int(tables[i, token // block_size]), token % block_size] = True
    sides = sides.masked_fill(~owned.to(DEVICE)[None, :, None, :, None], NAN)
    starts = [0, *itertools.accumulate(queries)]
    batch = PagedBatch(
        query_start=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        block_tables=tables.to(DEVICE),
        table_rows=torch.arange(len(lengths), dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64, device=DEVICE),
        max_context_len=max(lengths),
    )
    query = random(starts[-1], shape.num_heads, shape.head_dim, dtype=dtype, seed=seed + 1)
    return query, LayerCache(sides[0], sides[1]), batch


def attention(
    query: Tensor, cache: LayerCache, block_tables: Tensor, work: Mapping[str, Tensor], num_partials: int,
    spec: AttentionSpec,
) -> Tensor:  # fmt: skip
    """By the kernels that take everything; rows that are in no list of `work` stay unwritten."""
    out = torch.empty_like(query)
    for name, some in work.items():
        if name == "prefill":
            prefill_attention(query, out, cache, block_tables, some, spec)
        else:
            decode_attention(query, out, cache, block_tables, some, num_partials, spec)
    return out


def truth_of(
    query: Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    window: int | None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(query, dtype=torch.float64)
    starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
    group = query.shape[1] // cache.keys.shape[1]
    for i, length in enumerate(lengths):
        blocks = batch.block_tables[batch.table_rows[i]].long()
        keys, values = (
            side[blocks]
            .double()
            .transpose(0, 1)
            .flatten(1, 2)[:, :length]
            .repeat_interleave(group, 0)
            * scale
            for side, scale in zip((cache.keys, cache.values), cache.fp8_scales, strict=True)
        )
        rows = slice(starts[i], starts[i + 1])
        scores = (
            query[rows].double().transpose(0, 1) @ keys.transpose(1, 2) * query.shape[2] ** -0.5
        )
        scores = cap * (scores / cap).tanh() if cap else scores
        here = torch.arange(length - (starts[i + 1] - starts[i]), length, device=DEVICE)[:, None]
        key = torch.arange(length, device=DEVICE)
        if slopes is not None:
            scores = scores + slopes.double()[:, None, None] * (key - here)
        visible = (key <= here) & (key > here - (window or length + 1))
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat(
                (scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)), -1
            )
        out[rows] = (scores.softmax(-1)[..., :length] @ values).transpose(0, 1)
    return out


def attend(
    query: Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    window: int | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    if not cap and sinks is None and slopes is None:
        return decoding.attend(KERNELS, query, cache, batch, query.shape[2] ** -0.5, window)
    heads = HeadShape(query.shape[1], cache.keys.shape[1], query.shape[2])
    spec = AttentionSpec(heads, heads.head_dim**-0.5, window, cap)
    if slopes is not None:
        spec = replace(spec, slopes=tuple(slopes.tolist()))
    return KERNELS.attention(query, cache, batch, spec, sinks, slopes)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("cap", "window"), [(0.0, None), (0.0, 50), (1.5, None), (1.5, 50)])
def test_caps_sinks_and_scales_are_those_of_float64(
    dtype: torch.dtype, cap: float, window: int | None
) -> None:
    queries, lengths = [1, 1, 20, 40], [5, 600, 70, 40]
    query, cache, batch = make(lengths, queries, HeadShape(4, 2, 64), dtype)
    sinks = torch.tensor([-50.0, 0.5, 3.0, 60.0], device=DEVICE)
    for some in (None, sinks):
        scaled = replace(
            cache, fp8_scales=(1.0, 1.0) if some is None or window is None else (1.3, 0.7)
        )
        got = attend(query * 2, scaled, batch, window, cap, some).double()
        error = (got - truth_of(query * 2, scaled, batch, window, cap, some)).abs().max().item()
        assert error <= {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("cap", "window"), [(0.0, None), (1.5, 50)])
def test_slopes_are_those_of_float64_and_of_any_chunk(
    dtype: torch.dtype, cap: float, window: int | None
) -> None:
    queries, lengths = [1, 20, 40], [600, 70, 40]
    query, cache, batch = make(lengths, queries, HeadShape(4, 2, 64), dtype)
    slopes = torch.tensor([0.5, 0.0625, 0.3, 0.0], device=DEVICE)
    got = attend(query * 2, cache, batch, window, cap, None, slopes)
    error = got.double() - truth_of(query * 2, cache, batch, window, cap, None, slopes)
    limit = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert error.abs().max().item() <= limit
    # in the interpreter products of float32 are numpy's, as below
    is_exact = ON_GPU or dtype != torch.float32
    same = torch.equal if is_exact else partial(torch.allclose, atol=1e-5)
    positions = torch.tensor([0, 19, 39])  # of the last sequence, which is all new
    alone = one_each(query, batch, positions, 1)
    alone = replace(alone, table_rows=batch.table_rows[2:].expand(3).contiguous())
    assert same(
        attend((query * 2)[21:][positions.to(DEVICE)], cache, alone, window, cap, None, slopes),
        got[21:][positions.to(DEVICE)],
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("queries", [1, 20])
def test_what_lies_before_a_window_may_be_anything(queries: int) -> None:
    """From its begin rounded down to `keys_at_once` on everything is read; the blocks before are
    others' by now.
    """
    query, cache, batch = make([1200], [queries], HeadShape(4, 2, 64), torch.float32)
    expected = attend(query, cache, batch, 90)
    first_read = (1200 - queries - 90 + 1) // KERNELS.keys_at_once * KERNELS.keys_at_once
    assert first_read == 512 * 2
    for side in (cache.keys, cache.values):
        side[batch.block_tables[0, : first_read // 16].long()] = NAN
    assert torch.equal(attend(query, cache, batch, 90), expected)
    batch.block_tables[0, : first_read // 16] = 0  # which is nobody's
    assert torch.equal(attend(query, cache, batch, 90), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("window", [None, 128])
def test_with_caps_and_sinks_every_chunk_has_the_same_bits(
    head_dim: int, window: int | None
) -> None:
    query, cache, batch = make([LONG], [LONG], HeadShape(8, 2, head_dim), torch.bfloat16)
    sinks = torch.linspace(-2, 2, 8, device=DEVICE)
    for options in ({"cap": 2.0}, {"sinks": sinks}, {"cap": 2.0, "sinks": sinks}):
        whole = attend(query, cache, batch, window, **options)  # type: ignore[arg-type]
        positions = torch.arange(0, LONG)
        alone = one_each(query, batch, positions, 1)
        assert torch.equal(
            attend(query[positions.to(DEVICE)], cache, alone, window, **options), whole
        )  # type: ignore[arg-type]
        for start in range(0, LONG - 333, 333):
            part = replace(
                batch,
                query_start=torch.tensor([0, 333], dtype=torch.int32, device=DEVICE),
                context_lens=torch.tensor([start + 333], dtype=torch.int32, device=DEVICE),
            )
            got = attend(query[start : start + 333], cache, part, window, **options)  # type: ignore[arg-type]
            assert torch.equal(got, whole[start : start + 333]), start


@drawn
@given(
    st.sampled_from(DTYPES),
    st.sampled_from([(4, 2), (3, 1), (7, 1), (4, 4), (16, 1), (17, 1)]),
    st.sampled_from(DIMS),
    st.lists(
        st.sampled_from([(1, 1), (1, 63), (1, 600), (5, 70), (40, 40), (33, 130)]),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([None, 1, 50]),
)
def test_it_is_that_of_float64(
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    sequences: list[tuple[int, int]],
    window: int | None,
) -> None:
    queries, lengths = [list(each) for each in zip(*sequences, strict=True)]
    query, cache, batch = make(lengths, queries, HeadShape(*heads, head_dim), dtype)
    error = (
        (attend(query, cache, batch, window).double() - truth_of(query, cache, batch, window))
        .abs()
        .max()
        .item()
    )
    assert error <= {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_may_rise_along_the_context(dtype: torch.dtype) -> None:
    """So that what the weights are relative to changes several times within a split: still those of
    float64, and computed alone, at once or divided they are the same.
    """
    shape, count = HeadShape(4, 2, 128), LONG if ON_GPU else 30
    query, cache, batch = make([LONG], [count], shape, dtype)
    blocks = batch.block_tables[0].long()
    rising = torch.linspace(1, 30, LONG + 15, device=DEVICE)[: len(blocks) * 16].view(-1, 1, 16, 1)
    cache.keys[blocks] = (cache.keys[blocks].float() * rising).to(dtype)
    whole = attend(query, cache, batch)
    error = (whole.double() - truth_of(query, cache, batch, None)).abs().max().item()
    assert error <= {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    same = torch.equal if ON_GPU and dtype != torch.float32 else partial(torch.allclose, atol=1e-2)
    for step in (1, 100) if ON_GPU else (10,):  # many at once are not divided, few are
        rows = torch.arange(count - 1, 0, -step).flip(0)
        alone = one_each(query, batch, rows + LONG - count, 1)
        assert same(attend(query[rows.to(DEVICE)], cache, alone), whole[rows.to(DEVICE)])


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_score_far_above_all_others_takes_all_the_weight(dtype: torch.dtype) -> None:
    """Key 200 of a split is so much like the queries that weights relative to the first tile's
    would be infinite: who sees it has its value as result, to the bit (in float32 its weight is not
    rounded to 1).
    """
    query, cache, batch = make([300], [140], HeadShape(2, 2, 128), dtype)
    query[:] = query[:1]
    block = int(batch.block_tables[0, 200 // 16])
    cache.keys[block, :, 200 % 16] = query[0] * 30  # a score of about 340
    value = cache.values[block, :, 200 % 16]
    out = attend(query, cache, batch)
    same = torch.equal if dtype != torch.float32 else partial(torch.allclose, rtol=1e-5)
    assert same(out[40:], value.expand_as(out[40:]))
    assert (out[:40].double() - truth_of(query, cache, batch, None)[:40]).abs().max() <= 3e-2
    last = one_each(query, batch, torch.tensor([299]), 1)
    assert same(attend(query[-1:], cache, last), value[None])


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 700] if ON_GPU else [700])
@pytest.mark.parametrize(
    "heads", [(16, 8, 128), (9, 3, 64), (4, 1, 80)] if ON_GPU else [(2, 1, 64)], ids=str
)
def test_every_position_has_the_same_bits_in_any_chunk(
    heads: tuple[int, int, int], window: int | None
) -> None:
    """Decode = chunk = whole prompt, at every position of a long sequence. (In the interpreter
    products are numpy's, whose order of additions depends on the tile: there the numbers are only
    close.)
    """
    same = torch.equal if ON_GPU else partial(torch.allclose, atol=1e-5)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    query, cache, batch = make([LONG], [LONG], HeadShape(*heads), dtype)
    whole = attend(query, cache, batch, window)
    step = 1 if ON_GPU else 97
    positions = torch.arange(0, LONG, step)
    alone = one_each(query, batch, positions, 1)
    assert same(
        attend(query[positions.to(DEVICE)], cache, alone, window), whole[positions.to(DEVICE)]
    )
    for chunk in (2, 7, 64, 333) if ON_GPU else (7, 333):
        for start in range(0, LONG, 5 * chunk * (1 if ON_GPU else 30)):
            stop = min(start + chunk, LONG)
            part = replace(
                batch,
                query_start=torch.tensor([0, stop - start], dtype=torch.int32, device=DEVICE),
                context_lens=torch.tensor([stop], dtype=torch.int32, device=DEVICE),
            )
            assert same(attend(query[start:stop], cache, part, window), whole[start:stop]), (
                start,
                stop,
            )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(16, 8, 128), (9, 3, 64), (4, 1, 80), (4, 2, 256)], ids=str)
@pytest.mark.parametrize("window", [None, 700])
def test_a_cache_of_8_bits_gives_the_same_bits_in_any_chunk_and_those_of_float64(
    heads: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    query, cache, batch = make([LONG], [LONG], HeadShape(*heads), dtype)
    scales = (1.3, 0.7) if window else (1.0, 1.0)
    narrow = LayerCache(
        *(side.to(torch.float8_e4m3fn) for side in (cache.keys, cache.values)), fp8_scales=scales
    )
    whole = attend(query, narrow, batch, window)
    positions = torch.arange(0, LONG)
    assert torch.equal(attend(query, narrow, one_each(query, batch, positions, 1), window), whole)
    last = one_each(query, batch, positions[-1:], 1)  # divided among programs
    assert torch.equal(attend(query[-1:], narrow, last, window), whole[-1:])
    for chunk in (2, 7, 333):
        for start in range(0, LONG - chunk, 7 * chunk):
            part = one_each(query, batch, positions[start + chunk - 1 : start + chunk], chunk)
            got = attend(query[start : start + chunk], narrow, part, window)
            assert torch.equal(got, whole[start : start + chunk]), (start, chunk)
    wide = LayerCache(
        *(side.to(torch.float16) for side in (narrow.keys, narrow.values)), fp8_scales=scales
    )
    error = (whole.double() - truth_of(query, wide, batch, window)).abs().max().item()
    assert error <= {torch.float16: 4e-3, torch.bfloat16: 1e-2}[dtype]
    blocks = batch.block_tables[0]
    narrow.keys[blocks[(LONG - 1) // 16].long(), 0, (LONG - 1) % 16, 3] = NAN
    assert attend(query[-1:], narrow, last, window).isnan().any()


def one_each(query: Tensor, batch: PagedBatch, positions: Tensor, count: int) -> PagedBatch:
    """Each position as the last of a sequence of its own, all in the blocks of the one sequence of
    `batch`.
    """
    return replace(
        batch,
        query_start=torch.arange(
            0, len(positions) * count + 1, count, dtype=torch.int32, device=DEVICE
        ),
        context_lens=(positions + 1).int().to(DEVICE),
        table_rows=torch.zeros(len(positions), dtype=torch.int32, device=DEVICE),
    )


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 200, 700] if ON_GPU else [200])
def test_the_work_may_be_shared_out_in_any_way(window: int | None) -> None:
    """A split per program, several, whole sequences, each sequence in another way, few programs,
    many: the same bits. Again, as splits are counted.
    """
    shape = HeadShape(4, 2, 64)
    lengths = [LONG, 30, 513, 1024, 1]
    query, cache, batch = make(lengths, [1] * 5, shape, torch.float16)
    counts, rows = np.ones(5, np.int32), np.arange(5, dtype=np.int32)
    spec = AttentionSpec(shape, 0.125, window)
    programs = (1, 16, 1000) if ON_GPU else (1, 1000)
    lists = [
        module.attention_work(counts, np.array(lengths, np.int32), rows, shape, each)
        for each in programs
    ]
    some = ([1] * 5, [2, 1, 2, 1, 1], [2] * 5, [100] * 5, [3, 1, 1, 2, 1])
    lists += [
        {"decode": module.divided(rows, counts, np.array(lengths, np.int32), rows, np.array(runs))}
        for runs in some[: 5 if ON_GPU else 2]
    ]
    found = []
    # in the interpreter `attend` below has the first one again
    for made in [*lists, *(lists if ON_GPU else ())]:
        work = {name: torch.from_numpy(values).to(DEVICE) for name, values in made.items()}
        found.append(attention(query, cache, batch.block_tables, work, 64, spec))
    assert all(torch.equal(out, found[0]) for out in found)
    assert torch.equal(attend(query, cache, batch, window), found[0])


@pytest.mark.slow
@pytest.mark.parametrize("programs", [1, 16, 1250] if ON_GPU else [1250])
@pytest.mark.parametrize("num_queries", [1, 3, 40] if ON_GPU else [3])
def test_lists_made_for_longer_sequences_can_be_shortened(num_queries: int, programs: int) -> None:
    """As when guesses turn out wrong that the host counted as right: the bits of lists made for the
    true lengths.
    """
    shape = HeadShape(4, 2, 64)
    lengths, lags = [LONG, 60, 512, 513, 1024, 1000], [0, 5, 0, 1, 7, 12]
    queries = np.full(6, num_queries, np.int32)
    query, cache, batch = make(lengths, queries.tolist(), shape, torch.float16)

    def lists(context_lens: list[int]) -> dict[str, Tensor]:
        rows = np.arange(6, dtype=np.int32)
        made = module.attention_work(
            queries, np.array(context_lens, np.int32), rows, shape, programs
        )
        return {name: torch.from_numpy(values).to(DEVICE) for name, values in made.items()}

    drafted = lists([length + lag for length, lag in zip(lengths, lags, strict=True)])
    module.shorten_attention_work_(
        drafted, torch.tensor([*lags, 0], dtype=torch.int32, device=DEVICE)
    )
    found = [
        attention(query, cache, batch.block_tables, work, 64, AttentionSpec(shape, 0.125))
        for work in (drafted, lists(lengths))
    ]
    assert torch.equal(found[0], found[1])


@drawn
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5000)), min_size=1, max_size=20),
    st.sampled_from([(4, 2), (16, 1), (3, 3)]),
    st.sampled_from([2, 396]),
)
def test_the_lists_cover_everything_once(
    sequences: list[tuple[int, int]], heads: tuple[int, int], programs: int
) -> None:
    queries = np.array([count for count, _ in sequences], np.int32)
    lengths = np.array([count + before for count, before in sequences], np.int32)
    shape = HeadShape(*heads, 64)
    work = module.attention_work(
        queries, lengths, np.arange(len(queries), dtype=np.int32), shape, programs
    )
    group = heads[0] // heads[1]
    decode = work.get("decode", work.get("small", np.zeros((1, 8), np.int32)))
    prefill = work.get("prefill", np.zeros((0, 8), np.int32))
    # room for partial results is taken by this length
    assert len(decode) - 1 >= max(decode[0, 0], decode[0, 1])
    splits: dict[int, list[int]] = {}
    partials: set[int] = set()
    for where, first, _, count, length, row, end, new in decode[1 : 1 + decode[0, 0]].tolist():
        assert (count, length) == (queries[row], lengths[row])
        assert new == count
        splits.setdefault(row, []).extend(range(first, end))
        if end - first < -(-length // module.SPLIT):
            assert partials.isdisjoint(range(where + first, where + end))
            partials.update(range(where + first, where + end))
    assert partials == set(range(decode[0, 1]))
    tiles: dict[int, list[int]] = {}
    for first, _, _, count, length, row, _, _ in prefill.tolist():
        assert (count, length) == (queries[row], lengths[row])
        tiles.setdefault(row, []).append(first)
    for row, (count, length) in enumerate(zip(queries.tolist(), lengths.tolist(), strict=True)):
        if row in splits:
            assert count * group <= module.DECODE_ROWS
            assert sorted(splits[row]) == list(range(-(-length // module.SPLIT)))
        else:
            assert sorted(tiles[row]) == list(range(0, count * group, module.PROMPT_ROWS))
    assert len(splits) + len(tiles) == len(queries)


def test_the_lists_say_which_keys_the_step_writes() -> None:
    """Guesses that are checked as single queries are keys for those behind them."""
    lengths, rows = np.array([40, 700, 701, 702, 8], np.int32), np.array([3, 0, 0, 0, 5], np.int32)
    ((name, work),) = module.attention_work(
        np.ones_like(rows), lengths, rows, HeadShape(4, 2, 64), 132
    ).items()
    items = work[1 : 1 + work[0, 0]]
    assert name == "small"
    assert {(row, length, new) for _, _, _, _, length, row, _, new in items.tolist()} == {
        (3, 40, 1), (0, 700, 1), (0, 701, 2), (0, 702, 3), (5, 8, 1),
    }  # fmt: skip


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
def test_a_graph_gives_the_same_bits() -> None:
    query, cache, batch = make([LONG, 5, 700], [1, 1, 1], HeadShape(16, 8, 128), torch.bfloat16)
    shape, ones = HeadShape(16, 8, 128), np.ones(3, np.int32)
    lists = KERNELS.attention_work(
        ones, batch.context_lens.cpu().numpy(), np.arange(3, dtype=np.int32), shape
    )
    batch = replace(
        batch, work={name: torch.from_numpy(values).to(DEVICE) for name, values in lists.items()}
    )
    assert torch.equal(in_graph(lambda: attend(query, cache, batch)), attend(query, cache, batch))
