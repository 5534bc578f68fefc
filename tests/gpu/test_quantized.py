"""Quantised weights on a GPU: products against float64 and themselves, engines under all that must
not matter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.backends.select import select_kernels
from quire.checkpoints.checkpoint import StoredCache
from quire.kernels.formats import FORMATS
from quire.kernels.ops import Activation
from quire.kernels.weights import Weight
from quire.models.decoder import Decoder
from quire.models.weight_plan import QUANTIZED
from quire.runner.kv_cache import token_bytes
from quire.tools.bench.random_engine import quantized
from tests.gpu.support import (
    DEVICE,
    assert_same,
    decoder_of,
    mixed_jobs,
    plain_jobs,
    run_jobs,
    shape_of,
)
from tests.kernels.triton.support import ROW_COUNTS, assert_rows_alone, in_graph

pytestmark = pytest.mark.gpu
FOUR_BITS = ["Q4_0", "Q4_1", "Q4_K", "INT4", "INT4_G32", "INT4_G64", "INT4_G128"]
EIGHT_BITS = ["INT8", "FP8", "FP8_G128"]
CODED = ["Q8_0", "Q6_K", "Q5_1", "MXFP4"]
"""That have no kernel of their own: they become numbers within the product of all kinds of tiles."""
SHAPES = [(1024, 2048), (6144, 1024), (488, 768)]


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def weight_of(name: str, out: int, inner: int, seed: int = 0) -> Weight:
    format = FORMATS[name]
    numbers = random(out, inner, dtype=torch.float32, seed=seed) / inner**0.5
    return Weight.of(format, (out, inner), *quantized(format, numbers))


def expanded(weight: Weight) -> Tensor:
    return torch.cat(
        [part.format.expand(*part.tensors).reshape(part.rows, -1) for part in weight.parts]
    ).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FOUR_BITS + EIGHT_BITS + CODED)
def test_products_are_those_of_the_expanded_weight(name: str, dtype: torch.dtype) -> None:
    """Within what rounding the inputs (8 bits) or the scales (4 bits) may change."""
    kernels = select_kernels(DEVICE, dtype)
    for out, inner in SHAPES:
        weight = weight_of(name, out, inner)
        truth = expanded(weight)
        packed, bias = kernels.pack(weight), random(out, dtype=dtype, seed=3)
        for rows in (1, 5, 30, 72, 100, 200, 600):
            x = random(rows, inner, dtype=dtype, seed=rows)
            expected = x.double() @ truth.t() + bias.double()
            got = kernels.linear(x, packed, bias).double()
            room = torch.empty(rows, out, dtype=dtype, device=DEVICE)
            kernels.linear(x, packed, bias, room)
            assert torch.equal(room.double(), got)
            allowed = {"INT8": 0.02, "FP8": 0.06, "FP8_G128": 0.06}.get(name, 0.01)
            assert (got - expected).norm() <= allowed * expected.norm(), (out, inner, rows)
            gated = kernels.linear_gated(x, packed, bias, Activation.SILU).double()
            gate, up = kernels.linear(x, packed, bias).float().chunk(2, 1)
            wanted = torch.nn.functional.silu(gate).to(dtype).float() * up
            assert (
                torch.equal(gated.to(dtype), wanted.to(dtype))
                or (gated - wanted).norm() <= 1e-2 * wanted.norm()
            )


@pytest.mark.parametrize("name", FOUR_BITS + EIGHT_BITS + CODED)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    """Also without neighbours, beside NaN, and captured in a graph."""
    kernels = select_kernels(DEVICE, torch.bfloat16)
    for out, inner in SHAPES:
        packed = kernels.pack(weight_of(name, out, inner))
        x = random(max(ROW_COUNTS), inner, dtype=torch.bfloat16, seed=1)
        assert_rows_alone(lambda rows, packed=packed: kernels.linear(rows, packed), [x])
        assert_rows_alone(
            lambda rows, packed=packed: kernels.linear_gated(rows, packed, None, Activation.SILU),
            [x],
        )
        for rows in (1, 20, 256):
            some = x[:rows].clone()
            captured = in_graph(lambda some=some, packed=packed: kernels.linear(some, packed))
            assert torch.equal(captured, kernels.linear(some, packed))


@pytest.mark.parametrize("name", FOUR_BITS + EIGHT_BITS + CODED)
def test_an_output_has_the_same_bits_beside_any_others(name: str) -> None:
    """As it must where devices have different parts of a weight."""
    kernels = select_kernels(DEVICE, torch.bfloat16)
    whole = weight_of(name, 576, 768)
    (part,) = whole.parts
    half = Weight.of(
        part.format, (200, 768), *(tensor[:200].contiguous() for tensor in part.tensors)
    )
    packed = [kernels.pack(weight) for weight in (whole, half)]
    for rows in (1, 7, 30, 100, 300, 900):
        x = random(rows, 768, dtype=torch.bfloat16, seed=rows)
        assert torch.equal(kernels.linear(x, packed[0])[:, :200], kernels.linear(x, packed[1])), (
            rows
        )


@pytest.mark.parametrize("name", FOUR_BITS)
def test_four_bits_give_the_bits_of_the_same_weight_in_the_models_dtype(name: str) -> None:
    from quire.backends.triton.quantized import HAS_MINIMA
    from quire.backends.triton.streamed_linear import Int4, expand_int4

    kernels = select_kernels(DEVICE, torch.bfloat16)
    weight = weight_of(name, 1024, 2048)
    packed = kernels.pack(weight)
    codes, scales = packed.parts[0].tensors
    numbers = expand_int4(Int4(codes, scales, name in HAS_MINIMA), torch.bfloat16)
    close = expanded(weight)
    assert (numbers.double() - close).norm() <= 1e-2 * close.norm()
    dense = kernels.pack(Weight.dense(numbers))
    for rows in (1, 7, 16, 33, 64, 130, 300, 900):
        x = random(rows, 2048, dtype=torch.bfloat16, seed=rows)
        assert torch.equal(kernels.linear(x, packed), kernels.linear(x, dense)), rows


@pytest.mark.parametrize("name", CODED)
def test_codes_give_the_bits_of_the_expanded_weight(name: str) -> None:
    kernels = select_kernels(DEVICE, torch.bfloat16)
    weight = weight_of(name, 1024, 2048)
    dense = kernels.pack(Weight.dense(expanded(weight).to(torch.bfloat16)))
    packed = kernels.pack(weight)
    for rows in (1, 7, 16, 33, 64, 128, 130, 900):
        x = random(rows, 2048, dtype=torch.bfloat16, seed=rows)
        assert torch.equal(kernels.linear(x, packed), kernels.linear(x, dense)), rows


def test_a_weight_of_parts_in_different_formats() -> None:
    kernels = select_kernels(DEVICE, torch.bfloat16)
    weight = Weight.stacked(
        [
            weight_of("Q4_K", 1024, 2048),
            weight_of("FP8", 512, 2048, 1),
            weight_of("INT8", 64, 2048, 2),
        ]
    )
    packed, x = kernels.pack(weight), random(9, 2048, dtype=torch.bfloat16, seed=5)
    parts = [kernels.linear(x, part) for part, _ in packed.split()]
    assert torch.equal(kernels.linear(x, packed), torch.cat(parts, 1))
    truth = x.double() @ expanded(weight).t()
    assert (kernels.linear(x, packed).double() - truth).norm() <= 0.05 * truth.norm()


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_what_quantization_names_is_computed_here(quantization: str) -> None:
    assert select_kernels(DEVICE, torch.bfloat16).computes(QUANTIZED[quantization])
    assert not select_kernels(DEVICE, torch.float32).computes(QUANTIZED[quantization])


@pytest.mark.parametrize(
    "formats",
    [
        ["FP8"],
        ["INT4_G128"],
        ["FP8_G128", "INT8", "BF16", "Q4_0", "INT4", "Q4_K", "INT4_G64", "Q6_K"],
    ],
    ids=" ".join,
)
def test_engines_are_exact(formats: list[str]) -> None:
    """Graphs or none, chunks, preemption, a host tier, alone and together, with prompts scored on
    the way.
    """
    check_engine(decoder_of(shape_of("qwen3-0.6b", num_layers=4), formats=formats))


@pytest.mark.parametrize(
    "formats", [["FP8"], ["FP8_G128"], ["INT4_G128"], ["MXFP4"], ["Q4_K", "Q6_K"]], ids=" ".join
)
def test_engines_with_experts_are_exact(formats: list[str]) -> None:
    spec = replace(shape_of("qwen3-30b-a3b", num_layers=2), vocab_size=8192)
    spec = spec.with_layers(mlp=replace(spec.layers[0].mlp, num_experts=16))
    check_engine(decoder_of(spec, formats=formats))


def check_engine(decoder: Decoder) -> None:
    vocab_size = decoder.spec.vocab_size
    jobs = [*plain_jobs(80, vocab_size, seed=1), *mixed_jobs(40, vocab_size, seed=2)]
    everyone = range(len(jobs))
    expected = run_jobs(decoder, jobs)
    assert not expected.errors
    assert len({tuple(tokens) for tokens in expected.tokens.values()}) > 60
    order = sample(len(jobs))
    got = run_jobs(
        decoder, jobs, order, arrivals_per_step=3, max_batched_tokens=300, preempt_every=4
    )
    assert_same(got, expected, everyone)
    assert got.preemptions > 10
    options = {"cache_tokens": 6000, "host_cache_memory": "1GiB", "preempt_every": 5}
    assert_same(run_jobs(decoder, jobs, order, **options), expected, everyone)
    assert_same(
        run_jobs(decoder, jobs, cuda_graphs=False, depth=1, max_num_seqs=50), expected, everyone
    )
    for number in everyone[::20]:
        assert_same(run_jobs(decoder, jobs, [number], prefix_caching=False), expected, [number])


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 0.7)])
def test_a_cache_of_fp8_is_exact_and_holds_twice_the_tokens(scales: tuple[float, float]) -> None:
    stored = StoredCache("fp8", dict.fromkeys(range(3), scales))
    decoder = decoder_of(replace(shape_of("qwen3-0.6b", num_layers=3), cache=stored))
    jobs = [
        *plain_jobs(60, decoder.spec.vocab_size, seed=1),
        *mixed_jobs(24, decoder.spec.vocab_size, seed=2),
    ]
    everyone, order = range(len(jobs)), sample(len(jobs))
    fp8 = {"kv_cache_dtype": "fp8"}
    expected = run_jobs(decoder, jobs, **fp8)
    assert not expected.errors
    got = run_jobs(
        decoder, jobs, order, arrivals_per_step=3, max_batched_tokens=300, preempt_every=4, **fp8
    )
    assert_same(got, expected, everyone)
    options = {"cache_tokens": 6000, "host_cache_memory": "1GiB", "preempt_every": 5} | fp8
    assert_same(run_jobs(decoder, jobs, order, **options), expected, everyone)
    assert_same(
        run_jobs(decoder, jobs, cuda_graphs=False, depth=1, max_num_seqs=50, **fp8),
        expected,
        everyone,
    )
    other = run_jobs(decoder, jobs, kv_cache_dtype="model")
    assert other.tokens != expected.tokens  # another model, if a close one
    sizes = [
        token_bytes(decoder.spec, 16, dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    ]
    assert sizes[0] == 2 * sizes[1]


def sample(count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
