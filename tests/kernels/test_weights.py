"""Weights in formats of their own: every kernel computes with them as with the numbers they stand
for.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.formats import FORMATS
from quire.kernels.ops import Activation, ExpertWeights, Kernels, MoeSpec
from quire.kernels.reference import ReferenceKernels
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from tests.decoding import all_logits
from tests.kernels.cpu_support import random
from tests.parallel.ranks import whole_weights
from tests.random_models import SPECS, random_decoder

BLOCKS = [name for name, format in FORMATS.items() if format.scales]
BACKENDS = [ReferenceKernels, CpuKernels]
EXPANDED = ("Q2_K", "Q3_K")
"""Formats that the C++ kernels have no products for."""


def in_blocks(name: str, *shape: int, seed: int = 0) -> tuple[Weight, Tensor]:
    """A weight of random blocks and the numbers it stands for. Small bytes make small scales."""
    format = FORMATS[name]
    size = (*shape[:-1], format.nbytes(shape[-1:]))
    stored = torch.from_numpy(np.random.default_rng(seed).integers(0, 50, size, dtype=np.uint8))
    return Weight.of(format, shape, stored), format.expand(stored)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        (name, backend)
        for name in BLOCKS
        for backend in BACKENDS
        if backend is ReferenceKernels or name in EXPANDED
    ],
)
def test_products_and_rows_are_those_of_the_numbers(name: str, backend: type[Kernels]) -> None:
    """What the C++ kernels compute with as it is stored, with x in 8 bits, is tested in
    test_cpu_quantized.py.
    """
    kernels = backend()
    weight, numbers = in_blocks(name, 7, 512)
    assert numbers.shape == weight.shape
    assert weight.nbytes == weight.parts[0].format.nbytes(weight.shape) < numbers.nbytes
    x = random(5, 512, dtype=torch.float32)
    expected = ReferenceKernels().linear(x, Weight.dense(numbers))
    assert torch.equal(kernels.linear(x, kernels.pack(weight)), expected)
    ids = torch.tensor([6, 0, 6])
    assert torch.equal(kernels.embedding(ids, weight), numbers[ids])


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_may_have_formats_of_their_own(backend: type[Kernels]) -> None:
    """As query, key and value do in many GGUF files."""
    kernels = backend()
    plain = random(6, 64, dtype=torch.float32, seed=3)
    parts = [
        in_blocks("Q4_0", 8, 64),
        (Weight.dense(plain), plain),
        in_blocks("Q8_0", 4, 64, seed=1),
    ]
    weight = Weight.stacked(part for part, _ in parts)
    assert weight.shape == (18, 64)
    assert weight.format is None
    assert not weight.is_dense
    assert weight.nbytes == sum(part.nbytes for part, _ in parts)
    packed = kernels.pack(weight)
    assert packed.shape == weight.shape
    assert packed.nbytes >= weight.nbytes  # panels are filled up
    x, bias = random(5, 64, dtype=torch.float32, seed=4), random(18, dtype=torch.float32, seed=5)
    whole = torch.cat([numbers for _, numbers in parts])
    expected = ReferenceKernels().linear(x, Weight.dense(whole), bias)
    got = kernels.linear(x, packed, bias)
    if kernels.name == "reference":
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    else:  # which see x in 8 bits
        assert torch.corrcoef(torch.stack((got.flatten(), expected.flatten())))[0, 1] > 0.999
    out = torch.empty(5, 18)
    assert kernels.linear(x, packed, bias, out) is out
    assert torch.equal(out, got)
    gate_up = kernels.linear_gated(x, packed, bias, Activation.SILU)
    assert torch.equal(gate_up, kernels.gate(got, Activation.SILU))  # type: ignore[attr-defined]


def test_experts_may_be_in_blocks() -> None:
    kernels = ReferenceKernels()
    gate_up, gate_up_numbers = in_blocks("Q8_0", 3, 64, 32)
    down, down_numbers = in_blocks("Q4_0", 3, 32, 32, seed=1)
    spec = MoeSpec(num_experts=3, top_k=2, intermediate_size=32, normalize_weights=True)
    x, router = random(5, 32, dtype=torch.float32), random(5, 3, dtype=torch.float32, seed=2)
    expected = kernels.moe(
        x, router, ExpertWeights(Weight.dense(gate_up_numbers), Weight.dense(down_numbers)), spec
    )
    assert torch.equal(kernels.moe(x, router, ExpertWeights(gate_up, down), spec), expected)
    assert [expert.shape for expert in gate_up.experts] == [(64, 32)] * 3


@pytest.mark.parametrize("family", SPECS)
def test_a_model_computes_with_blocks_as_with_their_numbers(family: str) -> None:
    """Every matrix in another format, and none of them known to the decoder."""
    spec, kernels = SPECS[family], ReferenceKernels()
    plain = whole_weights(spec, torch.float32)
    parameters = spec.parameters()
    blocks, numbers = dict(plain), dict(plain)
    for i, (name, weight) in enumerate(plain.items()):
        if parameters[name].stays_plain:
            continue
        if len(weight.shape) == 2 and weight.shape[1] % 32 == 0:
            blocks[name], expanded = in_blocks(
                ("Q8_0", "Q4_0", "Q4_1")[i % 3], *weight.shape, seed=i
            )
            numbers[name] = Weight.dense(expanded)
    quantised, expected = (
        Decoder(spec, kernels, loaded, torch.float32) for loaded in (blocks, numbers)
    )
    assert quantised.nbytes < expected.nbytes
    tokens = list(range(40))
    assert torch.equal(all_logits(quantised, tokens), all_logits(expected, tokens))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_the_weights_take_until_they_are_released(
    dtype: torch.dtype, backend: type[Kernels]
) -> None:
    spec = SPECS["qwen2_moe"]
    decoder = random_decoder(spec, backend(), dtype)
    assert decoder.nbytes == spec.num_parameters * dtype.itemsize
    held = [weakref.ref(weight.tensor) for weight in decoder.weights.values()]
    decoder.release()
    gc.collect()
    assert not any(reference() is not None for reference in held)
