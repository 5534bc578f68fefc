"""Forks of requests: what they share, what they compute, and what becomes of blocks that are merely held."""

from __future__ import annotations

import pytest

from quire.engine.invariants import InvariantError, check_invariants
from quire.engine.request import Request, make_requests
from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.step import BlockCopy
from tests.engine.harness import Harness, config

PROMPT = list(range(10))


def computed(engine: Harness, name: str) -> int:
    return sum(entry.num_tokens for step in engine.steps for entry in step.scheduled if entry.request_id == name)


def copies(engine: Harness) -> list[BlockCopy]:
    return [copy for step in engine.steps for copy in step.copies if copy.kind == "device_to_device"]


def running(engine: Harness, turns: int = 4) -> Request:
    """A request that has answered with some tokens and goes on; at depth 1 each turn brings one."""
    (request,) = engine.add("parent", PROMPT, max_tokens=30)
    engine.turn(turns)
    return request


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("position", [1, 4, 7, 10, 13, 14])
@pytest.mark.parametrize("num_extra", [1, 5])
def test_a_fork_computes_only_its_own_tokens(position: int, num_extra: int, caching: bool, depth: int) -> None:
    engine = Harness(config(prefix_caching=caching), depth=depth)
    parent = running(engine, turns=3 + depth)
    assert len(parent.token_ids) == 14  # of which the last one is not computed for certain
    extra = [49 - i for i in range(num_extra)]
    (child,) = engine.add("child", [*parent.token_ids[:position], *extra], seed=5, source=parent)
    engine.run()
    engine.check_answers()
    shared = min(position, 13)
    assert child.forked_tokens == shared
    assert child.cached_tokens == 0
    assert computed(engine, "child") == position + num_extra - shared + 7
    assert len(copies(engine)) == (1 if shared % 4 else 0)
    admission = next(a for step in engine.steps for a in step.admitted if a.request_id == "child")
    assert (admission.forked_from, admission.num_cached_tokens) == ("parent", shared)


def test_one_token_is_always_computed_and_agreement_decides_what_is_shared() -> None:
    engine = Harness()
    parent = running(engine)
    (same,) = engine.add("same", parent.token_ids[:8], source=parent)
    (another,) = engine.add("another", [0, 1, 2, 3, 4, 40, 41], source=parent)
    (nothing,) = engine.add("nothing", [40, 1, 2, 3, 4], source=parent)
    engine.run()
    engine.check_answers()
    assert (same.forked_tokens, another.forked_tokens, nothing.forked_tokens) == (7, 5, 0)


@pytest.mark.parametrize("end", ["abort", "preempt", "finish"])
def test_a_waiting_fork_keeps_its_blocks_whatever_becomes_of_the_parent(end: str) -> None:
    engine = Harness(config(max_num_seqs=1, prefix_caching=False))
    parent = running(engine)
    (child,) = engine.add("child", [*parent.token_ids[:12], 40], source=parent)
    assert [block.ref_count for block in parent.block_table] == [2, 2, 2, 1]
    if end == "abort":
        engine.core.abort(["parent"], engine.now)
    elif end == "preempt":
        engine.scheduler.preempt("parent")
    assert len(child.block_table) == 3
    engine.run()
    engine.check_answers("child")
    assert child.forked_tokens == 12
    assert computed(engine, "child") == 8
    if end != "abort":
        engine.check_answers("parent")
    assert engine.scheduler.blocks.pool.num_free == 32


def test_a_partial_block_nobody_else_has_is_not_copied() -> None:
    engine = Harness(config(prefix_caching=False))
    parent = running(engine)
    (child,) = engine.add("child", [*parent.token_ids[:11], 40], source=parent)
    engine.core.abort(["parent"], engine.now)
    engine.run()
    engine.check_answers("child")
    assert child.forked_tokens == 11
    assert copies(engine) == []


def test_a_block_that_is_taken_over_loses_the_name_its_last_owner_gave_it() -> None:
    engine = Harness()
    parent = running(engine)
    (child,) = engine.add("child", [*parent.token_ids[:6], 40], source=parent)  # in a block that is full and cached
    engine.core.abort(["parent"], engine.now)
    engine.run()
    assert child.forked_tokens == 6
    assert copies(engine) == []
    (again,) = engine.add("again", [*parent.token_ids], seed=3)
    engine.run()
    engine.check_answers("child", "again")
    assert again.cached_tokens == 4


def test_forks_of_one_parent_share_its_blocks_and_name_them_once() -> None:
    engine = Harness(config(max_num_seqs=8))
    parent = running(engine, turns=7)
    for i in range(4):
        engine.add(f"child{i}", [*parent.token_ids[:13], 40 + i], source=parent, max_tokens=4)
    engine.turn()
    tables = [engine.requests[f"child{i}"].block_table for i in range(4)]
    assert all(table[:3] == parent.block_table[:3] for table in tables)
    assert len({table[3] for table in tables} | {parent.block_table[3]}) == 5
    assert [block.ref_count for block in parent.block_table] == [5, 5, 5, 1, 1]
    engine.run()
    engine.check_answers()


def test_forks_of_forks_that_still_wait() -> None:
    engine = Harness(config(max_num_seqs=1, prefix_caching=False))
    parent = running(engine)
    (child,) = engine.add("child", [*parent.token_ids[:12], 40], source=parent)
    (grandchild,) = engine.add("grandchild", [*parent.token_ids[:9], 41, 42], source=child)
    engine.core.abort(["parent"], engine.now)
    engine.run()
    engine.check_answers("child", "grandchild")
    assert (child.forked_tokens, grandchild.forked_tokens) == (12, 9)


def test_several_answers_to_a_fork() -> None:
    engine = Harness(config(prefix_caching=False))
    parent = running(engine)
    children = engine.add("child", [*parent.token_ids[:12], 40, 41], source=parent, n=3)
    engine.run()
    engine.check_answers()
    # The first has the parent's tokens, the others the first one's.
    assert [child.forked_tokens for child in children] == [12, 13, 13]


def test_a_fork_whose_prompt_is_scored_computes_it() -> None:
    engine = Harness()
    parent = running(engine)
    (child,) = engine.add("child", [*parent.token_ids[:12], 40], source=parent, prompt_logprobs=0)
    engine.run()
    engine.check_answers()
    assert child.forked_tokens == 0
    assert sum(len(found.scores) for name, found in engine.prompt_scores if name == "child") == 12


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_keeps_its_blocks_can_be_forked_after_its_end(depth: int) -> None:
    engine = Harness(config(prefix_caching=False), depth=depth)
    (parent,) = engine.add("parent", PROMPT, max_tokens=1, keeps_blocks=True)
    engine.run()
    assert engine.reason("parent") == "length"
    assert parent.row is None
    for i in range(3):
        engine.add(f"child{i}", [*PROMPT, 40 + i], source=parent, max_tokens=1)
    engine.core.let_go(parent)
    engine.run()
    engine.check_answers()
    assert [computed(engine, f"child{i}") for i in range(3)] == [1, 1, 1]
    assert len(copies(engine)) == 2  # the last one is alone with the parent's
    assert engine.scheduler.blocks.pool.num_free == 32


@pytest.mark.parametrize("reason", ["abort", "deadline"])
def test_only_an_end_of_its_own_keeps_blocks(reason: str) -> None:
    engine = Harness()
    (parent,) = engine.add("parent", PROMPT, keeps_blocks=True, deadline=3.5 if reason == "deadline" else None)
    engine.turn(2)
    if reason == "abort":
        engine.core.abort(["parent"], engine.now)
    engine.run()
    assert engine.reason("parent") == reason
    assert not parent.block_table
    (child,) = engine.add("child", [*PROMPT, 40], source=parent)
    engine.run()
    engine.check_answers("child")
    assert (child.forked_tokens, child.cached_tokens) == (0, 8)


@pytest.mark.parametrize("host_blocks", [0, 4])
def test_whoever_runs_takes_blocks_that_are_merely_held(host_blocks: int) -> None:
    # Eight blocks: four are kept, two are the running request's when it starts, seven when it ends.
    settings = config(num_blocks=9, prefix_caching=host_blocks > 0, num_host_blocks=host_blocks)
    engine = Harness(settings)
    (kept,) = engine.add("kept", range(14), max_tokens=1, keeps_blocks=True)
    engine.run()
    engine.add("other", range(20, 28), max_tokens=20)
    engine.run()
    assert not kept.block_table
    assert not any(step.preempted for step in engine.steps)
    (child,) = engine.add("child", [*range(14), 40], source=kept)
    engine.run()
    engine.check_answers()
    assert child.forked_tokens == 0
    assert child.cached_tokens + child.host_tokens == (12 if host_blocks else 0)
    assert (child.host_tokens > 0) == (host_blocks > 0)


def test_a_fork_that_loses_its_blocks_while_it_waits_computes_them() -> None:
    engine = Harness(config(max_num_seqs=2, prefix_caching=False))
    parent = running(engine)
    engine.add("other", range(20, 24), max_tokens=20)
    engine.turn()
    (child,) = engine.add("child", [*parent.token_ids[:11], 40], source=parent, max_tokens=2)
    engine.core.abort(["parent"], engine.now)
    engine.scheduler.preempt("child")  # "takes row and blocks": it has only blocks
    assert not child.block_table
    engine.run()
    engine.check_answers("other", "child")
    assert child.forked_tokens == 0
    assert computed(engine, "child") == 13


def test_who_waits_takes_held_blocks_from_those_behind_it_only() -> None:
    engine = Harness(config(num_blocks=9, prefix_caching=False, policy="priority"))
    (early,) = engine.add("early", range(12), max_tokens=1, priority=0, keeps_blocks=True)
    (late,) = engine.add("late", range(5), max_tokens=1, priority=2, keeps_blocks=True)
    engine.run()
    engine.add("running", range(20, 25), max_tokens=4, priority=1)
    engine.turn()
    assert engine.scheduler.blocks.pool.num_free == 1
    (waiting,) = engine.add("waiting", range(30, 35), max_tokens=1, priority=1)  # needs two blocks
    engine.turn()
    assert waiting.first_scheduled is not None
    assert (len(early.block_table), len(late.block_table)) == (3, 0)
    engine.add("all", range(30), max_tokens=1, priority=1)  # needs everything there is
    engine.turn()
    assert early.block_table
    engine.run()  # when nobody runs any more, it may have that too
    engine.check_answers()
    assert not early.block_table


def test_a_fork_has_its_parents_place_in_the_queue() -> None:
    engine = Harness(config(max_num_seqs=1))
    parent = running(engine)
    engine.add("waiting", [1, 2], max_tokens=1)
    engine.turn()
    (child,) = engine.add("child", [*parent.token_ids[:12], 40], source=parent, max_tokens=1)
    assert child.arrival == engine.now > parent.arrival
    engine.core.abort(["parent"], engine.now)
    engine.run()
    engine.check_answers("waiting", "child")
    assert [a.request_id for step in engine.steps for a in step.admitted] == ["parent", "child", "waiting"]


def test_what_a_step_in_flight_brings_back_is_not_taken_over() -> None:
    # The parent's blocks come back from the host in a step that fails after the fork was made.
    engine = Harness(config(num_blocks=9, num_host_blocks=8, max_num_seqs=1), depth=2)
    engine.add("first", PROMPT, max_tokens=1)
    engine.run()
    engine.add("flood", range(20, 49), max_tokens=1)  # pushes its blocks to the host
    engine.run()
    failing = engine.scheduler._num_steps
    engine.runner.step_faults = {failing: "result"}
    (parent,) = engine.add("parent", [*PROMPT, 40], max_tokens=9)
    engine.turn()
    assert parent.host_tokens == 8
    assert [step.step_id for step, _ in engine.scheduler.in_flight] == [failing]
    (child,) = engine.add("child", [*PROMPT, 41], source=parent)
    assert not child.block_table
    engine.run()
    assert engine.reason("parent") == "error"
    engine.check_answers("child")


def test_a_parent_that_fails_leaves_its_forks_alone() -> None:
    engine = Harness(config(max_num_seqs=1, prefix_caching=False), depth=2, request_faults={6: 0})
    parent = running(engine)
    (child,) = engine.add("child", [*parent.token_ids[:11], 40], source=parent)
    engine.run()
    assert engine.reason("parent") == "error"
    assert child.forked_tokens == 11
    engine.check_answers("child")


def test_what_cannot_be_forked_is_refused() -> None:
    engine = Harness()
    parent = running(engine)
    (stranger,) = make_requests("stranger", PROMPT, SamplingParams(), 0)
    (child,) = make_requests("child", PROMPT, SamplingParams(), 0)
    with pytest.raises(InvalidRequestError, match="source: stranger was never added"):
        engine.core.fork(child, stranger, engine.now)
    (salted,) = make_requests("salted", PROMPT, SamplingParams(cache_salt="x"), 0)
    with pytest.raises(InvalidRequestError, match="cache_salt: of salted and parent must be the same"):
        engine.core.fork(salted, parent, engine.now)
    (same_name,) = make_requests("parent", PROMPT, SamplingParams(), 0)
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.core.fork(same_name, parent, engine.now)
    assert set(engine.scheduler.ledger.requests) == {"parent"}
    check_invariants(engine.scheduler)


def test_invariants_notice_a_hold_nobody_knows_of() -> None:
    engine = Harness(config(max_num_seqs=1))
    parent = running(engine)
    engine.add("child", [*parent.token_ids[:11], 40], source=parent)
    engine.scheduler.ledger.holders.clear()
    with pytest.raises(InvariantError, match="block tables"):
        check_invariants(engine.scheduler)
    engine.scheduler.ledger.holders[engine.requests["child"]] = None
    engine.requests["child"].num_held_tokens += 4
    with pytest.raises(InvariantError, match="waits with 3 blocks for 15 tokens"):
        check_invariants(engine.scheduler)
