"""The first rungs: short loops that say what the engine says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.errors import InvalidRequestError
from quire.kernels.ops import AttentionSpec, HeadShape, Int32Array, LayerCache, PagedBatch
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams
from quire.tools.bench.jobs import Lengths, TokenSource, random_jobs
from quire.tools.ladder.contiguous import ContiguousCache, next_tokens
from quire.tools.ladder.kv_cache import generate_with_kv_cache, print_cache_growth
from quire.tools.ladder.naive import generate_naive
from quire.tools.ladder.speculation import generate_with_guesses, guess_from_repetition
from quire.tools.ladder.static_batching import (
    batch_start,
    generate_static_batch,
    serve_static_batches,
)
from tests.decoding import greedy
from tests.random_models import SPECS, Bench, random_decoder

PROMPT = [5, 17, 3, 90, 41, 8, 22]


@pytest.fixture(params=[ReferenceKernels, CpuKernels], ids=["reference", "cpu"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return random_decoder(SPECS["llama"], request.param(), torch.float32)


def ticking(step: float) -> Callable[[], float]:
    """A clock on which every look takes `step` seconds."""

    def ticks() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += step

    return ticks().__next__


@pytest.mark.few(4)
@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loops_say_what_a_paged_decoder_says(family: str, dtype: torch.dtype) -> None:
    decoder = random_decoder(SPECS[family], CpuKernels(), dtype)
    expected = greedy(decoder, PROMPT, 40)
    assert len(set(expected)) > 1  # random weights soon repeat themselves
    assert generate_naive(decoder, PROMPT, 40) == expected
    assert generate_with_kv_cache(decoder, PROMPT, 40) == expected


def test_attention_is_shared_out_once_a_token_and_not_once_a_layer() -> None:
    class Sharing(CpuKernels):
        def attention_work(
            self,
            query_lens: Int32Array,
            context_lens: Int32Array,
            table_rows: Int32Array,
            shape: HeadShape,
        ) -> dict[str, Int32Array]:
            asked.append((query_lens.tolist(), context_lens.tolist(), table_rows.tolist(), shape))
            return {"lengths": context_lens}

        def attention(
            self,
            query: Tensor,
            cache: LayerCache,
            batch: PagedBatch,
            spec: AttentionSpec,
            sinks: Tensor | None = None,
            slopes: Tensor | None = None,
        ) -> Tensor:
            assert batch.work is not None
            seen.append(batch.work["lengths"].tolist())
            return super().attention(query, cache, batch, spec, sinks, slopes)

    asked: list[Any] = []
    seen: list[list[int]] = []
    decoder = random_decoder(SPECS["llama"], Sharing(), torch.float32)
    generate_with_kv_cache(decoder, PROMPT, 3)
    shape = decoder.spec.head_shapes[0]
    assert asked == [([7], [7], [0], shape), ([1], [8], [0], shape), ([1], [9], [0], shape)]
    assert seen == [[length] for length in (7, 8, 9) for _ in decoder.layers]


def test_tokens_are_told_as_they_come(decoder: Decoder) -> None:
    for generate in (generate_naive, generate_with_kv_cache):
        told: list[int] = []
        assert generate(decoder, PROMPT, 9, told.append) == told


def test_the_key_length_grows_by_one_per_token(decoder: Decoder) -> None:
    shapes: list[list[int]] = []

    def note(cache: ContiguousCache) -> None:
        shapes.append(list(cache.keys(layer=1, sequence=0).shape))

    generate_with_kv_cache(decoder, PROMPT, 12, on_cache=note)
    spec = decoder.spec
    assert shapes[0] == [
        spec.head_shapes[0].num_kv_heads,
        len(PROMPT),
        spec.head_shapes[0].head_dim,
    ]
    assert all(after[1] == before[1] + 1 for before, after in pairwise(shapes))
    assert all([after[0], after[2]] == [before[0], before[2]] for before, after in pairwise(shapes))
    assert len(shapes) == 12


def test_the_cache_prints_its_shapes_as_they_grow(decoder: Decoder) -> None:
    lines: list[str] = []
    answer = print_cache_growth(decoder, PROMPT, 3, lines.append)
    assert answer == generate_with_kv_cache(decoder, PROMPT, 3)
    assert "computed   7 new: keys [2, 7, 16] in each of 2 layers" in lines[0]
    assert "computed   1 new: keys [2, 8, 16]" in lines[1]
    assert "computed   1 new: keys [2, 9, 16]" in lines[2]


def test_a_static_batch_gives_everyone_the_answer_they_get_alone(decoder: Decoder) -> None:
    jobs = random_jobs(5, Lengths(1, 20), Lengths(1, 12), TokenSource(0, decoder.spec.vocab_size))
    together = generate_static_batch(
        decoder, [job.token_ids for job in jobs], [job.max_tokens for job in jobs]
    )
    assert together == [
        tuple(generate_naive(decoder, job.token_ids, job.max_tokens)) for job in jobs
    ]


def test_static_batches_fill_up_or_give_up_waiting(decoder: Decoder) -> None:
    arrivals = [0.0, 0.01, 0.02, 0.5, 0.52, 9.0]
    # Computing takes one tick of 0.1 s per batch.
    answers = serve_static_batches(
        decoder, [(1, 2)] * 6, [2] * 6, arrivals, 3, max_wait_ms=100, clock=ticking(0.1)
    )
    starts = [answer.started for answer in answers]
    assert starts == pytest.approx([0.02, 0.02, 0.02, 0.6, 0.6, 9.1])
    assert [answer.finished for answer in answers] == pytest.approx(
        [start + 0.1 for start in starts]
    )
    assert len({answer.tokens for answer in answers}) == 1


def test_a_busy_machine_takes_along_whoever_came_meanwhile(decoder: Decoder) -> None:
    arrivals = [0.0, 0.3, 0.9]
    answers = serve_static_batches(
        decoder, [(1, 2)] * 3, [1] * 3, arrivals, 8, max_wait_ms=10, clock=ticking(1.0)
    )
    assert [answer.started for answer in answers] == pytest.approx([0.01, 1.01, 1.01])


@given(
    arrivals=st.lists(st.floats(0, 10), min_size=1, max_size=8).map(sorted),
    free_from=st.floats(0, 10),
    size=st.integers(1, 5),
    wait=st.floats(0, 5000),
)
def test_a_batch_starts_full_or_late_and_never_without_its_first(
    arrivals: list[float], free_from: float, size: int, wait: float
) -> None:
    start = batch_start(arrivals, free_from, size, wait)
    present = [arrival for arrival in arrivals if arrival <= start]
    assert present
    assert start >= free_from
    if start > free_from:
        waited = start == arrivals[0] + wait / 1000
        assert waited or len(present) >= size


def test_job_lengths_are_read_and_checked() -> None:
    assert Lengths.parse("--new-tokens", "7") == Lengths(7, 7)
    assert Lengths.parse("--new-tokens", "3-9") == Lengths(3, 9)
    for wrong in ("", "0", "9-3", "x", "3-", "-3", "1-2-3", "1.5"):
        with pytest.raises(InvalidRequestError, match="--new-tokens"):
            Lengths.parse("--new-tokens", wrong)


def test_jobs_are_the_same_each_time_and_begin_alike_where_asked() -> None:
    jobs = random_jobs(60, Lengths(3, 9), Lengths(2, 4), TokenSource(0, 1000), shared=5)
    assert jobs == random_jobs(60, Lengths(3, 9), Lengths(2, 4), TokenSource(0, 1000), shared=5)
    assert len({job.prompt[:5] for job in jobs}) == 1
    assert len({job.prompt for job in jobs}) == 60
    assert {len(job.prompt) for job in jobs} == set(range(8, 15))
    assert {job.max_tokens for job in jobs} == {2, 3, 4}


@pytest.mark.few(1)
def test_guesses_give_the_same_answer_in_fewer_steps(decoder: Decoder) -> None:
    expected = greedy(decoder, PROMPT, 40)
    steps: list[tuple[list[int], list[int]]] = []

    def oracle(tokens: Any, count: int) -> list[int]:
        first = len(tokens) - len(PROMPT)
        return [*expected[first : first + count - 1], 96]  # the last one is wrong, mostly

    def note(guesses: list[int], tokens: list[int]) -> None:
        steps.append((guesses, tokens))

    assert generate_with_guesses(decoder, PROMPT, 40, guess=oracle, on_step=note) == expected
    assert len(steps) == 10
    assert generate_with_guesses(decoder, PROMPT, 40) == expected
    assert (
        generate_with_guesses(decoder, PROMPT, 40, guess=lambda tokens, count: [1] * count)
        == expected
    )


def test_guesses_are_what_followed_the_last_time() -> None:
    assert guess_from_repetition([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3], 2) == [6, 7]
    assert guess_from_repetition([1, 2, 3, 4], 2) == []


def test_a_sequence_that_outgrows_its_room_is_refused_and_its_neighbour_untouched(
    decoder: Decoder,
) -> None:
    """It was written over with the reference kernels, and with the C++ ones a segmentation fault."""
    cache = ContiguousCache(decoder, num_sequences=2, capacity=8)
    next_tokens(decoder, cache, {0: PROMPT, 1: PROMPT})
    before = [cache.keys(layer, 1).clone() for layer in range(2)]
    next_tokens(decoder, cache, {0: [4]})
    with pytest.raises(
        InvalidRequestError, match="9 of sequence 0 don't fit: the cache has room for 8"
    ):
        next_tokens(decoder, cache, {0: [4]})
    assert cache.lengths == [8, 7]
    assert all(torch.equal(cache.keys(layer, 1), before[layer]) for layer in range(2))


@pytest.mark.parametrize(
    ("new_tokens", "message"),
    [
        ({2: [1]}, "sequence: 2 is none of the 2"),
        ({-1: [1]}, "sequence: -1 is none of the 2"),
        ({0: []}, "are none at all"),
        ({0: [97]}, "97 is outside the vocabulary of 97"),
        ({0: [-1]}, "-1 is outside the vocabulary of 97"),
        ({0: range(9)}, "9 of sequence 0 don't fit"),
    ],
)
def test_what_would_read_or_write_elsewhere_is_refused(
    decoder: Decoder, new_tokens: dict[int, list[int]], message: str
) -> None:
    cache = ContiguousCache(decoder, num_sequences=2, capacity=8)
    with pytest.raises(InvalidRequestError, match=message):
        next_tokens(decoder, cache, new_tokens)
    assert cache.lengths == [0, 0]


def test_a_loop_never_goes_past_the_models_last_position() -> None:
    """Behind it there are no angles to rotate by."""
    decoder = random_decoder(replace(SPECS["llama"], max_position=10), CpuKernels(), torch.float32)
    for generate in (generate_naive, generate_with_kv_cache, generate_with_guesses):
        with pytest.raises(InvalidRequestError, match="room for 10"):
            generate(decoder, PROMPT, 5)
        assert len(generate(decoder, PROMPT, 4)) == 4
    # Guesses up to the last position, right ones and wrong ones, are no reason to go past it.
    expected = greedy(decoder, PROMPT, 3)
    for tokens in (expected, [96, 96, 96]):
        guesses = partial(_guess_after_prompt, tokens)
        assert generate_with_guesses(decoder, PROMPT, 3, guess=guesses) == expected


def _guess_after_prompt(answer: list[int], tokens: Any, count: int) -> list[int]:
    return [*answer[len(tokens) - len(PROMPT) :], *[1] * count][:count]


def test_guesses_that_no_vocabulary_has_are_refused(decoder: Decoder) -> None:
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        generate_with_guesses(decoder, PROMPT, 4, guess=lambda tokens, count: [10**6])


def test_an_end_token_ends_the_loop_and_is_its_last(decoder: Decoder) -> None:
    whole = generate_naive(decoder, PROMPT, 40)
    end = whole[5]
    expected = whole[: whole.index(end) + 1]
    for generate in (generate_naive, generate_with_kv_cache):
        told: list[int] = []
        assert (
            generate(decoder, PROMPT, 40, told.append, eos_token_ids=(96, end)) == expected == told
        )


@pytest.mark.few(1)
def test_a_temperature_draws_what_the_engine_draws(decoder: Decoder) -> None:
    prompt = tuple(PROMPT)
    for seed in (0, 7):
        params = SamplingParams(temperature=0.9, seed=seed, max_tokens=12)
        expected = Bench(decoder).run([prompt], [params]).tokens["0"]
        naive = generate_naive(decoder, prompt, 12, temperature=0.9, seed=seed)
        assert naive == expected
        assert generate_with_kv_cache(decoder, prompt, 12, temperature=0.9, seed=seed) == expected
    assert naive != generate_naive(decoder, prompt, 12)
    with pytest.raises(InvalidRequestError, match="temperature"):
        generate_naive(decoder, prompt, 1, temperature=-1)
