"""The kernel for prompts on Hopper: the bits of the kernels it stands beside, at any length and in
any division.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.triton.support import DEVICE, MARKS, NAN, ON_GPU, drawn
from tests.kernels.triton.test_attention import make, one_each

from quire.kernels.ops import AttentionSpec, HeadShape  # isort: skip  (after the check for Triton)
from quire.backends.triton import attention as paged, attention_work  # isort: skip

ON_HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
if ON_HOPPER:
    from quire.backends.triton import prompt_attention, small_batch_attention

pytestmark = [*MARKS, pytest.mark.skipif(not ON_HOPPER, reason="this kernel is for Hopper")]


@drawn
@given(
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.sampled_from([(32, 8), (16, 8), (3, 1)]),
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
    dtype: torch.dtype,
    heads: tuple[int, int],
    sequences: list[tuple[int, int]],
    window: int | None,
    spread: int,
) -> None:
    """What belongs to nobody is NaN, and so is what is not written. Where scores are far apart,
    what was added up has to be scaled on the way, which the kernel leaves to the other one.
    """
    queries, lengths = [list(each) for each in zip(*sequences, strict=True)]
    shape = HeadShape(*heads, 128)
    query, cache, batch = make(lengths, queries, shape, dtype)
    rows = np.arange(len(lengths), dtype=np.int32)
    work = attention_work.attention_work(
        np.array(queries, np.int32), np.array(lengths, np.int32), rows, shape, 132
    )
    listed = torch.from_numpy(work["prefill"]).to(DEVICE)
    spec = AttentionSpec(shape, spread * 128**-0.5, window)
    expected, found = torch.full_like(query, NAN), torch.full_like(query, NAN)
    paged.prefill_attention(query, expected, cache, batch.block_tables, listed, spec)
    assert prompt_attention.takes(query, cache)
    prompt_attention.prompt_attention(query, found, cache, batch.block_tables, listed, spec, 132)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize(("window", "spread"), [(None, 1), (700, 1), (None, 60)])
def test_long_prompts_have_the_bits_of_single_queries_in_every_division(
    window: int | None, spread: int
) -> None:
    """33,000 tokens at once, and every so manieth of them alone, by both kernels for decode steps."""
    length, shape = 33_000, HeadShape(32, 8, 128)
    query, cache, batch = make([length], [length], shape, torch.bfloat16)
    spec = AttentionSpec(shape, spread * 128**-0.5, window)
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
        if run in (1, 1000):  # single splits or whole sequences
            arguments[1].fill_(NAN)
            small_batch_attention.small_batch_attention(*arguments, work, len(work), spec, 132)
            assert torch.equal(arguments[1], whole[positions.to(DEVICE)]), run
