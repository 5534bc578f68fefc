"""Promises of time: prompts in pieces so small that whoever is being answered gets tokens in time,
with the same answers.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from quire.engine import token_times
from quire.engine.token_times import AIM, LEAST_PROMPT_TOKENS, TokenTimes, work_of
from quire.errors import InvalidRequestError
from quire.observe.packed_entry import pack, unpack
from quire.observe.step_lines import LineReader, LineWriter
from quire.step import ScheduledRequest, Step, StepPromise
from tests.engine.harness import config
from tests.engine.timed_engine import TimedEngine, usual_time

TARGET = 0.03


def with_load(engine: TimedEngine, seconds: float = 6.0) -> TimedEngine:
    """Short requests, and one of ten with a prompt of 900 tokens."""
    rng = random.Random(7)
    time, number = 0.0, 0
    while time < seconds:
        length = 900 if number % 10 == 5 else rng.randint(5, 60)
        prompt = [rng.randrange(50) for _ in range(length)]
        engine.at(time, f"r{number}", prompt, max_tokens=rng.randint(8, 40), ignore_eos=True)
        time, number = time + rng.expovariate(9.0), number + 1
    engine.run()
    return engine


def percentile(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]


def test_tokens_come_in_time_and_answers_are_the_same() -> None:
    promised = with_load(TimedEngine(target_token_time=TARGET))
    plain = with_load(TimedEngine())
    promised.check_answers()
    assert promised.tokens == plain.tokens
    assert percentile(promised.gaps(), 0.99) <= 1.25 * TARGET
    assert percentile(plain.gaps(), 0.99) > 2 * TARGET
    assert promised.now <= plain.now / 0.93


def test_more_is_left_free_where_times_are_uncertain(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(noise: float) -> tuple[float, float]:
        rng = random.Random(11)
        engine = TimedEngine(
            lambda step: usual_time(step) * rng.lognormvariate(0, noise), target_token_time=TARGET
        )
        with_load(engine, 12.0)
        engine.check_answers()
        assert engine.scheduler.step_times is not None
        return percentile(engine.gaps(), 0.99) / TARGET, engine.scheduler.step_times.aim

    steady, aim = late(0.02)
    assert steady <= 1
    assert aim == AIM
    uncertain, aim = late(0.2)
    assert uncertain <= 1.13
    assert 0.6 <= aim < 0.85
    monkeypatch.setattr(token_times, "_LEAST_AIM", AIM)
    assert late(0.2)[0] > 1.2


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_steps_that_become_slower_are_learnt(seed: int) -> None:
    """Times vary by a factor of 5 in one of ten steps; from the middle on all take twice as long.
    From the 50th step on after each change the estimates are within 15%: of fifty steps together
    always, of a single one nearly always.
    """
    rng = random.Random(seed)
    times = TokenTimes(config(target_token_time=TARGET))
    now, wrong = 0.0, 0
    sums = [0.0, 0.0]
    for number in range(200):
        decodes = [
            ScheduledRequest(f"r{row}", row, rng.randint(10, 900), 1, True, ())
            for row in range(rng.randint(1, 64))
        ]
        chunk = ScheduledRequest("p", 64, rng.randint(0, 500), rng.randint(1, 256), False, ())
        step = Step(number, now, scheduled=(*decodes, chunk))
        seconds = (2.0 if number >= 100 else 1.0) * usual_time(step)
        if number % 100 >= 50:
            found = times.seconds(*work_of(step))
            sums = [sums[0] + found, sums[1] + seconds]
            wrong += abs(found / seconds - 1) > 0.15
        if number % 100 == 99:
            assert sums[0] == pytest.approx(sums[1], rel=0.1)
            sums = [0.0, 0.0]
        now += seconds * (5 ** rng.uniform(-1, 1) if rng.random() < 0.1 else rng.uniform(0.9, 1.1))
        times.observe(step, now)
    assert wrong <= 10
    exact = TokenTimes(config(target_token_time=TARGET))
    now = 0.0
    for number in range(150):
        scheduled = (
            ScheduledRequest("d", 0, rng.randint(10, 900), 1, True, ()),
            ScheduledRequest("p", 1, rng.randint(0, 500), rng.randint(1, 256), False, ()),
        )
        step = Step(number, now, scheduled=scheduled)
        now += (2.0 if number >= 100 else 1.0) * usual_time(step)
        exact.observe(step, now)
    found = exact.seconds(*work_of(step))
    assert found == pytest.approx(2 * usual_time(step), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_pairs_that_hardly_differ_teach_nothing_about_many(seed: int) -> None:
    """Short contexts only, times that vary; then the first part of a long prompt."""
    rng = random.Random(seed)
    times = TokenTimes(config(target_token_time=TARGET))
    now = 0.0
    for number in range(60):
        count = rng.randint(1, 16)
        chunk = ScheduledRequest("p", 1, 0, count, False, ())
        decode = ScheduledRequest("d", 0, rng.randint(10, 40), 1, True, ())
        step = Step(number, now, scheduled=(decode, chunk), num_decodes=1)
        disturbed = 3.0 if number in (52, 54) else 1.0
        now += usual_time(step) * rng.uniform(0.95, 1.05) * disturbed
        times.observe(step, now)
    long = Step(60, now, (ScheduledRequest("q", 1, 100, 16, False, ()),))
    assert times.seconds(*work_of(long)) == pytest.approx(usual_time(long), rel=0.2)


def test_large_steps_are_estimated_by_small_ones() -> None:
    """Steps of few tokens only, one in ten disturbed; then the first large ones."""
    rng = random.Random(3)
    times = TokenTimes(config(target_token_time=TARGET))
    now = 0.0
    for number in range(100):
        decode = ScheduledRequest("d", 0, rng.randint(10, 40), 1, True, ())
        chunk = ScheduledRequest("p", 1, 0, rng.randint(1, 30), False, ())
        step = Step(number, now, (decode, chunk), num_decodes=1)
        disturbed = 5 ** rng.uniform(-1, 1) if rng.random() < 0.1 else rng.uniform(0.95, 1.05)
        now += usual_time(step) * disturbed
        times.observe(step, now)
    large = Step(100, now, (ScheduledRequest("q", 1, 0, 200, False, ()),))
    assert times.seconds(*work_of(large)) == pytest.approx(usual_time(large), rel=0.15)


@pytest.mark.parametrize("disturbed", [1.0, 1.6])
def test_small_steps_after_many_alike_are_learnt_from_at_once(disturbed: float) -> None:
    """Sixty full steps, then three small ones, of which the first may be disturbed."""
    rng = random.Random(9)
    times = TokenTimes(config(target_token_time=TARGET))
    now = 0.0

    def small(tokens: int) -> Step:
        return Step(0, now, (ScheduledRequest("p", 0, 0, tokens, False, ()),))

    for tokens in [200] * 60 + [40, 30, 20]:
        step = small(tokens)
        factor = disturbed if tokens == 40 else 1.0
        now += usual_time(step) * rng.uniform(0.97, 1.03) * factor
        times.observe(step, now)
    assert times.seconds(*work_of(small(35))) == pytest.approx(usual_time(small(35)), rel=0.2)


def test_a_first_step_that_took_a_minute_is_forgotten() -> None:
    times = TokenTimes(config(target_token_time=TARGET))
    rng = random.Random(8)
    now = 0.0
    for number in range(12):
        chunk = ScheduledRequest("p", 0, 0, rng.randint(1, 60), False, ())
        step = Step(number, now, (chunk,))
        now += usual_time(step) * rng.uniform(0.95, 1.05) if number else 60.0
        times.observe(step, now)
    assert times.seconds(*work_of(step)) == pytest.approx(usual_time(step), rel=0.15)


@pytest.mark.parametrize("factor", [2.0, 1.2, 0.5, 0.2])
def test_a_change_is_noticed_where_estimates_were_good(factor: float) -> None:
    """Not every step is looked at then."""
    rng = random.Random(5)
    times = TokenTimes(config(target_token_time=TARGET))
    now = 0.0
    for number in range(350):
        decodes = tuple(
            ScheduledRequest(f"r{row}", row, 100 + number, 1, True, ()) for row in range(8)
        )
        step = Step(number, now, decodes, num_decodes=8)
        now += usual_time(step) * rng.uniform(0.99, 1.01) * (factor if number >= 300 else 1.0)
        times.observe(step, now)
    assert times.seconds(*work_of(step)) == pytest.approx(factor * usual_time(step), rel=0.05)


@pytest.mark.parametrize("per_pair", [0.0, 2e-8, 2e-6])
def test_a_promise_stands_while_a_new_one_would_be_as_long(per_pair: float) -> None:
    """A long prompt beside an answer: what a step is said to take is what its tokens and pairs
    take by what is known then.
    """
    engine = TimedEngine(
        lambda step: 0.01 + 0.0002 * step.num_tokens + per_pair * work_of(step)[1],
        target_token_time=TARGET,
    )
    engine.at(0.0, "answered", [1, 2, 3], max_tokens=300, ignore_eos=True)
    engine.at(0.5, "long", list(range(50)) * 18, max_tokens=4, ignore_eos=True)
    engine.at(1.5, "again", list(range(1, 51)) * 18, max_tokens=4, ignore_eos=True)
    times = engine.scheduler.step_times
    assert times is not None
    made: list[StepPromise] = []
    repeated = 0
    schedule = engine.scheduler.schedule

    def checked(now: float, held: frozenset[int] = frozenset()) -> Step:
        nonlocal repeated
        step = schedule(now, held)
        if step.promise is not None and step.num_decodes and len(step.scheduled) == 2:
            answered, chunk = step.scheduled
            allowed, seconds, _ = step.promise
            pairs = answered.start + allowed * (chunk.start + allowed / 2)
            assert seconds == pytest.approx(times.seconds(1 + allowed, pairs), rel=0.011)
            repeated += bool(made) and step.promise is made[-1]
            made.append(step.promise)
        return step

    engine.scheduler.schedule = checked  # type: ignore[method-assign]
    engine.run()
    engine.check_answers()
    assert len(made) > 10
    assert repeated > 0 or per_pair == 2e-6


def test_the_first_prompt_gets_half_and_short_ones_pass_it() -> None:
    engine = TimedEngine(target_token_time=TARGET)
    engine.at(0.0, "answered", [1, 2, 3], max_tokens=200, ignore_eos=True)
    engine.at(0.5, "long", list(range(50)) * 18, max_tokens=4, ignore_eos=True)
    engine.at(0.51, "short", [4, 5, 6], max_tokens=4, ignore_eos=True)
    engine.run()
    engine.check_answers()
    assert engine.token_times["short"][0] < engine.token_times["long"][0]
    for step in engine.steps:
        entries = {entry.request_id: entry for entry in step.scheduled}
        if step.promise is not None and "long" in entries and not entries["long"].samples:
            assert entries["long"].num_tokens >= (step.promise.prompt_tokens + 1) // 2


def test_a_target_that_decodes_alone_miss_still_lets_prompts_on() -> None:
    engine = TimedEngine(target_token_time=0.001)
    engine.at(0.0, "answered", [1, 2, 3], max_tokens=300, ignore_eos=True)
    engine.at(0.5, "long", list(range(50)) * 10, max_tokens=2, ignore_eos=True)
    engine.run()
    engine.check_answers()
    promises = [step.promise for step in engine.steps if step.promise is not None]
    assert min(one.prompt_tokens for one in promises) == LEAST_PROMPT_TOKENS
    assert {one.gave_way for one in promises[2:]} == {"first_token"}
    assert engine.first_token_time("long") < 500 / LEAST_PROMPT_TOKENS * 0.02


def test_where_little_time_is_left_prompts_get_no_more_than_fits() -> None:
    """As on a CPU: tokens cost so much that beside decodes there is room for ten of a prompt."""
    engine = TimedEngine(lambda step: 0.004 + 0.002 * step.num_tokens, target_token_time=TARGET)
    with_load(engine)
    engine.check_answers()
    assert percentile(engine.gaps(), 0.99) <= TARGET
    few = [step.promise for step in engine.steps[50:] if step.num_decodes and step.promise]
    assert len(few) > 100
    for promise in few:
        assert LEAST_PROMPT_TOKENS <= promise.prompt_tokens < 12
        assert promise.gave_way is None or promise.prompt_tokens == LEAST_PROMPT_TOKENS


@pytest.mark.parametrize("gives_way", ["first_token", "token_time"])
def test_which_target_gives_way_is_a_setting(gives_way: str) -> None:
    settings: dict[str, Any] = {"target_token_time": 0.013, "target_first_token": 0.15}
    engine = TimedEngine(**settings, gives_way=gives_way)
    engine.at(0.0, "answered", [1, 2, 3], max_tokens=200, ignore_eos=True)
    engine.at(0.5, "long", list(range(50)) * 16, max_tokens=2, ignore_eos=True)
    engine.run()
    ways = {step.promise.gave_way for step in engine.steps if step.promise is not None}
    assert ways >= {gives_way}
    late = engine.first_token_time("long") > 0.25
    slow = percentile(engine.gaps("answered"), 0.999) > 2 * 0.013
    assert (late, slow) == ((True, False) if gives_way == "first_token" else (False, True))


def test_without_a_target_or_a_prompt_nothing_is_promised() -> None:
    assert all(step.promise is None for step in with_load(TimedEngine(), 1.0).steps)
    alone = TimedEngine(target_token_time=TARGET)
    alone.at(0.0, "short", [1, 2], max_tokens=30, ignore_eos=True)
    alone.run()
    assert all(step.promise is None for step in alone.steps if step.num_decodes)


def slow_tokens(step: Step) -> float:
    """5 ms, and a millisecond for each token."""
    return 0.005 + 0.001 * step.num_tokens


def test_a_step_without_decodes_has_a_bound_too() -> None:
    """Whoever comes in the middle of it waits for its end. It may take longer than the target where
    a short one would cost throughput: here 0.005 s of 0.1 s, and at most four targets.
    """

    def longest(target: float | None, **settings: Any) -> float:
        engine = TimedEngine(slow_tokens, target_token_time=target, **settings)
        for number in range(8):
            prompt = [number, *range(50)] * 16
            engine.at(0.2 * number, f"r{number}", prompt, max_tokens=1, ignore_eos=True)
        engine.run()
        engine.check_answers()
        lengths = [slow_tokens(step) for step in engine.steps if not step.num_decodes]
        return max(lengths[len(lengths) // 2 :])

    assert longest(None) > 0.5
    assert 0.08 < longest(0.05) < 0.11
    assert 0.06 < longest(0.02) < 0.085
    assert 0.15 < longest(0.2) < 0.21
    first = {"target_first_token": 0.3, "gives_way": "token_time"}
    assert longest(0.05, **first) > 0.5  # those who wait come first, as was asked for


def test_the_log_keeps_promises() -> None:
    engine = with_load(TimedEngine(target_token_time=TARGET), 1.0)
    assert any(entry.step.promise for entry in engine.entries)
    writer, reader = LineWriter(), LineReader()
    for entry in engine.entries:
        assert reader.decode(writer.encode(entry)).step == entry.step
        assert unpack(pack(entry)).step == entry.step


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_token_time": 0.0}, "target_token_time: must be seconds above 0"),
        ({"target_token_time": float("nan")}, "target_token_time: must be seconds above 0"),
        ({"target_first_token": 1.0}, "target_first_token: needs target_token_time"),
        ({"target_token_time": 1.0, "gives_way": "both"}, "gives_way: must be"),
    ],
)
def test_what_can_not_be_promised_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        replace(config(), **settings)
