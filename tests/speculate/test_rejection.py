"""Acceptance by rejection: tokens keep their probabilities, whatever was guessed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.engine.request import Request
from quire.kernels.reference import ReferenceKernels
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from quire.step import AdmittedRequest
from tests.random_models import SPECS, Bench, random_decoder

NUM_DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.5, 0.0, -1.0, 0.5, -3.0, 1.0, float("-inf")])


def counts(propose: np.ndarray, params: SamplingParams) -> np.ndarray:  # type: ignore[type-arg]
    """How often each token comes, over many positions of one request."""
    sampler = Sampler(1, len(LOGITS), ReferenceKernels(), torch.device("cpu"))
    sampler.admit(AdmittedRequest("a", 0, (1,), 1, (), 0, 0, params, 5, (), 0.0))
    positions = np.arange(1, NUM_DRAWS + 1)
    history = torch.zeros(1, NUM_DRAWS + 2, dtype=torch.int64)
    metadata = sampler.metadata(np.zeros(NUM_DRAWS, np.int64), positions, history)
    object.__setattr__(metadata, "draft_tokens", propose)
    drawn = sampler.sample(LOGITS.repeat(NUM_DRAWS, 1), metadata).token_ids
    return np.bincount(drawn.numpy(), minlength=len(LOGITS))


def noisy_draft_tokens(params: SamplingParams) -> np.ndarray:  # type: ignore[type-arg]
    """What a draft model with other logits draws with the engine's own noise: the rule must not
    mind.
    """
    sampler = Sampler(1, len(LOGITS), ReferenceKernels(), torch.device("cpu"))
    sampler.admit(AdmittedRequest("a", 0, (1,), 1, (), 0, 0, params, 5, (), 0.0))
    history = torch.zeros(1, NUM_DRAWS + 2, dtype=torch.int64)
    metadata = sampler.metadata(np.zeros(NUM_DRAWS, np.int64), np.arange(1, NUM_DRAWS + 1), history)
    return sampler.sample((LOGITS * 0.5).repeat(NUM_DRAWS, 1), metadata).token_ids.numpy()


@pytest.mark.parametrize("drafter", ["likely", "unlikely", "impossible", "shared noise", "none"])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.8), SamplingParams(temperature=1.3, top_k=4)]
)
def test_probabilities_are_kept(drafter: str, params: SamplingParams) -> None:
    propose = {
        "likely": np.zeros(NUM_DRAWS, np.int64),
        "unlikely": np.full(NUM_DRAWS, 3),
        "impossible": np.full(NUM_DRAWS, 7),
        "none": np.full(NUM_DRAWS, -1),
    }.get(drafter)
    found = counts(noisy_draft_tokens(params) if propose is None else propose, params)
    scores = LOGITS.double() / params.temperature
    if params.top_k:
        scores[scores < scores.sort(descending=True).values[params.top_k - 1]] = -np.inf
    expected = scores.softmax(-1).numpy() * NUM_DRAWS
    possible = expected > 0
    assert found[~possible].sum() == 0
    chi_squared = (((found - expected) ** 2)[possible] / expected[possible]).sum()
    # beyond it lies a thousandth of a percent, with up to six degrees of freedom
    assert chi_squared < 27.9


def test_greedy_answers_are_what_they_are() -> None:
    found = counts(np.full(NUM_DRAWS, 1), SamplingParams(temperature=0))
    assert found.tolist() == [NUM_DRAWS, 0, 0, 0, 0, 0, 0, 0]


def test_a_runner_that_rejects_goes_on_as_ever() -> None:
    decoder = random_decoder(SPECS["llama"], ReferenceKernels(), torch.float32)
    params = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=1.0, seed=3, max_tokens=12),
    ]
    expected = Bench(decoder, observes=False).run([[1, 2, 3], [4, 5]], params)

    def propose(request: Request, most: int) -> list[int]:
        first = request.num_tokens - 1 - request.num_prompt_tokens
        return expected.tokens[request.request_id][first : first + 3]

    bench = Bench(decoder, propose=propose, observes=False)
    bench.runner._rejects = True
    got = bench.run([[1, 2, 3], [4, 5]], params)
    assert got.tokens["0"] == expected.tokens["0"]
    assert len(got.tokens["1"]) == 12
    # guesses are taken by chance: that is what exactness saves us from
    assert got.tokens["1"] != expected.tokens["1"]
