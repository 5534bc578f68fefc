"""Sampling against its definition, the noise against its distribution, and rows against their company."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.runner.noise import gumbel_noise, noise_keys
from quire.runner.sampler import SamplingBatch, sample


def batch(rows: int, **changes: object) -> SamplingBatch:
    plain = SamplingBatch(
        temperature=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int64),
        top_p=np.ones(rows, np.float32),
        seed=np.arange(rows, dtype=np.uint64),
        position=np.full(rows, 5, np.int64),
        forbidden=((),) * rows,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def kept_by_definition(logits: list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    """Which tokens may be drawn, in float64 and plain Python."""
    scaled = np.array(logits, dtype=np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k:
        kth = scaled[order[min(top_k, len(order)) - 1]]
        order = [i for i in order if scaled[i] >= kth]
    weights = np.exp(scaled[order] - scaled[order].max())
    probabilities = weights / weights.sum()
    kept, reached = set(), 0.0
    for i, probability in zip(order, probabilities, strict=True):
        if kept and reached >= top_p and top_p < 1:
            break
        kept.add(i)
        reached += probability
    return kept


@settings(max_examples=60)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=1, max_size=30),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 12),
    # Sums of these probabilities never land on these limits, so float32 and float64 agree on who is in.
    top_p=st.sampled_from([0.0137, 0.31713, 0.77177, 0.93371, 1.0]),
)
def test_only_what_the_filters_keep_is_drawn_and_all_of_it(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    draws = 400
    rows = torch.tensor([logits]).repeat(draws, 1)
    tokens = sample(
        rows,
        batch(
            draws,
            temperature=np.full(draws, temperature, np.float32),
            top_k=np.full(draws, top_k, np.int64),
            top_p=np.full(draws, top_p, np.float32),
        ),
    )
    kept = kept_by_definition(logits, temperature, top_k, top_p)
    drawn = set(tokens.tolist())
    assert drawn <= kept
    scaled = np.array([logits[i] for i in sorted(kept)]) / temperature
    probabilities = np.exp(scaled - scaled.max()) / np.exp(scaled - scaled.max()).sum()
    likely = {i for i, p in zip(sorted(kept), probabilities, strict=True) if p > 0.05}
    assert likely <= drawn  # one of probability 0.05 is missed by 400 draws once in 10^9


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 0.5, -3.0])
    draws = 50_000
    tokens = sample(logits.repeat(draws, 1), batch(draws, temperature=np.full(draws, temperature, np.float32)))
    expected = (logits.double() / temperature).softmax(0).numpy() * draws
    observed = np.bincount(tokens.numpy(), minlength=7)
    assert ((observed - expected) ** 2 / expected).sum() < 27.9  # chi-square with 6 degrees, p = 1e-4


def test_noise_of_neighbouring_positions_and_seeds_is_independent() -> None:
    """Pairs of draws at neighbouring positions, seeds and tokens fill the unit square evenly."""
    positions = np.arange(4000, dtype=np.int64)
    by_position = gumbel_noise(torch.from_numpy(noise_keys(np.full(4000, 9, np.uint64), positions)), 8)
    by_seed = gumbel_noise(
        torch.from_numpy(noise_keys(np.arange(4000, dtype=np.uint64), np.full(4000, 3, np.int64))), 8
    )
    for noise in (by_position, by_seed):
        uniform = torch.exp(-torch.exp(-noise.double())).numpy()
        for first, second in ((uniform[:-1, 0], uniform[1:, 0]), (uniform[:, 0], uniform[:, 1])):
            counts = np.histogram2d(first, second, bins=8, range=[[0, 1], [0, 1]])[0]
            expected = len(first) / 64
            assert ((counts - expected) ** 2 / expected).sum() < 114  # 63 degrees, p = 1e-4


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    keys = noise_keys(np.arange(64, dtype=np.uint64), np.arange(64, dtype=np.int64))
    noise = gumbel_noise(torch.from_numpy(keys), 8192).double()
    assert abs(noise.mean().item() - 0.5772156649) < 0.01
    assert abs(noise.var().item() - np.pi**2 / 6) < 0.02
    assert torch.isfinite(noise).all()


def test_noise_depends_on_seed_and_position_alone() -> None:
    seeds, positions = np.array([3, 3, 4], np.uint64), np.array([7, 8, 7], np.int64)
    together = gumbel_noise(torch.from_numpy(noise_keys(seeds, positions)), 100)
    alone = gumbel_noise(torch.from_numpy(noise_keys(seeds[:1], positions[:1])), 100)
    assert torch.equal(together[:1], alone)
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together[0], together[2])


def test_temperature_zero_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, batch(2, temperature=np.zeros(2, np.float32))).tolist() == [1, 0]


@pytest.mark.parametrize("vocab_size", [7, 8191, 8193, 49152])
def test_a_row_draws_the_same_in_any_company(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, vocab_size, generator=generator) * 3
    mixed = batch(
        6,
        temperature=np.array([0, 1, 0.7, 1, 0, 2], np.float32),
        top_k=np.array([0, 0, 5, 40, 3, 0], np.int64),
        top_p=np.array([1, 1, 0.9, 1, 0.5, 0.3], np.float32),
        forbidden=((), (), (1, 2), (), (0,), ()),
    )
    together = sample(logits.clone(), mixed)
    for row in range(6):
        single = SamplingBatch(*(getattr(mixed, field.name)[row : row + 1] for field in dataclasses.fields(mixed)))
        assert sample(logits[row : row + 1].clone(), single).item() == together[row].item()


def test_forbidden_tokens_are_never_chosen() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0]]).repeat(200, 1)
    forbidden = batch(200, forbidden=((0,),) * 200)
    assert 0 not in sample(logits.clone(), forbidden).tolist()
    greedy = dataclasses.replace(forbidden, temperature=np.zeros(200, np.float32))
    assert set(sample(logits, greedy).tolist()) == {1}


def test_the_only_token_left_is_chosen_whatever_the_noise() -> None:
    logits = torch.full((5000, 4), float("-inf"))
    logits[:, 2] = 0.0
    assert set(sample(logits, batch(5000)).tolist()) == {2}
