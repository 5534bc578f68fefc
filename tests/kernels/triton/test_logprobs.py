"""Log-probabilities and ranks: the kernel against the definition, ties included, and rows alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from quire.kernels.logprobs import gather_logprobs as define
from tests.kernels.triton.support import DEVICE, MARKS, ON_GPU, assert_rows_alone, random

from quire.backends.triton.logprobs import likeliest, gather_logprobs  # isort: skip

pytestmark = MARKS


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("vocab_size", "num_top"),
    list(itertools.product([1, 7, 4096, 8193, 49152, 151936], [0, 1, 20]))
    if ON_GPU
    else [(1, 20), (7, 0), (7, 1), (4096, 1), (8193, 0), (8193, 20)],
)
def test_scores_are_those_of_the_definition(vocab_size: int, num_top: int) -> None:
    logits = random(6, vocab_size, dtype=torch.float32, seed=vocab_size) * 4
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    logits[3, 1:] = float("-inf")
    tokens = torch.arange(6, device=DEVICE) % vocab_size
    count = min(num_top, vocab_size)
    got, expected = gather_logprobs(logits, tokens, count), define(logits, tokens, count)
    truth = logits.double().log_softmax(-1)
    assert torch.equal(got.ranks, expected.ranks)
    assert torch.equal(got.top_ids, expected.top_ids)
    torch.testing.assert_close(
        got.logprobs.double(), truth.gather(1, tokens[:, None])[:, 0], rtol=1e-6, atol=2e-6
    )
    torch.testing.assert_close(
        got.top_logprobs.double(), truth.gather(1, got.top_ids), rtol=1e-6, atol=2e-6
    )


def test_a_token_and_the_same_among_the_likeliest_have_the_same_bits() -> None:
    logits = random(9 if ON_GPU else 3, 5001, dtype=torch.float32)
    ids = likeliest(logits, 3)
    for place in range(3):
        got = gather_logprobs(logits, ids[:, place], 3)
        assert torch.equal(got.logprobs, got.top_logprobs[:, place])
        assert (got.ranks == place + 1).all()


def test_not_numbers_are_told() -> None:
    logits = random(3, 4100, dtype=torch.float32)
    logits[1, 4099] = float("nan")
    logits[2, 0] = float("-inf")
    got = gather_logprobs(logits, torch.zeros(3, dtype=torch.int64, device=DEVICE), 2)
    assert got.logprobs.isnan().tolist() == [False, True, False]
    assert got.logprobs[2] == float("-inf")
    assert ((got.top_ids >= 0) & (got.top_ids < 4100)).all()


def test_a_row_is_alone() -> None:
    rows = 300 if ON_GPU else 3
    logits, tokens = random(rows, 4103, dtype=torch.float32), torch.arange(rows, device=DEVICE)
    counts = (1, 2, 3, 64, 255) if ON_GPU else (1, 2)
    assert_rows_alone(
        lambda x, ids: tuple(gather_logprobs(x[:, :4101], ids, 4)), [logits, tokens], counts
    )
