"""Explanations from steps alone: their parts add up to what the engine measured, whatever happened
on the way.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.engine import EngineCore, Scheduler, SchedulerConfig, make_requests
from quire.observe.step_log import StepLog, read_step_log
from quire.sampling_params import SamplingParams
from quire.step import RequestMetrics, StepLogEntry
from quire.tools.explain.explain import PARTS, explain_request, request_names
from quire.tools.explain.text import explanation_svg, explanation_text
from quire.tools.simulate.fake_runner import FakeRunner
from tests.engine.timed_engine import TimedEngine
from tests.long_runs import short_or_long

CONFIG = SchedulerConfig(
    num_blocks=40, max_num_seqs=6, max_batched_tokens=24, max_model_len=96, block_size=4
)


class Clock:
    """Every result takes a while, by chance."""

    def __init__(self, source: random.Random) -> None:
        self.now = 100.0
        self._source = source

    def __call__(self) -> float:
        self.now += self._source.uniform(0.001, 0.05)
        return self.now


def load(
    seed: int, count: int, config: SchedulerConfig, depth: int, log: StepLog
) -> dict[str, RequestMetrics]:
    """Requests that come at random, share prompts, are aborted and preempted; what the engine
    measured of each.
    """
    source = random.Random(seed)
    clock = Clock(source)
    core = EngineCore(
        Scheduler(config), FakeRunner(config, vocab_size=50), depth, log.append, clock
    )
    shared = [source.randrange(50) for _ in range(40)]
    measured: dict[str, RequestMetrics] = {}
    added = 0
    while added < count or core.has_work:
        while added < count and source.random() < 0.4:
            prompt = shared[: source.choice((0, 8, 20))] + [
                source.randrange(50) for _ in range(source.randint(1, 40))
            ]
            params = SamplingParams(max_tokens=source.randint(1, 30), n=source.choice((1, 1, 1, 2)))
            for request in make_requests(f"r{added}", prompt, params, seed + added):
                core.add_request(request, clock.now)
            added += 1
        clock.now += source.choice((0.0, 0.0005))
        if source.random() < 0.02 and core.scheduler.table.requests:
            core.abort([source.choice(list(core.scheduler.table.requests))], clock.now)
        for update in core.step(clock.now):
            if update.metrics is not None:
                measured[update.request_id] = update.metrics
        clock.now += source.choice((0.0, 0.0005))
    return measured


def check(
    entries: list[StepLogEntry], measured: dict[str, RequestMetrics], config: SchedulerConfig | None
) -> None:
    for name, metrics in measured.items():
        explanation = explain_request(entries, name, config)
        assert explanation is not None, name
        answer = next(one for one in explanation["answers"] if one["name"] == name)
        total = metrics.finished - metrics.arrival
        assert abs(sum(answer["parts"].values()) - total) < 1e-6, name
        assert abs(answer["total_seconds"] - total) < 1e-6
        assert answer["output_tokens"] == metrics.num_output_tokens
        # what came after an end was dropped
        assert answer["tokens_so_far"] >= metrics.num_output_tokens
        assert len(answer["preemptions"]) == metrics.preemptions
        assert answer["recomputed_tokens"] == metrics.recomputed_tokens
        assert sum(one["cached_tokens"] for one in answer["admissions"]) == metrics.cached_tokens
        assert sum(one["host_tokens"] for one in answer["admissions"]) == metrics.host_tokens
        for one in answer["admissions"]:
            assert sum(one["computed_by"].values()) == one["cached_tokens"] + one["host_tokens"]
        waits = sum(wait["seconds"] for wait in answer["waited_for"].values())
        waiting = answer["parts"]["queue"] + answer["parts"]["preempted"]
        assert waits <= waiting + 1e-6
        if metrics.first_token is not None:
            assert (
                abs(answer["first_token_seconds"] - (metrics.first_token - metrics.arrival)) < 1e-6
            )
        if metrics.queue_time is not None:
            assert abs(answer["parts"]["queue"] - metrics.queue_time) < 1e-6
        ends = [segment["end"] for segment in answer["segments"]]
        starts = [segment["start"] for segment in answer["segments"]]
        assert starts[1:] == ends[:-1]  # no moment is missing and none counts twice


@pytest.mark.few(2)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_host_blocks", [0, 30])
def test_parts_add_up_to_what_was_measured(depth: int, num_host_blocks: int) -> None:
    config = SchedulerConfig(
        num_blocks=40, max_num_seqs=6, max_batched_tokens=24, max_model_len=96, block_size=4,
        num_host_blocks=num_host_blocks,
    )  # fmt: skip
    log = StepLog(capacity=10**6)
    measured = load(depth, short_or_long(60, 1000), config, depth, log)
    assert sum(metrics.preemptions for metrics in measured.values()) > 10
    assert sum(metrics.cached_tokens for metrics in measured.values()) > 50
    check(list(log), measured, config)


def test_a_file_tells_as_much(tmp_path: Path) -> None:
    log = StepLog(capacity=10**6, path=tmp_path / "steps.jsonl")
    measured = load(5, 25, CONFIG, 1, log)
    log.close()
    entries = read_step_log(tmp_path / "steps.jsonl")
    check(entries, measured, None)
    assert set(request_names(entries)) <= measured.keys()
    for name in request_names(entries):
        assert explain_request(entries, name) == explain_request(list(log), name)


def run_three(log: StepLog) -> None:
    """`a` fills the steps, `b` waits for a row, `c` finds what `a` computed."""
    config = SchedulerConfig(
        num_blocks=40, max_num_seqs=1, max_batched_tokens=8, max_model_len=64, block_size=4
    )
    clock = Clock(random.Random(0))
    core = EngineCore(Scheduler(config), FakeRunner(config, vocab_size=50), 1, log.append, clock)
    for name, length in (("a", 20), ("b", 3), ("c", 21)):
        prompt = range(length) if name != "b" else range(40, 40 + length)
        for request in make_requests(name, prompt, SamplingParams(max_tokens=3), 0):
            core.add_request(request, clock.now)
    while core.has_work:
        core.step(clock.now)


def test_answers_are_those_of_the_name_and_of_no_name_that_only_begins_with_it() -> None:
    config = SchedulerConfig(
        num_blocks=40, max_num_seqs=2, max_batched_tokens=8, max_model_len=64, block_size=4
    )
    log = StepLog()
    clock = Clock(random.Random(0))
    core = EngineCore(Scheduler(config), FakeRunner(config, vocab_size=50), 1, log.append, clock)
    for name, length, count in (("a", 20, 1), ("b", 6, 2), ("ab", 5, 1)):
        for request in make_requests(name, range(length), SamplingParams(max_tokens=4, n=count), 0):
            core.add_request(request, clock.now)
    while core.has_work:
        core.step(clock.now)
    entries = list(log)
    explanations = {name: explain_request(entries, name, config) for name in ("a", "b", "ab", "c")}
    answers = {name: one["answers"] for name, one in explanations.items() if one is not None}
    assert {name: [one["name"] for one in found] for name, found in answers.items()} == {
        "a": ["a"],
        "b": ["b/0", "b/1"],
        "ab": ["ab"],
    }
    (first,), (late,) = answers["a"], answers["ab"]
    assert first["prompt_tokens"] == 20
    assert first["computed_tokens"] == 20 + 3  # the last of four tokens is never computed
    assert first["first_token_seconds"] is not None
    assert first["finish_reason"] == "length"
    assert first["shared_steps_with"]
    # one whole block of its six tokens
    assert answers["b"][1]["admissions"][0]["cached_tokens"] == 4
    assert late["parts"]["queue"] > first["parts"]["queue"]
    assert late["waited_for"]["a row: all were taken"]["steps"] > 0


def test_it_says_who_was_waited_for_and_who_had_computed_what() -> None:
    log = StepLog()
    run_three(log)
    entries = list(log)
    first, second, third = (explain_request(entries, name) for name in "abc")
    assert first is not None
    assert second is not None
    assert third is not None
    (answer,) = first["answers"]
    assert [(chunk["start"], chunk["tokens"]) for chunk in answer["chunks"]] == [
        (0, 8),
        (8, 8),
        (16, 4),
    ]
    assert answer["parts"]["queue"] == 0
    (answer,) = second["answers"]
    (wait,) = answer["waited_for"].values()
    assert wait["because_of"] == ["a"]
    assert wait["steps"] == 5
    assert abs(wait["seconds"] - answer["parts"]["queue"]) < 1e-9
    (answer,) = third["answers"]
    assert answer["admissions"][0]["computed_by"] == {"a": 20}
    text = explanation_text(third)
    assert "20 of its tokens were cached, computed 20 by a." in text
    assert "s after the first step of the log." in text
    assert "for a row: all were taken (a, b)" in text
    assert "It ended with 'length'" in text
    assert explain_request(entries, "d") is None


def test_words_and_picture_of_everything_that_happens() -> None:
    log = StepLog(capacity=10**6)
    measured = load(2, 30, CONFIG, 2, log)
    entries = list(log)
    name = max(measured, key=lambda one: measured[one].preemptions)
    explanation = explain_request(entries, name.split("/")[0], CONFIG)
    assert explanation is not None
    for one in sorted(measured)[::3]:  # what a server does, which looks at no more than it must
        near, before = log.about(one)
        told, whole = (
            explain_request(near, one, CONFIG, before),
            explain_request(entries, one, CONFIG),
        )
        assert told is not None
        assert whole is not None
        assert [answer["admissions"] for answer in told["answers"]] == [
            answer["admissions"] for answer in whole["answers"]
        ]
    json.dumps(explanation)  # plain values only
    text = explanation_text(explanation)
    assert "it was preempted" in text
    assert "needed a block and none was free" in text
    picture = ElementTree.fromstring(explanation_svg(explanation))
    bars = picture.findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(bars) > len(PARTS)


def test_names_are_escaped_in_the_picture() -> None:
    log = StepLog()
    config = SchedulerConfig(
        num_blocks=40, max_num_seqs=1, max_batched_tokens=8, max_model_len=64, block_size=4
    )
    core = EngineCore(Scheduler(config), FakeRunner(config, vocab_size=50), 1, log.append)
    (request,) = make_requests("<script>&", range(3), SamplingParams(max_tokens=2), 0)
    core.add_request(request, 0.0)
    for now in range(1, 6):
        core.step(float(now))
    explanation = explain_request(list(log), "<script>&")
    assert explanation is not None
    svg = explanation_svg(explanation)
    assert "<script>" not in svg
    ElementTree.fromstring(svg)


def test_a_request_that_never_ran_waited_all_the_time() -> None:
    log = StepLog()
    config = SchedulerConfig(
        num_blocks=40, max_num_seqs=1, max_batched_tokens=8, max_model_len=64, block_size=4
    )
    clock = Clock(random.Random(1))
    core = EngineCore(Scheduler(config), FakeRunner(config, vocab_size=50), 1, log.append, clock)
    for name in "ab":
        (request,) = make_requests(name, range(5), SamplingParams(max_tokens=6), 0)
        core.add_request(request, clock.now)
    core.step(clock.now)
    core.abort(["b"], clock.now)
    while core.has_work:
        core.step(clock.now)
    explanation = explain_request(list(log), "b")
    assert explanation is not None
    (answer,) = explanation["answers"]
    assert answer["parts"]["queue"] == pytest.approx(answer["total_seconds"])
    assert answer["finish_reason"] == "abort"


@pytest.mark.parametrize("target", [None, 0.02])
def test_it_says_whose_prompts_tokens_came_later_for(target: float | None) -> None:
    """A step takes 10 ms and 0.1 ms a token, but for what is cheaper still: the keys it reads."""
    engine = TimedEngine(lambda step: 0.01 + 1e-4 * step.num_tokens, target_token_time=target)
    engine.at(0.0, "answered", [1, 2, 3], max_tokens=100, ignore_eos=True)
    engine.at(0.5, "long", list(range(50)) * 12, max_tokens=1)
    engine.at(0.5, "short", [4, 5, 6, 7], max_tokens=1)
    engine.run()
    told = explain_request(engine.entries, "answered")
    assert told is not None
    (answer,) = told["answers"]
    later = answer["later_for"]
    assert list(later) == ["long", "short"]
    # the pipe holds two steps, so the clock of one begins within the one before
    assert later["long"]["seconds"] == pytest.approx(600e-4, rel=0.3)
    assert later["short"]["seconds"] < 0.1 * later["long"]["seconds"]
    assert later["short"]["steps"] == 1
    assert (later["long"]["steps"] > 3) == (target is not None)
    text = explanation_text(told)
    assert re.search(
        r"came \d+\.\d ms later in all for the prompts of long \(\d+\.\d ms\), short", text
    )
    alone = explain_request(engine.entries, "long")
    assert alone is not None
    assert alone["answers"][0]["later_for"] == {}
    assert "later in all" not in explanation_text(alone)


def test_it_says_which_target_was_not_kept() -> None:
    engine = TimedEngine(target_token_time=0.001)
    engine.at(0.0, "answered", [1, 2, 3], max_tokens=30, ignore_eos=True)
    engine.at(0.1, "other", list(range(40)), max_tokens=1)
    engine.run()
    told = explain_request(engine.entries, "answered")
    assert told is not None
    assert set(told["answers"][0]["gave_way"]) == {"first_token"}
    assert "of its steps target_first_token could not be kept." in explanation_text(told)
