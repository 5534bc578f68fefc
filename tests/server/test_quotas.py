"""Bounds of single keys, their shares, and refusals that come early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidRequestError
from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.guard.admission import Admission
from quire.server.guard.first_tokens import Ahead, FirstTokens
from quire.server.guard.key_limits import KeyLimits, read_key
from quire.server.guard.quotas import Quotas, limits_by_owner, tenant_weights
from tests.server.harness import SMALL_ENGINE, Server, error_of

# The file of keys


def test_a_line_is_a_key_and_what_it_may_do() -> None:
    assert read_key("sk-1") == ("sk-1", KeyLimits())
    assert read_key("  sk-2 weight=2.5  max_requests=3 requests_per_minute=60\t") == (
        "sk-2",
        KeyLimits(2.5, 60, None, 3),
    )


@pytest.mark.parametrize(
    "settings",
    [
        *("weight=0", "weight=nan", "weight=x", "weight=inf", "weight=1 weight=2", "x"),
        *("max_requests=0", "max_requests=1.5", "color=red", "tokens_per_minute=-5"),
        *("requests_per_minute=", "weight=5e-324", "weight=1e300", "max_requests=" + "9" * 400),
    ],
)
def test_a_wrong_line_is_told_without_its_key(settings: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_key(f"sk-secret {settings}")
    assert "--api-key-file" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_weights_need_a_policy_that_knows_them() -> None:
    keys: dict[str, Any] = {"api_keys": ("a", "b"), "key_limits": {"a": KeyLimits(weight=4)}}
    with pytest.raises(InvalidRequestError, match="policy fair"):
        ServerConfig(**keys)
    config = ServerConfig(**keys, engine={"policy": "fair"})
    (owner,) = limits_by_owner(config)
    assert tenant_weights(config) == {"tenant_weights": f"{owner}=4"}
    with pytest.raises(InvalidRequestError, match="api_keys"):
        ServerConfig(api_keys=("b",), key_limits={"a": KeyLimits()})
    with pytest.raises(InvalidRequestError, match="policy priority"):
        ServerConfig(first_token_seconds=1.0, engine={"policy": "priority"})


# What is counted


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def quotas_of(clock: Clock, **limits: Any) -> Quotas:
    return Quotas({"me": KeyLimits(**limits)}, clock=clock)


@given(
    most=st.integers(1, 5),
    waits=st.lists(st.sampled_from([0.0, 0.4, 1.0, 7.0, 31.0, 59.0, 61.0, 200.0]), max_size=40),
)
def test_requests_of_a_minute_are_those_of_a_list(most: int, waits: list[float]) -> None:
    clock = Clock()
    quotas = quotas_of(clock, requests_per_minute=most)
    taken: list[int] = []
    for wait in waits:
        clock.now += wait
        taken = [second for second in taken if second > int(clock.now) - 60]
        left = quotas.headers("me")["x-ratelimit-remaining-requests"]
        assert int(left) == most - len(taken)
        if len(taken) < most:
            ticket = quotas.enter("me")
            assert ticket is not None
            ticket.release()
            taken.append(int(clock.now))
        else:
            with pytest.raises(ApiError) as caught:
                quotas.enter("me")
            error = caught.value
            assert (error.status, error.code) == (429, "rate_limit_exceeded")
            clock.now += float(error.headers()["retry-after"])
            ticket = quotas.enter("me")  # as it was told
            assert ticket is not None
            ticket.release()
            taken.append(int(clock.now))


def test_tokens_count_when_they_are_known_and_one_that_is_left_is_enough() -> None:
    clock = Clock()
    quotas = quotas_of(clock, tokens_per_minute=100)
    first = quotas.enter("me")
    assert first is not None
    first.add_tokens(99)
    second = quotas.enter("me")
    assert second is not None
    second.add_tokens(5000)
    with pytest.raises(ApiError, match="100 tokens a minute"):
        quotas.enter("me")
    assert quotas.headers("me")["x-ratelimit-remaining-tokens"] == "0"
    clock.now += 30
    assert quotas.headers("me")["x-ratelimit-reset-tokens"] == "30s"
    clock.now += 30
    assert quotas.enter("me") is not None


def test_a_place_is_given_back_once_and_refused_requests_take_none() -> None:
    quotas = quotas_of(Clock(), max_requests=2)
    tickets = [quotas.enter("me") for _ in range(2)]
    for _ in range(3):
        with pytest.raises(ApiError, match="2 requests of this key"):
            quotas.enter("me")
    for _ in range(2):
        assert tickets[0] is not None
        tickets[0].release()
    assert quotas.enter("me") is not None
    with pytest.raises(ApiError):
        quotas.enter("me")
    assert quotas.enter("somebody without bounds") is None
    assert quotas.headers("somebody without bounds") == {}


def test_processes_count_together_and_a_dead_one_no_more(tmp_path: Path) -> None:
    limits = {"other": KeyLimits(max_requests=9), "me": KeyLimits(max_requests=2)}
    clock = Clock()
    rows = [Quotas(limits, tmp_path / "quotas", row, 3, clock) for row in range(3)]
    assert rows[1].enter("me") is not None
    assert rows[2].enter("me") is not None
    for row in rows:
        with pytest.raises(ApiError):
            row.enter("me")
    rows[0].clear(2)
    assert rows[1].enter("me") is not None
    assert rows[1].enter("other") is not None


# First tokens


@given(
    per_token=st.floats(1e-5, 1e-2),
    per_answer=st.floats(1e-3, 1.0),
    seen=st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 50)), min_size=1, max_size=100),
)
def test_what_is_expected_is_what_was_seen(
    per_token: float, per_answer: float, seen: list[tuple[int, int]]
) -> None:
    times = FirstTokens()
    assert times.expected(Ahead(10_000, 10)) == 0  # nobody knows
    free = [one for one in seen[-64:] if one[1] == 0]
    for tokens, answers in seen:
        times.observe(Ahead(tokens, answers), per_token * tokens + per_answer * answers)
    if free:
        most = max(tokens for tokens, _ in seen[-64:])
        assert times.expected(Ahead(most, 0)) == pytest.approx(per_token * most)
        assert times.expected(Ahead(100 * most, 0)) == pytest.approx(2 * per_token * most)


def test_who_would_come_too_late_is_refused_and_told_when_to_come() -> None:
    clock = Clock()
    admission = Admission(2, 100, 10**6, clock)

    def ask(num_tokens: int, seconds: float | None) -> Any:
        ticket = admission.enter(1)
        try:
            ticket.add_tokens(num_tokens, seconds)
        except ApiError:
            ticket.release()
            raise
        return ticket

    first = ask(1000, 0.001)  # an idle server takes any
    clock.now += 1.0
    first.answered()
    second = ask(3000, None)  # behind 1,000 tokens that still wait
    with pytest.raises(ApiError) as caught:
        ask(1000, 1.5)
    assert (caught.value.status, caught.value.code) == (429, "too_late")
    assert 0 < float(caught.value.headers()["retry-after"]) <= 3
    assert admission.num_tokens == 4000
    ask(1, 10.0).release()
    for ticket in (first, second):
        ticket.release()
    assert admission.num_tokens == admission.num_answers == 0


def test_under_fair_shares_a_key_waits_for_its_own_requests_only() -> None:
    clock = Clock()
    admission = Admission(1, 1000, 10**6, clock, is_fair=True)
    slow = admission.enter(1, "flood")
    slow.add_tokens(1000)
    clock.now += 10
    slow.answered()
    for _ in range(20):
        admission.enter(1, "flood").add_tokens(1000)
    quick = admission.enter(1, "other")
    quick.add_tokens(10, 1.0)
    with pytest.raises(ApiError):
        admission.enter(1, "flood").add_tokens(1000, 1.0)


# A server


@pytest.fixture(scope="module")
def server(small_model: str) -> Iterator[Server]:
    limits = {
        "few": KeyLimits(requests_per_minute=3, tokens_per_minute=1000),
        "narrow": KeyLimits(max_requests=1),
        "gold": KeyLimits(weight=4),
    }
    with Server(
        model=small_model,
        engine={**SMALL_ENGINE, "policy": "fair"},
        api_keys=["few", "narrow", "gold", "free"],
        key_limits=limits,
        http_workers=2,
    ) as server:
        yield server


def complete(server: Server, key: str, **fields: Any) -> httpx.Response:
    with server.client(headers={"authorization": f"Bearer {key}"}) as client:
        body = {"prompt": "a b c", "max_tokens": 3, "ignore_eos": True, **fields}
        return client.post("/v1/completions", json=body)


def test_answers_say_how_much_is_left_whichever_process_gives_them(server: Server) -> None:
    headers = {}
    for left in (2, 1, 0):
        answer = complete(server, "few")
        assert answer.status_code == 200, answer.text
        headers = answer.headers
        assert headers["x-ratelimit-limit-requests"] == "3"
        assert headers["x-ratelimit-remaining-requests"] == str(left)
        assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert 0 < int(headers["x-ratelimit-remaining-tokens"]) < 1000
    refused = complete(server, "few")
    assert "3 requests a minute" in error_of(refused, 429)
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert "x-ratelimit-limit-requests" not in complete(server, "free").headers


def test_a_key_with_one_place_gets_it_again_after_each_request(server: Server) -> None:
    for _ in range(4):
        assert complete(server, "narrow").status_code == 200
    assert "prompt" in error_of(complete(server, "narrow", prompt=""), 400)
    assert complete(server, "narrow").status_code == 200


def test_classes_of_service_are_priorities_within_a_key(server: Server) -> None:
    with server.client(headers={"authorization": "Bearer gold"}) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        for tier, told in (("flex", "flex"), ("priority", "priority"), ("auto", "default")):
            answer = client.post("/v1/chat/completions", json={**body, "service_tier": tier})
            assert answer.json()["service_tier"] == told
        more = {"model": "x", "input": "Hi", "max_output_tokens": 16, "service_tier": "flex"}
        del more["model"]
        assert client.post("/v1/responses", json=more).json()["service_tier"] == "flex"


def test_a_class_needs_a_policy_that_knows_it(shared_small_server: Server) -> None:
    with shared_small_server.client() as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "service_tier": "flex"}
        message = error_of(client.post("/v1/chat/completions", json=body), 400)
    assert message.startswith("service_tier: counts only")
