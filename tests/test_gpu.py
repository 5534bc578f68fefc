"""The plain torch kernels on a GPU: right against the CPU, and exact."""

from __future__ import annotations

import random

import pytest
import torch

from quire.kernels.reference import ReferenceKernels
from quire.kernels.select import select_kernels
from quire.runner.sampler import sample
from tests.decoding import all_logits
from tests.random_models import SPECS, Bench, random_decoder
from tests.runner.sampling_support import make_batch
from tests.runner.test_sampler import mixed_jobs
from tests.test_exactness import SCENARIOS, assert_same, solo, workload

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", SPECS)
def test_float32_logits_equal_the_cpus(family: str) -> None:
    tokens = list(range(90))
    with torch.inference_mode():
        on_cpu = all_logits(random_decoder(SPECS[family], ReferenceKernels(), torch.float32), tokens)
        on_gpu = all_logits(random_decoder(SPECS[family], ReferenceKernels(), torch.float32, device="cuda"), tokens)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=1e-3, rtol=0)


def test_the_sampler_chooses_as_on_the_cpu_and_in_any_company() -> None:
    """Every mix of parameters that the sampler's own tests try, over a vocabulary that no tile divides."""
    jobs = mixed_jobs(8193, random.Random(1))
    logits = torch.randn(len(jobs), 8193, generator=torch.Generator().manual_seed(0)) * 3

    def draw(order: list[int], device: str) -> list[int]:
        batch = make_batch([jobs[i] for i in order], 8193, device=torch.device(device))
        return sample(logits[order].to(device), batch, ReferenceKernels()).token_ids.tolist()

    forwards = list(range(len(jobs)))
    on_gpu = draw(forwards, "cuda")
    assert on_gpu == draw(forwards, "cpu")
    assert draw(forwards[::-1], "cuda") == on_gpu[::-1]
    assert [draw([i], "cuda")[0] for i in forwards] == on_gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_requests_are_exact_on_the_gpu(family: str, dtype: torch.dtype) -> None:
    kernels = select_kernels(torch.device("cuda"), dtype)
    decoder = random_decoder(SPECS[family], kernels, dtype, device="cuda")
    prompts, params = workload(12, seed=4, longest=90)
    expected = solo(decoder, prompts, params)
    for name in ("one batch", "chunks of 7", "preempted every third step", "hardly any memory and a host tier"):
        assert_same(Bench(decoder, **SCENARIOS[name]).run(prompts, params), expected)
