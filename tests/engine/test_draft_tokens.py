"""Steps that compute guessed tokens: several tokens may come of one step, and the answer is never
another.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.engine.invariants import check_invariants
from quire.engine.request import Request
from quire.step import Step
from tests.engine.harness import Harness, config

PROMPT = range(10)


class Oracle:
    """Guesses `count` tokens, right but for every `wrong_every`-th one."""

    def __init__(self, count: int, wrong_every: int = 0) -> None:
        self.engine: Harness | None = None
        self.count = count
        self.wrong_every = wrong_every
        self.num_asked = 0

    def __call__(self, request: Request, most: int) -> list[int]:
        assert self.engine is not None
        assert most > 0
        answer = self.engine.solo(request.request_id)[0]
        first = request.num_tokens - 1 - request.num_prompt_tokens
        draft_tokens = []
        for token in answer[first : first + self.count]:
            self.num_asked += 1
            wrong = self.wrong_every and self.num_asked % self.wrong_every == 0
            draft_tokens.append((token + 1) % 50 if wrong else token)
        return draft_tokens


def harness(
    oracle: Oracle, depth: int = 1, eos: Sequence[int] = (), **settings: int | bool
) -> Harness:
    oracle.engine = Harness(config(**settings), depth=depth, eos=eos, propose=oracle)
    return oracle.engine


def sampling_steps(engine: Harness, name: str) -> list[Step]:
    return [
        step
        for step in engine.steps
        if any(e.request_id == name and e.samples for e in step.scheduled)
    ]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_right_draft_tokens_give_several_tokens_a_step(depth: int) -> None:
    engine = harness(Oracle(3), depth)
    engine.add("a", PROMPT, max_tokens=20)
    engine.run()
    engine.check_answers()
    assert len(sampling_steps(engine, "a")) == 5
    results = [
        entry.result.tokens["a"]
        for entry in engine.log
        if entry.result and "a" in entry.result.tokens
    ]
    assert [len(tokens) for tokens in results] == [4] * 5


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("wrong_every", [1, 2, 3, 5])
def test_wrong_draft_tokens_change_nothing(wrong_every: int, depth: int) -> None:
    engine = harness(Oracle(4, wrong_every), depth, max_num_seqs=3)
    for i in range(5):
        engine.add(f"r{i}", range(i, 3 + 4 * i), max_tokens=15, seed=i)
    engine.run()
    engine.check_answers()


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_asks_for_draft_tokens_while_a_request_pauses(depth: int) -> None:
    engine = harness(Oracle(3), depth)
    (request,) = engine.add("a", PROMPT, max_tokens=20)
    request.draft_pause = 4
    engine.run()
    engine.check_answers()
    counts = [
        len(entry.draft_tokens) for step in sampling_steps(engine, "a") for entry in step.scheduled
    ]
    assert counts == [0] * 4 + [3] * 4


def test_only_tokens_that_were_right_are_found_in_the_cache() -> None:
    engine = harness(Oracle(4, 2))
    (first,) = engine.add("first", PROMPT, max_tokens=14)
    engine.run()
    (again,) = engine.add("again", [*first.token_ids, 7], max_tokens=4)
    engine.run()
    engine.check_answers()
    assert again.cached_tokens == 20  # 23 tokens were computed: five whole blocks


@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_ends_at_the_stop_token_inside_a_run(depth: int) -> None:
    plain = Harness()
    plain.add("a", PROMPT, max_tokens=20)
    plain.run()
    stop = plain.tokens["a"][6]
    engine = harness(Oracle(8), depth)
    engine.add("a", PROMPT, max_tokens=20, stop_token_ids=(stop,))
    engine.run()
    expected = plain.tokens["a"][: plain.tokens["a"].index(stop) + 1]
    assert engine.tokens["a"] == expected
    assert engine.ends["a"].stop_token_id == stop
    assert engine.scheduler.blocks.pool.num_free == 32


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 9])
def test_no_more_is_drafted_than_the_answer_may_have(max_tokens: int) -> None:
    engine = harness(Oracle(100))
    engine.add("a", PROMPT, max_tokens=max_tokens)
    engine.run()
    engine.check_answers()
    assert [len(entry.draft_tokens) for step in engine.steps for entry in step.scheduled] == [
        max_tokens - 1
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("count", "draft_tokens"), [(1, 7), (2, 3), (3, 1), (4, 1), (5, 0)])
def test_a_step_with_draft_tokens_has_no_more_tokens_than_have_a_graph(
    count: int, draft_tokens: int, depth: int
) -> None:
    engine = harness(Oracle(9), depth, max_checked_tokens=8, max_num_seqs=5, num_blocks=60)
    for i in range(count):
        engine.add(f"r{i}", range(i, i + 4), max_tokens=20, seed=i)
    engine.run()
    engine.check_answers()
    found = {
        len(one.draft_tokens)
        for step in engine.steps
        if len(step.scheduled) == count
        for one in step.scheduled
    }
    assert max(found) == draft_tokens


def test_draft_tokens_take_no_budget_from_real_tokens() -> None:
    engine = harness(Oracle(5), max_batched_tokens=8, max_num_seqs=4)
    engine.add("a", range(3), max_tokens=30)
    engine.turn(2)
    engine.add("b", range(20, 40), max_tokens=3)
    engine.run()
    engine.check_answers()
    for step in engine.steps:
        chunks = [e for e in step.scheduled if e.request_id == "b" and not e.samples]
        if chunks:  # its prompt gets all that "a" does not need for its next token
            assert chunks[0].num_tokens == 7
            assert all(not e.draft_tokens for e in step.scheduled)


def test_draft_tokens_take_no_block_that_someone_else_may_need() -> None:
    engine = harness(Oracle(6), num_blocks=6, max_num_seqs=2)  # five blocks of four
    engine.add("a", range(3), max_tokens=8)
    engine.add("b", range(20, 23), max_tokens=8)
    engine.run()
    engine.check_answers()
    assert not any(step.preempted for step in engine.steps)
    assert any(entry.draft_tokens for step in engine.steps for entry in step.scheduled)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_request_preempted_between_draft_and_check_goes_on_where_it_was(depth: int) -> None:
    engine = harness(Oracle(4, 3), depth, num_host_blocks=8)
    engine.add("a", PROMPT, max_tokens=25)
    for turn in range(12):
        engine.turn()
        if turn % 3 == 2 and "a" in engine.scheduler.table.requests:
            engine.scheduler.preempt("a")
            check_invariants(engine.scheduler)
    engine.run()
    engine.check_answers()
    assert engine.requests["a"].preemptions > 1


def test_an_abort_between_draft_and_check_frees_everything() -> None:
    engine = harness(Oracle(4), depth=2)
    engine.add("a", PROMPT, max_tokens=25)
    engine.turn(2)
    engine.core.abort(["a"], engine.now)
    assert engine.scheduler.blocks.pool.num_free == 32
    engine.run()
    assert engine.tokens["a"] == engine.solo("a")[0][: len(engine.tokens["a"])]


def test_a_runner_that_returns_more_tokens_than_it_may_fails_that_request_alone() -> None:
    engine = harness(Oracle(1))
    engine.add("a", PROMPT, max_tokens=9)
    submit = engine.runner.submit

    def generous(step: Step):  # type: ignore[no-untyped-def]
        pending = submit(step)
        for name, tokens in pending.outcome.tokens.items():
            pending.outcome.tokens[name] = (*tokens, 1, 2, 3)
        return pending

    engine.runner.submit = generous  # type: ignore[method-assign]
    engine.run()
    assert engine.reason("a") == "error"
    assert "5 tokens instead of 1 to 2" in (engine.ends["a"].error or "")
