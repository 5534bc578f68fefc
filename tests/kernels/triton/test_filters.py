"""The filters' kernel: the same tokens as the definition leaves, whatever a row's numbers and its
company.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.filters import filter_rows_ as define_
from quire.kernels.ops import FILTERS
from quire.kernels.reference import ReferenceKernels
from tests.kernels.triton.support import DEVICE, MARKS, NAN, ON_GPU, ROW_COUNTS, drawn, random

from quire.backends.triton.filters import CHUNK, filter_rows_  # isort: skip

pytestmark = MARKS
INFINITE = float("inf")
OFF = {
    "temperature": 1.0,
    "top_n_sigma": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "log_min_p": -INFINITE,
    "typical_p": 1.0,
}
OFF["xtc_threshold"] = INFINITE
EACH: list[dict[str, float]] = [
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 700},
    {"top_p": 0.1871},
    {"top_p": 0.9713},
    {"log_min_p": -6.6},
    {"typical_p": 0.1871},
    {"typical_p": 0.9713},
    {"top_n_sigma": 1.0971},
    {"top_n_sigma": 2.1, "top_k": 50, "top_p": 0.7},
    {"xtc_threshold": 0.00171},
    {
        "top_n_sigma": 3.7,
        "top_k": 4000,
        "top_p": 0.95,
        "log_min_p": -7.2,
        "typical_p": 0.9,
        "xtc_threshold": 0.0037,
    },
]


def limits_of(*filters: dict[str, float]) -> Tensor:
    return torch.tensor([[(OFF | own)[name] for name in FILTERS] for own in filters], device=DEVICE)


def filtered(logits: Tensor, limits: Tensor) -> Tensor:
    logits = logits.clone()
    filter_rows_(logits, torch.arange(len(logits), device=DEVICE), limits)
    return logits


def defined(logits: Tensor, limits: Tensor) -> Tensor:
    logits = logits.clone()
    define_(ReferenceKernels(), logits, torch.arange(len(logits), device=DEVICE), limits)
    return logits


def assert_same_tokens(logits: Tensor, limits: Tensor) -> None:
    """But for a token at the edge of a limit, which rounding may put on the other side."""
    got, expected = filtered(logits, limits), defined(logits, limits)
    wrong = (got == -INFINITE) != (expected == -INFINITE)
    assert (((logits.double() / limits[:, :1]).softmax(-1) * wrong).sum(-1) < 1e-3).all()
    both = ~wrong & (got > -INFINITE)
    assert torch.equal(got[both], expected[both])
    assert ((got > -INFINITE).sum(-1) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "vocab_size", [7, CHUNK - 1, 2 * CHUNK + 1, 49152, 151936] if ON_GPU else [CHUNK + 1]
)
def test_each_filter_leaves_what_its_definition_leaves(vocab_size: int) -> None:
    filters = [{"temperature": 0.75} | own for own in EACH]
    for own in filters:
        own["top_k"] = min(own.get("top_k", 0), vocab_size - 1)
    assert_same_tokens(
        random(len(EACH), vocab_size, dtype=torch.float32, seed=vocab_size) * 1.5,
        limits_of(*filters),
    )


filters_drawn = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.3, 1.0, 2.5])},
    optional={
        "top_n_sigma": st.sampled_from([0.3137, 1.0971, 2.2371]),
        "top_k": st.integers(1, 299),
        "top_p": st.sampled_from([0.0137, 0.31713, 0.77177, 0.99371]),
        "log_min_p": st.sampled_from([-7.1, -1.3]),
        "typical_p": st.sampled_from([0.0137, 0.23713, 0.67177, 0.99371]),
        "xtc_threshold": st.sampled_from([0.0, 0.0171, 0.1013, 0.4]),
    },
)


@drawn
@given(
    filters_drawn,
    st.integers(300, 1500),
    st.sampled_from([0.01, 1.0, 8.0]),
    st.integers(0, 9),
    st.booleans(),
)
def test_any_mix_of_filters(
    own: dict[str, float], vocab_size: int, spread: float, seed: int, rounded: bool
) -> None:
    logits = random(1, vocab_size, dtype=torch.float32, seed=seed) * spread
    logits[0, ::3] = -INFINITE
    if rounded:  # many ties, zeros of both signs among them
        logits = (logits * 4).round() / 4
    assert_same_tokens(logits, limits_of(own))


@pytest.mark.slow
def test_flat_rows_that_no_ring_bounds() -> None:
    """So many equal or nearly equal scores that they are not collected."""
    vocab_size = 5 * CHUNK
    logits = random(3, vocab_size, dtype=torch.float32) * 1e-3
    logits[1] = 2.0
    got = filtered(logits, limits_of({"top_k": 17000}, {"top_k": 3, "top_p": 0.5}, {"top_p": 0.9}))
    kept = (got > -INFINITE).sum(-1).tolist()
    assert kept[:2] == [17000, vocab_size]
    assert abs(kept[2] - 0.9 * vocab_size) < 0.01 * vocab_size


def test_ties_and_zeros_of_both_signs_are_kept_together() -> None:
    logits = torch.tensor(
        [[3.0, 0.0, -0.0, -0.0, 0.0, -1.0], [1.0, 2.0, 2.0, 1.0, -INFINITE, 1.0]], device=DEVICE
    )
    got = filtered(logits, limits_of({"top_k": 2}, {"top_k": 3}))
    assert (got > -INFINITE).tolist() == [
        [True] * 5 + [False],
        [True, True, True, True, False, True],
    ]


def test_rows_that_are_decided_already_stay() -> None:
    logits = torch.full((3, 50), -INFINITE, device=DEVICE)
    logits[1] = 1.0
    logits[1, 7] = NAN
    logits[2, 3:5] = INFINITE
    got = filtered(
        logits, limits_of(*[{"top_k": 5, "top_p": 0.5, "typical_p": 0.5, "top_n_sigma": 1.0}] * 3)
    )
    assert torch.equal(got.nan_to_num(-5.0), logits.nan_to_num(-5.0))


def test_only_the_rows_that_are_named_change() -> None:
    logits = random(4, 300, dtype=torch.float32)
    changed = logits.clone()
    both = limits_of({"temperature": 0.5, "top_k": 3}, {"top_p": 0.4})
    filter_rows_(changed, torch.tensor([1, 3], device=DEVICE), both)
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])
    assert torch.equal(changed[[1, 3]], filtered(logits[[1, 3]], both))
    with pytest.raises(ValueError, match="filters"):
        filter_rows_(changed, torch.tensor([1], device=DEVICE), both)


@pytest.mark.slow
def test_a_row_is_alone() -> None:
    rows, counts = (max(ROW_COUNTS), ROW_COUNTS) if ON_GPU else (3, (1,))
    logits = random(rows, CHUNK + 5, dtype=torch.float32) * 2
    limits = limits_of(*(EACH[-1 - i % len(EACH)] for i in range(rows)))
    together = filtered(logits, limits)
    for count in counts:
        for start in {0, rows - count}:
            part = slice(start, start + count)
            assert torch.equal(filtered(logits[part], limits[part]), together[part]), (count, start)
    logits[1::2] = NAN
    assert torch.equal(filtered(logits, limits)[::2], together[::2])
