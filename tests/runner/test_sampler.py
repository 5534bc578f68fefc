"""Sampling: draws against their distribution, the noise against its own, and rows against their
company.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.filters import sum_rows
from quire.kernels.noise import chances, gumbel_noise, noise_keys
from quire.kernels.reference import ReferenceKernels
from quire.sampling.sampler import NOT_NUMBERS, SampledTokens
from quire.sampling_params import ResolvedTokens, SamplingParams, StructuredOutput
from tests.runner.sampling_definition import before_temperature, kept, probabilities
from tests.runner.sampling_support import Job, RecordingKernels, make_batch, run


@pytest.fixture(scope="module")
def kernels() -> RecordingKernels:
    return RecordingKernels()


DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1": {},
    "temperature 1.7": {"temperature": 1.7},
    "top_k and top_p": {"top_k": 5, "top_p": 0.9},
    "min_p and bias": {"min_p": 0.07, "logit_bias": {3: 2.5, 0: -1.0}},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.2},
    "typical and sigma": {"typical_p": 0.8, "top_n_sigma": 1.7},
}
LOGITS = [2.0, 1.0, 0.0, -1.0, 0.5, 0.5, -3.0]


@pytest.mark.parametrize("reference", [False, True], ids=["cpu", "reference"])
@pytest.mark.parametrize("name", list(DISTRIBUTIONS))
def test_draws_follow_the_definition(name: str, reference: bool, kernels: RecordingKernels) -> None:
    metadata = 50_000
    job = Job(SamplingParams(seed=1, **DISTRIBUTIONS[name]), prompt=(2, 6), answer=(1, 1, 4))
    batch = make_batch([job], len(LOGITS), ReferenceKernels() if reference else kernels)
    request_rows, positions = (
        batch.metadata.request_rows.repeat(metadata),
        batch.metadata.positions.repeat(metadata),
    )
    many = batch.sampler.metadata(request_rows, positions, batch.metadata.token_ids)
    many = replace(many, seeds=np.arange(metadata, dtype=np.uint64))
    tokens = batch.sampler.sample(torch.tensor([LOGITS]).repeat(metadata, 1), many).token_ids
    scores = [score / job.params.temperature for score in before_temperature(LOGITS, job)]
    expected = np.array(probabilities(kept(scores, job))) * metadata
    observed = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    assert (observed[expected == 0] == 0).all()
    possible = expected > 0
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    # The 0.9999 quantiles of chi-square with 1 to 6 degrees of freedom.
    assert statistic < {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 6: 27.9}[possible.sum() - 1]


def test_xtc_strikes_as_often_as_asked(kernels: RecordingKernels) -> None:
    seeds, positions = np.arange(50_000, dtype=np.uint64), np.full(50_000, 3)
    struck = chances(seeds, positions) < 0.3
    keys = noise_keys(seeds, positions).view(np.uint64)[:, 0]
    # not the noise's own bits
    assert abs(np.corrcoef(keys.astype(np.float64), chances(seeds, positions))[0, 1]) < 0.02
    assert abs(struck.mean() - 0.3) < 4 * (0.3 * 0.7 / 50_000) ** 0.5
    jobs = [
        Job(SamplingParams(seed=seed, xtc_probability=0.3, xtc_threshold=0.1), (0, 1, 2))
        for seed in range(40)
    ]
    _, scores = run(torch.tensor([[3.0, 2.5, 0.0]]).repeat(40, 1), jobs, kernels)
    assert (scores[:, 0] == float("-inf")).tolist() == struck[:40].tolist()


def test_xtc_with_a_threshold_everything_reaches_leaves_the_least_likely(
    kernels: RecordingKernels,
) -> None:
    """Of what the filters before it left: what they excluded is not the least likely token, but
    none.
    """
    params = SamplingParams(seed=1, min_p=0.2, xtc_probability=1.0, xtc_threshold=0.0)
    sampled, scores = run(torch.tensor([[3.0, 2.5, 2.0, -9.0]]), [Job(params)], kernels)
    assert not sampled.failures()
    assert (scores > float("-inf")).tolist() == [[False, False, True, False]]


def test_noise_of_neighbouring_positions_and_seeds_is_independent() -> None:
    """Pairs of draws at neighbouring positions, seeds and tokens fill the unit square evenly."""
    positions = np.arange(4000, dtype=np.int64)
    by_position = gumbel_noise(
        torch.from_numpy(noise_keys(np.full(4000, 9, np.uint64), positions)), 8
    )
    by_seed = gumbel_noise(
        torch.from_numpy(noise_keys(np.arange(4000, dtype=np.uint64), np.full(4000, 3, np.int64))),
        8,
    )
    for noise in (by_position, by_seed):
        uniform = torch.exp(-torch.exp(-noise.double())).numpy()
        for first, second in ((uniform[:-1, 0], uniform[1:, 0]), (uniform[:, 0], uniform[:, 1])):
            counts = np.histogram2d(first, second, bins=8, range=[[0, 1], [0, 1]])[0]
            expected = len(first) / 64
            assert ((counts - expected) ** 2 / expected).sum() < 114  # 63 degrees, p = 1e-4


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    keys = noise_keys(np.arange(64, dtype=np.uint64), np.arange(64, dtype=np.int64))
    noise = gumbel_noise(torch.from_numpy(keys), 8192).double()
    assert abs(noise.mean().item() - 0.5772156649) < 0.01
    assert abs(noise.var().item() - np.pi**2 / 6) < 0.02
    assert torch.isfinite(noise).all()


def test_noise_depends_on_seed_and_position_alone() -> None:
    seeds, positions = np.array([3, 3, 4], np.uint64), np.array([7, 8, 7], np.int64)
    together = gumbel_noise(torch.from_numpy(noise_keys(seeds, positions)), 100)
    alone = gumbel_noise(torch.from_numpy(noise_keys(seeds[:1], positions[:1])), 100)
    assert torch.equal(together[:1], alone)
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together[0], together[2])


def test_temperature_zero_takes_the_lowest_id_among_equals(kernels: RecordingKernels) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, -1.0, 0.0]])
    for temperature in (0.0, 1e-6):
        jobs = [Job(SamplingParams(temperature=temperature, top_p=0.5, top_k=1))] * 3
        for chosen in (kernels, ReferenceKernels()):
            assert make_batch(jobs, 4, chosen).sample(logits.clone()).token_ids.tolist() == [
                1,
                0,
                0,
            ]


def mixed_jobs(vocab_size: int, source: random.Random) -> list[Job]:
    """Every parameter, in mixes, next to plain rows."""
    high = min(vocab_size, 50)
    mixes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 5, "top_p": 0.9},
        {"top_p": 0.3, "temperature": 2.0},
        {"top_p": 0.995, "temperature": 3.0},
        {"min_p": 0.05, "typical_p": 0.7},
        {"typical_p": 0.98, "temperature": 4.0},
        {"top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.01},
        {"repetition_penalty": 1.37, "temperature": 0.0},
        {"presence_penalty": 0.31, "frequency_penalty": 0.77, "repetition_penalty": 0.83},
        {"no_repeat_ngram_size": 2},
        {"dry_multiplier": 0.83, "dry_base": 1.71, "dry_allowed_length": 1, "top_k": 40},
        {"logit_bias": {0: 3.3, vocab_size - 1: -7.7}, "min_tokens": 60, "stop_token_ids": (1, 2)},
        {"allowed_token_ids": tuple(range(0, vocab_size, 2))},
        {"structured": StructuredOutput(regex="x"), "top_p": 0.8},
        {"logits_processors": (lambda history, scores: scores + history[-1] / 10,)},
        # Once more with other values, so that no feature is alone in a batch.
        {"no_repeat_ngram_size": 4},
        {"no_repeat_ngram_size": 1, "temperature": 0.5},
        {"frequency_penalty": -0.3, "repetition_penalty": 1.9},
        {"frequency_penalty": 0.6},
        {"dry_multiplier": 0.3, "dry_base": 1.2, "dry_allowed_length": 4},
        {"top_n_sigma": 0.7, "min_p": 0.01, "top_k": 700, "typical_p": 0.9, "top_p": 0.97},
        {"xtc_probability": 1.0, "xtc_threshold": 0.003},
        {
            "structured": StructuredOutput(regex="x"),
            "allowed_token_ids": (0, vocab_size - 1, 2, 5, 6),
        },
    ]
    jobs = []
    for i, mix in enumerate(mixes):
        piece = [source.randrange(high) for _ in range(source.randint(2, 9))]
        history = piece * source.randint(2, 5)
        cut = source.randint(1, len(history))
        mask = None
        if "structured" in mix:
            mask = torch.tensor([source.random() < 0.5 for _ in range(vocab_size - 1)] + [True])
        resolved = ResolvedTokens(
            ((piece[0],), (*piece[-2:], piece[0])) if i % 3 == 0 else (), (piece[0],)
        )
        jobs.append(
            Job(SamplingParams(seed=i, **mix), history[:cut], history[cut:], resolved, (3,), mask)
        )
    return jobs


@pytest.mark.few(2)
@pytest.mark.parametrize("vocab_size", [7, 8191, 8193, 32000, 49152, 151936])
def test_a_row_is_sampled_the_same_in_any_company(
    vocab_size: int, kernels: RecordingKernels
) -> None:
    source = random.Random(vocab_size)
    jobs = mixed_jobs(vocab_size, source)
    logits = torch.randn(len(jobs), vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    alone: list[tuple[int, Tensor]] = []
    for i, job in enumerate(jobs):
        sampled, scores = run(logits[i : i + 1], [job], kernels)
        assert not sampled.failures()
        alone.append((int(sampled.token_ids), scores[0]))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            order = list(range(len(jobs)))
            source.shuffle(order)
            order += order[:3]
            sampled, scores = run(logits[order], [jobs[i] for i in order], kernels)
            for at, i in enumerate(order):
                assert int(sampled.token_ids[at]) == alone[i][0]
                assert torch.equal(scores[at], alone[i][1]), jobs[i].params
    finally:
        torch.set_num_threads(threads)


def test_a_request_may_draw_at_several_positions_at_once(kernels: RecordingKernels) -> None:
    """Each draw sees the tokens before its own position, as if it were alone."""
    vocab_size = 97
    jobs = [
        job
        for job in mixed_jobs(vocab_size, random.Random(5))
        if len(job.answer) > 3 and job.mask is None
    ]
    assert len(jobs) > 8
    for job in jobs:
        shorter = replace(job, answer=job.answer[:-2])
        logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
        alone = [run(logits[i : i + 1], [one], kernels) for i, one in enumerate((shorter, job))]
        batch = make_batch([job], vocab_size, kernels)
        positions = np.array([len(shorter.history), len(job.history)])
        both = batch.sampler.metadata(
            batch.metadata.request_rows.repeat(2), positions, batch.metadata.token_ids
        )
        together = batch.sampler.sample(logits.clone(), both)
        assert together.token_ids.tolist() == [int(sampled.token_ids) for sampled, _ in alone], (
            job.params
        )
        assert torch.equal(kernels.scores, torch.cat([scores for _, scores in alone])), job.params


def test_a_failing_processor_fails_its_request_alone(kernels: RecordingKernels) -> None:
    def broken(history: Tensor, scores: Tensor) -> Tensor:
        raise KeyError("mine")

    def shapeless(history: Tensor, scores: Tensor) -> Tensor:
        return scores[:2]

    def poisonous(history: Tensor, scores: Tensor) -> Tensor:
        return scores / 0

    def forces_two(history: Tensor, scores: Tensor) -> Tensor:
        assert history.tolist() == [4, 1]
        scores[:] = float("-inf")
        scores[2] = 0.0
        return scores

    functions = (None, broken, shapeless, poisonous, forces_two)
    jobs = [
        Job(SamplingParams(logits_processors=() if f is None else (f,), seed=1), (4,), (1,))
        for f in functions
    ]
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(0)).repeat(5, 1)
    sampled, _ = run(logits, jobs, kernels)
    failures = sampled.failures()
    assert list(failures) == [1, 2, 3]
    assert "KeyError('mine')" in failures[1]
    assert sampled.token_ids[4] == 2
    assert sampled.token_ids[0] == run(logits[:1], jobs[:1], kernels)[0].token_ids[0]


def test_what_was_in_a_row_before_does_not_count(kernels: RecordingKernels) -> None:
    """Behind its own tokens a row holds those of earlier requests."""
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=4.0,
        frequency_penalty=1.0,
        no_repeat_ngram_size=1,
        dry_multiplier=5.0,
    )
    long = Job(params, (1, 1, 1, 1, 1), (1, 1))
    short = Job(params, (1,), (2,))
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 9.0]]).repeat(2, 1)
    # unwritten places of the rows hold token 4
    sampled, scores = run(logits, [long, short], kernels)
    assert sampled.token_ids.tolist() == [4, 4]
    assert scores[:, 4].tolist() == [9.0, 9.0]


def test_sums_over_the_vocabulary_have_the_same_bits_in_any_company() -> None:
    threads = torch.get_num_threads()
    try:
        for size in (1, 2, 7, 8191, 49152, 151936):
            values = torch.randn(16, size, generator=torch.Generator().manual_seed(size)).exp()
            torch.set_num_threads(2)
            together = sum_rows(values)
            for count in (1, 2):
                torch.set_num_threads(count)
                assert all(
                    torch.equal(sum_rows(values[i : i + 1]), together[i : i + 1]) for i in range(16)
                )
            torch.testing.assert_close(
                together[:, 0].double(), values.double().sum(-1), rtol=1e-6, atol=0
            )
    finally:
        torch.set_num_threads(threads)


def test_dry_stops_at_breakers(kernels: RecordingKernels) -> None:
    params = SamplingParams(temperature=0.0, dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    history = (1, 2, 7, 3, 4, 1, 2, 7, 3)
    for breakers, lost in (((), 8.0), ((7,), 1.0), ((2,), 2.0), ((3,), 0.0), ((4,), 0.0)):
        _, scores = run(
            torch.zeros(1, 8),
            [Job(params, history, resolved=ResolvedTokens((), breakers))],
            kernels,
        )
        assert scores[0].tolist() == [0.0] * 4 + [-lost] + [0.0] * 3


def test_bad_words_begin_in_the_answer(kernels: RecordingKernels) -> None:
    words = ResolvedTokens(((1, 2), (3, 1, 2), (5,)))
    for prompt, answer, banned in (
        ((0, 1), (), {5}),
        ((0,), (1,), {2, 5}),
        ((0, 3), (1,), {2, 5}),
        ((3, 1), (0,), {5}),
    ):
        _, scores = run(torch.zeros(1, 6), [Job(SamplingParams(), prompt, answer, words)], kernels)
        assert {i for i, score in enumerate(scores[0].tolist()) if score == float("-inf")} == banned


def test_a_plain_batch_costs_the_choice_alone() -> None:
    """With nothing but temperatures asked for, the logits are read once and changed nowhere."""

    class OnlyChoosing:
        def gumbel_argmax(
            self, logits: Tensor, temperature: Tensor, keys: Tensor
        ) -> tuple[Tensor, Tensor]:
            return ReferenceKernels().gumbel_argmax(logits, temperature, keys)

    jobs = [
        Job(SamplingParams(temperature=t, top_k=0 if t else 5, seed=1, min_tokens=2), (0,), (1, 2))
        for t in (0, 1)
    ]
    batch = make_batch(jobs, 4, OnlyChoosing())  # type: ignore[arg-type]
    logits = torch.randn(2, 4)
    before = logits.clone()
    assert batch.is_plain
    assert batch.sample(logits).failures() == {}
    assert torch.equal(logits, before)


@pytest.mark.parametrize("changes", DISTRIBUTIONS.values(), ids=list(DISTRIBUTIONS))
def test_whoever_asks_for_more_is_not_plain(changes: dict[str, Any]) -> None:
    assert make_batch([Job(SamplingParams(**changes))], 7).is_plain == (
        set(changes) <= {"temperature"}
    )


def test_every_mix_but_the_first_two_is_more_than_plain() -> None:
    for i, job in enumerate(mixed_jobs(99, random.Random(0))):
        words = replace(job, resolved=ResolvedTokens(()))
        assert make_batch([words], 99).is_plain == (i < 2), job.params
    assert not make_batch([Job(SamplingParams(min_tokens=1))], 9).is_plain
    assert not make_batch([Job(SamplingParams(), resolved=ResolvedTokens(((1,),)))], 9).is_plain


def test_a_nan_fails_its_row_though_it_is_masked(kernels: RecordingKernels) -> None:
    jobs = [
        Job(SamplingParams(seed=1, allowed_token_ids=(0, 1))),
        Job(SamplingParams(seed=1)),
        Job(SamplingParams()),
    ]
    logits = torch.zeros(3, 5)
    logits[0, 4] = logits[1, 2] = float("nan")
    sampled, _ = run(logits, jobs, kernels)
    assert sampled.failures() == dict.fromkeys((0, 1), NOT_NUMBERS)
    assert sampled.tensor[1].tolist() == [1, 1, 0]


def test_failures_are_read_from_copies_on_the_host() -> None:
    sampled = SampledTokens(torch.zeros(2, 4, dtype=torch.int64), {1: "mine", 2: "mine"})
    assert sampled.failures() == {1: "mine", 2: "mine"}
    failures = sampled.failures([0, 2, 3, 6])
    assert (failures[1], "NaN" in failures[2], "processor" in failures[3]) == ("mine", True, True)
