"""What a layer computes behind its attention, as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.ops import Activation, LayerEnd
from quire.kernels.reference import ReferenceKernels
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.spec import MlpSpec, ModelSpec
from tests.decoding import all_logits
from tests.random_models import SPECS, random_decoder


def end_of(kernels: ReferenceKernels, dtype: torch.dtype) -> LayerEnd:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    def weight(*shape: int) -> Weight:
        return kernels.pack(Weight.dense(random(*shape)))

    norm = random(48) + 1
    return LayerEnd(weight(48, 64), norm, 1e-5, weight(192, 48), weight(48, 96), Activation.SILU)


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("make", [ReferenceKernels, CpuKernels])
def test_it_is_its_operations_one_by_one(make: type[ReferenceKernels], rows: int) -> None:
    kernels, dtype = make(), torch.bfloat16
    end = end_of(kernels, dtype)
    attended, residual = torch.randn(rows, 64).to(dtype), torch.randn(rows, 48).to(dtype)
    kernels.prepare_layer_end(end)
    found, found_total = kernels.finish_layer(attended, residual, end)
    output = kernels.linear(attended, end.output)
    normed, total = kernels.add_rms_norm(output, residual, end.norm, end.eps)
    hidden = kernels.linear_gated(normed, end.up, None, end.activation)
    assert torch.equal(found, kernels.linear(hidden, end.down))
    assert torch.equal(found_total, total)


def decoder_of(spec: ModelSpec) -> Decoder:
    return random_decoder(spec, ReferenceKernels(), torch.float32)


def plain_layers(decoder: Decoder) -> list[bool]:
    return [layer.end is not None for layer in decoder.layers]


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "smollm3", "mistral", "hunyuan"])
def test_a_model_has_the_same_logits_either_way(name: str) -> None:
    decoder = decoder_of(SPECS[name])
    tokens = list(range(40))
    expected = all_logits(decoder, tokens)
    for layer in decoder.layers:
        layer.end = None
    assert torch.equal(all_logits(decoder, tokens), expected)


def test_plain_layers_are_found() -> None:
    expected: dict[str, Sequence[bool]] = {
        "qwen3": (True, True),
        "qwen2": (True, True),
        "smollm3": (True, True),
        "llama": (False, False),  # these products have biases
        "qwen3_moe": (True, False),
        "gemma2": (False, False),
        "olmo2": (False, False),
        "starcoder2": (False, False),
        "cohere2": (False, False),
        "granite": (False, False),
    }
    found = {name: tuple(plain_layers(decoder_of(SPECS[name]))) for name in expected}
    assert found == expected
    scaled = SPECS["qwen3"].with_layers(mlp=MlpSpec(96, output_scale=0.5))
    ungated = SPECS["qwen3"].with_layers(mlp=MlpSpec(96, gated=False))
    for spec in (scaled, ungated, replace(SPECS["qwen3"], norm_offset=1.0)):
        assert not any(plain_layers(decoder_of(spec)))
