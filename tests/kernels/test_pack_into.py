"""Weights replaced where they lie: the products of a fresh `pack`, bit for bit, at the same
addresses.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.backends.triton import quantized
from quire.backends.triton.kernels import TritonKernels
from quire.kernels.formats import FORMATS
from quire.kernels.ops import Activation, ExpertWeights, Kernels, MoeSpec
from quire.kernels.reference import ReferenceKernels
from quire.kernels.weights import Weight
from quire.parallel.division import Division
from quire.parallel.kernels import DividedWeight, parallel_kernels
from tests.kernels.cpu_support import random
from tests.kernels.triton.support import ON_GPU
from tests.parallel.ranks import Ranks
from tests.random_models import SPECS

OUT, IN = 64, 256
ROWS = (1, 7, 40)
CPU_PLAIN = ("F32", "BF16")
CASES = [
    *((ReferenceKernels, name) for name in FORMATS),
    *(
        (CpuKernels, name)
        for name, format in FORMATS.items()
        if format.dtype is None or name in CPU_PLAIN
    ),
]


def random_weight(name: str, *shape: int, seed: int) -> Weight:
    """Random numbers in a format, none of them infinite: small bytes make small scales."""
    format, generator = FORMATS[name], torch.Generator().manual_seed(seed)
    tensors = format.empty(shape)
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.01)
        else:
            tensor.copy_(
                torch.randint(0, 15 if format.has_zeros else 50, tensor.shape, generator=generator)
            )
    if name == "MXFP4":  # the first byte of a block is the exponent of its scale
        exponents = tensors[0][..., :: format.num_bytes]
        exponents.remainder_(4).add_(118)
    return Weight.of(format, shape, *tensors)


def addresses(weight: Weight) -> list[int]:
    return [tensor.data_ptr() for part in weight.parts for tensor in part.tensors]


def rows_of(weight: Weight, dtype: torch.dtype) -> Iterator[Tensor]:
    return (random(count, weight.shape[-1], dtype=dtype, seed=count) for count in ROWS)


def assert_replaced(kernels: Kernels, old: Weight, new: Weight, dtype: torch.dtype) -> None:
    """That `new` in the place of `old` gives what it gives in a place of its own."""
    packed, fresh = kernels.pack(old), kernels.pack(new)
    before, places = [kernels.linear(x, packed) for x in rows_of(packed, dtype)], addresses(packed)
    kernels.pack_into(packed, new)
    assert addresses(packed) == places
    for x, stale in zip(rows_of(packed, dtype), before, strict=True):
        got = kernels.linear(x, packed)
        assert got.isfinite().all()
        assert torch.equal(got, kernels.linear(x, fresh))
        assert not torch.equal(got, stale)
        gated = kernels.linear_gated(x, fresh, None, Activation.SILU)
        assert torch.equal(kernels.linear_gated(x, packed, None, Activation.SILU), gated)


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_a_replaced_weight_is_a_freshly_packed_one(backend: type[Kernels], name: str) -> None:
    kernels = backend()
    dtype = torch.bfloat16 if name == "BF16" else torch.float32
    old, new = (random_weight(name, OUT, IN, seed=seed) for seed in (1, 2))
    assert_replaced(kernels, old, new, dtype)
    packed, ids = kernels.pack(random_weight(name, OUT, IN, seed=1)), torch.tensor([OUT - 1, 0, 5])
    kernels.pack_into(packed, new)
    assert torch.equal(kernels.embedding(ids, packed), kernels.embedding(ids, kernels.pack(new)))


@pytest.mark.parametrize("use_amx", [True, False])
def test_bfloat16_is_replaced_with_and_without_amx(use_amx: bool) -> None:
    old, new = (random_weight("BF16", OUT, IN, seed=seed) for seed in (1, 2))
    assert_replaced(CpuKernels(use_amx=use_amx), old, new, torch.bfloat16)


@pytest.mark.few(3)
@pytest.mark.skipif(
    ON_GPU, reason="the interpreter's; tests/gpu/test_weights_replaced.py has the GPU's layouts"
)
@pytest.mark.parametrize(
    "name", ["F16", "INT8", "Q4_0", "Q4_K", "Q5_1", "Q6_K", "Q8_0", "MXFP4", "INT4_G32"]
)
def test_tritons_layouts_are_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "capability", lambda: (8, 0))
    monkeypatch.setattr(quantized, "HAS_GLUON", False)
    kernels = TritonKernels(torch.float16)
    old, new = (random_weight(name, OUT, IN, seed=seed) for seed in (1, 2))
    packed, fresh = kernels.pack(old), kernels.pack(new)
    places = addresses(packed)
    kernels.pack_into(packed, new)
    assert addresses(packed) == places
    for x in rows_of(packed, torch.float16):
        x = x * 0.01
        assert torch.equal(kernels.linear(x, packed), kernels.linear(x, fresh))
    assert packed.layout == fresh.layout
    for part, other in zip(packed.parts, fresh.parts, strict=True):
        assert all(map(torch.equal, part.tensors, other.tensors))


@pytest.mark.parametrize("backend", [ReferenceKernels, CpuKernels])
def test_parts_in_several_formats_are_replaced_together(backend: type[Kernels]) -> None:
    def stacked(seed: int) -> Weight:
        return Weight.stacked(
            random_weight(name, rows, IN, seed=seed) for name, rows in (("Q4_0", 32), ("Q8_0", 16))
        )

    assert_replaced(backend(), stacked(1), stacked(2), torch.float32)


@pytest.mark.parametrize("name", ["F32", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("backend", [ReferenceKernels, CpuKernels])
def test_stacked_experts_are_replaced(backend: type[Kernels], name: str) -> None:
    kernels, spec = (
        backend(),
        MoeSpec(num_experts=3, top_k=2, intermediate_size=32, normalize_weights=True),
    )
    x, router = random(7, 64, dtype=torch.float32), random(7, 3, dtype=torch.float32, seed=2)

    def experts(seed: int) -> tuple[Weight, Weight]:
        return random_weight(name, 3, 64, 64, seed=seed), random_weight(
            name, 3, 64, 32, seed=seed + 1
        )

    packed, fresh = (ExpertWeights(*map(kernels.pack, experts(seed))) for seed in (1, 5))
    stale = kernels.moe(x, router, packed, spec)  # which also makes the views of single experts
    for own, new in zip(packed[:2], experts(5), strict=True):
        places = addresses(own)
        kernels.pack_into(own, new)
        assert addresses(own) == places
    got = kernels.moe(x, router, packed, spec)
    assert torch.equal(got, kernels.moe(x, router, fresh, spec))
    assert not torch.equal(got, stale)


@pytest.mark.parametrize("backend", [ReferenceKernels, CpuKernels])
def test_what_does_not_fit_changes_nothing(backend: type[Kernels]) -> None:
    kernels = backend()
    packed = kernels.pack(random_weight("F32", OUT, IN, seed=1))
    x = random(3, IN, dtype=torch.float32)
    expected = kernels.linear(x, packed)
    for other in (
        random_weight("F32", OUT, 2 * IN, seed=2),
        random_weight("F32", OUT // 2, IN, seed=2),
        random_weight("BF16", OUT, IN, seed=2),
        random_weight("Q8_0", OUT, IN, seed=2),
        Weight.stacked(random_weight("F32", OUT // 2, IN, seed=seed) for seed in (2, 3)),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            kernels.pack_into(packed, other)
        assert torch.equal(kernels.linear(x, packed), expected)


def test_a_ranks_part_is_replaced() -> None:
    """A divided weight is its rank's kernels' own; what stands around it stays."""
    division = Division(SPECS["llama"], 0, 1)
    old, new = (random_weight("F32", OUT, IN, seed=seed) for seed in (1, 2))
    kernels = parallel_kernels(CpuKernels(), Ranks(1).groups[0], division)
    given = (DividedWeight(one.shape, one.parts, one, (OUT,)) for one in (old, new))
    assert_replaced(kernels, *given, torch.float32)
    packed = kernels.pack(DividedWeight(old.shape, old.parts, old, (OUT,)))
    kernels.pack_into(packed, new)  # without its widths, as a caller has it
    x = random(5, IN, dtype=torch.float32)
    assert torch.equal(kernels.linear(x, packed), CpuKernels().linear(x, CpuKernels().pack(new)))
