"""The plain torch kernels on a GPU: right against the CPU, and exact."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.reference import ReferenceKernels
from quire.kernels.select import select_kernels
from tests.decoding import all_logits
from tests.random_models import SPECS, Bench, random_decoder
from tests.test_exactness import SCENARIOS, assert_same, solo, workload

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", SPECS)
def test_float32_logits_equal_the_cpus(family: str) -> None:
    tokens = list(range(90))
    with torch.inference_mode():
        on_cpu = all_logits(random_decoder(SPECS[family], ReferenceKernels(), torch.float32), tokens)
        on_gpu = all_logits(random_decoder(SPECS[family], ReferenceKernels(), torch.float32, device="cuda"), tokens)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_requests_are_exact_on_the_gpu(family: str, dtype: torch.dtype) -> None:
    kernels = select_kernels(torch.device("cuda"), dtype)
    decoder = random_decoder(SPECS[family], kernels, dtype, device="cuda")
    prompts, params = workload(12, seed=4, longest=90)
    expected = solo(decoder, prompts, params)
    for name in ("one batch", "chunks of 7", "preempted every third step", "hardly any memory and a host tier"):
        assert_same(Bench(decoder, **SCENARIOS[name]).run(prompts, params), expected)
