"""Graphs that draw tokens themselves, as CUDA's do, played on a CPU: they write over the guesses they have computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.models.decoder import Decoder
from quire.runner.batch import StepShape
from quire.runner.graphs import DecodeOutput
from quire.runner.recorded import RecordedSteps
from quire.sampling.noise import noise_keys
from quire.sampling_params import SamplingParams
from tests.random_models import SPECS, Bench, random_decoder
from tests.test_exactness import make_kernels
from tests.test_guesses import EVERYTHING, Guesser, assert_same, prompts

HISTORIES = [
    SamplingParams(temperature=0, max_tokens=40, no_repeat_ngram_size=1),
    SamplingParams(temperature=1.5, seed=2, max_tokens=40, no_repeat_ngram_size=1),
    SamplingParams(temperature=1.5, seed=3, max_tokens=40, repetition_penalty=3.0),
    SamplingParams(temperature=1.5, seed=4, max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0),
    *EVERYTHING[4:],
]
"""What was said before decides much."""


class DrawingSteps(RecordedSteps):
    """Draws plain tokens, by seed, position and temperature alone, and writes them to the request rows."""

    def run(self, shape: StepShape, lag: Tensor | None = None) -> DecodeOutput | None:
        decoded = super().run(shape, lag)
        if decoded is None:
            return None
        rows = torch.from_numpy(shape.request_rows).long()
        starts = shape.starts if lag is None else shape.starts - lag.numpy()
        places = torch.from_numpy(starts).long() + 1
        seeds = self._rows.seeds[rows].numpy().view(np.uint64)
        keys = torch.from_numpy(noise_keys(seeds, places.numpy()))
        logits = decoded.logits.float().contiguous()
        token_ids, flags = self._decoder.kernels.gumbel_argmax(logits, self._rows.temperatures[rows], keys)
        self._rows.token_ids[rows, places] = token_ids
        return DecodeOutput(torch.stack((token_ids, flags.long())), decoded.logits)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder(SPECS["qwen3"], make_kernels("auto", torch.float32), torch.float32)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("right", [0.6, 1.0])
def test_guesses_change_no_bit(decoder: Decoder, right: float, depth: int) -> None:
    expected = Bench(decoder).run(prompts(), HISTORIES)
    for observes in (True, False):
        bench = Bench(decoder, depth=depth, guess=Guesser(expected.tokens, right, depth), observes=observes)
        runner = bench.runner
        runner._graphs = DrawingSteps(decoder, runner._kv_cache.layers, runner._request_rows)
        got = bench.run(prompts(), HISTORIES)
        if observes:
            assert_same(got, expected)
        assert got.tokens == expected.tokens
