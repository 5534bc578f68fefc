"""Engines that come and go with the queue, or with new options, while requests are answered as if
they had stayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from quire.errors import InvalidRequestError, QuireError
from quire.server.link.replicas import elastic
from quire.server.link.replicas.elastic import ElasticPool
from quire.server.link.replicas.scaling import Scaler, ScalingRule
from tests.server.replicas.local_engines import (
    LocalEngines,
    LocalServer,
    local_links,
    seen_by_client,
)

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "one two three four five six seven", "max_tokens": 30, "temperature": 0,
                        "ignore_eos": True, "stream": True}  # fmt: skip


class TestScaler:
    def test_follows_the_queue(self) -> None:
        scaler = Scaler(ScalingRule(1, 3, target_queue=4, up_seconds=2, down_seconds=10))
        decide = scaler.decide
        assert decide(0.0, 1, 4, 20, 16) == 0
        assert decide(1.0, 1, 5, 20, 16) == 0  # too long since now
        assert decide(2.9, 1, 9, 20, 16) == 0
        assert decide(3.0, 1, 9, 20, 16) == 1
        assert decide(3.1, 2, 9, 20, 16) == 0
        assert decide(4.0, 2, 3, 20, 16) == 0  # and short again
        assert decide(9.0, 2, 9, 20, 16) == 0
        assert decide(11.0, 2, 9, 20, 16) == 1
        assert decide(20.0, 3, 99, 20, 16) == 0  # there are no more
        assert [decide(30.0 + n, 3, 0, 4, 16) for n in range(12)] == [0] * 10 + [-1, 0]
        assert decide(60.0, 3, 0, 40, 16) == 0  # those that run need them
        assert [decide(70.0 + n, 1, 0, 0, 16) for n in range(12)] == [0] * 12

    def test_a_new_rule_is_caught_up_with(self) -> None:
        scaler = Scaler(ScalingRule(2, 3))
        assert scaler.decide(0.0, 1, 0, 0, 16) == 1
        assert scaler.decide(0.0, 4, 0, 0, 16) == -1

    @pytest.mark.parametrize(
        "wrong",
        [{"lowest": 0}, {"lowest": 3, "highest": 2}, {"target_queue": 0}, {"down_seconds": -1.0}],
    )
    def test_nonsense(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequestError):
            ScalingRule(**wrong)


class ElasticServer(LocalServer):
    """Around an elastic pool."""

    def __init__(self, engines: LocalEngines, rule: ScalingRule, **fields: Any) -> None:
        super().__init__(engines, rule.highest + 1, **fields)
        self.client = ElasticPool(
            self.config, self.metrics, lambda: self.failures.append("given up"), rule
        )

    @property
    def elastic(self) -> ElasticPool:
        assert isinstance(self.client, ElasticPool)
        return self.client


@pytest.fixture(scope="module")
def engines(small_model: str) -> LocalEngines:
    return LocalEngines(small_model)


def run(
    engines: LocalEngines,
    rule: ScalingRule,
    script: Callable[[ElasticServer, httpx.AsyncClient], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    **fields: Any,
) -> None:
    # Metrics are those of a registry: the pool that LocalServer makes would register its own first.
    monkeypatch.setattr("tests.server.replicas.local_engines.open_engines", lambda *args: None)
    monkeypatch.setattr(elastic, "_LOOK_SECONDS", 0.005)

    async def main() -> None:
        engines.kill_at()
        engines.links.clear()
        engines.refuses_to_start = False
        server = ElasticServer(engines, rule, **fields)
        async with server as http:
            await script(server, http)
            server.assert_empty()

    with local_links(engines):
        asyncio.run(main())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def test_more_while_the_queue_is_long_and_fewer_when_it_is_short(
    engines: LocalEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(server: ElasticServer, http: httpx.AsyncClient) -> None:
        pool = server.elastic
        assert pool.num_engines == 1
        wanted = await seen_by_client(http, COMPLETIONS, BODY)
        found = await asyncio.gather(*(seen_by_client(http, COMPLETIONS, BODY) for _ in range(30)))
        assert all(one == wanted for one in found)
        assert max(int(link.number) for link in engines.links) >= 1
        await until(lambda: pool.num_engines == 1 and not pool._leaving)
        assert len(engines.live) == 1
        assert await seen_by_client(http, COMPLETIONS, BODY) == wanted

    rule = ScalingRule(1, 3, target_queue=1, up_seconds=0.0, down_seconds=0.01)
    run(engines, rule, script, monkeypatch)


@pytest.mark.few(1)
@pytest.mark.parametrize("drain_seconds", [30.0, 0.001])
def test_new_options_without_a_lost_stream(
    engines: LocalEngines, monkeypatch: pytest.MonkeyPatch, drain_seconds: float
) -> None:
    """Answers end where they began, or go on elsewhere if that takes too long."""

    async def script(server: ElasticServer, http: httpx.AsyncClient) -> None:
        pool = server.elastic
        wanted = await seen_by_client(http, COMPLETIONS, BODY)
        streams = [asyncio.create_task(seen_by_client(http, COMPLETIONS, BODY)) for _ in range(4)]
        await until(lambda: any(any(relay.outputs.values()) for relay in pool._relays.values()))
        old = set(engines.live)
        options = {**engines.options, "max_num_seqs": 3}
        await pool.replace_all(replace(server.config, engine=options))
        assert not old & set(engines.live)
        assert [await stream for stream in streams] == [wanted] * 4
        assert (server.moved() > 0) == (drain_seconds < 1)
        assert pool.num_engines == 2
        assert {link.config.engine["max_num_seqs"] for link in engines.live} == {3}
        assert await seen_by_client(http, COMPLETIONS, BODY) == wanted

    rule = ScalingRule(2, 2, down_seconds=1000.0)
    run(engines, rule, script, monkeypatch, drain_seconds=drain_seconds)


def test_engines_that_cannot_be_had(engines: LocalEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(server: ElasticServer, http: httpx.AsyncClient) -> None:
        pool = server.elastic
        engines.refuses_to_start = True
        assert not await pool.grow()
        with pytest.raises(QuireError, match="the old ones stay"):
            await pool.replace_all(server.config)
        assert (pool.num_engines, pool.state) == (1, "ready")
        assert (await seen_by_client(http, COMPLETIONS, BODY))[0] == 200
        await pool.shrink()  # not the last one
        assert pool.num_engines == 1
        engines.kill_at(2)
        status, _ = await seen_by_client(http, COMPLETIONS, {**BODY, "stream": False})
        assert status == 503
        await until(lambda: server.failures)
        assert pool.state == "failed"

    run(engines, ScalingRule(1, 2, up_seconds=1000.0), script, monkeypatch)


def test_an_answer_never_goes_on_with_another_model(
    engines: LocalEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is lost in the middle of a change after which the same tokens would not come: it
    is told so.
    """

    async def script(server: ElasticServer, http: httpx.AsyncClient) -> None:
        pool = server.elastic
        engines.kill_at(5)
        other = pool.replicas[1]
        monkeypatch.setattr(
            pool, "_fingerprint", lambda replica: "other" if replica is other else "first"
        )
        await until(lambda: pool.num_engines == 2)
        engines.refuses_to_start = True
        statuses = [
            (await seen_by_client(http, COMPLETIONS, {**BODY, "stream": False}))[0]
            for _ in range(2)
        ]
        assert 503 in statuses

    run(engines, ScalingRule(2, 2), script, monkeypatch, queue_seconds=0.05)
