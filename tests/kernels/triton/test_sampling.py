"""The choice of a token by Triton: against its definition, with its flags, and each row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.noise import gumbel_noise, noise_keys
from quire.kernels.reference import ReferenceKernels
from tests.kernels.triton.support import (
    DEVICE,
    DTYPES,
    MARKS,
    ON_GPU,
    ROW_COUNTS,
    assert_rows_alone,
    in_graph,
    random,
)

from quire.backends.triton.kernels import TritonKernels  # isort: skip  (after the check for Triton)
from quire.backends.triton.sampling import (  # isort: skip
    HAS_NAN,
    NOTHING_LEFT,
    gumbel_argmax,
    sample_rows,
)

pytestmark = MARKS
NEVER = float("-inf")
VOCABULARIES = [1, 7, 4095, 4097, 49152, 151936] if ON_GPU else [1, 7, 4095, 4097, 9001]


def keys_for(rows: int) -> Tensor:
    keys = noise_keys(np.arange(rows, dtype=np.uint64) * 7919, np.arange(rows) + 3)
    return torch.from_numpy(keys).to(DEVICE)


def temperatures(rows: int) -> Tensor:
    values = torch.tensor([0.0, 1.0, 0.3, 0.01, 2.5, 50.0], device=DEVICE)
    return values[torch.arange(rows, device=DEVICE) % len(values)]


@pytest.mark.few(2)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_token_is_the_one_of_the_definition(dtype: torch.dtype, vocab_size: int) -> None:
    rows = 12
    logits = random(rows, vocab_size, dtype=dtype, seed=vocab_size) * 4
    keys, temperature = keys_for(rows), temperatures(rows)
    chosen, flags = gumbel_argmax(logits, temperature, keys)
    drawn = (temperature > 0).unsqueeze(1)
    truth = logits.double() / temperature.double().unsqueeze(1).where(drawn, 1.0)
    truth += torch.where(drawn, gumbel_noise(keys, vocab_size).double(), 0.0)
    best = truth.amax(-1)
    # The noise is rounded differently here and there, so a hair's breadth may decide otherwise.
    assert (best - truth.gather(1, chosen.unsqueeze(1))[:, 0] <= best.abs() * 1e-6 + 2e-5).all()
    assert (
        chosen == ReferenceKernels().gumbel_argmax(logits.float(), temperature, keys)[0]
    ).sum() >= rows - 1
    assert (flags == 0).all()


@pytest.mark.slow
def test_noise_is_that_of_the_definition() -> None:
    """One token against an ever higher rival without noise shows its noise: here for many tokens at
    once.
    """
    rows = 200 if ON_GPU else 20
    keys, noise = keys_for(rows), gumbel_noise(keys_for(rows), 300)
    for token_id in (0, 1, 299):
        logits = torch.full((rows, 300), NEVER, device=DEVICE)
        logits[:, token_id] = 0.0
        # The rival, token 5 (its own noise taken off), is just below and just above.
        for margin, winner in ((-1e-4, token_id), (1e-4, 5)):
            logits[:, 5] = noise[:, token_id] - noise[:, 5] + margin
            chosen, _ = gumbel_argmax(logits, torch.ones(rows, device=DEVICE), keys)
            assert (chosen == winner).all()


@pytest.mark.slow
def test_ties_and_forbidden_tokens() -> None:
    logits = torch.full((4, 5000), NEVER, device=DEVICE)
    logits[0, [7, 40, 4999]] = 2.0
    logits[1, 4163] = -1e30
    logits[3] = 5.0
    chosen, flags = gumbel_argmax(logits, torch.zeros(4, device=DEVICE), keys_for(4))
    assert chosen.tolist() == [7, 4163, 0, 0]
    assert flags.tolist() == [0, 0, NOTHING_LEFT, 0]
    repeats = 20
    ones = torch.ones(4 * repeats, device=DEVICE)
    chosen, flags = gumbel_argmax(logits.repeat(repeats, 1), ones, keys_for(4 * repeats))
    drawn = chosen.view(repeats, 4)
    assert set(drawn[:, 0].tolist()) == {7, 40, 4999}
    assert set(drawn[:, 1].tolist()) == {4163}
    assert set(drawn[:, 2].tolist()) == {0}
    assert len(set(drawn[:, 3].tolist())) > repeats // 2
    assert flags.view(repeats, 4).unique(dim=0).tolist() == [[0, 0, NOTHING_LEFT, 0]]


@pytest.mark.few(2)
@pytest.mark.parametrize("place", [0, 4095, 4096, 8999])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nan_is_flagged_wherever_it_is(place: int, temperature: float) -> None:
    logits = random(3, 9000, dtype=torch.float32)
    logits[1, place] = float("nan")
    logits[2] = NEVER
    logits[2, place] = float("nan")
    chosen, flags = gumbel_argmax(logits, torch.full((3,), temperature, device=DEVICE), keys_for(3))
    assert flags.tolist() == [0, HAS_NAN, HAS_NAN]
    assert chosen[1:].tolist() == [0, 0]


def test_infinity_wins() -> None:
    logits = random(2, 100, dtype=torch.float32)
    logits[:, 60:62] = float("inf")
    chosen, flags = gumbel_argmax(logits, torch.tensor([0.0, 1.0], device=DEVICE), keys_for(2))
    assert chosen.tolist() == [60, 60]
    assert flags.tolist() == [0, 0]


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_alone(dtype: torch.dtype) -> None:
    rows = max(ROW_COUNTS)
    wide = random(rows, 4103, dtype=dtype)
    inputs = [wide, temperatures(rows), keys_for(rows)]
    assert_rows_alone(
        lambda logits, temperature, keys: gumbel_argmax(logits[:, :4101], temperature, keys), inputs
    )


def test_rows_sample_with_their_own_seeds_and_write_their_tokens() -> None:
    max_rows, longest, vocab_size = 10, 40, 4200
    seeds = np.array([2**64 - 1, 0, 5, 2**63, 123456789, 7, 8, 9, 10, 11], dtype=np.uint64)
    row_index = [7, 0, -1, 3, 4, 9]
    position = [3, 39, 5, 1, 17, 0]
    logits = random(len(row_index), vocab_size, dtype=torch.float32)
    token_ids = torch.full((max_rows, longest + 3), -5, dtype=torch.int64, device=DEVICE)[
        :, :longest
    ]
    out = torch.full((2, len(row_index)), -7, dtype=torch.int64, device=DEVICE)
    all_temperatures = temperatures(max_rows)
    found = sample_rows(
        logits,
        torch.tensor(row_index, dtype=torch.int32, device=DEVICE),
        torch.from_numpy(seeds.view(np.int64)).to(DEVICE),
        all_temperatures,
        torch.tensor(position, dtype=torch.int32, device=DEVICE),
        token_ids,
        out=out,
    )
    keys = torch.from_numpy(noise_keys(seeds[row_index], np.array(position))).to(DEVICE)
    expected, _ = gumbel_argmax(logits, all_temperatures[row_index], keys)
    assert found is out
    written = torch.full_like(token_ids, -5)
    for i, (row, where) in enumerate(zip(row_index, position, strict=True)):
        if row < 0:
            assert out[:, i].tolist() == [-7, -7]
        else:
            assert out[:, i].tolist() == [expected[i], 0]
            written[row, where] = expected[i]
    assert torch.equal(token_ids, written)


@pytest.mark.parametrize("size", [1, 17, 3001])
def test_the_largest_values_are_those_of_a_sort(size: int) -> None:
    x = random(5, size, dtype=torch.float32, seed=size)
    x[1] = x[1].round()
    x[2] = NEVER
    expected = x.sort(-1, descending=True).values
    for k in sorted({1, min(300, size), size}):
        assert torch.equal(TritonKernels().top_values(x, k), expected[:, :k])
    with pytest.raises(ValueError, match="largest"):
        TritonKernels().top_values(x, size + 1)


@pytest.mark.gpu
def test_a_graph_draws_the_same_tokens() -> None:
    rows, vocab_size = 33, 151936
    logits = random(rows, vocab_size, dtype=torch.bfloat16)
    row_index = torch.randperm(40, device=DEVICE)[:rows].int()
    seeds, positions = torch.arange(40, device=DEVICE), torch.arange(rows, device=DEVICE).int()
    token_ids, all_temperatures = (
        torch.zeros(40, 64, dtype=torch.int64, device=DEVICE),
        temperatures(40),
    )

    def draw() -> Tensor:
        return sample_rows(logits, row_index, seeds, all_temperatures, positions, token_ids)[0]

    assert torch.equal(in_graph(draw), draw())
