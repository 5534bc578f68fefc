"""Requests of more adapters than there is room for: they wait, and nobody else does."""

from __future__ import annotations

from quire.engine import Scheduler, SchedulerConfig, make_requests
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.step import Step, StepResult


def scheduler(max_loras: int = 2, max_num_seqs: int = 4) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_blocks=200,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=64,
            max_model_len=128,
            max_loras=max_loras,
        )
    )


def add(engine: Scheduler, name: str, adapter: str, max_tokens: int = 4) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    resolved = ResolvedTokens(adapter=adapter)
    for request in make_requests(name, [1, 2, 3], params, 0, resolved=resolved):
        engine.add(request, 0.0)


def step(engine: Scheduler) -> Step:
    made = engine.schedule(0.0)
    tokens = {entry.request_id: (7,) for entry in made.scheduled if entry.samples}
    engine.commit(made, StepResult(made.step_id, tokens), 0.0)
    return made


def admitted(made: Step) -> list[str]:
    return [one.request_id for one in made.admitted]


def test_a_request_waits_for_room_for_its_adapter_and_holds_up_nobody() -> None:
    engine = scheduler()
    for name, adapter in (("a", "A"), ("b", "B"), ("c", "C"), ("a2", "A"), ("plain", "")):
        add(engine, name, adapter)
    # there is room for two adapters, and for four requests
    assert admitted(step(engine)) == ["a", "b", "a2", "plain"]
    for _ in range(3):
        step(engine)
    assert admitted(step(engine)) == ["c"]


def test_a_request_that_waits_for_its_adapter_is_not_passed_for_ever() -> None:
    engine = scheduler(max_loras=1)
    add(engine, "a0", "A")
    add(engine, "b", "B")
    began = None
    for number in range(1, 60):
        add(engine, f"a{number}", "A")
        if "b" in admitted(step(engine)):
            began = number
            break
    assert began is not None
    assert began < 20


def test_a_preempted_request_gives_up_the_room_of_its_adapter() -> None:
    engine = scheduler(max_loras=1)
    add(engine, "a", "A", max_tokens=20)
    add(engine, "b", "B")
    assert admitted(step(engine)) == ["a"]
    assert admitted(step(engine)) == []
    engine.preempt("a")
    made = step(engine)
    assert [one.request_id for one in made.preempted] == ["a"]
    assert len(admitted(made)) == 1
    while engine.has_work:
        step(engine)
    assert not engine.table.adapters


def test_blocks_of_different_adapters_have_different_names() -> None:
    engine = scheduler(max_loras=4)
    params = SamplingParams(max_tokens=2, temperature=0)
    cached = {}
    for name, adapter in (("a", "A"), ("b", "B"), ("plain", ""), ("a again", "A")):
        resolved = ResolvedTokens(adapter=adapter)
        (request,) = make_requests(name, list(range(40)), params, 0, resolved=resolved)
        engine.add(request, 0.0)
        while engine.has_work:
            step(engine)
        cached[name] = request.cached_tokens
    assert cached == {"a": 0, "b": 0, "plain": 0, "a again": 32}
