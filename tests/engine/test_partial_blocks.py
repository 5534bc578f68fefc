"""Blocks that are cached before they are full: for the other answers to a prompt, and for beams."""

from __future__ import annotations

import pytest

from quire.step import BlockCopy
from tests.engine.harness import Harness, config

PROMPT = list(range(10))


def computed(engine: Harness, name: str) -> int:
    return sum(
        entry.num_tokens
        for step in engine.steps
        for entry in step.scheduled
        if entry.request_id == name
    )


def copies(engine: Harness) -> list[BlockCopy]:
    return [
        copy for step in engine.steps for copy in step.copies if copy.kind == "device_to_device"
    ]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_follower_computes_only_its_own_token(depth: int) -> None:
    engine = Harness(depth=depth)
    for length in range(10, 26):  # as beams do: a request for every token
        (request,) = engine.add(
            f"r{length}", range(length), max_tokens=1, caches_partial_block=True
        )
        engine.run()
        assert computed(engine, f"r{length}") == (1 if length > 10 else 10)
        assert request.cached_tokens == (length - 1 if length > 10 else 0)
    engine.check_answers()
    assert len(copies(engine)) == sum(length % 4 != 0 for length in range(10, 25))


def test_what_agrees_is_shared_and_no_more() -> None:
    engine = Harness()
    engine.add("a", range(11), max_tokens=1, caches_partial_block=True)
    engine.run()
    (half,) = engine.add("half", [*range(9), 40, 41, 42])
    (same,) = engine.add("same", range(11))
    (salted,) = engine.add("salted", range(12), cache_salt="other")
    (less,) = engine.add("less", range(7))
    engine.run()
    engine.check_answers()
    assert (half.cached_tokens, same.cached_tokens, salted.cached_tokens, less.cached_tokens) == (
        9,
        10,
        0,
        4,
    )


def test_without_the_mark_only_full_blocks_are_cached() -> None:
    engine = Harness()
    engine.add("a", range(11), max_tokens=1)
    engine.run()
    (follower,) = engine.add("b", range(12))
    engine.run()
    assert follower.cached_tokens == 8


def test_a_block_that_fills_up_is_found_as_a_full_one() -> None:
    engine = Harness()
    # the first answer goes on in the block it offers
    engine.add("group", range(6), n=2, max_tokens=9)
    engine.run()
    (leader, other) = (engine.requests[f"group/{i}"] for i in range(2))
    assert other.cached_tokens == 5
    (follower,) = engine.add("follower", [*leader.token_ids])
    engine.run()
    engine.check_answers()
    assert follower.cached_tokens == 12


@pytest.mark.parametrize("end", ["abort", "preempt", "error"])
def test_answers_whose_first_one_is_lost_compute_the_prompt_themselves(end: str) -> None:
    faults = {"request_faults": {1: 0}} if end == "error" else {}
    engine = Harness(config(max_batched_tokens=4), **faults)
    engine.add("group", range(12), n=3, max_tokens=5)
    engine.turn(2)
    if end == "abort":
        engine.core.abort(["group/0"], engine.now)
    elif end == "preempt":
        engine.scheduler.preempt("group/0")
    engine.run()
    engine.check_answers(*(name for name in engine.requests if name != "group/0"))
    assert engine.scheduler.blocks.pool.num_free == 32


def test_a_partly_filled_block_gives_way_when_blocks_are_scarce() -> None:
    engine = Harness(config(num_blocks=5, max_num_seqs=1))  # four blocks
    engine.add("a", range(6), max_tokens=1, caches_partial_block=True)
    engine.run()
    (follower,) = engine.add("b", range(14), max_tokens=2)  # needs all four
    engine.run()
    engine.check_answers()
    assert follower.cached_tokens == 4


def test_partly_filled_blocks_stay_off_the_host_tier() -> None:
    engine = Harness(config(num_blocks=5, max_num_seqs=1, num_host_blocks=8))
    engine.add("a", range(6), max_tokens=1, caches_partial_block=True)
    engine.run()
    engine.add("b", range(20, 35), max_tokens=1)
    engine.run()
    engine.check_answers()
    assert len(engine.scheduler.blocks.host) == 1
