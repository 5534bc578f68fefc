"""Recurrent layers: their states are made, kept, found again and given back, and no answer is ever
another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from quire.block_groups import BlockGroup, StateSpec
from quire.engine.config import SchedulerConfig
from quire.engine.invariants import InvariantError, check_invariants
from quire.engine.request import Request
from quire.errors import CapacityError, InvalidRequestError
from quire.tools.explain.explain import explain_request
from quire.tools.explain.text import explanation_text
from tests.engine.harness import VOCAB, Harness, config
from tests.engine.test_draft_tokens import Oracle

CHUNK = 8
PROMPT = [7 * i % VOCAB for i in range(44)]
RECORDS = BlockGroup("records", CHUNK)
KINDS = {
    "records alone": (RECORDS,),
    "beside attention": (BlockGroup(), RECORDS),
    "and a window": (BlockGroup("window", 5), RECORDS, BlockGroup(), RECORDS),
}
WITH_ATTENTION = ("beside attention", "and a window")


def settings(
    kind: str = "beside attention", interval: int = 1024, state_blocks: int = 2, **changes: Any
) -> Any:
    state = StateSpec(CHUNK, state_blocks, interval)
    values = {
        "num_blocks": 200,
        "max_model_len": 256,
        "groups": KINDS[kind],
        "state": state,
        **changes,
    }
    return config(**values)


def check_end(engine: Harness) -> None:
    """All answers are those of requests alone, and no block is lost."""
    engine.run()
    engine.check_answers()
    assert engine.scheduler.blocks.pool.num_free == engine.config.num_usable_blocks


def computed(engine: Harness, name: str) -> int:
    return sum(
        entry.num_tokens
        for step in engine.steps
        for entry in step.scheduled
        if entry.request_id == name
    )


def cached(engine: Harness, name: str, prompt: list[int], **params: Any) -> int:
    """Runs a request to its end, and says how many of its tokens were cached."""
    engine.add(name, prompt, **{"max_tokens": 2, **params})
    engine.run()
    return engine.requests[name].cached_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [4, 7, 64])
def test_an_answer_over_several_chunks_is_that_of_the_model_alone(kind: str, most: int) -> None:
    engine = Harness(settings(kind, max_batched_tokens=most), depth=2)
    engine.add("a", PROMPT, max_tokens=50)
    engine.add("b", PROMPT[5:20], max_tokens=30)
    check_end(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_prompt_starts_from_the_state_at_its_last_chunk(kind: str) -> None:
    engine = Harness(settings(kind))
    assert cached(engine, "a", PROMPT, max_tokens=20) == 0
    assert cached(engine, "b", PROMPT, max_tokens=20) == 40
    assert computed(engine, "b") == 4 + 19
    check_end(engine)


def test_without_a_state_nothing_else_is_of_use() -> None:
    engine = Harness(settings())
    cached(engine, "a", PROMPT, max_tokens=20)
    cache, pool = engine.scheduler.blocks.cache, engine.scheduler.blocks.pool
    lost = [
        block
        for block in pool.blocks
        if block.key is not None and block.key.extra_keys == ("state 1",)
    ]
    assert len(lost) == 2  # at the prompt's end and at the answer's: each has its first block still
    for block in lost:
        cache.remove(block)
        pool.place(block)
    assert cached(engine, "b", PROMPT) == 0
    check_end(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3])
def test_a_conversation_computes_little_more_than_what_is_new(kind: str, depth: int) -> None:
    engine = Harness(settings(kind, num_blocks=400, max_batched_tokens=256), depth=depth)
    history = PROMPT.copy()
    for turn in range(6):
        name, new = f"turn {turn}", [turn * 11 % VOCAB + i for i in range(5 + turn)]
        before = len(history)
        history += new
        engine.add(name, history, max_tokens=13)
        engine.run()
        if turn:
            assert len(history) - engine.requests[name].cached_tokens <= len(new) + 1 + CHUNK, (
                before
            )
        history += engine.tokens[name]
    check_end(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_to_one_prompt_compute_it_once(kind: str) -> None:
    engine = Harness(settings(kind))
    engine.add("a", [*PROMPT, 1, 2], n=3, max_tokens=10)
    check_end(engine)
    assert [engine.requests[f"a/{i}"].cached_tokens for i in range(3)] == [0, 45, 45]


@pytest.mark.parametrize("kind", WITH_ATTENTION)
def test_where_prompts_part_the_second_keeps_a_state_and_the_third_starts_from_it(
    kind: str,
) -> None:
    engine = Harness(settings(kind))
    prompts = [[*PROMPT[:27], *(first + i for i in range(30))] for first in (1, 2, 3)]
    found = [cached(engine, f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    assert found == [0, 0, 24]
    check_end(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_states_at_multiples_of_the_interval_are_kept(kind: str) -> None:
    engine = Harness(settings(kind, interval=16, max_batched_tokens=256))
    cached(engine, "a", [*PROMPT, *PROMPT], max_tokens=30)
    ends = [entry.start + entry.num_tokens for step in engine.steps for entry in step.scheduled][:6]
    assert ends == [16, 32, 48, 64, 80, 88]
    assert cached(engine, "b", [*PROMPT[:20], 1, 2, 3]) == 16
    assert cached(engine, "c", [*PROMPT[:39], 1, 2, 3]) == 32
    assert cached(engine, "d", [*PROMPT, *PROMPT[:36], 1, 2, 3]) == 80
    check_end(engine)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("wrong_every", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", WITH_ATTENTION)
def test_draft_tokens_over_a_chunks_end(kind: str, wrong_every: int, depth: int) -> None:
    oracle = Oracle(5, wrong_every)
    engine = oracle.engine = Harness(settings(kind), depth=depth, propose=oracle)
    for i in range(2):
        engine.add(f"r{i}", PROMPT[: 12 + 3 * i], seed=i, max_tokens=24)
    check_end(engine)
    over = [
        entry
        for step in engine.steps
        for entry in step.scheduled
        if entry.draft_tokens and entry.start // CHUNK < (entry.start + entry.num_tokens) // CHUNK
    ]
    assert over
    first = engine.requests["r0"]
    engine.add("again", [*first.token_ids, 1, 2], max_tokens=12)  # from a state that guesses made
    engine.run()
    assert engine.requests["again"].cached_tokens >= len(first.token_ids) // CHUNK * CHUNK - CHUNK
    check_end(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", [0, 60])
@pytest.mark.parametrize("depth", [1, 3])
def test_preemption_changes_no_answer(kind: str, host: int, depth: int) -> None:
    engine = Harness(settings(kind, num_host_blocks=host, num_blocks=90), depth=depth)
    for i in range(6):
        engine.add(f"r{i}", PROMPT[i : 20 + i], seed=i, max_tokens=30)
    turns = 0
    while engine.core.has_work:
        engine.turn()
        turns += 1
        if turns % 7 == 0 and engine.scheduler.table.running:
            engine.scheduler.preempt(engine.scheduler.table.running[-1].request_id)
    assert any(request.preemptions for request in engine.requests.values())
    check_end(engine)


def test_a_swapped_request_goes_on_from_its_last_whole_block() -> None:
    """Its state and the records since come back from the host, although others took all blocks of
    the device.
    """
    engine = Harness(settings(num_blocks=46, num_host_blocks=60, policy="priority"))
    (first,) = engine.add("a", PROMPT, max_tokens=20)
    while first.num_committed_tokens < 53:
        engine.turn()
    engine.scheduler.preempt("a")
    engine.add("b", [5] * 60, priority=-1, max_tokens=10)
    before = computed(engine, "a")
    check_end(engine)
    assert computed(engine, "a") - before <= 64 - 52
    assert first.cached_tokens + first.host_tokens >= 52


def test_records_of_a_chunk_that_is_over_leave_the_cache() -> None:
    engine = Harness(settings())
    (request,) = engine.add("a", PROMPT, max_tokens=20)
    while request.num_committed_tokens < 58:
        engine.turn()
    cache = engine.scheduler.blocks.cache
    found = [cache.find(key) is not None for key in request.block_keys]
    assert found[0::2] == [True] * 14
    # the 15th block is not full, those before are of chunks that are over
    assert found[1::2] == [False] * 14
    held = [block.block_id > 0 for block in request.block_table[1::2]]
    assert held == [False] * 14 + [True]
    check_end(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_too_little_room_for_kept_states_holds_nobody_up(kind: str) -> None:
    """A pool that just fits two requests: they run as in a large one, step by step."""
    roomy = settings(kind, interval=CHUNK, prefix_caching=True)
    each = roomy.blocks_for(len(PROMPT) + 19) + roomy.num_state_blocks
    engines = [
        Harness(one, depth=4)
        for one in (roomy, settings(kind, interval=CHUNK, num_blocks=1 + 2 * each))
    ]
    for engine in engines:
        engine.add("a", PROMPT, max_tokens=20)
        engine.add("b", [3 * token % VOCAB for token in PROMPT], max_tokens=20)
        check_end(engine)
        assert not any(request.preemptions for request in engine.requests.values())
    assert len(engines[0].steps) == len(engines[1].steps)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_request_may_be_aborted_at_any_moment(depth: int) -> None:
    for moment in range(10):
        engine = Harness(
            settings(interval=CHUNK, max_batched_tokens=10, num_blocks=99, num_host_blocks=20),
            depth=depth,
        )
        engine.add("a", PROMPT, max_tokens=12)
        engine.add("b", [*PROMPT[:20], 9], max_tokens=12)
        engine.turn(moment)
        engine.core.abort("a", engine.now)
        check_invariants(engine.scheduler)
        engine.run()
        engine.check_answers("b")
        engine.add("c", PROMPT, max_tokens=5)
        engine.run()
        engine.check_answers("c")
        assert engine.scheduler.blocks.pool.num_free == engine.config.num_usable_blocks


@pytest.mark.parametrize("kind", KINDS)
def test_without_prefix_caching_no_state_is_kept_or_copied(kind: str) -> None:
    engine = Harness(settings(kind, interval=CHUNK, prefix_caching=False))
    for name in ("a", "b"):
        assert cached(engine, name, PROMPT, max_tokens=20) == 0
    assert len(engine.scheduler.blocks.cache) == 0
    assert not any(step.copies for step in engine.steps)
    check_end(engine)


def test_room_for_two_states_is_counted_before_a_request_is_taken() -> None:
    engine = Harness(settings(num_blocks=1 + 4 + 2 * 5))
    assert engine.config.num_tokens == 20
    with pytest.raises(CapacityError, match="need room for 21 tokens, the cache holds 20"):
        engine.add("a", PROMPT[:10], max_tokens=12)
    engine.add("b", PROMPT[:10], max_tokens=11)
    check_end(engine)
    assert engine.requests["b"].preemptions == 0
    with pytest.raises(CapacityError):
        Harness(settings(num_blocks=4)).add("a", [1], max_tokens=2)


@pytest.mark.parametrize(
    ("groups", "state", "field"),
    [
        ((RECORDS,), None, "groups"),
        ((BlockGroup(),), StateSpec(8, 1, 8), "groups"),
        ((BlockGroup("records", 16),), StateSpec(8, 1, 8), "groups"),
        ((RECORDS, BlockGroup("records", 16)), StateSpec(8, 1, 8), "groups"),
        ((BlockGroup("records", 6),), StateSpec(6, 1, 12), "state"),
        ((BlockGroup("records", 0),), StateSpec(0, 1, 8), "groups"),
        ((RECORDS,), StateSpec(8, 0, 8), "state"),
        ((RECORDS,), StateSpec(8, 1, 12), "state"),
        ((RECORDS,), StateSpec(8, 1, 0), "state"),
        ((), None, "groups"),
        ((BlockGroup("window"),), None, "groups"),
    ],
)
def test_states_that_can_not_be_are_refused(
    groups: Any, state: StateSpec | None, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        config(groups=groups, state=state)
    assert refusal.value.field == field


def test_states_are_not_kept_in_blocks_that_running_requests_need() -> None:
    """A long prompt makes states faster than its steps come back, beside answers that grow."""

    def preemptions(prefix_caching: bool) -> int:
        tight = settings(
            "records alone",
            interval=CHUNK,
            num_blocks=60,
            max_num_seqs=8,
            max_batched_tokens=24,
            prefix_caching=prefix_caching,
        )
        engine = Harness(tight, depth=4)
        for i in range(4):
            engine.add(str(i), PROMPT[i : i + 5], max_tokens=24)
        for _ in range(3):
            engine.turn()
        engine.add("long", [11 * i % VOCAB for i in range(120)], max_tokens=1)
        check_end(engine)
        return sum(request.preemptions for request in engine.requests.values())

    assert preemptions(prefix_caching=True) == preemptions(prefix_caching=False)


@pytest.mark.parametrize("kind", KINDS)
def test_explain_tells_who_made_a_state_and_what_it_takes(kind: str) -> None:
    engine = Harness(settings(kind, bytes_per_block=1000))
    engine.add("a", PROMPT[:30], max_tokens=4)
    engine.run()
    engine.add("b", [*PROMPT, 1], max_tokens=4)
    engine.run()
    found = cached(engine, "c", [*PROMPT, 1, 2, 3, 4])
    explanation = explain_request(list(engine.log), "c", engine.config)
    assert explanation is not None
    answer = explanation["answers"][0]
    whose = answer["admissions"][0]["computed_by"]
    assert sum(whose.values()) == found > 32
    # whoever has no token of the first chunks any more knows them by the state that b has made
    assert set(whose) == ({"b"} if kind == "records alone" else {"a", "b"})
    assert answer["cache"]["state_blocks"] == 2 * 2
    fresh = len(engine.config.groups) * -(-(found + 9) // engine.config.block_size)
    assert 2 * 2 < answer["cache"]["blocks"] <= 2 * 2 + fresh
    assert answer["cache"]["bytes"] == 1000 * answer["cache"]["blocks"]
    assert f"{answer['cache']['blocks']} blocks of the cache" in explanation_text(explanation)
    assert "4 of them for states" in explanation_text(explanation)


def test_settings_of_old_and_new_logs_are_read() -> None:
    old = {"num_blocks": 9, "max_num_seqs": 1, "max_batched_tokens": 4, "max_model_len": 8}
    window = BlockGroup("window", 5)
    assert SchedulerConfig.from_settings(old).groups == (BlockGroup(),)
    grouped = SchedulerConfig.from_settings(
        {**old, "num_groups": 3, "num_windowed": 2, "window": 5}
    )
    assert grouped.groups == (BlockGroup(), window, window)
    plain = SchedulerConfig.from_settings({**old, "num_groups": 2, "num_windowed": 0, "window": 0})
    assert plain.groups == (BlockGroup(),) * 2
    for kind in KINDS:
        one = settings(kind, bytes_per_block=4096)
        assert SchedulerConfig.from_settings(json.loads(json.dumps(asdict(one)))) == one


def test_a_group_sees_as_far_back_as_it_says() -> None:
    assert [BlockGroup().first_token(at) for at in (0, 9)] == [0, 0]
    assert [BlockGroup("window", 4).first_token(at) for at in (0, 3, 4, 9)] == [0, 0, 1, 6]
    for keeps in ("chunk", "records"):
        assert [BlockGroup(keeps, 4).first_token(at) for at in (0, 3, 4, 9)] == [0, 0, 4, 8]


def _another_chunk(first: Request, _: Request) -> None:
    first.states[1].chunk += 2


def _the_other_state(first: Request, _: Request) -> None:
    even, odd = first.states
    even.blocks, odd.blocks = odd.blocks, even.blocks


def _anothers_state(first: Request, second: Request) -> None:
    ours, theirs = first.states[1], second.states[1]
    ours.blocks, theirs.blocks = theirs.blocks, ours.blocks


def _blocks_exchanged(first: Request, _: Request) -> None:
    first.states[1].blocks.reverse()


def _a_block_less(first: Request, _: Request) -> None:
    first.states[0].blocks.pop()


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_another_chunk, "without the state before it"),
        (_the_other_state, "state of another prefix"),
        (_anothers_state, "state of another prefix"),
        (_blocks_exchanged, "state of another prefix"),
        (_a_block_less, "lacks blocks for its states"),
    ],
)
@pytest.mark.parametrize("kind", WITH_ATTENTION)
def test_a_wrong_state_is_found(
    kind: str, plant: Callable[[Request, Request], None], message: str
) -> None:
    engine = Harness(settings(kind, interval=CHUNK))
    (first,) = engine.add("a", PROMPT, max_tokens=20)
    (second,) = engine.add("b", [token + 1 for token in PROMPT], max_tokens=20)
    while first.num_committed_tokens < 45 or second.num_committed_tokens < 45:
        engine.turn()
    assert first.states[1].chunk == second.states[1].chunk == 5
    plant(first, second)
    with pytest.raises(InvariantError, match=message):
        check_invariants(engine.scheduler)
