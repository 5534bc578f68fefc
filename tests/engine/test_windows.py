"""Layers with windows give back the blocks behind them; the prefix cache offers what is still
there, and no more.
"""

from __future__ import annotations

from typing import Any

import pytest

from quire.block_groups import BlockGroup
from quire.engine.config import SchedulerConfig
from tests.engine.harness import VOCAB, Harness, config

PROMPT = [7 * i % VOCAB for i in range(40)]
WINDOWED = BlockGroup("window", 9)
KINDS = {
    "all layers": (WINDOWED,),
    "half of them": (BlockGroup(), WINDOWED),
    "most of them": (BlockGroup(), WINDOWED, WINDOWED, WINDOWED),
}


def settings(kind: str, num_blocks: int = 33, **changes: Any) -> SchedulerConfig:
    groups = KINDS[kind]
    return config(num_blocks=1 + (num_blocks - 1) * len(groups), groups=groups, **changes)


def check(engine: Harness) -> None:
    """All answers are those of requests alone."""
    engine.check_answers()


def num_held(engine: Harness) -> int:
    return engine.config.num_usable_blocks - engine.scheduler.blocks.pool.num_free


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caching", [True, False])
def test_a_long_answer_takes_no_more_than_its_windows(kind: str, caching: bool) -> None:
    """Groups without one grow by a block for every four tokens; those with one keep what nine
    tokens lie in.
    """
    engine = Harness(settings(kind, 100, max_model_len=512, prefix_caching=caching))
    engine.add("a", PROMPT, max_tokens=300)
    groups, windowed = engine.config.num_groups, len(engine.config.leaving_groups)
    while engine.core.has_work:
        engine.turn()
        tokens = engine.requests["a"].num_tokens
        if tokens > len(PROMPT) + 4 and engine.core.has_work:
            full = -(-tokens // 4)
            assert num_held(engine) <= (groups - windowed) * full + windowed * 4
    check(engine)
    assert num_held(engine) == 0


def test_more_requests_run_at_once() -> None:
    """Sixty tokens of eight requests are 120 blocks; there are 60."""
    engine = Harness(settings("all layers", 61, max_num_seqs=8, prefix_caching=False))
    for i in range(8):
        engine.add(f"r{i}", [i, i + 1, i + 2], max_tokens=57)
    engine.run()
    check(engine)
    assert all(request.preemptions == 0 for request in engine.requests.values())
    assert max(step.num_running for step in engine.steps) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_found_by_the_window_at_its_end(kind: str) -> None:
    engine = Harness(settings(kind))
    engine.add("a", PROMPT, max_tokens=4)
    engine.run()
    engine.add("b", [*PROMPT, 1, 2], max_tokens=4)
    engine.turn()
    (admission,) = engine.steps[-1].admitted
    assert admission.num_cached_tokens == len(PROMPT)
    groups, windowed = engine.config.num_groups, len(engine.config.leaving_groups)
    # Of a prefix of ten blocks the last two hold the eight tokens that the next one sees beside
    # itself.
    held = [
        [bool(block) for block in admission.block_ids[group::groups]] for group in range(groups)
    ]
    assert held == [[True] * 10] * (groups - windowed) + [[False] * 8 + [True] * 2] * windowed
    engine.run()
    check(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_whose_window_is_gone_is_not_offered(kind: str) -> None:
    """The blocks behind a long answer's window are taken by others: what is left of its prompt is
    too little.
    """
    engine = Harness(settings(kind, 33, max_model_len=128))
    engine.add("a", PROMPT, max_tokens=60)
    for _ in range(40):
        engine.turn()
    cache = engine.scheduler.blocks.cache
    num_known = len(cache)
    prompt_keys = engine.requests["a"].block_keys[: 10 * engine.config.num_groups]
    groups, full = (
        engine.config.num_groups,
        engine.config.num_groups - len(engine.config.leaving_groups),
    )
    for place, key in enumerate(prompt_keys):  # as if the next requests had needed exactly these
        block = cache.find(key)
        if place % groups >= full and block is not None and block.ref_count == 0:
            cache.remove(block)
            engine.scheduler.blocks.pool.place(block)
    assert len(cache) < num_known
    engine.add("b", [*PROMPT, 1, 2], max_tokens=4)
    engine.turn()
    (admission,) = engine.steps[-1].admitted
    assert admission.num_cached_tokens == 0
    engine.run()
    check(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3])
def test_preempted_swapped_and_ahead(kind: str, depth: int) -> None:
    host = 12 * len(KINDS[kind])
    engine = Harness(settings(kind, 15, num_host_blocks=host), depth=depth)
    for i in range(8):
        engine.add(f"r{i}", PROMPT[i : 20 + i], seed=i, max_tokens=30)
    turns = 0
    while engine.core.has_work:
        engine.turn()
        turns += 1
        if turns % 12 == 0 and engine.scheduler.table.running:
            engine.scheduler.preempt(engine.scheduler.table.running[-1].request_id)
    check(engine)
    assert any(request.preemptions for request in engine.requests.values())
    came_back = any(copy.kind == "host_to_device" for step in engine.steps for copy in step.copies)
    assert came_back or kind == "all layers"  # who all of need so little that the device keeps it


def test_who_has_cached_what_is_told_in_spite_of_holes() -> None:
    from quire.tools.explain.block_origins import cached_from

    engine = Harness(settings("all layers"))
    engine.add("a", PROMPT, max_tokens=4)
    engine.run()
    engine.add("b", [*PROMPT, 1], max_tokens=1)
    engine.run()
    entries = list(engine.log)
    step = next(
        entry.step for entry in entries if any(one.request_id == "b" for one in entry.step.admitted)
    )
    assert set(cached_from(entries, step, step.admitted[0])) == {"a"}
