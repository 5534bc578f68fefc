"""Steps that check guesses, and steps that run ahead of the check, on a GPU: the same tokens and
scores as without.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from quire.models.decoder import Decoder
from quire.sampling_params import ResolvedTokens, SamplingParams
from tests.gpu.support import DEVICE, GpuEngine, decoder_of, plain_jobs, run_jobs, shape_of
from tests.gpu.support import assert_same as assert_same_answers
from tests.gpu.test_families import gpu_spec, make_kernels
from tests.random_models import Bench, random_decoder
from tests.test_draft_tokens import EVERYTHING, Proposer, assert_same, prompts

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder(
        gpu_spec("qwen3"),
        make_kernels("triton", torch.bfloat16),
        torch.bfloat16,
        device=str(DEVICE),
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_draft_tokens_change_no_bit(decoder: Decoder, right: float, depth: int) -> None:
    expected = Bench(decoder).run(prompts(), EVERYTHING)
    got = Bench(decoder, depth=depth, propose=Proposer(expected.tokens, right, depth)).run(
        prompts(), EVERYTHING
    )
    assert_same(got, expected)


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_plain_requests_run_ahead_of_their_draft_tokens(decoder: Decoder, right: float) -> None:
    """Nothing but a temperature: tokens are drawn and guesses checked without the host, over the
    borders of splits.
    """
    source = random.Random(3)
    texts = [
        [source.randrange(97) for _ in range(length)]
        for length in (5, 500, 505, 511, 512, 700, 40, 41)
    ]
    params = [
        SamplingParams(temperature=i % 3 * 0.5, seed=i, max_tokens=40) for i in range(len(texts))
    ]
    expected = Bench(decoder, observes=False).run(texts, params)
    bench = Bench(decoder, depth=2, propose=Proposer(expected.tokens, right, 1), observes=False)
    got = bench.run(texts, params)
    assert got.tokens == expected.tokens
    assert any(entry.runs_ahead for line in bench.log for entry in line.step.scheduled)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("shape", ["smollm2-135m", "qwen3-0.6b", "llama-3.2-1b"])
def test_checks_in_graphs_see_the_draft_tokens_before_them(shape: str, depth: int) -> None:
    """A guess's key is written by the step that checks the one behind it, which a small batch's
    attention, that reads earlier steps' keys before its turn, must know.
    """
    decoder = decoder_of(shape_of(shape, num_layers=3))
    plain = [
        replace(job, params=replace(job.params, max_tokens=60))
        for job in plain_jobs(4, 10_000, seed=5)
    ]
    expected = run_jobs(decoder, plain)
    jobs = []
    for number, job in enumerate(plain):
        answer = expected.tokens[str(number)]
        predicted = tuple(
            (token + (place % 9 == 8)) % decoder.spec.vocab_size
            for place, token in enumerate(answer)
        )
        jobs.append(replace(job, resolved=ResolvedTokens(prediction_ids=predicted)))
    bench = GpuEngine(decoder, depth, speculation="ngram", prefix_caching=False, max_num_seqs=16)
    # All steps take as long by this clock, so that guesses are made whatever else the machine does.
    bench.engine.core.clock = partial(next, itertools.count(0.0, 1e-3))
    for _ in range(3):  # graphs are captured on the way
        assert_same_answers(bench.run(jobs), expected, range(len(jobs)))
    drafted = [
        len(entry.draft_tokens) for line in bench.engine.step_log for entry in line.step.scheduled
    ]
    assert sum(drafted) > 100
