"""The named tuples of a step that are made without their constructors equal what these make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.step import (
    FinishReason,
    PromptLogprobs,
    RequestUpdate,
    ScheduledColumns,
    ScheduledRequest,
    TokenLogprob,
    decode_entry,
    tokens_update,
    with_draft_tokens,
)
from tests.engine.harness import Harness, config

names = st.text(max_size=8)
counts = st.integers(0, 2**31)
tokens = st.lists(counts, max_size=4).map(tuple)
logprobs = st.lists(st.builds(TokenLogprob, counts, st.floats(-9, 0), counts), max_size=2).map(
    tuple
)
entries = st.builds(
    ScheduledRequest,
    request_id=names,
    row=counts,
    start=counts,
    num_tokens=counts,
    samples=st.booleans(),
    new_block_ids=tokens,
    draft_tokens=tokens,
    runs_ahead=st.booleans(),
    num_drafts=counts,
)


@given(names, counts, counts, tokens, st.booleans())
def test_a_decode_is_the_entry_that_its_constructor_makes(
    request_id: str, row: int, start: int, new_block_ids: tuple[int, ...], runs_ahead: bool
) -> None:
    expected = ScheduledRequest(
        request_id=request_id,
        row=row,
        start=start,
        num_tokens=1,
        samples=True,
        new_block_ids=new_block_ids,
        runs_ahead=runs_ahead,
    )
    found = decode_entry(
        request_id=request_id,
        row=row,
        start=start,
        new_block_ids=new_block_ids,
        runs_ahead=runs_ahead,
    )
    assert isinstance(found, ScheduledRequest)
    assert found._asdict() == expected._asdict()


@given(entries, tokens, tokens, counts)
def test_an_entry_with_draft_tokens_differs_in_these_fields_only(
    entry: ScheduledRequest,
    new_block_ids: tuple[int, ...],
    draft_tokens: tuple[int, ...],
    num_drafts: int,
) -> None:
    found = with_draft_tokens(
        entry, new_block_ids=new_block_ids, draft_tokens=draft_tokens, num_drafts=num_drafts
    )
    assert isinstance(found, ScheduledRequest)
    assert found._asdict() == {
        **entry._asdict(),
        "num_tokens": entry.num_tokens + len(draft_tokens),
        "new_block_ids": new_block_ids,
        "draft_tokens": draft_tokens,
        "num_drafts": num_drafts,
    }


@given(names, tokens, logprobs)
def test_an_update_of_tokens_is_what_its_constructor_makes(
    request_id: str, new_token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
) -> None:
    found = tokens_update(request_id=request_id, new_token_ids=new_token_ids, logprobs=logprobs)
    assert isinstance(found, RequestUpdate)
    expected = RequestUpdate(request_id=request_id, new_token_ids=new_token_ids, logprobs=logprobs)
    assert found._asdict() == expected._asdict()
    assert found.only_appends_tokens == (new_token_ids != () and logprobs == ())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("finish_reason", "stop"),
        ("stop_token_id", 0),
        ("error", ""),
        ("logprobs", (TokenLogprob(1, 0.0, 1),)),
        ("prompt_logprobs", PromptLogprobs(0, ())),
        ("pooled", b""),
    ],
)
def test_an_update_that_tells_more_is_no_growth(field: str, value: FinishReason) -> None:
    assert not RequestUpdate("one", (1,))._replace(**{field: value}).only_appends_tokens


@given(st.lists(entries, min_size=1, max_size=4))
def test_columns_have_the_values_of_each_field(scheduled: list[ScheduledRequest]) -> None:
    columns = ScheduledColumns.of(scheduled)
    for name in ScheduledRequest._fields:
        assert getattr(columns, name) == tuple(getattr(entry, name) for entry in scheduled)


def test_what_the_loops_over_rows_write_is_what_these_functions_make() -> None:
    """Entries and updates of an engine at work, with prompts, decodes and ends."""
    harness = Harness(config(max_batched_tokens=8), depth=2)
    for index in range(4):
        harness.add(f"r{index}", range(index, index + 9), max_tokens=5 + index)
    updates: list[RequestUpdate] = []
    while harness.core.has_work:
        harness.now += 1.0
        updates += harness.core.step(harness.now)
    entries = [entry for one in harness.log for entry in one.step.scheduled[: one.step.num_decodes]]
    assert entries
    for entry in entries:
        made = decode_entry(
            entry.request_id, entry.row, entry.start, entry.new_block_ids, entry.runs_ahead
        )
        assert (type(entry), entry) == (ScheduledRequest, made)
    growing = [update for update in updates if update.finish_reason is None]
    assert growing
    for update in growing:
        made_update = tokens_update(update.request_id, update.new_token_ids, update.logprobs)
        assert (type(update), update) == (RequestUpdate, made_update)
