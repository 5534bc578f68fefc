"""The kernels for small batches: the same bits as those they stand in for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

# isort: skip  (after the check for Triton)
from quire.kernels.ops import Activation, AttentionSpec, HeadShape
from tests.kernels.triton.support import DEVICE, MARKS, NAN, ON_GPU, drawn, in_graph, random
from tests.kernels.triton.test_attention import make, one_each
from tests.long_runs import short_or_long

from quire.backends.triton import (  # isort: skip
    attention as paged,
    router_linear,
    small_batches,
    tested,
)

# isort: skip
from quire.backends.triton.attention_work import attention_work, decode_lists, divided

from quire.backends.triton.kernels import TritonKernels  # isort: skip
from quire.backends.triton.linear import linear  # isort: skip
from quire.kernels.weights import Weight  # isort: skip
from quire.kernels.quantize import FP8, quantize  # isort: skip

if ON_GPU:
    from quire.backends.triton import single_row_linear, small_batch_attention

pytestmark = MARKS
on_gpu = pytest.mark.skipif(not ON_GPU, reason="these kernels don't run in Triton's interpreter")
HEADS = [(16, 8, 128), (32, 8, 128), (9, 3, 64), (32, 8, 64), (16, 1, 128), (3, 1, 64)]


@on_gpu
@drawn
@given(
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.sampled_from(HEADS),
    st.lists(
        st.sampled_from(
            [1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 511, 512, 513, 575, 1024, 1025, 2500]
        ),
        min_size=1,
        max_size=16,
    ),
    st.sampled_from([None, 1, 50, 600]),
    st.booleans(),
    st.booleans(),
)
def test_attention_of_small_batches_is_that_of_large_ones(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    lengths: list[int],
    window: int | None,
    is_divided: bool,
    has_sinks: bool,
) -> None:
    """Any lengths, whole sequences or single splits, what belongs to nobody being NaN; twice, as
    splits are counted.
    """
    shape = HeadShape(*heads)
    query, cache, batch = make(lengths, [1] * len(lengths), shape, dtype)
    ones, rows = np.ones(len(lengths), np.int32), np.arange(len(lengths), dtype=np.int32)
    runs = np.full(len(lengths), 1 if is_divided else 100)
    work = torch.from_numpy(divided(rows, ones, np.array(lengths, np.int32), rows, runs)).to(DEVICE)
    spec = AttentionSpec(shape, shape.head_dim**-0.5, window)
    sinks = random(shape.num_heads, dtype=torch.float32, seed=3) * 4 if has_sinks else None
    expected = torch.full_like(query, NAN)
    paged.decode_attention(query, expected, cache, batch.block_tables, work, len(work), spec, sinks)
    for _ in range(2):
        found = torch.full_like(query, NAN)
        small_batch_attention.small_batch_attention(
            query, found, cache, batch.block_tables, work, len(work), spec, 132, sinks
        )
        assert torch.equal(found, expected)
    assert not expected.isnan().any()


@on_gpu
@pytest.mark.parametrize("window", [None, 700])
def test_every_position_alone_has_the_bits_of_the_whole_prompt(window: int | None) -> None:
    kernels, shape, length = TritonKernels(), HeadShape(16, 8, 128), 3000
    query, cache, batch = make([length], [length], shape, torch.bfloat16)
    spec = AttentionSpec(shape, shape.head_dim**-0.5, window)
    whole = kernels.attention(query, cache, batch, spec)
    for start in range(0, length, 16):
        positions = torch.arange(start, min(start + 16, length))
        alone = one_each(query, batch, positions, 1)
        found = kernels.attention(query[positions], cache, alone, spec)
        assert torch.equal(found, whole[positions]), start


@on_gpu
def test_attention_in_a_graph_has_the_same_bits() -> None:
    kernels, shape = TritonKernels(), HeadShape(16, 8, 128)
    spec = AttentionSpec(shape, 0.1)
    query, cache, batch = make([2000, 5, 700], [1, 1, 1], shape, torch.bfloat16)
    lists = kernels.attention_work(
        np.ones(3, np.int32), batch.context_lens.cpu().numpy(), np.arange(3, dtype=np.int32), shape
    )
    batch = replace(
        batch, work={name: torch.from_numpy(values).to(DEVICE) for name, values in lists.items()}
    )
    assert small_batch_attention.takes(query, cache)
    assert batch.work is not None
    other = replace(batch, work={"decode": batch.work["small"]})
    expected = kernels.attention(query, cache, other, spec)  # by the other kernel
    assert torch.equal(in_graph(lambda: kernels.attention(query, cache, batch, spec)), expected)


@on_gpu
def test_it_is_for_half_precision_and_some_heads() -> None:
    def taken(heads: tuple[int, int, int], dtype: torch.dtype) -> bool:
        query, cache, _ = make([20], [1], HeadShape(*heads), dtype)
        return small_batch_attention.takes(query, cache)

    assert taken((16, 8, 128), torch.bfloat16)
    assert taken((32, 4, 64), torch.float16)
    assert not taken((16, 8, 128), torch.float32)
    assert not taken((16, 8, 80), torch.bfloat16)
    assert not taken((17, 1, 64), torch.bfloat16)


def test_it_is_chosen_by_the_work() -> None:
    """Single queries, while there is a multiprocessor for every split of every key head; and graphs
    know of it.
    """

    def kind(lengths: list[int], shape: HeadShape, count: int = 1) -> str:
        rows = np.arange(len(lengths), dtype=np.int32)
        lists = attention_work(
            np.full_like(rows, count), np.array(lengths, np.int32), rows, shape, 132
        )
        ((name, work),) = lists.items()
        most = decode_lists(len(lengths), len(lengths), max(lengths), shape, 132)
        assert count > 1 or len(work) - 1 <= most[name]
        return name

    qwen = HeadShape(32, 8, 128)
    assert kind([512] * 16, qwen) == kind([8192], qwen) == kind([1000] * 8, qwen) == "small"
    assert kind([512] * 17, qwen) == kind([8193], qwen) == kind([513] * 16, qwen) == "decode"
    assert kind([400] * 33, HeadShape(32, 4, 128)) == "small"
    assert kind([20], qwen, count=2) == "decode"
    assert decode_lists(1, 1, 8192, qwen, 132) == {"small": 16}
    assert decode_lists(17, 20, 600, qwen, 132) == {"decode": 40}
    assert decode_lists(15, 20, 600, qwen, 132) == {"small": 16, "decode": 40}


@on_gpu
@drawn
@given(
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.sampled_from(
        [(1024, 2048), (1024, 3072), (16, 512), (48, 1536), (1008, 4608), (2048, 5120), (5120, 768)]
    ),
    st.booleans(),
)
def test_the_product_of_a_single_row_is_that_of_any(
    dtype: torch.dtype, shape: tuple[int, int], has_bias: bool
) -> None:
    size, inner = shape
    x, weight = random(1, inner, dtype=dtype), random(2 * size, inner, dtype=dtype, seed=1)
    bias = random(2 * size, dtype=dtype, seed=2) if has_bias else None
    for silu_mul, some in ((False, weight[:size]), (True, weight)):
        assert single_row_linear.takes(1, some, silu_mul)
        some_bias = None if bias is None else bias[: len(some)]
        expected = linear(x, some, some_bias, silu_mul=silu_mul)
        found = torch.full_like(expected, NAN)
        single_row_linear.single_row_linear(x, some, some_bias, found, silu_mul)
        assert torch.equal(found, expected)


@on_gpu
@pytest.mark.parametrize(
    "shape", [(4096, 1024), (6144, 4096), (2048, 8192), (1024, 12288), (48, 512)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_single_row_times_fp8_is_that_of_any(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    kernels = TritonKernels(dtype)
    x = random(2, shape[1], dtype=dtype)
    made = quantize(FP8, random(*shape, dtype=torch.float32, seed=1))
    assert made is not None
    packed = kernels.pack(Weight.of(FP8, shape, *made))
    bias = random(shape[0], dtype=dtype, seed=2)
    assert single_row_linear.takes(1, made[0], False)
    assert single_row_linear.takes(1, made[0], True)
    for one in (None, bias):
        assert torch.equal(kernels.linear(x[:1], packed, one), kernels.linear(x, packed, one)[:1])
        gated = kernels.linear_gated(x, packed, one, Activation.SILU)
        assert torch.equal(kernels.linear_gated(x[:1], packed, one, Activation.SILU), gated[:1])
    x[0, 3] = NAN
    assert kernels.linear(x[:1], packed).isnan().all()


@on_gpu
def test_the_product_of_a_single_row_in_a_graph_has_the_same_bits() -> None:
    kernels = TritonKernels()
    x, weight = (
        random(16, 3072, dtype=torch.bfloat16),
        random(1024, 3072, dtype=torch.bfloat16, seed=1),
    )
    assert single_row_linear.takes(1, weight, False)
    packed = Weight.dense(weight)
    assert torch.equal(
        in_graph(lambda: kernels.linear(x[:1], packed)), kernels.linear(x, packed)[:1]
    )


@on_gpu
def test_a_triton_that_cannot_compile_them_does_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("unknown layout")

    assert small_batches.are_exact.__wrapped__(DEVICE, torch.bfloat16)
    monkeypatch.setattr(single_row_linear, "single_row_linear", fail)
    assert not small_batches.are_exact.__wrapped__(DEVICE, torch.bfloat16)
    assert "unknown layout" in caplog.text


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_for_prompts_through_routers_are_exact_here(dtype: torch.dtype) -> None:
    assert router_linear.many_rows_are_exact(DEVICE, dtype)
    assert router_linear.many_rows_are_exact(DEVICE, torch.float32)


@on_gpu
def test_the_kernel_of_routers_is_tested_when_experts_are_packed_in_any_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode steps of 64 rows use it in graphs, during whose capture nothing can be tested."""
    asked = []

    def note(_: torch.device, dtype: torch.dtype) -> bool:
        asked.append(dtype)
        return True

    monkeypatch.setattr(router_linear, "many_rows_are_exact", note)
    shape = (4, 256, 128)
    made = quantize(FP8, random(*shape, dtype=torch.float32))
    assert made is not None
    TritonKernels(torch.bfloat16).pack(Weight.of(FP8, shape, *made))
    assert set(asked) == {torch.bfloat16, torch.float32}


def test_kernels_that_do_not_compile_or_give_other_bits_are_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> bool:
        raise RuntimeError("unknown layout")

    assert tested.is_exact("some", lambda: True)
    assert not caplog.text
    assert not tested.is_exact("small batches", lambda: False)
    assert "small batches take longer, as a kernel for them gives other bits" in caplog.text
    assert not tested.is_exact("prompts", fail)
    assert "prompts take longer, as a kernel for them doesn't compile here: unknown" in caplog.text


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("sizes", "inner"), [((768, 576), 2048), ((1536, 576), 7168), ((64, 16), 512)]
)
def test_two_products_of_one_row_in_one_launch(
    sizes: tuple[int, int], inner: int, dtype: torch.dtype
) -> None:
    first, second = (random(size, inner, dtype=dtype, seed=size) for size in sizes)
    x = random(1, inner, dtype=dtype)
    assert single_row_linear.takes_pair(1, first, second)
    found = single_row_linear.single_row_pair(x, first, second)
    assert torch.equal(found[0], linear(x, first))
    assert torch.equal(found[1], linear(x, second))
    assert not single_row_linear.takes_pair(2, first, second)
    assert not single_row_linear.takes_pair(1, first, second[:1])


def test_other_devices_and_dtypes_do_without() -> None:
    assert not small_batches.are_exact(torch.device("cpu"), torch.bfloat16)
    assert not small_batches.are_exact(DEVICE, torch.float32)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.skipif(ON_GPU, reason="where there is a GPU they are run")
def test_kernels_for_all_devices_compile_and_fit_into_what_each_has() -> None:
    """Those of small batches, prompts, four bits and experts for an H200: no register is spilled
    (hardly one by the last three). Attention with the tiles each device gets: for a card with 100
    KB, and in the long form for others.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.compile_kernels"]
    done = subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found["small batches"]) == short_or_long(8, 43)
    for name, used in found["small batches"].items():
        # Heads of 256 fill the registers; little of what is spilled is read in the loop over tiles.
        hardly_any = 96 if name.startswith(("prompt", "four bits", "experts")) else 0
        spilled = {"prompt 256": 192, "prompt 128": 128}.get(name[:10], hardly_any)
        assert used["stack"] <= spilled, name
        assert used["shared"] <= 227 * 1024, name
    assert len(found["attention"]) == short_or_long(2, 16)
    for name, (shared, limit) in found["attention"].items():
        assert shared <= limit, name
    assert len(found["latent"]) == short_or_long(4, 28)
    assert len(found["adapters"]) == short_or_long(0, 8)
    for name, used in (found["latent"] | found["adapters"]).items():
        spilled = {"latent": 1200, "prompts": 96, "single": 192}.get(name.split()[0], 32)
        assert used["stack"] <= spilled, name
        is_small = name.startswith(
            ("scores", "values", "single")
        )  # two programs on a multiprocessor
        assert used["shared"] <= (113 if is_small else 227) * 1024, name
    assert len(found["recurrent"]) == short_or_long(4, 20)
    for name, used in found["recurrent"].items():
        # Recurrences of 64 columns have 128 registers, for a fourth program: Triton 3.6 spills 16.
        assert used["stack"] <= (128 if "recurrence 64" in name else 32), name
        assert used["shared"] <= 76 * 1024, name  # three programs on a multiprocessor
    assert len(found["shared experts"]) == short_or_long(2, 5)
    for name, used in found["shared experts"].items():
        assert used["stack"] == 0, name
        assert used["shared"] <= 113 * 1024, name  # two programs
    assert found["router of many rows"]["stack"] == 0
    assert found["router of many rows"]["shared"] <= 227 * 1024


def test_tiles_are_as_large_as_fits() -> None:
    assert [paged.fitting_tiles(256, limit << 10) for limit in (227, 163, 99)] == [(64, 64)] * 3
    assert [paged.fitting_tiles(512, limit << 10) for limit in (227, 163, 99)] == [
        (64, 64),
        (64, 64),
        (32, 64),
    ]
    assert [paged.fitting_tiles(1024, limit << 10) for limit in (227, 163, 99)] == [
        (64, 64),
        (32, 64),
        (16, 32),
    ]
