"""Acceptance against an engine that knows no steps, no cache and no guesses: one token at a time,
from the start.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.request import Request
from quire.models.decoder import Decoder
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from quire.step import AdmittedRequest
from tests.decoding import all_logits
from tests.long_runs import short_or_long
from tests.random_models import SPECS, Bench, random_decoder
from tests.test_exactness import make_kernels


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder(SPECS["llama"], make_kernels("auto", torch.float32), torch.float32)


def naive_answer(
    decoder: Decoder, prompt: Sequence[int], params: SamplingParams, seed: int
) -> list[int]:
    """Every token from the logits of the whole sequence so far."""
    tokens = list(prompt)
    sampler = Sampler(1, decoder.spec.vocab_size, decoder.kernels, torch.device("cpu"))
    sampler.admit(
        AdmittedRequest("a", 0, tuple(prompt), len(prompt), (), 0, 0, params, seed, (), 0.0)
    )
    assert params.max_tokens is not None
    while len(tokens) - len(prompt) < params.max_tokens:
        history = torch.zeros(1, 256, dtype=torch.int64)
        history[0, : len(tokens)] = torch.tensor(tokens)
        metadata = sampler.metadata(
            torch.tensor([0]).numpy(), torch.tensor([len(tokens)]).numpy(), history
        )
        logits = all_logits(decoder, tokens)[-1:].float().clone()
        tokens.append(int(sampler.sample(logits, metadata).token_ids))
        if tokens[-1] in params.stop_token_ids and len(tokens) - len(prompt) > params.min_tokens:
            break
    return tokens[len(prompt) :]


class Drafter:
    """Guesses the answer, each token right with a chance, at most so many, and more than are left
    now and then.
    """

    def __init__(self, answer: Sequence[int], right: float, longest: int, seed: int) -> None:
        self.answer = answer
        self.right = right
        self.longest = longest
        self.rng = random.Random(seed)

    def __call__(self, request: Request, most: int) -> Sequence[int]:
        first = request.num_tokens - 1 - request.num_prompt_tokens
        known = list(self.answer[first : first + self.rng.randint(0, self.longest)])
        known += [0] * self.rng.choice([0, 0, 1, 40])
        return [
            token if self.rng.random() < self.right else self.rng.randrange(97) for token in known
        ]


features = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.7, 1.3]), "max_tokens": st.integers(1, 18)},
    optional={
        "top_k": st.integers(1, 20),
        "top_p": st.sampled_from([0.5, 0.9]),
        "repetition_penalty": st.sampled_from([0.8, 1.4]),
        "frequency_penalty": st.sampled_from([-0.5, 0.9]),
        "presence_penalty": st.sampled_from([-1.0, 1.0]),
        "no_repeat_ngram_size": st.integers(1, 4),
        "dry_multiplier": st.sampled_from([0.5, 3.0]),
        "xtc_probability": st.just(0.6),
        "logit_bias": st.just({3: 5.0, 4: 5.0, 5: 5.0}),
        "stop_token_ids": st.sampled_from([(3,), (4, 5)]),
        "min_tokens": st.just(1),
    },
)


@pytest.mark.soak
@settings(max_examples=short_or_long(25, 1500, quick=12))
@given(
    features=features,
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    seed=st.integers(0, 2**64 - 1),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    longest=st.sampled_from([1, 4, 15]),
    depth=st.integers(1, 3),
    max_batched=st.sampled_from([2, 7, 512]),
    block_size=st.sampled_from([1, 4, 16]),
    preempt_every=st.sampled_from([0, 0, 13]),
)
def test_draft_tokens_never_change_an_answer(
    decoder: Decoder,
    features: dict[str, object],
    prompt: list[int],
    seed: int,
    right: float,
    longest: int,
    depth: int,
    max_batched: int,
    block_size: int,
    preempt_every: int,
) -> None:
    params = SamplingParams(seed=seed, **features)  # type: ignore[arg-type]
    expected = naive_answer(decoder, prompt, params, seed)
    bench = Bench(
        decoder,
        depth=depth,
        propose=Drafter(expected, right, longest, seed % 97),
        max_num_seqs=2,
        max_batched_tokens=max_batched,
        block_size=block_size,
        preempt_every=preempt_every,
        num_blocks=200,
        observes=False,
    )
    # company, whose guesses are the first one's
    other = SamplingParams(temperature=0.5, seed=1, max_tokens=6)
    got = bench.run([prompt, [5, 6]], [params, other])
    assert got.tokens["0"] == expected
