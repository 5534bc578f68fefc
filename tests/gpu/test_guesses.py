"""Steps that check guesses, and steps that run ahead of the check, on a GPU: the same tokens and scores as without."""

from __future__ import annotations

import random

import pytest
import torch

from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams
from tests.gpu.support import DEVICE
from tests.gpu.test_families import gpu_spec, make_kernels
from tests.random_models import Bench, random_decoder
from tests.test_guesses import EVERYTHING, Guesser, assert_same, prompts

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder(gpu_spec("qwen3"), make_kernels("triton", torch.bfloat16), torch.bfloat16, device=str(DEVICE))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_guesses_change_no_bit(decoder: Decoder, right: float, depth: int) -> None:
    expected = Bench(decoder).run(prompts(), EVERYTHING)
    got = Bench(decoder, depth=depth, guess=Guesser(expected.tokens, right, depth)).run(prompts(), EVERYTHING)
    assert_same(got, expected)


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_plain_requests_run_ahead_of_their_guesses(decoder: Decoder, right: float) -> None:
    """Nothing but a temperature: tokens are drawn and guesses checked without the host, over the borders of splits."""
    source = random.Random(3)
    texts = [[source.randrange(97) for _ in range(length)] for length in (5, 500, 505, 511, 512, 700, 40, 41)]
    params = [SamplingParams(temperature=i % 3 * 0.5, seed=i, max_tokens=40) for i in range(len(texts))]
    expected = Bench(decoder, observes=False).run(texts, params)
    bench = Bench(decoder, depth=2, guess=Guesser(expected.tokens, right, 1), observes=False)
    got = bench.run(texts, params)
    assert got.tokens == expected.tokens
    assert any(entry.runs_ahead for line in bench.log for entry in line.step.scheduled)
