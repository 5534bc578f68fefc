"""More requests than fit: a bounded queue, and the accepted ones come through."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.harness import SMALL_ENGINE, Server, error_of

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(small_model: str) -> Iterator[Server]:
    """Two answers at a time, four in the queue, 600 prompt tokens in the queue; nobody waits long."""
    engine = {**SMALL_ENGINE, "max_num_seqs": 2}
    limits = {"max_queued_requests": 4, "max_queued_tokens": 600, "queue_seconds": 3.0}
    with Server(faults=True, model=small_model, engine=engine, **limits) as server:
        server.assert_sound()
        yield server
        server.assert_sound()


def many(server: Server, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    responses: list[httpx.Response | None] = [None] * len(bodies)

    def send(i: int) -> None:
        responses[i] = server.post(COMPLETIONS, bodies[i])

    threads = [threading.Thread(target=send, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [response for response in responses if response is not None]


def test_ten_times_too_many(server: Server) -> None:
    server.fault_file.write_text("slow 0.01")
    bodies = [
        {"prompt": f"Number {i}:", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        for i in range(60)
    ]
    responses = many(server, bodies)
    server.fault_file.write_text("")
    assert len(responses) == 60
    assert {response.status_code for response in responses} == {200, 429}
    for body, response in zip(bodies, responses, strict=True):
        if response.status_code == 429:
            assert "at most 6" in error_of(response, 429)
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert response.json()["error"]["type"] == "rate_limit_error"
        else:
            again = server.post(COMPLETIONS, body).json()["choices"][0]["token_ids"]
            assert response.json()["choices"][0]["token_ids"] == again
    server.assert_sound()


def test_too_many_tokens_wait(server: Server) -> None:
    server.fault_file.write_text("slow 0.2")
    responses = many(server, [{"prompt": "so " * 250, "max_tokens": 2, "temperature": 0}] * 6)
    server.fault_file.write_text("")
    refused = [response for response in responses if response.status_code == 429]
    assert refused
    assert any("prompt tokens are waiting" in error_of(response, 429) for response in refused)
    assert any(response.status_code == 200 for response in responses)
    server.assert_sound()


def test_one_call_larger_than_the_queue_is_served_when_nobody_is_there(server: Server) -> None:
    body = server.complete(
        prompt=["a", "b", "c", "d", "e"], n=2, temperature=1.0, seed=1, max_tokens=2
    )
    assert len(body["choices"]) == 10
    assert server.post(COMPLETIONS, {"prompt": "so " * 300, "max_tokens": 1}).status_code == 200


def test_who_waits_too_long_is_told(server: Server) -> None:
    server.fault_file.write_text("slow 0.05")
    long = {"prompt": "Go on:", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    responses = many(server, [long] * 4)
    server.fault_file.write_text("")
    statuses = [response.status_code for response in responses]
    assert sorted(statuses) == [200, 200, 503, 503]
    for response in responses:
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "queue_timeout"
            assert "retry-after" in response.headers
    server.assert_sound()


@pytest.mark.slow
def test_memory_runs_out_and_nothing_changes(small_model: str) -> None:
    """A cache of one long answer for two of them: one gives way, both get the tokens they get
    alone.
    """
    small = {**SMALL_ENGINE, "max_num_seqs": 2, "kv_cache_memory": "320KiB", "max_model_len": 500}
    fields = {"max_tokens": 300, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    bodies = [{"prompt": word * 30, **fields} for word in ("go on ", "stop it ")]
    with Server(model=small_model, engine=small) as tight:
        alone = [tight.post(COMPLETIONS, body).json()["choices"][0]["token_ids"] for body in bodies]
        together = [response.json()["choices"][0]["token_ids"] for response in many(tight, bodies)]
        assert together == alone
        assert tight.metric("vllm:num_preemptions_total") > 0
        tight.assert_sound()
