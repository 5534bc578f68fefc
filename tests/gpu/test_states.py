"""Layers with a state on a GPU: the same bits alone, in a batch, in chunks and from the cache."""

from __future__ import annotations

import pytest
import torch

from quire.backends.select import select_kernels
from tests.gpu.support import DEVICE
from tests.random_models import WITH_STATES, Bench, random_decoder
from tests.test_exactness import assert_same, solo
from tests.test_states_exactness import prompts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", WITH_STATES)
def test_bits_do_not_depend_on_the_batch_or_the_cache(name: str) -> None:
    device = DEVICE
    kernels = select_kernels(device, torch.bfloat16, "auto")
    decoder = random_decoder(WITH_STATES[name], kernels, torch.bfloat16, device=str(DEVICE))
    expected = solo(decoder, *prompts(), prefix_caching=False)
    bench = Bench(decoder, max_num_seqs=4, max_batched_tokens=50)
    assert_same(bench.run(*prompts()), expected)
    assert bench.run(*prompts()).tokens == expected.tokens
