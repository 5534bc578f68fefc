"""The kernel for prompts on Hopper: the bits of the kernels it stands beside, at any length and in
any division.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.triton.support import DEVICE, MARKS, NAN, ON_GPU, drawn, random
from tests.kernels.triton.test_attention import make, one_each

from quire.kernels.ops import AttentionSpec, HeadShape  # isort: skip  (after the check for Triton)
from quire.backends.triton import attention as paged, attention_work, small_batches  # isort: skip
from quire.backends.triton.kernels import TritonKernels  # isort: skip

ON_HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
if ON_HOPPER:
    from quire.backends.triton import prompt_attention, small_batch_attention

pytestmark = [*MARKS, pytest.mark.skipif(not ON_HOPPER, reason="this kernel is for Hopper")]


@pytest.mark.parametrize(
    ("heads", "dtype", "has_sinks"),
    [
        ((32, 8, 128), torch.bfloat16, False),
        ((16, 8, 128), torch.float16, True),
        ((3, 1, 128), torch.bfloat16, True),
        ((16, 2, 256), torch.bfloat16, False),
        ((8, 4, 256), torch.bfloat16, True),
        ((3, 1, 256), torch.float16, False),
        ((64, 8, 64), torch.bfloat16, True),
        ((32, 8, 64), torch.float16, False),
        ((14, 2, 64), torch.bfloat16, False),
        ((4, 4, 64), torch.bfloat16, False),
    ],
)
@drawn
@given(
    st.lists(
        st.sampled_from(
            [
                (33, 33),
                (64, 64),
                (129, 2049),
                (512, 1024),
                (513, 513),
                (37, 3000),
                (700, 700),
                (20, 70),
            ]
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([None, 1, 50, 700]),
    st.sampled_from([1, 6, 60]),
)
def test_it_has_the_bits_of_the_kernel_for_all_devices(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    has_sinks: bool,
    sequences: list[tuple[int, int]],
    window: int | None,
    spread: int,
) -> None:
    """What belongs to nobody is NaN, and so is what is not written. Where scores are far apart,
    what was added up has to be scaled on the way, which the kernel leaves to the other one.
    """
    queries, lengths = [list(each) for each in zip(*sequences, strict=True)]
    shape = HeadShape(*heads)
    query, cache, batch = make(lengths, queries, shape, dtype)
    rows = np.arange(len(lengths), dtype=np.int32)
    work = attention_work.attention_work(
        np.array(queries, np.int32), np.array(lengths, np.int32), rows, shape, 132
    )
    listed = torch.from_numpy(work["prefill"]).to(DEVICE)
    spec = AttentionSpec(shape, spread * shape.head_dim**-0.5, window)
    sinks = random(shape.num_heads, dtype=torch.float32) if has_sinks else None
    expected, found = torch.full_like(query, NAN), torch.full_like(query, NAN)
    arguments = cache, batch.block_tables, listed, spec
    paged.prefill_attention(query, expected, *arguments, sinks)
    prompt_attention.prompt_attention(query, found, *arguments, 132, sinks)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("heads", "window", "spread"),
    [
        ((32, 8, 128), None, 1),
        ((32, 8, 128), 700, 1),
        ((32, 8, 128), None, 60),
        ((16, 2, 256), None, 1),
        ((8, 4, 256), 1024, 1),
        ((16, 2, 256), None, 60),
        ((64, 8, 64), None, 1),
        ((64, 8, 64), 128, 1),
    ],
)
def test_long_prompts_have_the_bits_of_single_queries_in_every_division(
    heads: tuple[int, int, int], window: int | None, spread: int
) -> None:
    """33,000 tokens at once, and every so manieth of them alone, by both kernels for decode steps."""
    length, shape = 33_000, HeadShape(*heads)
    query, cache, batch = make([length], [length], shape, torch.bfloat16)
    spec = AttentionSpec(shape, spread * shape.head_dim**-0.5, window)
    ones, zeros = np.ones(1, np.int32), np.zeros(1, np.int32)
    lists = attention_work.attention_work(ones * length, ones * length, zeros, shape, 132)
    whole = torch.full_like(query, NAN)
    work = torch.from_numpy(lists["prefill"]).to(DEVICE)
    prompt_attention.prompt_attention(query, whole, cache, batch.block_tables, work, spec, 132)
    positions = torch.arange(0, length, 97)
    alone = one_each(query, batch, positions, 1)
    count = len(positions)
    lengths, rows = (positions + 1).int().numpy(), np.arange(count, dtype=np.int32)
    arguments = (
        query[positions.to(DEVICE)],
        torch.full_like(query[:count], NAN),
        cache,
        alone.block_tables,
    )
    for run in (1, 2, 5, 1000):
        divided = attention_work.divided(
            rows, np.ones_like(rows), lengths, np.zeros_like(rows), np.full(count, run)
        )
        work = torch.from_numpy(divided).to(DEVICE)
        paged.decode_attention(*arguments, work, len(work), spec)
        assert torch.equal(arguments[1], whole[positions.to(DEVICE)]), run
        if run in (1, 1000) and small_batch_attention.takes(query, cache):
            arguments[1].fill_(NAN)  # single splits or whole sequences
            small_batch_attention.small_batch_attention(*arguments, work, len(work), spec, 132)
            assert torch.equal(arguments[1], whole[positions.to(DEVICE)]), run


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_it_is_exact_here(dtype: torch.dtype, head_dim: int) -> None:
    """Tested when a model's head shapes are asked for, and not again at the first prompt, when kernels
    may be compiled only.
    """
    kernels, heads = TritonKernels(dtype), HeadShape(4, 2, head_dim)
    kernels.decode_lists(1, 1, 1, heads)
    num_tests = small_batches.prompts_are_exact.cache_info().misses
    query, cache, batch = make([40], [40], heads, dtype)
    kernels.attention(query, cache, batch, AttentionSpec(heads, 0.1))
    assert small_batches.prompts_are_exact(torch.device("cuda"), dtype, head_dim)
    assert small_batches.prompts_are_exact.cache_info().misses == num_tests
    assert not small_batches.prompts_are_exact(DEVICE, torch.float32, head_dim)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_blocks_of_any_size_that_it_takes_have_the_same_bits(block_size: int) -> None:
    shape = HeadShape(16, 2, 256)
    query, cache, batch = make([700, 90], [300, 90], shape, torch.bfloat16, block_size=block_size)
    lengths, counts = np.array([700, 90], np.int32), np.array([300, 90], np.int32)
    rows = np.arange(2, dtype=np.int32)
    work = attention_work.attention_work(counts, lengths, rows, shape, 132)["prefill"]
    arguments = (
        cache,
        batch.block_tables,
        torch.from_numpy(work).to(DEVICE),
        AttentionSpec(shape, 0.0625),
    )
    expected, found = torch.empty_like(query), torch.empty_like(query)
    paged.prefill_attention(query, expected, *arguments)
    prompt_attention.prompt_attention(query, found, *arguments, 132)
    assert torch.equal(found, expected)
