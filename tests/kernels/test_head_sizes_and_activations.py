"""Activations on every backend that runs here, and heads of sizes that the C++ code does not take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from quire import LLM, SamplingParams
from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.ops import Activation, Kernels, MoeSpec
from quire.kernels.reference import ReferenceKernels
from quire.kernels.routing import route
from quire.models.config_parts import plain_attention
from tests.models.random_configurations import config_class, random_model
from tests.random_models import SPECS, random_decoder


@pytest.mark.parametrize("kernels", [ReferenceKernels(), CpuKernels()], ids=lambda one: one.name)
@pytest.mark.parametrize("size", [1, 7, 64, 300])
def test_gelu_and_squared_relu_are_those_of_float64(kernels: ReferenceKernels, size: int) -> None:
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(size)) * 4
    exact = F.gelu(x.double())
    assert (kernels.activate(x, Activation.GELU).double() - exact).abs().max() < 2e-6
    squared = x.double().clamp(min=0) ** 2
    torch.testing.assert_close(
        kernels.activate(x, Activation.RELU2).double(), squared, rtol=1e-6, atol=0
    )
    up = torch.randn(5, size)
    gated = kernels.gate(torch.cat((x, up), 1), Activation.GELU)
    assert torch.equal(gated, kernels.activate(x, Activation.GELU) * up)


@pytest.mark.parametrize("activation", [Activation.GELU, Activation.RELU2])
@pytest.mark.parametrize("kernels", [ReferenceKernels(), CpuKernels()], ids=lambda one: one.name)
def test_an_activation_has_the_same_bits_in_any_company(
    kernels: ReferenceKernels, activation: Activation
) -> None:
    x = torch.randn(9, 37) * 3
    together = kernels.activate(x, activation)
    for row in range(9):
        assert torch.equal(kernels.activate(x[row : row + 1], activation)[0], together[row])
    with_nan = torch.full((1, 20), float("nan"))
    assert kernels.activate(with_nan, activation).isnan().all()


def test_experts_are_chosen_in_the_best_groups_only() -> None:
    spec = MoeSpec(8, 2, 16, True, sigmoid_scores=True, num_groups=4, top_groups=1)
    # the best expert is alone in its group, the two best together are in the last one
    logits = torch.tensor([[5.0, -5.0, 0.0, 0.0, 1.0, -9.0, 3.0, 2.9]])
    _, chosen = route(logits, spec)
    assert sorted(chosen[0].tolist()) == [6, 7]


def logits_of(kernels: Kernels, head_dim: int) -> torch.Tensor:
    from tests.decoding import all_logits

    spec = SPECS["mistral"]
    layers = tuple(
        replace(one, mixer=plain_attention(4, 2, head_dim, window=24)) for one in spec.layers
    )
    decoder = random_decoder(replace(spec, layers=layers), kernels, torch.float32)
    return all_logits(decoder, list(range(1, 40)))


@pytest.mark.parametrize("head_dim", [4, 100, 320])
def test_heads_of_other_sizes_are_computed_by_the_reference(head_dim: int) -> None:
    """They failed at the first request."""
    found, expected = logits_of(CpuKernels(), head_dim), logits_of(ReferenceKernels(), head_dim)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_a_model_with_such_heads_answers_and_the_log_says_so(tmp_path: Path) -> None:
    from quire.tools.bench.random_checkpoint import write_tokenizer

    config = config_class("llama")(
        vocab_size=300, hidden_size=40, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=20, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    random_model(config, 0).save_pretrained(tmp_path)
    write_tokenizer(300, tmp_path)
    with LLM(str(tmp_path), device="cpu", dtype="float32", kv_cache_memory=0.01) as llm:
        (output,) = llm.generate(["a b"], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(output.token_ids) == 4
        assert "heads of 20" in llm.description
