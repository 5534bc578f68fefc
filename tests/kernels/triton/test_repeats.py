"""Where a row of tokens repeats its end: the kernel against the definition."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.repeats import match_lengths as define
from tests.kernels.triton.support import DEVICE, MARKS, drawn

from quire.backends.triton.repeats import match_lengths  # isort: skip

pytestmark = MARKS


@drawn
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=4),
    st.integers(1, 30),
    st.integers(0, 70),
    st.booleans(),
    st.integers(0, 9),
)
def test_lengths_are_those_of_the_definition(
    rows: list[list[int]], repeats: int, most: int, has_breaks: bool, seed: int
) -> None:
    histories = [row * repeats for row in rows]
    tokens = torch.full((len(rows), max(map(len, histories)) + seed), 1, dtype=torch.int64)
    for row, history in zip(tokens, histories, strict=True):
        row[: len(history)] = torch.tensor(history)
    breaks = (
        torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.05
        if has_breaks
        else None
    )
    lengths = torch.tensor([len(history) for history in histories])
    got = match_lengths(
        tokens.to(DEVICE), lengths.to(DEVICE), None if breaks is None else breaks.to(DEVICE), most
    ).cpu()
    assert got.dtype == torch.int32
    assert torch.equal(got, define(tokens, lengths, breaks, most))
    for row, history in enumerate(histories):
        for place in range(0, len(history) - 1, 7):
            length = 0
            while length < min(most, place + 1) and history[place - length] == history[-1 - length]:
                if breaks is not None and breaks[row, len(history) - 1 - length]:
                    break
                length += 1
            assert got[row, place] == length
