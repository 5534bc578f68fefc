"""Matrix products: our own kernel and cuBLAS give the same bits, for any number of rows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.triton.support import (
    DEVICE,
    DTYPES,
    MARKS,
    ON_GPU,
    ROW_COUNTS,
    assert_close,
    assert_rows_alone,
    drawn,
    in_graph,
    random,
)

from quire.kernels.ops import Activation  # isort: skip  (after the check for Triton)
from quire.backends.triton.exact_products import rows_are_exact  # isort: skip
from quire.backends.triton.kernels import TritonKernels  # isort: skip
from quire.backends.triton import cublas  # isort: skip
from quire.backends.triton.linear import linear, room_for, tile_of  # isort: skip
from quire.backends.triton.router_linear import router_linear  # isort: skip
from quire.kernels.weights import Weight  # isort: skip

pytestmark = MARKS
HALVES = [dtype for dtype in DTYPES if dtype != torch.float32]
TRUE_SHAPES = [
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (4096, 12288),
    (2048, 8192),
    (151936, 1024),
]


@drawn
@given(
    st.sampled_from(DTYPES),
    st.sampled_from([1, 5, 16, 17, 33, 300]),
    st.sampled_from([1, 31, 64, 97, 130]),
    st.sampled_from([16, 64, 100, 576]),
    st.booleans(),
)
def test_products_are_those_of_float64(
    dtype: torch.dtype, rows: int, size: int, inner: int, has_bias: bool
) -> None:
    x, weight = random(rows, inner, dtype=dtype), random(size, inner, dtype=dtype, seed=1)
    bias = random(size, dtype=dtype, seed=2) if has_bias else None
    truth = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.double().abs().T + 1
    assert_close(linear(x, weight, bias), truth, size=magnitude)
    assert_close(TritonKernels().linear(x, Weight.dense(weight), bias), truth, size=magnitude)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(96, 64), (130, 300)] + ([(1024, 3072)] if ON_GPU else []), ids=str
)
def test_a_row_is_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    kernels = TritonKernels()
    weight, bias = Weight.dense(random(*shape, dtype=dtype)), random(shape[0], dtype=dtype, seed=1)
    x = random(max(ROW_COUNTS), shape[1], dtype=dtype, seed=2)
    assert_rows_alone(lambda x: kernels.linear(x, weight), [x])
    assert_rows_alone(lambda x: kernels.linear(x, weight, bias), [x])
    assert_rows_alone(lambda x: kernels.linear_gated(x, weight, bias, Activation.SILU), [x])


@pytest.mark.parametrize("silu_mul", [False, True])
def test_every_tile_fits_a_multiprocessor(silu_mul: bool) -> None:
    """A tile's stages lie in the shared memory, of which an H200 gives a program 227 KiB (an A100
    163).
    """
    for rows in (1, 8, 9, 16, 17, 32, 33, 128, 129, 256, 257, 4096):
        for size in (2, 64, 512, 514, 1024, 1026, 4096, 24574, 24576, 65536, 151936):
            for inner in (16, 1024, 4096, 12288):
                tile = tile_of(rows, torch.empty(size, inner, device="meta"), silu_mul)
                held = (tile.outputs * (1 + silu_mul) + tile.rows) * tile.inner * tile.stages
                assert held * torch.bfloat16.itemsize <= 227 * 1024, (rows, size, inner, tile)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 20, 40])
def test_the_fused_activation_is_the_unfused_one(dtype: torch.dtype, rows: int) -> None:
    x, weight = random(rows, 128, dtype=dtype), random(160, 128, dtype=dtype, seed=1)
    gate, up = linear(x, weight).double().chunk(2, dim=-1)
    assert_close(
        linear(x, weight, silu_mul=True), F.silu(gate) * up, roundings=4, size=(gate * up).abs() + 1
    )


@pytest.mark.skipif(not ON_GPU, reason="cuBLAS runs on a GPU")
@pytest.mark.parametrize("shape", TRUE_SHAPES, ids=str)
def test_cublas_adds_in_the_same_order(shape: tuple[int, int]) -> None:
    """The fact that decode steps (our kernel) and prompts (cuBLAS) agree on. Not true of every
    shape: for those that fail, our kernel is used throughout; of these it is expected.
    """
    TritonKernels()  # turns off what would change it
    for dtype in HALVES:
        weight, bias = random(*shape, dtype=dtype) * 0.02, random(shape[0], dtype=dtype, seed=1)
        assert rows_are_exact(weight, has_bias=False)
        assert rows_are_exact(weight, has_bias=True)
        x = random(300, shape[1], dtype=dtype, seed=2)
        for rows in (16, 100, 300):
            some = x[:rows]
            assert torch.equal(
                cublas.product(some, weight, room_for(some, len(weight)), bias),
                linear(some, weight, bias),
            )


USERS_SETTINGS = """
import torch
from quire.backends.triton.kernels import TritonKernels
from quire.backends.triton.linear import linear
from quire.kernels.weights import Weight

generator = torch.Generator("cuda").manual_seed(0)
x, matrix, bias = (torch.randn(*shape, device="cuda", generator=generator).to(torch.bfloat16)
                   for shape in ((300, 4096), (2880, 4096), (2880,)))
kernels, weight = TritonKernels(), Weight.dense(matrix * 0.05)
kernels.pack(weight)
for rows in range(16, 300, 4):
    for some in (None, bias):
        assert torch.equal(kernels.linear(x[:rows], weight, some), linear(x[:rows], weight.tensor, some)), rows
"""


@pytest.mark.skipif(not ON_GPU, reason="cuBLAS runs on a GPU")
def test_memory_for_split_sums_changes_nothing() -> None:
    """As some set it to make torch deterministic: torch's products of this shape then change bits
    with the batch.
    """
    settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUBLASLT_WORKSPACE_SIZE": "4096"}
    command = [sys.executable, "-c", USERS_SETTINGS]
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "our own kernel" not in done.stderr


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
def test_a_graph_gives_the_same_bits() -> None:
    kernels = TritonKernels()
    x, bias = random(300, 1024, dtype=torch.bfloat16), random(4096, dtype=torch.bfloat16, seed=2)
    weight = Weight.dense(random(4096, 1024, dtype=torch.bfloat16, seed=1))
    kernels.pack(weight)
    for rows in (1, 16, 300):  # the last is for cuBLAS
        for some in (None, bias):
            found = in_graph(lambda rows=rows, some=some: kernels.linear(x[:rows], weight, some))
            assert torch.equal(found, kernels.linear(x[:rows], weight, some))


@pytest.mark.parametrize("rows", [1, 16, 40])
def test_results_go_where_they_are_wanted(rows: int) -> None:
    kernels = TritonKernels()
    x, weight = (
        random(rows, 64, dtype=torch.float16),
        Weight.dense(random(70, 64, dtype=torch.float16, seed=1)),
    )
    out = torch.empty(rows, 70, dtype=torch.float16, device=DEVICE)
    assert kernels.linear(x, weight, out=out) is out
    assert torch.equal(out, kernels.linear(x, weight))


@drawn
@given(
    st.sampled_from([1, 5, 16, 17]),
    st.sampled_from([1, 60, 64, 160]),
    st.sampled_from([16, 100, 576, 2048]),
    st.booleans(),
)
def test_routers_in_float32_have_the_bits_of_each_row_alone(
    rows: int, size: int, inner: int, has_bias: bool
) -> None:
    """Of a model in half precision, where each sum is one reduction."""
    x, weight = (
        random(rows, inner, dtype=torch.float32),
        random(size, inner, dtype=torch.float32, seed=1),
    )
    bias = random(size, dtype=torch.float32, seed=2) if has_bias else None
    truth = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    kernels, packed = TritonKernels(torch.float16), Weight.dense(weight)
    found = kernels.linear(x, packed, bias)
    assert_close(found, truth, size=x.double().abs() @ weight.double().abs().T + 1)
    if ON_GPU:  # many rows are divided among programs otherwise
        many = x.repeat(500, 1)
        assert torch.equal(kernels.linear(many, packed, bias), found.repeat(500, 1))
    for i in range(rows):
        assert torch.equal(kernels.linear(x[i : i + 1], packed, bias)[0], found[i])


@pytest.mark.parametrize(("size", "inner"), [(64, 2048), (30, 1000)], ids=str)
def test_routers_of_many_rows_have_the_bits_of_few(size: int, inner: int) -> None:
    """Several rows at a time, the last of them not full."""
    half = torch.bfloat16 if ON_GPU else torch.float16
    x = random(1027, inner, dtype=half)
    weight = random(size, inner, dtype=torch.float32, seed=1)
    bias = random(size, dtype=torch.float32, seed=2)
    found = router_linear(x, weight, bias)
    parts = [slice(0, 1), slice(500, 517), slice(1024, 1027)]
    if ON_GPU:  # around the number of rows from which another kernel computes them
        parts += [slice(63), slice(3, 67), slice(300)]
    for some in parts:
        assert torch.equal(router_linear(x[some], weight, bias), found[some])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "inner"),
    [(768, 576, 2048), (256, 1, 2048), (1536, 576, 7168)]
    if ON_GPU
    else [(20, 17, 300), (5, 1, 64)],
)
def test_two_products_in_one_launch_have_the_bits_of_two(
    first: int, second: int, inner: int
) -> None:
    kernels, dtype = TritonKernels(DTYPES[-1]), DTYPES[-1]
    weights = [
        Weight.dense(random(size, inner, dtype=dtype, seed=size) * inner**-0.5)
        for size in (first, second)
    ]
    bias = random(first, dtype=dtype, seed=5)
    for rows in (1, 2, 16, 17, 32, 33, 100, 129, 256) if ON_GPU else (1, 3, 17):
        wide = random(rows, inner + 8, dtype=dtype, seed=rows)
        for x in (wide[:, :inner], wide[:, :inner].contiguous()):
            for added in (None, bias):
                found = kernels.linear_pair(x, weights[0], added, weights[1], None)
                expected = kernels.linear(x, weights[0], added), kernels.linear(x, weights[1])
                assert all(map(torch.equal, found, expected))
                assert found[0].is_contiguous()
    poisoned = wide.clone()
    poisoned[:-1] = float("nan")
    again = kernels.linear_pair(poisoned[:, :inner], weights[0], None, weights[1], None)
    plain = kernels.linear_pair(wide[:, :inner], weights[0], None, weights[1], None)
    assert all(torch.equal(one[-1], other[-1]) for one, other in zip(again, plain, strict=True))
    narrow = kernels.linear_pair(wide[:, :inner], weights[0], None, weights[1], bias[:second])
    assert torch.equal(narrow[1], kernels.linear(wide[:, :inner], weights[1], bias[:second]))
