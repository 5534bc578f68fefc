"""The promise for layers with a state: the same bits alone and in any batch, chunk, preemption,
with drafts and from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.backends.cpu.kernels import CpuKernels
from quire.engine.request import Request
from quire.kernels.ops import Kernels
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from quire.runner.recorded import RecordedSteps
from quire.sampling_params import SamplingParams
from tests.random_models import WITH_STATES, Bench, Transcript, random_decoder
from tests.test_exactness import assert_same, solo

FEW: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks of 7": {"max_num_seqs": 4, "max_batched_tokens": 7},
    "chunks of 64, two steps in flight": {"max_batched_tokens": 64, "depth": 2},
    "preempted every third step": {"preempt_every": 3, "max_batched_tokens": 50},
    "swapped every third step": {
        "preempt_every": 3,
        "num_host_blocks": 64,
        "max_batched_tokens": 96,
    },
    "no prefix cache": {"prefix_caching": False},
    "nothing recorded": {"recorded": False},
}


def prompts() -> tuple[list[list[int]], list[SamplingParams]]:
    """Some begin alike, for 70 tokens; answers go over a chunk's end."""
    source = torch.Generator().manual_seed(1)

    def drawn(count: int) -> list[int]:
        return torch.randint(97, (count,), generator=source).tolist()

    shared = drawn(70)
    made = [[*shared, *drawn(20)], drawn(60), drawn(1), [*shared, *drawn(50)], drawn(130)]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=count)
        for seed, (temperature, count) in enumerate([(0, 6), (0.9, 8), (0, 5), (0.7, 3), (0, 2)])
    ]
    return made, params


KERNELS: dict[str, tuple[Callable[[], Kernels], torch.dtype]] = {
    "definition": (ReferenceKernels, torch.float32),
    "cpu": (CpuKernels, torch.float32),
    "cpu bfloat16": (CpuKernels, torch.bfloat16),
}


# By far the slowest are those of the definition.
_PARAMS = [
    pytest.param(f"{model}, {kernels}", marks=[pytest.mark.slow] if kernels == "definition" else [])
    for kernels in KERNELS
    for model in WITH_STATES
]


@pytest.fixture(scope="module", params=_PARAMS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    model, kernels = request.param.split(", ")
    make, dtype = KERNELS[kernels]
    return random_decoder(WITH_STATES[model], make(), dtype)


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> Transcript:
    return solo(decoder, *prompts(), prefix_caching=False)


def test_decode_steps_are_recorded_where_kernels_can_be(decoder: Decoder) -> None:
    """Factors of packed rows are applied by torch, and layers without an MLP are not recorded yet."""
    has_factors = any(getattr(one, "input_scales", ()) for one in decoder.spec.mixers)
    is_whole = all(layer.mixers and layer.mlp is not None for layer in decoder.spec.layers)
    expected = isinstance(decoder.kernels, CpuKernels) and is_whole and not has_factors
    assert RecordedSteps.fit(decoder) == expected


@pytest.mark.few(8)
@pytest.mark.parametrize("scenario", FEW)
def test_bits_do_not_depend_on_what_happens_around_a_request(
    decoder: Decoder, expected: Transcript, scenario: str
) -> None:
    assert_same(Bench(decoder, **FEW[scenario]).run(*prompts()), expected)


@pytest.mark.few(3)
def test_a_second_run_takes_prefixes_from_the_cache(decoder: Decoder, expected: Transcript) -> None:
    bench = Bench(decoder)
    assert_same(bench.run(*prompts()), expected)
    again = bench.run(*prompts())
    assert again.tokens == expected.tokens
    assert again.cached_tokens > 150
    for key, logits in again.logits.items():
        assert torch.equal(logits, expected.logits[key])


@pytest.mark.few(4)
def test_drafts_do_not_change_bits_even_across_a_chunks_end(
    decoder: Decoder, expected: Transcript
) -> None:
    """Every other draft is right, so steps accept some and refuse the others."""
    given, _ = prompts()

    def draft(request: Request, count: int) -> list[int]:
        position = len(request.token_ids) - len(given[int(request.request_id)])
        answer = expected.tokens[request.request_id]
        right = answer[position : position + min(count, 4)]
        return [token if i % 3 else (token + position % 2) % 97 for i, token in enumerate(right)]

    found = Bench(decoder, propose=draft).run(*prompts())
    assert found.tokens == expected.tokens
    for key, logits in expected.logits.items():
        assert torch.equal(found.logits[key], logits)
