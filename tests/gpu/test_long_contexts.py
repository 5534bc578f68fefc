"""Long contexts in an engine: the same tokens by graphs of either kind of attention, alone,
together and in chunks.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from quire.backends.select import select_kernels
from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams
from quire.tools.bench.random_engine import random_decoder
from tests.gpu.support import DEVICE, Job, assert_same, run_jobs, shape_of

pytestmark = pytest.mark.gpu
LONGEST = 33_500


@pytest.fixture(scope="module")
def small() -> Decoder:
    """Two layers of Qwen3-0.6B for long contexts."""
    spec = replace(shape_of("qwen3-0.6b", num_layers=2), max_position=LONGEST)
    kernels = select_kernels(DEVICE, torch.bfloat16)
    return random_decoder(
        spec, kernels, torch.bfloat16, DEVICE, std=2.0 / spec.hidden_size**0.5, max_position=LONGEST
    )


def test_long_contexts_give_the_same_tokens_however_they_are_computed(small: Decoder) -> None:
    """The first one grows from 16 splits to 17, where one sequence alone changes from one kernel to
    the other.
    """
    source = random.Random(0)
    jobs = [
        Job(
            [source.randrange(small.spec.vocab_size) for _ in range(length)],
            SamplingParams(temperature=0.8, seed=length, max_tokens=120, ignore_eos=True),
        )
        for length in (8150, 33_000, 500, 12_000)
    ]
    expected = run_jobs(small, jobs, max_model_len=LONGEST, cuda_graphs=False, max_num_seqs=8)
    together = run_jobs(small, jobs, max_model_len=LONGEST, max_num_seqs=8, max_batched_tokens=3000)
    assert_same(together, expected, range(len(jobs)))
    for i in range(len(jobs)):
        alone = run_jobs(small, jobs, [i], max_model_len=LONGEST, max_num_seqs=8)
        assert_same(alone, expected, [i])
