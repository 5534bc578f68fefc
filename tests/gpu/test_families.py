"""Every family on a GPU, small: right against the CPU, and exact; with the Triton kernels and with
plain torch.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from quire.backends.select import select_kernels
from quire.kernels.ops import Kernels
from quire.kernels.reference import ReferenceKernels
from quire.models.config_parts import plain_attention
from quire.models.spec import MlpSpec, ModelSpec, alibi_slopes
from tests.decoding import all_logits
from tests.gpu.support import DEVICE
from tests.random_models import SPECS, Bench, random_decoder
from tests.runner.sampling_support import make_batch
from tests.runner.test_sampler import mixed_jobs
from tests.test_exactness import SCENARIOS, assert_same, solo, workload

pytestmark = pytest.mark.gpu

HEAD_DIMS = {
    "smollm3": 128,
    "mistral": 80,
    "mixtral": 96,
    "qwen2": 256,
    "qwen3": 128,
    "gemma2": 256,
}


FAMILIES = SPECS | {
    "bloom": SPECS["llama"].with_layers(rope=None).with_attention(slopes=alibi_slopes(4, 8.0))
}


def gpu_spec(family: str) -> ModelSpec:
    """The family's small model, with a head dimension that real models have."""
    spec = FAMILIES[family]
    layers = []
    for layer in spec.layers:
        plain = plain_attention(4, 2, HEAD_DIMS.get(family, 64), layer.mixer.sliding_window)
        attention = replace(plain, soft_cap=layer.mixer.soft_cap, slopes=layer.mixer.slopes)
        mlp = (
            replace(layer.mlp, intermediate_size=192)
            if isinstance(layer.mlp, MlpSpec)
            else layer.mlp
        )
        layers.append(replace(layer, mixer=attention, mlp=mlp))
    return replace(spec, hidden_size=128, layers=tuple(layers))


def make_kernels(name: str, dtype: torch.dtype) -> Kernels:
    return ReferenceKernels() if name == "reference" else select_kernels(DEVICE, dtype, name)


@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_equal_the_cpus(family: str, kernels: str) -> None:
    tokens = list(range(90))
    spec = gpu_spec(family)
    with torch.inference_mode():
        on_cpu = all_logits(random_decoder(spec, ReferenceKernels(), torch.float32), tokens)
        decoder = random_decoder(
            spec, make_kernels(kernels, torch.float32), torch.float32, device=str(DEVICE)
        )
        on_gpu = all_logits(decoder, tokens)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=1e-3, rtol=0)


def test_the_sampler_chooses_as_on_the_cpu_and_in_any_company() -> None:
    """Every mix of parameters that the sampler's own tests try, over a vocabulary that no tile
    divides.
    """
    jobs = mixed_jobs(8193, random.Random(1))
    logits = torch.randn(len(jobs), 8193, generator=torch.Generator().manual_seed(0)) * 3

    def draw(order: list[int], device: torch.device, kernels: Kernels) -> list[int]:
        batch = make_batch([jobs[i] for i in order], 8193, kernels, device=device)
        return batch.sample(logits[order].to(device)).token_ids.tolist()

    forwards = list(range(len(jobs)))
    on_cpu = draw(forwards, torch.device("cpu"), ReferenceKernels())
    for name in ("triton", "reference"):
        kernels = make_kernels(name, torch.float32)
        on_gpu = draw(forwards, DEVICE, kernels)
        assert on_gpu == on_cpu
        assert draw(forwards[::-1], DEVICE, kernels) == on_gpu[::-1]
        assert [draw([i], DEVICE, kernels)[0] for i in forwards] == on_gpu


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.bfloat16) for family in FAMILIES),
        *(
            (family, dtype)
            for family in ("llama", "qwen3_moe")
            for dtype in (torch.float32, torch.float16)
        ),
    ],
)
def test_requests_are_exact(family: str, dtype: torch.dtype) -> None:
    """Logits of every generated position, compared with each request's run alone."""
    decoder = random_decoder(
        gpu_spec(family), make_kernels("triton", dtype), dtype, device=str(DEVICE)
    )
    prompts, params = workload(10, seed=4, longest=90)
    expected = solo(decoder, prompts, params)
    for name in (
        "one batch",
        "chunks of 7",
        "preempted every third step",
        "hardly any memory and a host tier",
    ):
        assert_same(Bench(decoder, **SCENARIOS[name]).run(prompts, params), expected)


def test_requests_are_exact_with_the_reference_kernels() -> None:
    decoder = random_decoder(
        SPECS["qwen3_moe"], ReferenceKernels(), torch.bfloat16, device=str(DEVICE)
    )
    prompts, params = workload(8, seed=5, longest=70)
    expected = solo(decoder, prompts, params)
    for name in (
        "one batch",
        "chunks of 7",
        "preempted every third step",
        "hardly any memory and a host tier",
    ):
        assert_same(Bench(decoder, **SCENARIOS[name]).run(prompts, params), expected)
