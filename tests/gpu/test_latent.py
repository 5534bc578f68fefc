"""Latent attention on a GPU: right against the CPU, and exact in every scenario."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from quire.sampling_params import ResolvedTokens
from tests.decoding import all_logits
from tests.gpu.support import (
    DEVICE,
    GpuEngine,
    assert_same,
    decoder_of,
    mixed_jobs,
    plain_jobs,
    run_jobs,
    shape_of,
)
from tests.gpu.test_families import make_kernels
from tests.random_models import SPECS, Bench, random_decoder
from tests.test_draft_tokens import EVERYTHING, Proposer, prompts
from tests.test_draft_tokens import assert_same as assert_same_drafted
from tests.test_exactness import SCENARIOS as SMALL_SCENARIOS
from tests.test_exactness import assert_same as assert_same_small
from tests.test_exactness import solo, workload

pytestmark = pytest.mark.gpu
SHAPES = ("glm-4.7-flash", "deepseek-v2-lite")
SCENARIOS = {
    "backwards, a few at a time, small chunks, preempted": {
        "arrivals_per_step": 5,
        "max_batched_tokens": 300,
        "preempt_every": 3,
    },
    "few rows, chunks that no tile divides": {
        "max_num_seqs": 37,
        "max_batched_tokens": 71,
        "prefix_caching": False,
    },
    "hardly any memory, a host tier": {
        "cache_tokens": 6000,
        "host_cache_memory": "1GiB",
        "max_batched_tokens": 2048,
        "preempt_every": 5,
    },
    "without graphs": {"cuda_graphs": False},
    "one step in flight": {"depth": 1},
}


def two_layers(shape: str) -> Decoder:
    """One with an MLP, one with experts."""
    return decoder_of(shape_of(shape, num_layers=2))


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_requests_are_exact_in_every_scenario(shape: str, cache: str) -> None:
    decoder = two_layers(shape)
    vocab = decoder.spec.vocab_size
    jobs = [*plain_jobs(100, vocab, seed=5), *mixed_jobs(24, vocab, seed=6)]
    everyone = range(len(jobs))
    options = {"kv_cache_dtype": cache}
    expected = run_jobs(decoder, jobs, **options)
    assert not expected.errors
    assert len({tuple(tokens) for tokens in expected.tokens.values()}) > 50
    order = random.Random(1).sample(everyone, len(jobs))
    for name, scenario in SCENARIOS.items():
        got = run_jobs(decoder, jobs, order, **options, **scenario)
        assert_same(got, expected, everyone)
        if "preempt_every" in scenario:
            assert got.preemptions > 10, name
    engine = GpuEngine(decoder, prefix_caching=False, **options)
    for number in everyone[::12]:
        assert_same(engine.run(jobs, [number]), expected, [number])


@pytest.mark.parametrize("shape", SHAPES)
def test_long_contexts_are_exact(shape: str) -> None:
    """Several splits: divided among programs where a request is alone, by one program in prompts."""
    decoder = two_layers(shape)
    source = random.Random(2)
    jobs = [
        replace(job, prompt=[source.randrange(1000) for _ in range(length)])
        for job, length in zip(
            plain_jobs(8, 1000, seed=7), (511, 512, 513, 1100, 2047, 3000, 3900, 20), strict=True
        )
    ]
    options = {"max_model_len": 4096}
    expected = run_jobs(decoder, jobs, **options)
    got = run_jobs(decoder, jobs, max_batched_tokens=701, cuda_graphs=False, **options)
    assert_same(got, expected, range(8))
    engine = GpuEngine(decoder, prefix_caching=False, **options)
    for number in range(8):
        assert_same(engine.run(jobs, [number]), expected, [number])


@pytest.mark.parametrize("depth", [1, 2])
def test_checks_of_draft_tokens_change_no_answer(depth: int) -> None:
    decoder = two_layers(SHAPES[0])
    plain = [
        replace(job, params=replace(job.params, max_tokens=60))
        for job in plain_jobs(4, 10_000, seed=5)
    ]
    expected = run_jobs(decoder, plain)
    jobs = []
    for number, job in enumerate(plain):
        predicted = tuple(
            (token + (place % 9 == 8)) % decoder.spec.vocab_size
            for place, token in enumerate(expected.tokens[str(number)])
        )
        jobs.append(replace(job, resolved=ResolvedTokens(prediction_ids=predicted)))
    bench = GpuEngine(decoder, depth, speculation="ngram", prefix_caching=False, max_num_seqs=16)
    bench.engine.core.clock = partial(next, itertools.count(0.0, 1e-3))
    for _ in range(3):  # graphs are captured on the way
        assert_same(bench.run(jobs), expected, range(len(jobs)))


@pytest.mark.parametrize("right", [0.0, 0.6])
def test_draft_tokens_in_steps_without_graphs(right: float) -> None:
    """Several rows of a request in one tile, of sequences that turn out shorter."""
    decoder = random_decoder(
        SPECS["deepseek_v3"],
        make_kernels("triton", torch.bfloat16),
        torch.bfloat16,
        device=str(DEVICE),
    )
    expected = Bench(decoder).run(prompts(), EVERYTHING)
    bench = Bench(decoder, depth=2, propose=Proposer(expected.tokens, right, 2))
    assert_same_drafted(bench.run(prompts(), EVERYTHING), expected)


def test_float32_logits_equal_the_cpus() -> None:
    tokens, spec = list(range(90)), SPECS["deepseek_v3"]
    with torch.inference_mode():
        on_cpu = all_logits(random_decoder(spec, ReferenceKernels(), torch.float32), tokens)
        kernels = make_kernels("triton", torch.float32)
        decoder = random_decoder(spec, kernels, torch.float32, device=str(DEVICE))
        on_gpu = all_logits(decoder, tokens)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_logits_are_exact(dtype: torch.dtype) -> None:
    kernels = make_kernels("triton", dtype)
    decoder = random_decoder(SPECS["deepseek_v3"], kernels, dtype, device=str(DEVICE))
    texts, params = workload(10, seed=4, longest=90)
    expected = solo(decoder, texts, params)
    for name in ("one batch", "chunks of 7", "preempted every third step"):
        assert_same_small(Bench(decoder, **SMALL_SCENARIOS[name]).run(texts, params), expected)
