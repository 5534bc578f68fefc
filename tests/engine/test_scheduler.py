"""The scheduler case by case: order, budget, preemption, several answers, and the crashes others
keep having.
"""

from __future__ import annotations

import pytest

from quire.engine.request import make_requests
from quire.engine.scheduler import Scheduler
from quire.errors import CapacityError, EngineError, InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.step import StepResult
from tests.engine.harness import Harness, config


def test_whole_prompt_is_a_prefix_hit_and_one_token_is_still_computed() -> None:
    engine = Harness()
    engine.add("first", range(16))
    engine.run()
    engine.add("second", range(16))
    engine.run()
    engine.check_answers()
    admission = engine.steps[-9].admitted[0]
    assert admission.request_id == "second"
    # Not 16: the last block is computed again for its last token.
    assert admission.num_cached_tokens == 12
    assert engine.ends["second"].metrics is not None
    assert engine.ends["second"].metrics.cached_tokens == 12


def test_prompt_one_token_longer_than_its_cached_blocks_computes_just_that_token() -> None:
    engine = Harness()
    engine.add("first", range(17))
    engine.run()
    engine.add("second", range(17))
    engine.turn()
    entry = engine.steps[-1].scheduled[0]
    assert (entry.start, entry.num_tokens, entry.samples) == (16, 1, True)
    engine.run()
    engine.check_answers()


@pytest.mark.parametrize("host_blocks", [0, 8])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefix_hit_meets_preemption(depth: int, host_blocks: int) -> None:
    engine = Harness(config(num_blocks=9, num_host_blocks=host_blocks), depth=depth)
    engine.add("first", range(12), max_tokens=20)
    engine.turn(depth + 1)
    for name in ("second", "third"):
        engine.add(name, [*range(12), 40], max_tokens=20, seed=7)
    engine.run()
    engine.check_answers()
    assert sum(r.preemptions for r in engine.requests.values()) > 0


@pytest.mark.parametrize("num_prompt", [15, 16, 17])
def test_request_that_exactly_fills_its_last_block(num_prompt: int) -> None:
    # 16 slots in 4 blocks; the last token is never computed, so prompt + answer may be 17.
    engine = Harness(config(num_blocks=5))
    if num_prompt < 17:
        engine.add("request", range(num_prompt), max_tokens=17 - num_prompt)
        engine.run()
        engine.check_answers()
        assert engine.reason("request") == "length"
    with pytest.raises(
        CapacityError, match=r"need room for 17 tokens, the cache holds 16 \(4 blocks of 4\)"
    ):
        engine.add("too long", range(num_prompt), max_tokens=18 - num_prompt)


def test_prompt_longer_than_the_cache_is_refused_with_both_numbers() -> None:
    engine = Harness(config(num_blocks=5))
    with pytest.raises(CapacityError, match=r"prompt \(40 tokens\).*48 tokens, the cache holds 16"):
        engine.add("long", range(40), max_tokens=9)
    assert not engine.core.has_work


@pytest.mark.parametrize(
    ("prompt", "field"),
    [([], "prompt"), (range(64), "prompt"), ([-1], "prompt"), ([2**31], "prompt")],
)
def test_impossible_prompts_are_refused_by_field(prompt: list[int], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Harness().add("request", prompt)
    assert caught.value.field == field


def test_names_in_use_and_requests_added_twice_are_refused_and_free_names_are_not() -> None:
    engine = Harness()
    (request,) = engine.add("name", [1, 2])
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add("name", [3])
    with pytest.raises(InvalidRequestError, match="was added before"):
        engine.core.add_request(request, 0.0)
    engine.run()
    engine.ends.clear()
    engine.add("name", [3])
    engine.run()
    engine.check_answers()


def test_group_with_another_prompt_is_refused() -> None:
    scheduler = Scheduler(config())
    params = SamplingParams(n=2)
    scheduler.add(make_requests("group", [1, 2], params, 0)[0], 0.0)
    with pytest.raises(InvalidRequestError, match="group has another prompt"):
        scheduler.add(make_requests("group", [1, 3], params, 0)[1], 0.0)


def test_config_that_could_starve_is_refused() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"max_batched_tokens: is 3, less than max_num_seqs \(4\)"
    ):
        config(max_batched_tokens=3)
    with pytest.raises(InvalidRequestError, match="turn prefix_caching on"):
        config(num_host_blocks=4, prefix_caching=False)


def test_decodes_go_on_while_a_long_prompt_is_chunked() -> None:
    engine = Harness(config(max_batched_tokens=8))
    engine.add("short", [1, 2], max_tokens=12)
    engine.turn()
    engine.add("long", range(40), max_tokens=2)
    engine.turn(6)
    chunks = [
        entry.num_tokens
        for step in engine.steps
        for entry in step.scheduled
        if entry.request_id == "long"
    ]
    assert chunks == [7, 7, 7, 7, 7, 5]
    assert len(engine.tokens["short"]) == 7  # One token every step.
    engine.run()
    engine.check_answers()


def test_nobody_overtakes_a_waiting_request_that_has_no_room() -> None:
    engine = Harness(config(num_blocks=9, max_batched_tokens=64))
    engine.add("running", range(16), max_tokens=4)
    engine.turn()
    engine.add("big", range(30, 50), max_tokens=4)
    engine.add("small", [1], max_tokens=1)
    engine.turn()
    assert engine.requests["small"].first_scheduled is None
    engine.run()
    admitted = [admission.request_id for step in engine.steps for admission in step.admitted]
    assert admitted == ["running", "big", "small"]
    engine.check_answers()


def test_priorities_order_waiting_requests_and_can_change() -> None:
    engine = Harness(config(max_num_seqs=1, policy="priority"))
    for name, priority in (("a", 5), ("b", 1), ("c", 1), ("d", 9)):
        engine.add(name, [1], max_tokens=2, priority=priority)
    engine.scheduler.set_priority("d", 0)
    engine.run()
    admitted = [admission.request_id for step in engine.steps for admission in step.admitted]
    assert admitted == ["d", "b", "c", "a"]


def test_set_priority_is_refused_where_it_would_have_no_effect() -> None:
    engine = Harness()
    engine.add("a", [1])
    with pytest.raises(InvalidRequestError, match="policy 'priority' or 'fair'"):
        engine.scheduler.set_priority("a", 1)


def test_preemption_takes_the_least_important_and_it_returns_to_its_place() -> None:
    engine = Harness(config(num_blocks=7, policy="priority"))
    engine.add("low", range(8), max_tokens=12, priority=2)
    engine.add("high", range(20, 28), max_tokens=12, priority=1)
    engine.turn(2)
    engine.add("later", [9], max_tokens=2, priority=2)
    engine.run()
    preempted = [p.request_id for step in engine.steps for p in step.preempted]
    assert set(preempted) == {"low"}
    admitted = [a.request_id for step in engine.steps for a in step.admitted]
    assert admitted.index("later") > 2  # "low" came back first: it arrived before.
    engine.check_answers()


def test_a_step_that_preempted_admits_nobody() -> None:
    # Depth 2: whoever gave way has a token in flight, so it isn't ready, and "small" behind it
    # would fit.
    engine = Harness(config(num_blocks=7, max_num_seqs=2), depth=2)
    engine.add("first", range(8), max_tokens=12)
    engine.add("second", range(20, 28), max_tokens=12)
    engine.add("small", [1], max_tokens=1)
    engine.run()
    preempting = [step for step in engine.steps if step.preempted]
    assert preempting
    assert all(not step.admitted for step in preempting)
    engine.check_answers()


@pytest.mark.parametrize(("max_tokens", "admitted"), [(1, True), (2, False)])
def test_admission_keeps_room_for_the_first_new_token(max_tokens: int, admitted: bool) -> None:
    engine = Harness(config(num_blocks=5, max_model_len=16))
    engine.add("running", [40], max_tokens=4)
    engine.turn()
    # Its prompt fills the three free blocks: enough only if its one new token is never computed.
    engine.add("waiting", range(12), max_tokens=max_tokens)
    engine.turn()
    assert (engine.requests["waiting"].first_scheduled is not None) == admitted
    engine.run()
    engine.check_answers()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_early_stop_wastes_at_most_the_rows_in_flight(depth: int) -> None:
    engine = Harness(depth=depth, eos=range(20))
    engine.add("request", range(9), max_tokens=40)
    engine.run()
    engine.check_answers()
    assert engine.reason("request") == "stop"
    num_scheduled = sum(entry.samples for step in engine.steps for entry in step.scheduled)
    assert num_scheduled - len(engine.tokens["request"]) <= depth - 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_length_stops_are_predicted(depth: int) -> None:
    engine = Harness(depth=depth)
    engine.add("request", range(9), max_tokens=5)
    engine.run()
    assert sum(entry.samples for step in engine.steps for entry in step.scheduled) == 5


def test_min_tokens_keeps_stop_tokens_from_ending_the_answer() -> None:
    scheduler = Scheduler(config())
    (request,) = make_requests("a", [1, 2], SamplingParams(min_tokens=2, max_tokens=9), 0, [5])
    scheduler.add(request, 0.0)
    for token, ended in ((5, False), (5, False), (5, True)):
        step = scheduler.schedule(0.0)
        (update,) = scheduler.commit(step, StepResult(step.step_id, {"a": (token,)}), 0.0)
        assert (update.finish_reason == "stop") == ended
    assert request.stop_token_id == 5
    assert request.token_ids[request.num_prompt_tokens :] == [5, 5, 5]


def test_deadline_ends_waiting_and_running_requests() -> None:
    engine = Harness(config(max_num_seqs=1))
    engine.add("running", [1], max_tokens=40, deadline=3.5)
    engine.add("waiting", [2], max_tokens=40, deadline=2.5)
    engine.add("patient", [3], max_tokens=4)
    engine.run()
    assert {name: engine.reason(name) for name in engine.requests} == {
        "running": "deadline",
        "waiting": "deadline",
        "patient": "length",
    }
    assert len(engine.tokens["running"]) == 3
    assert engine.tokens["running"] == engine.solo("running")[0][:3]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("turns", [0, 1, 2, 4])
def test_abort_frees_everything_at_once(depth: int, turns: int) -> None:
    engine = Harness(config(max_batched_tokens=6), depth=depth)
    engine.add("gone", range(20), n=3)
    engine.add("stays", range(9))
    engine.turn(turns)
    engine.core.abort(["gone", "unknown"], engine.now)
    assert set(engine.scheduler.table.requests) == {"stays"}
    engine.run()
    assert [engine.reason(f"gone/{i}") for i in range(3)] == ["abort"] * 3
    engine.check_answers("stays")
    assert engine.scheduler.blocks.pool.num_free == 32


@pytest.mark.parametrize("depth", [1, 2])
def test_a_name_used_again_does_not_get_late_results_of_its_first_owner(depth: int) -> None:
    engine = Harness(depth=depth)
    engine.add("name", [1, 2, 3], max_tokens=30)
    engine.turn(4)
    engine.core.abort(["name"], engine.now)
    updates = engine.scheduler.take_updates()
    assert [update.finish_reason for update in updates] == ["abort"]
    engine.add("name", [7, 8, 9], max_tokens=5)
    engine.run()
    engine.check_answers()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_prompt", [1, 4, 5, 12, 15])
def test_several_answers_compute_the_prompt_once(
    num_prompt: int, caching: bool, depth: int
) -> None:
    engine = Harness(config(prefix_caching=caching), depth=depth)
    engine.add("group", range(num_prompt), n=4, max_tokens=6, seed=2**64 - 2)
    engine.run()
    engine.check_answers()
    assert [engine.requests[f"group/{i}"].seed for i in range(4)] == [2**64 - 2, 2**64 - 1, 0, 1]
    # The first one's prompt, the last prompt token again for each of the others (a last block that
    # is full is not copied: all of it again), and five more tokens each; without a prefix cache
    # everyone computes the prompt.
    again = (1 if num_prompt % 4 else 4) if caching else num_prompt
    assert engine.runner.num_computed_tokens == num_prompt + 3 * again + 4 * 5
    copies = [copy.kind for step in engine.steps for copy in step.copies]
    assert copies == (["device_to_device"] * 3 if caching and num_prompt % 4 > 1 else [])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_leader_aborted_in_mid_prompt_hands_over_to_a_sibling(depth: int) -> None:
    engine = Harness(config(max_batched_tokens=5), depth=depth)
    engine.add("group", range(22), n=3, max_tokens=6)
    engine.turn(2)
    assert engine.requests["group/0"].row is not None
    engine.core.abort(["group/0"], engine.now)
    engine.run()
    assert engine.reason("group/0") == "abort"
    engine.check_answers("group/1", "group/2")
    assert engine.requests["group/2"].cached_tokens == 21


def test_siblings_do_not_hold_up_others_while_the_leader_computes() -> None:
    engine = Harness(config(max_batched_tokens=8))
    engine.add("group", range(12), n=2)
    engine.add("other", [1])
    engine.turn(2)
    assert [a.request_id for step in engine.steps for a in step.admitted] == ["group/0", "other"]
    engine.run()
    engine.check_answers()


@pytest.mark.parametrize("host_blocks", [0, 6])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preempting_everyone_again_and_again_changes_no_answer(
    depth: int, host_blocks: int
) -> None:
    engine = Harness(config(num_host_blocks=host_blocks), depth=depth)
    engine.add("a", range(13), max_tokens=12)
    engine.add("b", range(9), max_tokens=12, n=2)
    turns = 0
    while engine.core.has_work:
        turns += 1
        if turns % (depth + 2) == 0 and turns < 60:
            for name in list(engine.scheduler.table.requests):
                engine.scheduler.preempt(name)
        engine.turn()
    engine.check_answers()
    kinds = {p.kind for step in engine.steps for p in step.preempted}
    assert kinds >= ({"swap"} if host_blocks else {"recompute"})


def test_a_swapped_request_resumes_from_the_host_tier() -> None:
    engine = Harness(config(num_blocks=7, num_host_blocks=8))
    engine.add("first", range(8), max_tokens=12)
    engine.add("second", range(20, 28), max_tokens=12)
    while not (preempted := [one for step in engine.steps for one in step.preempted]):
        engine.turn()
    assert [(one.request_id, one.kind) for one in preempted] == [("second", "swap")]
    engine.run()
    engine.check_answers()
    assert engine.requests["second"].host_tokens >= 8
    assert engine.requests["second"].recomputed_tokens < 8


def test_results_out_of_order_are_refused() -> None:
    scheduler = Scheduler(config())
    for request in make_requests("a", [1, 2], SamplingParams(), 0):
        scheduler.add(request, 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    with pytest.raises(EngineError, match="expected step 0, got step 1"):
        scheduler.commit(second, StepResult(1, {"a": (1,)}), 0.0)
    scheduler.commit(first, StepResult(0, {"a": (1,)}), 0.0)
    with pytest.raises(EngineError, match="result of step 0"):
        scheduler.commit(second, StepResult(0, {"a": (1,)}), 0.0)


@pytest.mark.parametrize("tokens", [(), (1, 2)])
def test_a_runner_that_returns_too_few_or_too_many_tokens_fails_that_request_alone(
    tokens: tuple[int, ...],
) -> None:
    scheduler = Scheduler(config())
    for name in ("a", "b"):
        for request in make_requests(name, [1, 2], SamplingParams(), 0):
            scheduler.add(request, 0.0)
    step = scheduler.schedule(0.0)
    updates = scheduler.commit(step, StepResult(0, {"a": tokens, "b": (3,)}), 0.0)
    assert [(update.request_id, update.finish_reason) for update in updates] == [
        ("a", "error"),
        ("b", None),
    ]
    assert updates[0].error == f"the runner returned {len(tokens)} tokens instead of one"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("prompts", "counts"),
    [
        ([15], [15]),
        ([16], [15]),
        ([23], [15]),
        ([24], [24]),  # with the decode more than half as much again: quicker at once
        ([10, 12], [10, 5]),
        ([20, 2, 1], [13, 1, 1]),  # nobody who is admitted goes without a token
    ],
)
def test_a_step_a_little_larger_than_a_graph_is_cut_to_it(
    prompts: list[int], counts: list[int], depth: int
) -> None:
    engine = Harness(config(max_checked_tokens=16, num_blocks=60), depth)
    engine.add("decodes", [9], max_tokens=30)
    engine.turn(2)
    for number, length in enumerate(prompts):
        engine.add(f"r{number}", range(number, number + length))
    engine.run()
    engine.check_answers()
    (step,) = (
        step for step in engine.steps if any(one.request_id == "r0" for one in step.admitted)
    )
    assert [entry.num_tokens for entry in step.scheduled] == [1, *counts]
