"""A pool of engines as the rest of the server sees it: one engine, as long as one of them is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config import EngineConfig
from quire.errors import InvalidRequestError, QuireError
from quire.server.batches.run import BatchJob, run_batch
from quire.server.config import ServerConfig
from quire.server.link import engine_client
from quire.server.link.messages import Updates
from quire.server.link.replicas import relay, shares
from quire.server.link.replicas.pool import ReplicaPool
from quire.server.link.replicas.shares import divide, numbered, visible_gpus
from tests.server.harness import SMALL_ENGINE
from tests.server.replicas.local_engines import (
    LocalEngines,
    LocalLink,
    LocalServer,
    local_links,
    seen_by_client,
)

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "one two three four five six seven", "max_tokens": 12, "temperature": 0,
                        "ignore_eos": True}  # fmt: skip


@pytest.fixture(scope="module")
def engines(small_model: str) -> LocalEngines:
    return LocalEngines(small_model, {"max_batched_tokens": 512})


def run(
    engines: LocalEngines,
    script: Callable[[LocalServer, httpx.AsyncClient], Awaitable[None]],
    replicas: int = 2,
    **fields: Any,
) -> LocalServer:
    async def main() -> LocalServer:
        engines.kill_at()
        engines.links.clear()
        engines.refuses_to_start = False
        server = LocalServer(engines, replicas, **fields)
        async with server as http:
            await script(server, http)
            server.assert_empty()
        return server

    with local_links(engines):
        return asyncio.run(main())


def kill_everyone(engines: LocalEngines, at_token: int) -> None:
    """All engines die with the message that brings an answer to that length."""
    seen = 0

    def watch(link: LocalLink, event: Updates) -> bool:
        nonlocal seen
        seen += sum(len(update.new_token_ids) for update in event.all_updates())
        if seen >= at_token:
            engines.kill_at()
            for one in engines.live:
                one.kill()
        return True

    engines.watch = watch


def test_requests_are_spread_and_conversations_stay(engines: LocalEngines) -> None:
    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        opening = [
            f"This is conversation number {number}, about something else. " * 3
            for number in range(6)
        ]
        for turn in range(3):
            answers = await asyncio.gather(
                *(http.post(COMPLETIONS, json={**BODY, "prompt": text}) for text in opening)
            )
            for number, answer in enumerate(answers):
                usage = answer.json()["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached > usage["prompt_tokens"] - 40 or not turn
                opening[number] += answer.json()["choices"][0]["text"] + " And then?"
        each = [
            server.count("quire_replica_requests_total", engine=str(number)) for number in range(3)
        ]
        assert sum(each) == 18
        assert min(each) >= 3

    run(engines, script, replicas=3)


def test_an_answer_that_ends_while_it_is_explained(
    engines: LocalEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        body = {**BODY, "max_tokens": 150}
        task = asyncio.create_task(http.post(COMPLETIONS, json=body, headers={"x-request-id": "r"}))
        describe, times = server.client.describe, []

        async def describe_slowly(response_id: str) -> dict[str, Any] | None:
            described = await describe(response_id)
            times.append(described)
            await task
            return described

        monkeypatch.setattr(server.client, "describe", describe_slowly)
        async with asyncio.timeout(60):
            while not any(link._engine.core.has_work for link in engines.live):
                await asyncio.sleep(0)
        explained = (await http.get("/v1/requests/r/explain")).json()
        assert times[0]["answers"][0]["finish_reason"] is None  # type: ignore[index]
        assert "It ended with 'length'" in explained["text"]

    run(engines, script)


def test_what_the_server_tells(engines: LocalEngines) -> None:
    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        assert server.service.ready.max_num_seqs == 2 * SMALL_ENGINE["max_num_seqs"]
        for number in range(4):
            response = await http.post(
                COMPLETIONS, json=BODY, headers={"x-request-id": f"r{number}"}
            )
            assert response.status_code == 200
        explained = (await http.get("/v1/requests/r3/explain")).json()
        assert explained["replica"] in (0, 1)
        assert "computing the answer" in explained["text"]
        assert (await http.get("/v1/requests/r3")).json()["engine"]["replica"] == explained[
            "replica"
        ]
        health = (await http.get("/health")).json()
        assert [one["status"] for one in health["replicas"]] == ["ready", "ready"]
        assert sum(one["cached_blocks"] for one in health["replicas"]) > 0
        text = (await http.get("/metrics")).text
        labels = (
            'engine="0",model_name="m"',
            'engine="1",model_name="m"',
            'engine="all",model_name="m"',
        )
        for name, wanted in (
            ("vllm:num_requests_running", [True, True, False]),
            ("vllm:iteration_tokens_total_count", [True, True, False]),
            ("vllm:generation_tokens_total", [False, False, True]),
            ("vllm:e2e_request_latency_seconds_count", [False, False, True]),
            ("quire_engine_restarts_total", [True, True, False]),
        ):
            assert [f"{name}{{{label}" in text for label in labels] == wanted, name
        assert server.count("vllm:generation_tokens_total", engine="all", model_name="m") == 48
        assert text.count("vllm:cache_config_info{") == 2

    run(engines, script)


def test_when_all_are_lost_requests_wait_for_the_first_that_is_back(engines: LocalEngines) -> None:
    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        wanted = await seen_by_client(http, COMPLETIONS, {**BODY, "stream": True})
        kill_everyone(engines, 5)
        assert await seen_by_client(http, COMPLETIONS, {**BODY, "stream": True}) == wanted
        assert server.moved() in (1, 2)  # to the other one, of whose end nobody had heard yet

    run(engines, script)


def test_one_that_never_comes_back_is_done_without(
    engines: LocalEngines, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        engines.refuses_to_start = True
        engines.kill_at(3)
        assert (await http.post(COMPLETIONS, json=BODY)).status_code == 200
        async with asyncio.timeout(60):
            while "failed" not in [replica.state for replica in server.pool.replicas]:
                await asyncio.sleep(0.005)
        assert not server.failures
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 200
        assert (await http.post(COMPLETIONS, json=BODY)).status_code == 200
        # Now the last one.
        engines.kill_at(3)
        response = await http.post(COMPLETIONS, json=BODY)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_unavailable"
        assert server.failures == ["given up"]
        assert (await http.get("/health")).status_code == 503
        assert (await http.post(COMPLETIONS, json=BODY)).status_code == 503

    run(engines, script)
    assert "is given up; 1 are left" in caplog.text


@pytest.mark.parametrize("prompts", [1, 4])
def test_a_request_that_kills_engines_does_not_kill_them_all(
    engines: LocalEngines, prompts: int
) -> None:
    """Nor do other prompts of the same call, which ends with the first of them."""
    body = {**BODY, "prompt": [BODY["prompt"]] * prompts}

    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        def watch(link: LocalLink, event: Updates) -> bool:
            if link._engine.core.scheduler.table.running:
                link.kill()
            return not link.is_dead

        engines.watch = watch
        response = await http.post(COMPLETIONS, json=body)
        assert response.status_code == 503
        assert "4 engines failed one after the other" in response.json()["error"]["message"]
        engines.kill_at()
        server.assert_empty()
        dead = len([link for link in engines.links if link.is_dead])
        assert dead == 4 or (prompts > 1 and 4 <= dead <= 4 * prompts)
        await server.all_up()
        assert (await http.post(COMPLETIONS, json=BODY)).status_code == 200

    run(engines, script, replicas=3)


@pytest.mark.parametrize("everyone", [False, True])
def test_a_call_that_failed_is_not_begun_again(engines: LocalEngines, everyone: bool) -> None:
    """An engine is lost with several prompts of one call: the first can't be moved any more, which
    ends the call, and so the others are not moved either, whether there is another engine or they
    waited for one.
    """

    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        def watch(link: LocalLink, event: Updates) -> bool:
            first, *_ = server.pool._relays.values()
            first._num_lost = 3
            engines.kill_at()
            for one in engines.live if everyone else [link]:
                one.kill()
            return False

        engines.watch = watch
        response = await http.post(COMPLETIONS, json={**BODY, "prompt": [BODY["prompt"]] * 3})
        assert response.status_code == 503
        await server.all_up()
        await asyncio.sleep(0.01)
        server.assert_empty()
        assert not any(link._engine.core.has_work for link in engines.live)

    run(engines, script)


def test_whoever_leaves_while_nobody_can_compute_is_forgotten(engines: LocalEngines) -> None:
    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        kill_everyone(engines, 2)
        engines.refuses_to_start = True
        task = asyncio.create_task(http.post(COMPLETIONS, json=BODY))
        async with asyncio.timeout(60):
            while not server.pool._stranded:
                await asyncio.sleep(0)
        (stranded,) = server.pool._stranded
        server.pool.abort([stranded.message.request_id])
        assert not server.pool._stranded
        server.pool.abort([stranded.message.request_id])
        server.pool.end(stranded.answer_ids[0])
        stranded.listener.abort()  # type: ignore[attr-defined]
        engines.refuses_to_start = False
        assert (await task).status_code == 200  # of what it had

    run(engines, script)


def test_an_answer_of_weights_that_nobody_has_any_more_is_told_so_at_once(
    engines: LocalEngines,
) -> None:
    """It waited for an engine that could not come, until its time was over: weights were replaced
    elsewhere just before its engine was lost.
    """

    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        def watch(link: LocalLink, event: Updates) -> bool:
            for one in server.pool._relays.values():
                if any(one.outputs.values()):
                    one.fingerprint = "that of weights which were replaced"
                    link.kill()
            return True

        engines.watch = watch
        async with asyncio.timeout(60):
            response = await http.post(COMPLETIONS, json=BODY)
        assert response.status_code == 503
        error = response.json()["error"]
        assert error["code"] == "engine_unavailable"
        assert "none has the weights any more that it was begun with" in error["message"]
        assert not server.pool._stranded

    run(engines, script, queue_seconds=1000.0)


@pytest.mark.parametrize("how", ["abandon", "timeout", "deadline"])
def test_waiting_for_an_engine_ends(engines: LocalEngines, how: str) -> None:
    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        kill_everyone(engines, 2)
        engines.refuses_to_start = True
        task = asyncio.create_task(http.post(COMPLETIONS, json=BODY))
        async with asyncio.timeout(60):
            while not server.pool._stranded:
                await asyncio.sleep(0)
        if how == "abandon":
            server.pool.abandon()
        elif how == "deadline":
            (stranded,) = server.pool._stranded
            stranded._arrival -= 1000.0
            engines.refuses_to_start = False
        response = await task
        codes = {
            "abandon": "shutting_down",
            "timeout": "engine_unavailable",
            "deadline": "deadline_exceeded",
        }
        assert response.status_code == (504 if how == "deadline" else 503)
        assert response.json()["error"]["code"] == codes[how]
        engines.refuses_to_start = False

    run(engines, script, queue_seconds=0.002 if how == "timeout" else 60.0)


def test_another_engine_may_refuse(engines: LocalEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has less room, say: the client is told that its engine was lost, not that the request is
    wrong.
    """

    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        engines.kill_at(3)
        again = relay.Relay.again

        def spoiled(self: relay.Relay) -> Any:
            message = again(self)
            self.message.params["max_tokens"] = 10**6
            return message

        monkeypatch.setattr(relay.Relay, "again", spoiled)
        message = dict(BODY)
        response = await http.post(COMPLETIONS, json=message)
        assert response.status_code in (200, 503)
        if response.status_code == 503:
            assert "another one refuses" in response.json()["error"]["message"]

    run(engines, script)


def test_an_engine_that_cannot_start_ends_the_others(engines: LocalEngines) -> None:
    async def main() -> None:
        engines.links.clear()
        engines.refuses_to_start = True
        server = LocalServer(engines, 2)
        with pytest.raises(OSError, match="no more processes"):
            await server.client.start()
        assert server.client.state == "stopped"
        assert not engines.live

    with local_links(engines):
        asyncio.run(main())
    engines.refuses_to_start = False


def test_a_batch_has_the_same_answers(
    engines: LocalEngines, small_model: str, tmp_path: Path
) -> None:
    requests = tmp_path / "requests.jsonl"
    body = {"max_tokens": 8, "temperature": 1.0}
    lines = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": COMPLETIONS,
            "body": {**body, "prompt": f"number {n}", "n": 2},
        }
        for n in range(12)
    ]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    with local_links(engines):
        for replicas in (1, 3):
            engines.kill_at(*((20, 60) if replicas == 3 else ()))
            answers = tmp_path / f"answers.{replicas}.jsonl"
            job = BatchJob(requests, answers, small_model, dict(SMALL_ENGINE), replicas=replicas)
            summary = run_batch(job, lambda *args: None)
            assert (summary.done, summary.failed) == (12, 0)
            found.append(answers.read_bytes())
    assert found[0] == found[1]


class TestShares:
    def test_cores_and_memory_of_one_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shares, "num_cores", lambda: 9)
        config = ServerConfig(replicas=4, engine={"device": "cpu", "step_log": "logs/steps.jsonl"})
        found = divide(config, {})
        assert [one.share.environment for one in found] == [{"OMP_NUM_THREADS": "2"}] * 4
        assert [one.share.log_name for one in found] == [
            "engine 0",
            "engine 1",
            "engine 2",
            "engine 3",
        ]
        assert all(one.share.block_events for one in found)
        assert [one.engine["kv_cache_memory"] for one in found] == [0.0625] * 4
        assert found[2].engine["step_log"] == "logs/steps.2.jsonl"
        assert divide(config, {"OMP_NUM_THREADS": "3"})[0].share.environment == {}
        more = ServerConfig(replicas=12, engine={"device": "cpu", "kv_cache_memory": "1GiB"})
        assert divide(more, {})[11].share.environment == {"OMP_NUM_THREADS": "1"}
        assert divide(more, {})[11].engine["kv_cache_memory"] == "1GiB"
        for one in found:
            EngineConfig.of(one.engine)

    def test_gpus_of_their_own(self) -> None:
        config = ServerConfig(replicas=2, engine={"tensor_parallel_size": 2})
        found = divide(config, {"CUDA_VISIBLE_DEVICES": "4,5, 6,7"})
        assert [one.share.environment["CUDA_VISIBLE_DEVICES"] for one in found] == ["4,5", "6,7"]
        assert "kv_cache_memory" not in found[0].engine
        with pytest.raises(InvalidRequestError, match=r"2 with 2 GPUs .* there are 3 GPUs"):
            divide(config, {"CUDA_VISIBLE_DEVICES": "0,1,2"})
        one = ServerConfig(replicas=2, engine={"device": "cuda:0"})
        assert [part.share.environment for part in divide(one, {"CUDA_VISIBLE_DEVICES": "0"})] == [
            {},
            {},
        ]
        assert divide(one, {"CUDA_VISIBLE_DEVICES": "0"})[0].engine["kv_cache_memory"] == 0.45
        with pytest.raises(QuireError, match="no GPU here"):
            divide(
                ServerConfig(replicas=2, engine={"device": "cuda"}), {"CUDA_VISIBLE_DEVICES": ""}
            )

    def test_which_gpus_there_are(self, tmp_path: Path) -> None:
        for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
            (tmp_path / name).touch()
        assert visible_gpus({}, tmp_path) == ["2", "10"]
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1,3,-1,4"}, tmp_path) == ["GPU-1", "3"]
        assert visible_gpus({}, tmp_path / "nowhere") == []
        assert numbered(Path("a/steps"), 1) == Path("a/steps.1")

    @pytest.mark.parametrize("replicas", [0, -1, 65])
    def test_how_many(self, replicas: int) -> None:
        with pytest.raises(InvalidRequestError, match="replicas"):
            ServerConfig(replicas=replicas)


def test_an_engine_too_busy_to_explain_has_not_forgotten(
    engines: LocalEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        await http.post(COMPLETIONS, json=BODY, headers={"x-request-id": "r"})
        monkeypatch.setattr(engine_client, "_DESCRIBE_SECONDS", 0.0)
        for path in ("/v1/requests/r/explain", "/v1/requests/r"):
            refused = await http.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_busy")
            assert refused.headers["retry-after"] == "1"

    run(engines, script)


def test_a_pool_knows_no_more_than_one_engine_would(engines: LocalEngines) -> None:
    """The same questions, whichever is asked."""

    async def script(server: LocalServer, http: httpx.AsyncClient) -> None:
        pool = server.pool
        assert isinstance(pool, ReplicaPool)
        assert (pool.state, pool.is_stalled, pool.seconds_silent) == ("ready", False, 0.0)
        assert await pool.describe("nobody") is None
        pool.end("nobody")
        pool.abort(["nobody"])

    run(engines, script)
