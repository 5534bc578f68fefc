"""The promise on a GPU: 256 requests give the same tokens and logprobs, bit for bit, whatever
happens around them.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams, StructuredOutput
from tests.gpu.support import (
    MIXES,
    Answers,
    GpuEngine,
    Job,
    assert_same,
    decoder_of,
    mixed_jobs,
    plain_jobs,
    run_jobs,
    shape_of,
)

pytestmark = pytest.mark.gpu

ALL = range(256)


def shuffled(seed: int) -> list[int]:
    order = list(ALL)
    random.Random(seed).shuffle(order)
    return order


SCENARIOS: dict[str, dict[str, Any]] = {
    "backwards, a few at a time, small chunks, preempted": {
        "order": ALL[::-1],
        "arrivals_per_step": 5,
        "max_batched_tokens": 300,
        "preempt_every": 3,
    },
    "shuffled, few rows, chunks that no tile divides": {
        "order": shuffled(1),
        "max_num_seqs": 37,
        "max_batched_tokens": 71,
        "prefix_caching": False,
    },
    "shuffled, hardly any memory, a host tier": {
        "order": shuffled(2),
        "cache_tokens": 6000,
        "host_cache_memory": "1GiB",
        "max_batched_tokens": 2048,
        "preempt_every": 5,
    },
    "without graphs": {"cuda_graphs": False},
    "one step in flight": {"depth": 1},
}


def check_all(decoder: Decoder, jobs: list[Job]) -> Answers:
    expected = run_jobs(decoder, jobs)
    assert not expected.errors
    for name, options in SCENARIOS.items():
        got = run_jobs(decoder, jobs, **options)
        assert_same(got, expected, ALL)
        if "preempt_every" in options:
            assert got.preemptions > 10, name
        if "host" in name:
            assert got.host_tokens > 0, name
    return expected


def test_256_plain_requests_are_exact(decoder: Decoder) -> None:
    """With nothing but a temperature, tokens are sampled inside the graphs."""
    jobs = plain_jobs(256, decoder.spec.vocab_size, seed=1)
    expected = check_all(decoder, jobs)
    assert len({tuple(tokens) for tokens in expected.tokens.values() if len(tokens) >= 16}) > 100


def test_256_requests_of_every_kind_are_exact(decoder: Decoder) -> None:
    """Logprobs, prompt logprobs, penalties, filters, masks and several answers side by side."""
    jobs = mixed_jobs(256, decoder.spec.vocab_size, seed=2)
    expected = check_all(decoder, jobs)
    assert expected.cached_tokens > 0
    for number, job in enumerate(jobs):
        if job.params.prompt_logprobs is not None:
            assert expected.prompt_logprobs.get(str(number), {}).keys() == set(
                range(1, len(job.prompt))
            )
        if job.params.logprobs is not None and job.params.n == 1:
            assert len(expected.logprobs[str(number)]) == len(expected.tokens[str(number)])


def test_each_alone_equals_all_together(qwen: Decoder) -> None:
    """Every ninth request of both kinds, by itself in an engine that has just served others."""
    vocab_size = qwen.spec.vocab_size
    jobs = [*plain_jobs(128, vocab_size, seed=3), *mixed_jobs(128, vocab_size, seed=4)]
    together = run_jobs(qwen, jobs)
    engine = GpuEngine(qwen, prefix_caching=False)
    for number in ALL[::9]:
        assert_same(engine.run(jobs, [number]), together, [number])


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-8b", "qwen3-30b-a3b"])
def test_other_shapes_are_exact(shape: str) -> None:
    """Two layers each: other head dimensions, matrices and experts."""
    decoder = decoder_of(shape_of(shape, num_layers=2))
    jobs = [
        *plain_jobs(100, decoder.spec.vocab_size, seed=5),
        *mixed_jobs(20, decoder.spec.vocab_size, seed=6),
    ]
    everyone = range(len(jobs))
    expected = run_jobs(decoder, jobs)
    order = random.Random(1).sample(everyone, len(jobs))
    got = run_jobs(
        decoder, jobs, order, arrivals_per_step=3, max_batched_tokens=300, preempt_every=4
    )
    assert_same(got, expected, everyone)
    assert got.preemptions > 10
    assert_same(
        run_jobs(decoder, jobs, cuda_graphs=False, depth=1, max_num_seqs=50), expected, everyone
    )


def test_n_answers_equal_n_requests_with_their_seeds(qwen: Decoder) -> None:
    prompt = plain_jobs(1, qwen.spec.vocab_size, seed=7)[0].prompt * 3
    together = run_jobs(
        qwen, [Job(prompt, SamplingParams(n=5, seed=2**64 - 2, max_tokens=40, logprobs=2))]
    )
    seeds = [(2**64 - 2 + i) % 2**64 for i in range(5)]
    apart = run_jobs(
        qwen, [Job(prompt, SamplingParams(seed=seed, max_tokens=40, logprobs=2)) for seed in seeds]
    )
    for i in range(5):
        assert together.tokens[f"0/{i}"] == apart.tokens[str(i)]
        assert together.logprobs[f"0/{i}"] == apart.logprobs[str(i)]
    assert len({tuple(tokens) for tokens in together.tokens.values()}) == 5


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("shape", ["qwen3-8b", "qwen3-30b-a3b"])
def test_neighbours_full_of_nan_fail_alone(shape: str, cuda_graphs: bool) -> None:
    """Requests that hold a token whose embedding is NaN end with an error; nobody else notices."""
    decoder = decoder_of(shape_of(shape, num_layers=2))
    poison = decoder.spec.vocab_size - 1
    assert not decoder.spec.tie_embeddings  # else everybody's logits would hold a NaN
    decoder.weights["embedding"].tensor[poison] = float("nan")
    jobs = [
        *plain_jobs(40, poison, seed=8, longest=200),
        *mixed_jobs(2 * len(MIXES), poison, seed=9, longest=200),
    ]
    bad = [
        Job([*job.prompt, poison, 1], job.params)
        for job in plain_jobs(40, poison, seed=10, longest=200)
    ]
    clean = run_jobs(decoder, jobs, cuda_graphs=cuda_graphs)
    assert not clean.errors
    everyone = [*jobs, *bad]
    order = random.Random(2).sample(range(len(everyone)), len(everyone))
    got = run_jobs(
        decoder,
        everyone,
        order,
        arrivals_per_step=4,
        max_batched_tokens=300,
        cuda_graphs=cuda_graphs,
    )
    assert_same(got, clean, range(len(jobs)))
    assert got.errors.keys() == {str(number) for number in range(len(jobs), len(everyone))}


def test_constrained_answers_are_exact_and_keep_to_their_form(qwen: Decoder) -> None:
    """Grammars of bytes, among requests without."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    form = StructuredOutput(regex="[ab]{5,20}c")
    jobs = plain_jobs(40, qwen.spec.vocab_size, seed=11, longest=100)
    choices = {"max_tokens": 30, "structured": form, "ignore_eos": False}
    jobs[::2] = [Job(job.prompt, replace(job.params, **choices)) for job in jobs[::2]]
    everyone = range(len(jobs))
    engine = GpuEngine(qwen)
    # held, so that it is there when requests are admitted
    grammar = engine.engine.grammars.compile(form)
    expected = engine.run(jobs)
    for number in everyone[::2]:
        answer = bytes(
            token
            for token in expected.tokens[str(number)]
            if token not in engine.engine.eos_token_ids
        )
        assert re.fullmatch(b"[ab]{5,20}c", answer)
    got = engine.run(jobs, everyone[::-1], arrivals_per_step=3, preempt_every=4)
    assert got.preemptions > 10
    assert_same(got, expected, everyone)
    for number in everyone[:8]:
        assert_same(engine.run(jobs, [number]), expected, [number])
    assert grammar is not None
