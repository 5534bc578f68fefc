"""Steps that check guesses on a real model: the same tokens, logits and scores as without, right or
wrong guesses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from quire.engine.request import Request
from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams
from tests.random_models import SPECS, Bench, Transcript, random_decoder
from tests.test_exactness import DTYPES, make_kernels

EVERYTHING = [
    SamplingParams(temperature=0, max_tokens=30),
    SamplingParams(temperature=0.8, seed=3, max_tokens=25, logprobs=3),
    SamplingParams(
        temperature=0.9, seed=4, max_tokens=40, repetition_penalty=1.3, frequency_penalty=0.4
    ),
    SamplingParams(
        temperature=0.7,
        seed=5,
        max_tokens=22,
        top_k=12,
        top_p=0.9,
        min_tokens=12,
        stop_token_ids=(7, 9),
    ),
    SamplingParams(
        temperature=0, max_tokens=30, no_repeat_ngram_size=3, logprobs=0, prompt_logprobs=1
    ),
    SamplingParams(
        temperature=1.0, seed=6, max_tokens=30, dry_multiplier=0.8, xtc_probability=0.5, n=2
    ),
    SamplingParams(
        temperature=0.6, seed=7, max_tokens=18, logit_bias={5: 3.0}, min_p=0.05, stop_token_ids=(3,)
    ),
]


class Proposer:
    """Knows the answers; every guess is right with some chance, and now and then there are more
    than are left.
    """

    def __init__(self, answers: dict[str, list[int]], right: float, seed: int) -> None:
        self.answers = answers
        self.right = right
        self.rng = random.Random(seed)
        self.num_draft_tokens = 0

    def __call__(self, request: Request, most: int) -> Sequence[int]:
        first = request.num_tokens - 1 - request.num_prompt_tokens
        known = self.answers[request.request_id][first : first + self.rng.randint(0, 7)]
        self.num_draft_tokens += len(known)
        return [
            token if self.rng.random() < self.right else self.rng.randrange(97)
            for token in [*known, 0]
        ]


def assert_same(got: Transcript, expected: Transcript) -> None:
    assert got.tokens == expected.tokens
    assert got.logprobs == expected.logprobs
    assert got.prompt_logprobs == expected.prompt_logprobs
    for key, logits in expected.logits.items():
        assert torch.equal(got.logits[key], logits)


def prompts() -> list[list[int]]:
    source = random.Random(11)
    return [[source.randrange(97) for _ in range(length)] for length in (3, 50, 17, 31, 70, 5, 16)]


@pytest.fixture(scope="module", params=list(DTYPES))
def decoder(request: pytest.FixtureRequest) -> Decoder:
    dtype = DTYPES[request.param]
    return random_decoder(SPECS["qwen3"], make_kernels("auto", dtype), dtype)


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> Transcript:
    return Bench(decoder).run(prompts(), EVERYTHING)


@pytest.mark.few(3)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_draft_tokens_change_no_bit(
    decoder: Decoder, expected: Transcript, right: float, depth: int
) -> None:
    guesser = Proposer(expected.tokens, right, depth)
    bench = Bench(decoder, depth=depth, propose=guesser)
    got = bench.run(prompts(), EVERYTHING)
    assert_same(got, expected)
    assert guesser.num_draft_tokens > 100
    if right == 1.0 and depth == 1:
        assert got.steps < expected.steps * 0.6
    if depth > 1:
        assert any(entry.runs_ahead for line in bench.log for entry in line.step.scheduled)


def test_draft_tokens_change_no_bit_of_latent_attention() -> None:
    decoder = random_decoder(
        SPECS["deepseek_v3"], make_kernels("auto", torch.bfloat16), torch.bfloat16
    )
    expected = Bench(decoder).run(prompts(), EVERYTHING)
    bench = Bench(decoder, depth=2, propose=Proposer(expected.tokens, 0.6, 2), preempt_every=5)
    assert_same(bench.run(prompts(), EVERYTHING), expected)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_batched_tokens": 12, "max_num_seqs": 5},
        {"preempt_every": 3},
        {"num_blocks": 20, "num_host_blocks": 12},
    ],
)
def test_draft_tokens_meet_chunks_preemption_and_scarcity(
    decoder: Decoder, expected: Transcript, settings: dict[str, int]
) -> None:
    bench = Bench(decoder, depth=2, propose=Proposer(expected.tokens, 0.7, 5), **settings)  # type: ignore[arg-type]
    assert_same(bench.run(prompts(), EVERYTHING), expected)
