"""Shares of tenants: by tokens computed over weights, whoever sends how much."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.fair_shares import FairQueue, FairShares
from quire.engine.request import Request
from quire.engine.token_times import work_of
from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.tools.bench.open_loop import Arrival, Mix, percentile
from tests.engine.harness import Harness, config
from tests.engine.timed_engine import TimedEngine


def flooded(weights: dict[str, float], counts: dict[str, int], **settings: Any) -> TimedEngine:
    """Requests of each tenant, as many as are said, all at once."""
    engine = TimedEngine(policy="fair", tenant_weights=tuple(weights.items()), **settings)
    rng = random.Random(3)
    for tenant, count in counts.items():
        for number in range(count):
            prompt = [rng.randrange(50) for _ in range(rng.randint(1, 20))]
            engine.at(
                0.0, f"{tenant}{number}", prompt, max_tokens=8, tenant=tenant, ignore_eos=True
            )
    return engine


@pytest.mark.few(1)
@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 3.0}, {"a": 2.0}])
@pytest.mark.parametrize("target", [None, 0.02])
def test_shares_are_as_weights_over_any_200_steps(
    weights: dict[str, float], target: float | None
) -> None:
    engine = flooded(weights, {"a": 360, "b": 360}, target_token_time=target)
    engine.run()
    engine.check_answers()
    tenants = {name: request.tenant for name, request in engine.requests.items()}
    last = dict.fromkeys("ab", 0)
    for number, step in enumerate(engine.steps):
        for admission in step.admitted:
            last[tenants[admission.request_id]] = number
    busy = engine.steps[: min(last.values())]  # from there on one of them has nothing waiting
    assert len(busy) > 200
    computed = Counter[str]()
    new_tokens = []  # what a preemption has computed again is nobody's share
    for step in busy:
        counts = Counter[str]()
        for entry in step.scheduled:
            end = entry.start + entry.num_tokens
            before = max(entry.start, computed[entry.request_id])
            counts[tenants[entry.request_id]] += max(0, end - before)
            computed[entry.request_id] = max(end, before)
        new_tokens.append(counts)
    for start in range(0, len(busy) - 200, 50):
        served = sum(new_tokens[start : start + 200], Counter[str]())
        share = served["a"] / served.total()
        expected = weights["a"] / (weights["a"] + weights.get("b", 1.0))
        assert share == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
def test_a_flood_does_not_hold_up_others() -> None:
    """One sends twenty times its share; another a request now and then."""

    def first_tokens(policy: str, has_flood: bool) -> list[float]:
        engine = TimedEngine(policy=policy)
        rng = random.Random(5)
        if has_flood:
            for number in range(240):
                prompt = [rng.randrange(50) for _ in range(40)]
                engine.at(0.0, f"f{number}", prompt, max_tokens=40, tenant="flood", ignore_eos=True)
        for number in range(20):
            prompt = [rng.randrange(50) for _ in range(40)]
            engine.at(
                0.2 * number, f"q{number}", prompt, max_tokens=10, tenant="quiet", ignore_eos=True
            )
        engine.run()
        engine.check_answers()
        return sorted(engine.first_token_time(f"q{number}") for number in range(20))

    fair, alone = first_tokens("fair", True), first_tokens("fair", False)
    assert fair[18] <= 1.5 * alone[18] + 0.05  # a step or two of those who are being answered
    assert first_tokens("fcfs", True)[18] > 20 * alone[18]


@pytest.mark.parametrize("target", [None, 0.03])
def test_long_prompts_of_a_flood_do_not_hold_up_others(target: float | None) -> None:
    """Prompts that are being computed come before waiting ones, but not before those of a tenant
    that has had less.
    """

    def first_token(has_flood: bool) -> float:
        engine = TimedEngine(policy="fair", target_token_time=target, max_batched_tokens=256)
        engine.at(0.0, "answered", [1, 2, 3], max_tokens=100, tenant="flood", ignore_eos=True)
        for number in range(6 if has_flood else 0):
            prompt = [number, *range(50)] * 17
            engine.at(0.1, f"f{number}", prompt, max_tokens=4, tenant="flood", ignore_eos=True)
        engine.at(0.5, "long", list(range(50)) * 12, max_tokens=2, tenant="quiet", ignore_eos=True)
        engine.at(0.52, "short", [7] * 20, max_tokens=2, tenant="quiet", ignore_eos=True)
        engine.run()
        engine.check_answers()
        # without a target the tenant's own long prompt goes first
        assert engine.first_token_time("short") < (0.5 if target is None else 0.3)
        return engine.first_token_time("long")

    # its share is half, and there may be a step or two of the others before it
    assert first_token(True) < 2 * first_token(False) + (0.13 if target is None else 0.06)


@pytest.mark.slow
def test_three_tenants_hardly_notice_a_flood() -> None:
    """As `quire.tools.bench.gpu.promises` has it, on a device with steady steps: three send at 60%
    of what it can do, one prompt in ten is long, and a fourth sends 20 times its quarter at once.
    """
    mix = Mix((50, 200), 2000, 48, vocab_size=50)

    def play(arrivals: list[Arrival], **settings: Any) -> TimedEngine:
        engine = TimedEngine(
            lambda step: 0.005 + 4e-5 * step.num_tokens + 1e-9 * work_of(step)[1],
            num_blocks=32 * 140,
            max_num_seqs=32,
            max_batched_tokens=2048,
            max_model_len=2100,
            prefix_caching=False,
            **settings,
        )
        for number, (time, tenant, prompt, max_tokens) in enumerate(arrivals):
            name = f"{tenant}{number}"
            engine.at(time, name, prompt, max_tokens=max_tokens, tenant=tenant, ignore_eos=True)
        engine.run(until=9.0)
        return engine

    def first_tokens(engine: TimedEngine) -> float:
        times = [
            (engine.token_times[name] or [engine.now])[0] - request.arrival
            for name, request in engine.requests.items()
            if request.tenant in "abc"
        ]
        return percentile(times, 0.95)

    capacity = 64 / play(mix.at_once(64, seed=2, tenant="a")).now
    others = mix.arrivals(0.6 * capacity, 6.0, seed=4, tenants="abc")
    flood = mix.at_once(int(20 / 4 * capacity * 6.0), seed=5, tenant="flood")
    alone = first_tokens(play(others, policy="fair", target_token_time=0.03))
    flooded = play([*flood, *others], policy="fair", target_token_time=0.03)
    assert first_tokens(flooded) < 1.3 * alone
    assert percentile(flooded.gaps(), 0.99) <= 0.03
    assert first_tokens(play([*flood, *others], policy="fcfs")) > 10 * alone


def test_a_flood_whose_prompts_take_the_whole_step_gives_blocks_up() -> None:
    engine = TimedEngine(
        policy="fair", num_blocks=61, max_num_seqs=3, max_batched_tokens=64, max_model_len=960
    )
    for number, length in enumerate((100, 700)):
        prompt = [number] * length
        engine.at(0.0, f"f{number}", prompt, max_tokens=60, tenant="flood", ignore_eos=True)
    engine.at(0.05, "quiet", [7] * 200, max_tokens=2, tenant="quiet", ignore_eos=True)
    engine.run()
    engine.check_answers()
    notices = [notice for step in engine.steps for notice in step.preempted]
    assert "quiet of a tenant with less than its share waited" in notices[0].why
    assert engine.first_token_time("quiet") < 0.2


def test_whoever_is_preempted_does_not_pay_twice_and_the_cache_is_free() -> None:
    engine = Harness(config(policy="fair", max_num_seqs=2))
    shares = engine.scheduler.table.shares
    assert shares is not None
    engine.add("one", list(range(12)), max_tokens=6, tenant="a")
    engine.turn(3)
    before = shares.had("a")
    engine.scheduler.preempt("one")
    engine.turn()
    assert shares.had("a") <= before + 1
    engine.run()
    assert shares.had("a") == 12 + 6 - 1
    engine.add("again", list(range(12)), max_tokens=1, tenant="a")
    engine.run()
    assert shares.had("a") == 12 + 6 - 1 + 4  # eight of its tokens were in full cached blocks
    engine.check_answers()


def test_nobody_saves_up_and_nobody_loses_debts_by_leaving() -> None:
    shares = FairShares({"b": 2.0}, 4)
    shares.enter("a")
    shares.charge("a", 100)
    shares.enter("b")
    assert shares.had("b") == 100
    shares.charge("b", 40)
    shares.leave("b", 9)
    shares.enter("b")
    assert shares.had("b") == 120
    shares.leave("a", 9)
    shares.leave("b", 9)
    shares.enter("c")
    assert shares.had("c") == 120


def test_nobody_gives_its_only_row_or_more_than_its_share() -> None:
    shares = FairShares({}, 4)
    for tenant in "ab":
        shares.enter(tenant)
    for _ in range(3):
        shares.start("a")
    shares.charge("a", 10)
    assert shares.giver("b") == "a"
    shares.stop("a")
    assert shares.giver("b") is None
    for tenant in "cdefgh":
        shares.enter(tenant)
    shares.stop("a")
    shares.charge("a", 10)
    assert shares.giver("c") is None


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(6))
def test_turns_are_those_of_whoever_looks_at_every_tenant(seed: int) -> None:
    """Tenants without a row are kept in a heap of what they have had; the order must be as if all
    were compared each time.
    """
    rng = random.Random(seed)
    tenants = [f"t{number}" for number in range(12)]
    shares = FairShares({one: rng.choice([1e-6, 0.3, 1.0, 7.0, 1e6]) for one in tenants[::2]}, 6)
    queue = FairQueue(shares)
    running: list[Request] = []

    def by_standing() -> list[str]:
        waiting = {one.tenant for one in queue}
        return sorted(waiting, key=lambda one: (shares.standing(one), one))

    def start(request: Request) -> None:
        queue.remove(request)
        running.append(request)
        shares.start(request.tenant)
        shares.charge(request.tenant, rng.randint(1, 90))

    def stop(request: Request) -> None:
        running.remove(request)
        shares.stop(request.tenant)

    for number in range(1500):
        event = rng.choice(["add", "add", "abort", "end", "decode", "decode", "preempt", "admit"])
        if event == "add":
            params = SamplingParams(tenant=rng.choice(tenants))
            request = Request(f"r{number}", (1,), params, seed=0, order=(0, 0.0, number))
            shares.enter(request.tenant)
            queue.add(request)
        elif event == "abort" and queue:
            request = rng.choice(list(queue))
            queue.remove(request)
            shares.leave(request.tenant, rng.randint(1, 90))
        elif event == "end" and running:
            request = rng.choice(running)
            stop(request)
            shares.leave(request.tenant, rng.randint(1, 90))
        elif event == "preempt" and running:
            request = rng.choice(running)
            stop(request)
            queue.add(request)
        elif event == "decode":
            for _ in range(rng.randint(1, 5)):
                shares.charge_decodes(running, [])
        elif event == "admit" and queue:
            expected = by_standing()
            for count, request in enumerate(queue.candidates()):
                if len(running) == 6 or count > 8:
                    break
                if request.tenant in expected:  # asked for the first time
                    assert request.tenant == expected.pop(0)
                if rng.random() < 0.5:
                    start(request)
                    expected = [one for one in expected if one != request.tenant]
        if queue:
            assert queue.first().tenant == by_standing()[0]


def test_a_heap_of_tenants_does_not_grow_with_those_who_come_and_go() -> None:
    shares = FairShares({}, 2)
    for tenant in ("busy", "far behind"):
        shares.enter(tenant)
    shares.charge("far behind", 1000)
    for number in range(50_000):
        tenant = "again" if number % 2 else f"new{number}"
        shares.enter(tenant)
        shares.charge(tenant, 9)
        shares.leave(tenant, 9)
    assert shares.least_without_row() == (0.0, "busy")
    assert len(shares._without_row) < 200
    assert len(shares._served) < 11_000


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_thousands_of_tenants_that_wait_do_not_make_steps_long(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step looks at are tenants with rows, and those that it admits: it took 18 ms with 5,000
    tenants while it looked at all of them.
    """
    num_asked = 0
    had = FairShares.had

    def counted(self: FairShares, tenant: str) -> float:
        nonlocal num_asked
        num_asked += 1
        return had(self, tenant)

    engine = TimedEngine(policy=policy, target_token_time=0.03)
    for number in range(3000):
        params = {"tenant": f"t{number}"} if policy == "fair" else {}
        engine.at(0.0, f"r{number}", [1, 2, 3], max_tokens=4, ignore_eos=True, **params)
    engine.run(until=0.03)  # all have come
    monkeypatch.setattr(FairShares, "had", counted)
    before = len(engine.steps)
    engine.run(until=1.0)
    steps = len(engine.steps) - before
    assert steps > 20
    assert num_asked < 600 * steps  # the check of invariants asks all of them, every 20 steps


def test_a_token_counts_whatever_others_have_had_and_weigh() -> None:
    """Beside a counter of a million millions a millionth would be lost: two tenants of the largest
    weight would stay where they are, and the one whose name comes first would have all.
    """
    shares = FairShares({"light": 1e-6, "a": 1e6, "b": 1e6}, 4)
    shares.enter("light")
    shares.start("light")
    shares.charge("light", 10**6)
    for tenant in "ab":
        shares.enter(tenant)
    for _ in range(5):
        for tenant in "ab":
            shares.charge(tenant, 1)
    assert shares.had("a") - shares.had("b") == 0
    shares.charge("a", 1)
    assert shares.had("a") - shares.had("b") == pytest.approx(1e-6, rel=1e-3)
    debt = shares.had("light")
    assert debt == 0  # who was least served when they came
    shares.charge("light", 3)
    assert shares.had("light") == pytest.approx(3e6)
    # and after everybody has left
    for tenant in ("a", "b", "light"):
        shares.leave(tenant, 9)
    shares.enter("b")
    before = shares.had("b")
    shares.charge("b", 1)
    assert shares.had("b") - before == pytest.approx(1e-6, rel=1e-3)


def test_debts_stay_when_counters_are_made_smaller() -> None:
    shares = FairShares({}, 4)
    for tenant in ("a", "b", "gone", "waits"):
        shares.enter(tenant)
    for tenant in ("a", "b", "gone"):
        shares.start(tenant)
    for number, tenant in enumerate(("a", "waits", "gone", "b")):
        shares.charge(tenant, 2**21 + 100 * number)
    shares.stop("gone")
    shares.leave("gone", 9)
    shares.enter("c")
    assert [shares.had(one) for one in ("a", "b", "c", "waits")] == [0, 300, 0, 100]
    assert shares.least_without_row() == (0.0, "c")
    shares.start("c")
    assert shares.least_without_row() == (100.0, "waits")
    shares.enter("gone")
    assert shares.had("gone") == 200


def test_weights_that_large_ones_swallowed_still_give_rows() -> None:
    weights = {"light": 1e-6} | {f"t{number}": 1e6 for number in range(20_000)}
    shares = FairShares(weights, 8)
    for tenant in reversed(weights):
        shares.enter(tenant)
    for number in range(20_000):
        shares.leave(f"t{number}", 9)
    for _ in range(3):
        shares.start("light")
    assert shares.giver("light") is None  # it is alone: all rows are its share
    shares.enter("t0")
    shares.charge("light", 9)
    assert shares.giver("t0") == "light"


def test_decodes_are_charged_together_as_one_by_one() -> None:
    rng = random.Random(6)
    requests = [
        Request(f"r{number}", (1,), SamplingParams(tenant="abc"[number % 3]), seed=0)
        for number in range(9)
    ]
    together, single = FairShares({"b": 4.0}, 9), FairShares({"b": 4.0}, 9)
    for shares in (together, single):
        for tenant in "abc":
            shares.enter(tenant)
    running = requests
    for step in range(20):
        if step % 4 == 3:
            running = rng.sample(requests, rng.randint(0, 9))
        recomputed = running[:2] if step % 5 == 4 else []
        plan = running.copy()
        together.charge_decodes(plan, [one.tenant for one in recomputed])
        plan.append(requests[0])  # a chunk that the step has behind its decodes
        for request in running:
            single.charge(request.tenant, request not in recomputed)
        assert all(together.had(one) == single.had(one) for one in "abc")


def test_priority_counts_within_a_tenant_only() -> None:
    engine = Harness(config(policy="fair", max_num_seqs=1))
    engine.add("a1", [1], max_tokens=2, tenant="a", priority=3)
    engine.add("a2", [2], max_tokens=2, tenant="a", priority=-5)
    engine.add("b1", [3], max_tokens=2, tenant="b", priority=9)
    engine.scheduler.set_priority("a1", -9)
    engine.run()
    admitted = [admission.request_id for step in engine.steps for admission in step.admitted]
    assert admitted == ["a1", "b1", "a2"]
    engine.check_answers()


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["enter", "leave", "charge"])),
        max_size=60,
    )
)
def test_whoever_comes_has_had_as_much_as_the_least_served(
    events: list[tuple[str, str]],
) -> None:
    shares = FairShares({"c": 3.0}, 2)
    for tenant, event in events:
        if event == "enter":
            known = {one: shares.had(one) for one in shares.num_live}
            before = shares.had(tenant)
            shares.enter(tenant)
            assert shares.had(tenant) >= before
            assert tenant in known or shares.had(tenant) >= min(known.values(), default=0.0)
        elif shares.num_live[tenant] > 0:
            if event == "leave":
                shares.leave(tenant, 9)
            else:
                shares.charge(tenant, 7)
    assert all(count > 0 for count in shares.num_live.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"policy": "fair", "tenant_weights": (("a", 0.0),)},
            "tenant_weights: must be from 1e-06 to 1e\\+06",
        ),
        ({"policy": "fair", "tenant_weights": (("a", 5e-324),)}, "tenant_weights: must be from"),
        ({"tenant_weights": (("a", 1.0),)}, "tenant_weights: count under policy 'fair' only"),
    ],
)
def test_weights_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        replace(config(), **settings)
