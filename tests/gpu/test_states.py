"""Layers with a state on a GPU: the same bits alone, in a batch, in chunks and from the cache."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from quire.assemble import assemble
from quire.backends.select import select_kernels
from quire.backends.triton.kernels import TritonKernels
from quire.config import EngineConfig
from quire.engine import Request
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from quire.runner.graphs import DecodeGraphs
from tests.gpu.support import (
    DEVICE,
    MAX_MODEL_LEN,
    decoder_of,
    plain_jobs,
    run_jobs,
    shape_of,
)
from tests.gpu.support import assert_same as assert_same_answers
from tests.random_models import WITH_STATES, Bench, random_decoder
from tests.test_exactness import assert_same, solo
from tests.test_states_exactness import FEW, prompts

pytestmark = pytest.mark.gpu
NAMES = [name for name in WITH_STATES if name != "decays of channels"]
"""Those that have kernels."""
SCENARIOS = {name: options for name, options in FEW.items() if name != "nothing recorded"}


class ByDefinition(TritonKernels):
    """Layers with a state in plain torch, outside of graphs."""

    convolve_ = staticmethod(ReferenceKernels.convolve_)
    recur_ = staticmethod(ReferenceKernels.recur_)
    gated_norm = staticmethod(ReferenceKernels.gated_norm)

    def captures(self, part: object) -> bool:
        return ReferenceKernels.captures(self, part)


def small_decoder(name: str) -> Decoder:
    kernels = select_kernels(DEVICE, torch.bfloat16, "auto")
    return random_decoder(WITH_STATES[name], kernels, torch.bfloat16, device=str(DEVICE))


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_the_batch_or_the_cache(name: str) -> None:
    decoder = small_decoder(name)
    expected = solo(decoder, *prompts(), prefix_caching=False)
    bench = Bench(decoder, max_num_seqs=4, max_batched_tokens=50)
    assert_same(bench.run(*prompts()), expected)
    assert bench.run(*prompts()).tokens == expected.tokens


@pytest.mark.parametrize("name", NAMES)
def test_bits_are_the_same_in_every_scenario(name: str) -> None:
    decoder = small_decoder(name)
    expected = solo(decoder, *prompts(), prefix_caching=False)
    for scenario, options in SCENARIOS.items():
        found = Bench(decoder, **options).run(*prompts())
        assert found.tokens == expected.tokens, scenario
        assert_same(found, expected)
    bench = Bench(decoder)
    bench.run(*prompts())
    again = bench.run(*prompts())
    assert again.tokens == expected.tokens
    assert again.cached_tokens > 150
    given, _ = prompts()

    def draft(request: Request, count: int) -> list[int]:
        """Every other one is right."""
        position = len(request.token_ids) - len(given[int(request.request_id)])
        right = expected.tokens[request.request_id][position : position + min(count, 4)]
        return [token if i % 3 else (token + position % 2) % 97 for i, token in enumerate(right)]

    drafted = Bench(decoder, propose=draft).run(*prompts())
    assert drafted.tokens == expected.tokens
    for key, logits in expected.logits.items():
        assert torch.equal(drafted.logits[key], logits)


@pytest.mark.parametrize("name", ["delta rule", "state space", "convolution"])
def test_kernels_agree_with_the_definition(name: str) -> None:
    plain = random_decoder(
        WITH_STATES[name], ByDefinition(torch.bfloat16), torch.bfloat16, device=str(DEVICE)
    )
    expected = solo(plain, *prompts(), prefix_caching=False)
    found = solo(small_decoder(name), *prompts(), prefix_caching=False)
    for key in expected.logits.keys() & found.logits.keys():
        if found.tokens[key[0]] == expected.tokens[key[0]]:
            torch.testing.assert_close(
                found.logits[key].float(), expected.logits[key].float(), atol=0.05, rtol=0.05
            )


@pytest.fixture(scope="module")
def hybrid() -> Decoder:
    """Four layers of Qwen3.5-9B's shape."""
    return decoder_of(shape_of("qwen3.5-9b", num_layers=4))


def test_engines_are_exact(hybrid: Decoder) -> None:
    """By graphs, without them, in chunks and preempted; what nobody wrote is NaN."""
    jobs = plain_jobs(48, hybrid.spec.vocab_size, seed=11, longest=300)
    everyone = range(len(jobs))
    expected = run_jobs(hybrid, jobs, cuda_graphs=False)
    assert not expected.errors
    scenarios: dict[str, dict[str, Any]] = {
        "graphs": {},
        "one step in flight": {"depth": 1},
        "chunks, preempted": {
            "arrivals_per_step": 3,
            "max_batched_tokens": 200,
            "max_num_seqs": 100,
            "preempt_every": 4,
        },
        "n-gram drafts": {"speculation": "ngram"},
        "no prefix cache": {"prefix_caching": False},
    }
    for name, options in scenarios.items():
        order = random.Random(1).sample(everyone, len(jobs))
        got = run_jobs(hybrid, jobs, order, **options)
        assert got.tokens == expected.tokens, name
        assert_same_answers(got, expected, everyone)


def test_steps_of_hybrids_are_captured(hybrid: Decoder) -> None:
    config = EngineConfig(device=str(DEVICE), max_model_len=MAX_MODEL_LEN, kv_cache_memory="4GiB")
    engine = assemble(hybrid, config, name="test", eos_token_ids=())
    assert isinstance(engine.runner._graphs, DecodeGraphs)
