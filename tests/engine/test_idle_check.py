"""The check of an idle engine: what it finds and when, what it costs, and what becomes of a fault
it finds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.block_key import BlockKey
from quire.engine.block_manager import BlockManager
from quire.engine.block_pool import Block, BlockPool
from quire.engine.idle_check import IdleCheck
from quire.engine.invariants import InvariantError, check_invariants
from quire.engine.prefix_cache import PrefixCache
from quire.engine.request import Request, make_requests
from quire.engine.scheduler import Scheduler
from quire.sampling_params import SamplingParams
from quire.step import StepResult
from quire.tools.simulate.scenario import make_scenario
from quire.tools.simulate.simulation import Simulation
from tests.engine.harness import Harness, config
from tests.long_runs import short_or_long


def idle_engine() -> Harness:
    """An engine with nothing to do. Blocks and host slots have names or not."""
    engine = Harness(config(num_blocks=13, num_host_blocks=12))
    for index in range(3):
        engine.add(f"r{index}", range(index, index + 17), max_tokens=4)
        engine.run()
    engine.add("keeper", range(30, 39), max_tokens=2, caches_partial_block=True)
    engine.run()
    blocks = engine.scheduler.blocks
    assert blocks.host.num_free > 1 < len(blocks.host)
    assert sum(block.key is not None for block in blocks.pool.free) > 4
    return engine


def free_block(scheduler: Scheduler, index: int, named: bool = False) -> Block:
    free = [block for block in scheduler.blocks.pool.free if not named or block.key is not None]
    return free[index % len(free)]


def miscount(scheduler: Scheduler, index: int) -> None:
    pool = scheduler.blocks.pool
    pool.blocks[index % len(pool.blocks)].ref_count += 1


def free_a_stranger(scheduler: Scheduler, index: int) -> None:
    pool = scheduler.blocks.pool
    lost = free_block(scheduler, index)
    del pool.free[lost]
    pool.place(Block(lost.block_id))


def free_padding(scheduler: Scheduler, index: int) -> None:
    pool = scheduler.blocks.pool
    del pool.free[free_block(scheduler, index)]
    pool.place(pool.blocks[0])


def exchange_names(scheduler: Scheduler, index: int) -> None:
    one, other = (
        free_block(scheduler, index, named=True),
        free_block(scheduler, index + 1, named=True),
    )
    one.key, other.key = other.key, one.key


def forget_name(scheduler: Scheduler, index: int) -> None:
    key = free_block(scheduler, index, named=True).key
    assert key is not None
    del scheduler.blocks.cache._blocks[key.digest]


def use_slot_twice(scheduler: Scheduler, index: int) -> None:
    slots = scheduler.blocks.host._slots
    names = list(slots)
    one, other = names[index % len(names)], names[(index + 1) % len(names)]
    slots[one] = (slots[one][0], slots[other][1])


def free_slot_under_another_number(scheduler: Scheduler, index: int) -> None:
    free = scheduler.blocks.host._free
    del free[list(free)[index % len(free)]]
    free[100] = None


def rename_slot(scheduler: Scheduler, index: int) -> None:
    host = scheduler.blocks.host
    entries = list(host._slots.values())
    key, slot = entries[index % len(entries)]
    host._slots[key.digest] = (BlockKey(b"another", key.token_ids, None, ()), slot)


IN_ITS_TURN = [
    miscount,
    free_a_stranger,
    free_padding,
    exchange_names,
    forget_name,
    use_slot_twice,
    free_slot_under_another_number,
    rename_slot,
]


def lose_block(scheduler: Scheduler, index: int) -> None:
    del scheduler.blocks.pool.free[free_block(scheduler, index)]


def leak_reference(scheduler: Scheduler, index: int) -> None:
    scheduler.blocks.pool.share(free_block(scheduler, index))


def lose_row(scheduler: Scheduler, index: int) -> None:
    rows = scheduler.table.free_rows
    del rows[index % len(rows)]


def free_row_twice(scheduler: Scheduler, index: int) -> None:
    rows = scheduler.table.free_rows
    rows[index % 4] = rows[(index + 1) % 4]


def lose_slot(scheduler: Scheduler, index: int) -> None:
    free = scheduler.blocks.host._free
    del free[list(free)[index % len(free)]]


def lose_named_slot(scheduler: Scheduler, index: int) -> None:
    slots = scheduler.blocks.host._slots
    del slots[list(slots)[index % len(slots)]]


def leave_pin(scheduler: Scheduler, index: int) -> None:
    scheduler.blocks.host.pinned.add(index % 6)


def stranger() -> Request:
    return Request("stranger", (1, 2), SamplingParams(), seed=0, group_id="strangers")


def leave_in_group(scheduler: Scheduler, index: int) -> None:
    scheduler.table.groups["strangers"] = [stranger()]


def leave_in_queue(scheduler: Scheduler, index: int) -> None:
    (scheduler.table.waiting if index % 2 else scheduler.table.running).add(stranger())


def name_nothing(scheduler: Scheduler, index: int) -> None:
    for number in range(13):
        scheduler.blocks.cache._blocks[bytes([number])] = free_block(scheduler, index)


AT_ONCE = [
    lose_block,
    leak_reference,
    lose_row,
    free_row_twice,
    lose_slot,
    lose_named_slot,
    leave_pin,
    leave_in_group,
    leave_in_queue,
    name_nothing,
]

Fault = Callable[[Scheduler, int], None]


def check_often(check: IdleCheck, times: int) -> None:
    for _ in range(times):
        check.check()


def calls_per_round(scheduler: Scheduler, slice_size: int) -> int:
    """After so many every block and every slot was looked at."""
    return -(-max(len(scheduler.blocks.pool.blocks), scheduler.blocks.host.num_slots) // slice_size)


@pytest.mark.parametrize("fault", IN_ITS_TURN)
@settings(max_examples=25, deadline=None)
@given(index=st.integers(0, 30), slice_size=st.integers(1, 15), num_before=st.integers(0, 20))
def test_what_is_wrong_with_a_block_or_slot_is_found_within_a_round(
    fault: Fault, index: int, slice_size: int, num_before: int
) -> None:
    scheduler = idle_engine().scheduler
    check = IdleCheck(scheduler, slice_size)
    check_often(check, num_before)
    fault(scheduler, index)
    with pytest.raises(InvariantError):
        check_invariants(scheduler)
    with pytest.raises(InvariantError):
        check_often(check, calls_per_round(scheduler, slice_size))


@pytest.mark.parametrize("fault", AT_ONCE)
@settings(max_examples=10, deadline=None)
@given(index=st.integers(0, 30), num_before=st.integers(0, 20))
def test_sums_rows_and_queues_are_found_at_once(fault: Fault, index: int, num_before: int) -> None:
    scheduler = idle_engine().scheduler
    check = IdleCheck(scheduler, slice_size=1)
    check_often(check, num_before)
    fault(scheduler, index)
    with pytest.raises(InvariantError):
        check_invariants(scheduler)
    with pytest.raises(InvariantError):
        check.check()


def test_a_name_is_never_put_over_another() -> None:
    """The idle check could not see the name that stays behind, so it must not come about."""
    cache, block = PrefixCache(1), Block(1)
    keys: list[BlockKey] = []
    cache.extend_keys(keys, [1, 2], 2, [()])
    assert cache.publish(keys[0], block)
    with pytest.raises(AssertionError, match="holds another prefix already"):
        cache.publish(keys[1], block)


@pytest.mark.few(1)
@pytest.mark.parametrize("slice_size", [1, 5])
def test_sound_engines_never_trip(slice_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random workloads, with whatever is cached and swapped whenever they come to rest."""
    num_checks = 0
    whole = IdleCheck.check

    def check(self: IdleCheck) -> None:
        nonlocal num_checks
        num_checks += 1
        whole(self)

    monkeypatch.setattr(IdleCheck, "check", check)
    for seed in range(7000, 7000 + short_or_long(80, 80, quick=25)):
        simulation = Simulation(make_scenario(seed))
        scheduler = simulation.scheduler
        simulation.core._idle_check = IdleCheck(scheduler, slice_size)
        simulation.run()
    assert num_checks > short_or_long(80, 80, quick=15)


class WatchedList(list[Block]):
    """Notes which blocks somebody asks it for; walking all of it is not allowed."""

    seen: list[int]

    def __iter__(self) -> Any:
        raise AssertionError("all blocks are looked at")

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        self.seen += (
            [block.block_id for block in found] if isinstance(found, list) else [found.block_id]
        )
        return found


@pytest.mark.parametrize("num_blocks", [100, 1000, 1001, 2500])
def test_a_check_looks_at_one_slice_and_a_round_at_every_block_once(num_blocks: int) -> None:
    pool = BlockPool(num_blocks)
    pool.blocks = watched = WatchedList(pool.blocks)
    settings = config(num_blocks=num_blocks, num_host_blocks=2 * num_blocks)
    scheduler = Scheduler(settings, BlockManager(settings, pool=pool))
    check = IdleCheck(scheduler, slice_size=200)
    rounds: list[int] = []
    for _ in range(calls_per_round(scheduler, 200)):
        watched.seen = []
        check.check()
        assert len(watched.seen) <= 200
        rounds += watched.seen
    assert rounds[:num_blocks] == list(range(num_blocks))


def count_lines(call: Callable[[], None]) -> int:
    """Lines of Python that a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def compute(scheduler: Scheduler, prompt: list[int]) -> None:
    """One request for one token, with a model that costs nothing however long the prompt is."""
    for request in make_requests("r", prompt, SamplingParams(max_tokens=1), seed=0):
        scheduler.add(request, 0.0)
    while scheduler.has_work:
        step = scheduler.schedule(0.0)
        tokens = {entry.request_id: (0,) for entry in step.scheduled if entry.samples}
        scheduler.commit(step, StepResult(step.step_id, tokens), 0.0)


def test_a_check_does_as_much_for_a_large_cache_as_for_a_small_one() -> None:
    counts = set()
    for factor in (1, 10):
        num_tokens = 2500 * factor
        scheduler = Scheduler(
            config(
                num_blocks=1000 * factor, num_host_blocks=500 * factor, max_model_len=num_tokens + 1
            )
        )
        # Two prompts that don't fit together, so that most blocks have names and host slots are in
        # use.
        for first in (0, 1):
            compute(scheduler, list(range(first, num_tokens + first)))
        assert len(scheduler.blocks.cache) > 600 * factor
        assert len(scheduler.blocks.host) > 200 * factor
        counts.add(count_lines(IdleCheck(scheduler, slice_size=100).check))
    assert len(counts) == 1


def end_at_rest(engine: Harness, how: str) -> None:
    """A request whose end is told by the very step after which the engine is idle."""
    engine.add("last", range(5), max_tokens=40, deadline=3.0 if how == "deadline" else None)
    engine.turn(2)
    if how == "abort":
        engine.core.abort(["last"], engine.now)


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_the_last_updates_come_before_the_fault(how: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = Harness()
    end_at_rest(engine, how)
    engine.scheduler.table.free_rows.pop()
    with caplog.at_level(logging.CRITICAL):
        (update,) = engine.core.step(4.0)
    assert update.finish_reason == how
    assert "rows are lost" in caplog.text
    for _ in range(2):  # nobody can work on past it
        assert engine.core.has_work
        with pytest.raises(InvariantError, match=r"rows are lost .* start a new one"):
            engine.core.step(9.0)


def test_a_check_that_stumbles_has_found_something() -> None:
    engine = Harness()
    end_at_rest(engine, "abort")
    pool: Any = engine.scheduler.blocks.pool
    pool.blocks[7] = None
    (update,) = engine.core.step(4.0)
    assert update.finish_reason == "abort"
    with pytest.raises(InvariantError, match="AttributeError"):
        engine.core.step(5.0)
