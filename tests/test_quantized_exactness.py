"""The promise for quantised weights: the same bits in every scenario, for every format, on every
instruction set.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.errors import DeviceError
from quire.kernels.formats import FORMATS
from quire.kernels.quantize import INT8, to_codes, to_q4_0
from quire.kernels.weights import Weight
from quire.models.spec import MlpSpec, ModelSpec
from quire.sampling_params import SamplingParams
from tests.kernels.cpu_support import VARIANTS, is_best_again, variant_kernels
from tests.kernels.test_cpu_quantized import NAMES, quantized
from tests.long_runs import IS_LONG, short_or_long
from tests.random_models import SPECS, Bench, random_decoder
from tests.test_exactness import SCENARIOS, assert_same, solo, workload


def widened(family: str) -> ModelSpec:
    """With rows of whole blocks of 256."""
    spec = replace(SPECS[family], hidden_size=256)
    layers = tuple(
        replace(one, mlp=replace(one.mlp, bias=one.mlp.bias, intermediate_size=256))
        if isinstance(one.mlp, MlpSpec)
        else replace(one, mlp=replace(one.mlp, intermediate_size=256, shared_intermediate_size=256))
        if one.mlp.shared_intermediate_size
        else replace(one, mlp=replace(one.mlp, intermediate_size=256))
        for one in spec.layers
    )
    attention = replace(
        layers[0].mixer, heads=replace(layers[0].mixer.heads, num_heads=8, head_dim=32)
    )
    return replace(spec, layers=tuple(replace(one, mixer=attention) for one in layers))


def in_format(name: str, value: Tensor) -> Weight:
    """The numbers in a format, or for formats that nothing here can make, random blocks of the same
    size.
    """
    if name == "INT8":
        return Weight.of(FORMATS[name], tuple(value.shape), *to_codes(INT8, value))
    if name == "Q4_0":
        return Weight.of(FORMATS[name], tuple(value.shape), to_q4_0(value))
    seed = int(value.flatten()[0].abs() * 1e6)
    flat = value.view(-1, value.shape[-1])
    weight, _ = quantized(name, *flat.shape, seed=seed)
    return Weight.of(FORMATS[name], tuple(value.shape), weight.tensor.view(*value.shape[:-1], -1))


def formats_and_families() -> list[tuple[str, str]]:
    """In the short form each format in one of them, dense or with experts, in turn."""
    families = ["llama", "qwen3_moe"]
    return [
        (name, family)
        for number, name in enumerate(NAMES)
        for family in (families if IS_LONG else [families[number % 2]])
    ]


@pytest.mark.few(1)
@pytest.mark.soak
@pytest.mark.parametrize(("name", "family"), formats_and_families())
def test_every_format_is_exact_in_every_scenario(name: str, family: str) -> None:
    spec = widened(family)
    decoder = random_decoder(
        spec, CpuKernels(), torch.float32, quantize=lambda value: in_format(name, value)
    )
    assert not any(weight.is_dense for weight in decoder.weights.values() if len(weight.shape) == 3)
    count = short_or_long(6, 12)
    prompts, params = workload(count, seed=3, longest=70)
    expected = solo(decoder, prompts, params)
    # or nothing is shown
    assert len({tuple(tokens) for tokens in expected.tokens.values()}) > count // 2
    for scenario in (
        "one batch",
        "chunks of 7",
        "nothing recorded",
        "swapped every third step",
        "hardly any memory",
    ):
        assert_same(Bench(decoder, **SCENARIOS[scenario]).run(prompts, params), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gemma2", "phi3", "olmo2", "starcoder2", "glm4_moe", "gpt_oss"])
@pytest.mark.parametrize("name", ["Q5_1", "INT8", "MXFP4"])
def test_newer_families_are_exact_with_quantised_weights(name: str, family: str) -> None:
    decoder = random_decoder(
        widened(family), CpuKernels(), torch.float32, quantize=lambda v: in_format(name, v)
    )
    prompts, params = workload(6, seed=3, longest=40)
    expected = solo(decoder, prompts, params)
    assert len({tuple(tokens) for tokens in expected.tokens.values()}) > 2
    for scenario in ("one batch", "chunks of 7", "swapped every third step"):
        assert_same(Bench(decoder, **SCENARIOS[scenario]).run(prompts, params), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "INT8"])
def test_scores_of_an_answer_are_those_of_the_same_text_as_a_prompt(name: str) -> None:
    decoder = random_decoder(
        widened("llama"), CpuKernels(), torch.float32, quantize=lambda v: in_format(name, v)
    )
    prompt = list(range(20))
    answered = Bench(decoder).run([prompt], [SamplingParams(seed=1, max_tokens=30, logprobs=2)])
    text = prompt + answered.tokens["0"]
    scored = Bench(decoder, max_batched_tokens=64).run(
        [text], [SamplingParams(max_tokens=1, prompt_logprobs=2)]
    )
    found = [scored.prompt_logprobs["0"][position] for position in range(20, 50)]
    assert found == answered.logprobs["0"]


@pytest.mark.slow
def test_a_model_answers_with_the_same_bits_on_every_instruction_set() -> None:
    """All that a quantised model computes in float32, attention and norms included."""
    prompts, params = workload(6, seed=4, longest=60)
    expected = None
    for variant in VARIANTS:
        try:
            if is_best_again(variant):
                continue
            kernels = variant_kernels(variant)
        except DeviceError as error:
            pytest.skip(str(error))
        decoder = random_decoder(
            widened("qwen3"), kernels, torch.float32, quantize=lambda v: in_format("Q4_K", v)
        )
        got = Bench(decoder).run(prompts, params)
        expected = expected or got
        assert_same(got, expected)
