"""Requests of more adapters than there is room for: they wait, and nobody else does."""

from __future__ import annotations

from quire.engine import Scheduler, SchedulerConfig, make_requests
from quire.observe.packed_entry import pack, unpack
from quire.observe.prometheus import ServerMetrics
from quire.observe.step_lines import LineReader, LineWriter
from quire.observe.step_log import summarize
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.step import Step, StepAdapters, StepLogEntry, StepResult
from quire.tools.explain.explain import explain_request
from quire.tools.explain.text import explanation_text


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
    resolved = ResolvedTokens(adapter=adapter, adapter_name=adapter.lower())
    for request in make_requests(name, [1, 2, 3], params, 0, resolved=resolved):
        engine.add(request, 0.0)


def step(engine: Scheduler) -> Step:
    made = engine.schedule(0.0)
    tokens = {entry.request_id: (7,) for entry in made.scheduled if entry.samples}
    engine.commit(made, StepResult(made.step_id, tokens), 0.0)
    return made


def logged(engine: Scheduler) -> list[StepLogEntry]:
    """All steps, of a second each, with their results."""
    found: list[StepLogEntry] = []
    while not (made := engine.schedule(number := float(len(found)))).is_empty:
        tokens = {entry.request_id: (7,) for entry in made.scheduled if entry.samples}
        result = StepResult(made.step_id, tokens)
        engine.commit(made, result, number + 1.0)
        found.append(StepLogEntry(made, result, None, number + 1.0))
    return found


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
        resolved = ResolvedTokens(adapter=adapter, adapter_name=adapter.lower())
        (request,) = make_requests(name, list(range(40)), params, 0, resolved=resolved)
        engine.add(request, 0.0)
        while engine.has_work:
            step(engine)
        cached[name] = request.cached_tokens
    assert cached == {"a": 0, "b": 0, "plain": 0, "a again": 32}


def test_steps_say_who_has_and_who_waits_for_adapters() -> None:
    engine = scheduler()
    for name, adapter in (("a", "A"), ("b", "B"), ("c", "C"), ("c2", "C"), ("plain", "")):
        add(engine, name, adapter)
    first, *_, last = logged(engine)
    assert first.step.adapters == StepAdapters(("a", "b"), ("c",), 2)
    assert last.step.adapters is None
    assert unpack(pack(first)) == first
    line = LineWriter().encode(first)
    assert LineReader().decode(line) == first
    assert "adapters" not in LineWriter().encode(last)


def test_metrics_say_who_has_and_who_waits_for_adapters() -> None:
    engine = scheduler()
    for name, adapter in (("a", "A"), ("b", "B"), ("c", "C"), ("c2", "C")):
        add(engine, name, adapter)
    first, *_, last = [summarize(entry) for entry in logged(engine)]
    metrics = ServerMetrics("m")
    metrics.steps([first], 100)
    text = metrics.text().decode()
    info = next(line for line in text.splitlines() if line.startswith("vllm:lora_requests_info"))
    assert 'running_lora_adapters="a,b"' in info
    assert 'waiting_lora_adapters="c"' in info
    assert 'reason="adapter"} 2.0' in text
    metrics.steps([last], 100)
    text = metrics.text().decode()
    assert "vllm:lora_requests_info{" not in text
    assert 'reason="adapter"} 0.0' in text


def test_an_explanation_says_that_a_request_waited_for_its_adapter() -> None:
    engine = scheduler(max_loras=1)
    add(engine, "a", "A")
    add(engine, "b", "B")
    found = explanation_text(explain_request(logged(engine), "b"))
    assert "room for its adapter" in found
    assert "The adapter b answered it." in found


def test_an_adapter_has_its_room_until_the_last_of_its_requests_ends() -> None:
    engine = scheduler(max_loras=1)
    add(engine, "short", "A", max_tokens=2)
    add(engine, "long", "A", max_tokens=8)
    add(engine, "other", "B")
    while engine.has_work:
        made = step(engine)
        running = {one.adapter for one in engine.table.running}
        assert len(running) <= 1
        if "other" in admitted(made):
            assert "long" not in engine.table.requests
    assert not engine.table.adapters


def test_a_preempted_request_leaves_the_room_to_others_of_its_adapter() -> None:
    engine = scheduler(max_loras=1)
    add(engine, "first", "A", max_tokens=20)
    add(engine, "second", "A", max_tokens=20)
    add(engine, "other", "B")
    assert admitted(step(engine)) == ["first", "second"]
    engine.preempt("second")
    for _ in range(3):
        made = step(engine)
        assert "other" not in admitted(made)
        assert engine.table.adapters["A"] >= 1
