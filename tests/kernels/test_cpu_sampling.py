"""The choice of a token and the largest values by the C++ kernels: against their definitions, in
any company.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.backends.cpu.kernels import CpuKernels
from quire.kernels.noise import gumbel_noise, noise_keys
from quire.kernels.ops import HAS_NAN, NOTHING_LEFT
from tests.kernels.cpu_support import REFERENCE, random

VOCABULARIES = [1, 7, 16, 17, 8191, 8193, 49152, 151936]


def keys_for(rows: int) -> Tensor:
    return torch.from_numpy(
        noise_keys(np.arange(rows, dtype=np.uint64) * 7919, np.arange(rows) + 3)
    )


def temperatures(rows: int) -> Tensor:
    values = torch.tensor([0.0, 1.0, 0.3, 0.01, 2.5, 50.0])
    return values[torch.arange(rows) % len(values)]


@pytest.mark.few(4)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_token_is_the_one_of_the_definition(kernels: CpuKernels, vocab_size: int) -> None:
    rows = 18
    logits = random(rows, vocab_size, dtype=torch.float32, seed=vocab_size) * 4
    keys, temperature = keys_for(rows), temperatures(rows)
    chosen, flags = kernels.gumbel_argmax(logits, temperature, keys)
    drawn = (temperature > 0).unsqueeze(1)
    truth = logits.double() / temperature.double().unsqueeze(1).where(drawn, 1.0)
    truth += torch.where(drawn, gumbel_noise(keys, vocab_size).double(), 0.0)
    best = truth.amax(-1)
    # The noise is rounded differently here and there, so a hair's breadth may decide otherwise.
    assert (best - truth.gather(1, chosen.unsqueeze(1))[:, 0] <= best.abs() * 1e-6).all()
    assert (chosen == REFERENCE.gumbel_argmax(logits, temperature, keys)[0]).sum() >= rows - 1
    assert (flags == 0).all()


def test_ties_and_forbidden_tokens(kernels: CpuKernels) -> None:
    never = float("-inf")
    logits = torch.full((4, 100), never)
    logits[0, [7, 40, 99]] = 2.0
    logits[1, 63] = -1e30
    logits[3] = 5.0
    for one in (kernels, REFERENCE):
        chosen, flags = one.gumbel_argmax(logits, torch.zeros(4), keys_for(4))
        assert chosen.tolist() == [7, 63, 0, 0]
        assert flags.tolist() == [0, 0, NOTHING_LEFT, 0]
    chosen, flags = kernels.gumbel_argmax(logits.repeat(200, 1), torch.ones(800), keys_for(800))
    assert flags.view(200, 4).unique(dim=0).tolist() == [[0, 0, NOTHING_LEFT, 0]]
    drawn = chosen.view(200, 4)
    assert set(drawn[:, 0].tolist()) == {7, 40, 99}
    assert set(drawn[:, 1].tolist()) == {63}
    assert set(drawn[:, 2].tolist()) == {0}
    assert len(set(drawn[:, 3].tolist())) > 50


def test_rising_scores_make_every_token_a_candidate(kernels: CpuKernels) -> None:
    logits = torch.arange(5000.0).div(50).repeat(12, 1)
    keys = keys_for(12)
    chosen, _ = kernels.gumbel_argmax(logits, torch.ones(12), keys)
    assert chosen.tolist() == (logits + gumbel_noise(keys, 5000)).argmax(-1).tolist()


@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_token_in_any_company(kernels: CpuKernels) -> None:
    rows, vocab_size = 40, 3001
    logits, keys, temperature = (
        random(rows, vocab_size, dtype=torch.float32),
        keys_for(rows),
        temperatures(rows),
    )
    alone = [
        kernels.gumbel_argmax(logits[i : i + 1], temperature[i : i + 1], keys[i : i + 1])[0].item()
        for i in range(rows)
    ]
    wide = torch.full((rows, vocab_size + 5), float("nan"))
    wide[:, :vocab_size] = logits
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert kernels.gumbel_argmax(logits, temperature, keys)[0].tolist() == alone
        assert kernels.gumbel_argmax(wide[:, :vocab_size], temperature, keys)[0].tolist() == alone
    logits[::2] = float("nan")
    chosen, flags = kernels.gumbel_argmax(logits, temperature, keys)
    assert chosen[1::2].tolist() == alone[1::2]
    assert flags.tolist() == [HAS_NAN, 0] * (rows // 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_sample_with_their_own_seeds_and_write_their_tokens(
    kernels: CpuKernels, dtype: torch.dtype
) -> None:
    max_rows, longest = 10, 40
    seeds = np.array([2**64 - 1, 0, 5, 2**63, 123456789, 7, 8, 9, 10, 11], dtype=np.uint64)
    row_index, position = [7, 0, -1, 3, 4, 9], [3, 39, 5, 1, 17, 0]
    logits = random(len(row_index), 20001, dtype=torch.float32).to(dtype)
    logits[1, 20000] = 50.0  # in the last piece, which ends in the middle of a vector
    logits[5, 9000] = float("nan")
    token_ids = torch.full((max_rows, longest + 3), -5, dtype=torch.int64)[:, :longest]
    out = torch.full((2, len(row_index)), -7, dtype=torch.int64)
    rows, places = (torch.tensor(values, dtype=torch.int32) for values in (row_index, position))
    every = temperatures(max_rows)
    found = kernels.sample_rows(
        logits, rows, torch.from_numpy(seeds.view(np.int64)), every, places, token_ids, out
    )
    assert found is out
    keys = torch.from_numpy(noise_keys(seeds[row_index], np.array(position)))
    expected = torch.stack(kernels.gumbel_argmax(logits.float(), every[row_index], keys)).long()
    assert expected[1].tolist() == [0, 0, 0, 0, 0, HAS_NAN]
    expected[:, 2] = -7
    assert torch.equal(out, expected)
    written = torch.full_like(token_ids, -5)
    for row, where, token in zip(row_index, position, expected[0], strict=True):
        if row >= 0:
            written[row, where] = token
    assert torch.equal(token_ids, written)


@pytest.mark.parametrize("place", [0, 15, 16, 98, 99])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nan_is_flagged_wherever_it_is(kernels: CpuKernels, place: int, temperature: float) -> None:
    logits = random(3, 100, dtype=torch.float32)
    logits[1, place] = float("nan")
    logits[2] = float("-inf")
    logits[2, place] = float("nan")
    for one in (kernels, REFERENCE):
        chosen, flags = one.gumbel_argmax(logits, torch.full((3,), temperature), keys_for(3))
        assert flags.tolist() == [0, HAS_NAN, HAS_NAN]
        assert chosen[1:].tolist() == [0, 0]


def test_other_formats_are_refused(kernels: CpuKernels) -> None:
    with pytest.raises(TypeError, match="bfloat16"):
        kernels.gumbel_argmax(torch.zeros(1, 8, dtype=torch.bfloat16), torch.ones(1), keys_for(1))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [1, 7, 16, 17, 3001, 49152])
def test_the_largest_values_are_those_of_a_sort(kernels: CpuKernels, size: int) -> None:
    x = random(9, size, dtype=torch.float32, seed=size)
    x[1] = x[1].sort().values
    x[2] = x[2].sort(descending=True).values
    x[3] = x[3].round()
    x[4] = float("-inf")
    x[5, size // 2 :] = float("-inf")
    expected = x.sort(-1, descending=True).values
    for count in (1, 3):
        torch.set_num_threads(count)
        for k in sorted({1, min(2, size), min(40, size), size // 2 + 1, size}):
            assert torch.equal(kernels.top_values(x, k), expected[:, :k])
            assert torch.equal(REFERENCE.top_values(x, k), expected[:, :k])
    wide = torch.full((9, size + 3), float("inf"))
    wide[:, :size] = x
    assert torch.equal(kernels.top_values(wide[:, :size], 1), expected[:, :1])
    with pytest.raises(ValueError, match="largest"):
        kernels.top_values(x, size + 1)


@pytest.mark.parametrize("size", [1, 7, 16, 17, 3001])
def test_what_lies_between_the_limits_stays(kernels: CpuKernels, size: int) -> None:
    infinite = float("inf")
    wide = random(5, size + 3, dtype=torch.float32, seed=size).mul_(4).round_()
    low = torch.tensor([-2.0, -infinite, 1.0, float("nan"), -infinite])
    high = torch.tensor([infinite, 2.0, 1.0, 0.0, infinite])
    expected = wide.clone()
    REFERENCE.keep_between_(expected[:, :size], low, high)
    kernels.keep_between_(wide[:, :size], low, high)
    assert torch.equal(wide, expected)
    kept = expected[2, :size]
    assert set(kept.tolist()) <= {1.0, -infinite}
    with pytest.raises(ValueError, match="float64"):
        kernels.keep_between_(wide, low.double(), high)
