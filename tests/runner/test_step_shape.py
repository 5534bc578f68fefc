"""What the host knows of a step: which of its tokens are whose, and behind which of them others are
drawn.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.runner.batch import BatchShape
from quire.step import ScheduledRequest, Step


@st.composite
def scheduled(draw: st.DrawFn) -> list[ScheduledRequest]:
    """Decodes, checks of guesses, prompts that end in this step and prompts that don't."""
    found = []
    for row in draw(st.permutations(range(6)))[: draw(st.integers(1, 6))]:
        kind, start = (
            draw(st.sampled_from(["decode", "check", "last", "chunk"])),
            draw(st.integers(0, 50)),
        )
        draft_tokens = tuple(range(draw(st.integers(1, 5)))) if kind == "check" else ()
        count = 1 + len(draft_tokens) if kind in ("decode", "check") else draw(st.integers(1, 9))
        found.append(
            ScheduledRequest(
                f"r{row}", row, start, count, kind != "chunk", (), draft_tokens, False, 0
            )
        )
    return found


@given(scheduled())
def test_tokens_and_draws_are_those_of_the_requests_one_by_one(
    entries: list[ScheduledRequest],
) -> None:
    step = Step(step_id=1, now=0.0, scheduled=tuple(entries))
    shape = BatchShape.of(step)
    tokens = [(one.row, one.start + i) for one in entries for i in range(one.num_tokens)]
    drawn = [
        (one.row, one.start + i)
        for one in entries
        for i in range(one.num_tokens - 1 - len(one.draft_tokens), one.num_tokens)
        if one.samples
    ]
    single = shape.by_token()
    assert list(zip(single.request_rows.tolist(), single.starts.tolist(), strict=True)) == tokens
    assert [tokens[index] for index in shape.logits_indices.tolist()] == drawn
    assert [
        place for place, samples in zip(tokens, single.samples, strict=True) if samples
    ] == drawn
    assert shape.is_sampled_everywhere == (tokens == drawn)
    assert shape.sample_positions.tolist() == [position + 1 for _, position in drawn]
