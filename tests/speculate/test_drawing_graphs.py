"""Graphs draw tokens themselves: they write over the guesses they have computed."""

from __future__ import annotations

import pytest
import torch

from quire.backends.cpu import recording
from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams
from tests.random_models import SPECS, Bench, random_decoder
from tests.test_draft_tokens import EVERYTHING, Proposer, assert_same, prompts
from tests.test_exactness import make_kernels

HISTORIES = [
    SamplingParams(temperature=0, max_tokens=40, no_repeat_ngram_size=1),
    SamplingParams(temperature=1.5, seed=2, max_tokens=40, no_repeat_ngram_size=1),
    SamplingParams(temperature=1.5, seed=3, max_tokens=40, repetition_penalty=3.0),
    SamplingParams(
        temperature=1.5, seed=4, max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0
    ),
    *EVERYTHING[4:],
]
"""What was said before decides much."""
PLAIN = [SamplingParams(temperature=heat, seed=2, max_tokens=30) for heat in (0.0, 0.7, 1.5)]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder(SPECS["qwen3"], make_kernels("auto", torch.float32), torch.float32)


@pytest.mark.few(1)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("right", [0.6, 1.0])
def test_draft_tokens_change_no_bit(decoder: Decoder, right: float, depth: int) -> None:
    expected = Bench(decoder).run(prompts(), HISTORIES)
    for observes in (True, False):
        bench = Bench(
            decoder, depth=depth, propose=Proposer(expected.tokens, right, depth), observes=observes
        )
        got = bench.run(prompts(), HISTORIES)
        if observes:
            assert_same(got, expected)
        assert got.tokens == expected.tokens


@pytest.mark.few(2)
@pytest.mark.parametrize("max_bytes", [2**26, 1024])
@pytest.mark.parametrize("params", [PLAIN, HISTORIES[:3]])
def test_tokens_are_the_same_whoever_draws_them(
    decoder: Decoder, params: list[SamplingParams], max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs alone, or what comes behind them; and where a step is too large to be recorded its
    guesses stay, though computing it for the first time, which finds that out, has drawn other
    tokens in their places.
    """
    jobs = prompts()[: len(params)]
    expected = Bench(decoder, recorded=False).run(jobs, params)
    monkeypatch.setattr(recording, "_MAX_BYTES", max_bytes)
    for right, depth in ((0.7, 2), (1.0, 1)):
        bench = Bench(
            decoder, depth=depth, propose=Proposer(expected.tokens, right, depth), observes=False
        )
        got = bench.run(jobs, params)
        assert got.tokens == expected.tokens
    assert got.steps < expected.steps
