"""Several HTTP processes behind one port: they share limits and keys, no count is lost, and they
come and go.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.long_runs import IS_LONG
from tests.server.harness import Server, error_of, wait_for
from tests.server.scripted_engine import LONG_PROMPT

KEY = "a-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
WAITS = [5] * (LONG_PROMPT + 1)
"""A prompt that has no answer until it is released."""
ROWS, QUEUE = 16, 4
"""Answers that run in the scripted engine, and that may wait."""


class WorkersServer(Server):
    """Its clients send the key."""

    def client(self, **options: Any) -> httpx.Client:
        return super().client(headers=HEADERS, **options)

    @property
    def workers(self) -> list[int]:
        assert self.process is not None
        children = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        return [
            int(pid)
            for pid in children
            if b"workers.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def served_by(self) -> Counter[str]:
        """How many requests each process has answered, by its log."""
        return Counter(re.findall(r" (worker-\d|server) INFO request ", self.log))


def start(small_model: str, folder: Path, **fields: Any) -> WorkersServer:
    return WorkersServer(
        model=small_model,
        engine={},
        engine_module="tests.server.scripted_engine",
        http_workers=2,
        api_keys=[KEY],
        served_model_names=["m"],
        max_queued_requests=QUEUE,
        batches=str(folder / "batches"),
        **fields,
    )


@pytest.fixture(scope="module")
def server(small_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkersServer]:
    with start(small_model, tmp_path_factory.mktemp("workers")) as server:
        yield server
        log = server.log
        assert "Traceback" not in log, log


def completion(tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, **more}


def open_stream(server: WorkersServer) -> tuple[httpx.Client, httpx.Response]:
    """A stream whose answer waits to be released."""
    client = server.client()
    body = completion(3, prompt=WAITS, stream=True)
    response = client.send(client.build_request("POST", "/v1/completions", json=body), stream=True)
    return client, response


def test_every_token_and_request_is_counted(server: WorkersServer) -> None:
    names = (
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_count",
    )
    before = server.metrics(*names)
    wanted = [3 + i % 5 for i in range(48)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda count: server.post("/v1/completions", completion(count)), wanted)
        )
    assert [one.json()["usage"]["completion_tokens"] for one in answers] == wanted
    after = server.metrics(*names)
    assert [b - a for a, b in zip(before, after, strict=True)] == [
        sum(wanted),
        len(wanted),
        len(wanted),
    ]
    found = {name: count for name, count in server.served_by().items() if name != "server"}
    assert sorted(found) == ["worker-1", "worker-2"]
    text = server.get("/metrics").text
    counted = re.findall(
        r'quire_http_requests_total\{path="/v1/completions",status="200"\} (\S+)', text
    )
    assert [float(one) for one in counted] == [sum(found.values())]


def test_limits_hold_over_all_workers(server: WorkersServer) -> None:
    streams = []
    try:
        statuses = []
        for _ in range(ROWS + QUEUE + 6):
            streams.append(open_stream(server))
            statuses.append(streams[-1][1].status_code)
        assert statuses == [200] * (ROWS + QUEUE) + [429] * 6
        refusal = streams[-1][1]
        refusal.read()
        assert f"{ROWS + QUEUE} answers are running or waiting" in error_of(refusal, 429)
        streams[0][0].close()  # whoever leaves makes room, whichever worker it had
        wait_for(lambda: server.post("/v1/completions", completion(1)).status_code == 200, "room")
    finally:
        for client, _ in streams:
            client.close()
    wait_for(lambda: server.is_idle, "all to be gone")


def test_keys_are_asked_for_by_all(server: WorkersServer) -> None:
    for path, body in (("/v1/completions", completion(1)), ("/tokenize", {"prompt": "a"})):
        for _ in range(4):
            assert httpx.post(server.url + path, json=body).status_code == 401
    for path in ("/v1/models", "/metrics", "/v1/batches", "/v1/responses/x"):
        assert httpx.get(server.url + path).status_code == 401
        assert httpx.get(server.url + path, headers=HEADERS).status_code in (200, 404)
    assert httpx.get(server.url + "/health").json() == {"status": "ready"}
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    # no CORS asked for
    assert httpx.options(server.url + "/v1/completions", headers=preflight).status_code == 401


def test_what_one_worker_did_all_of_them_know(server: WorkersServer) -> None:
    """Each call comes over a connection of its own, so to either worker."""
    server.fault_file.write_text("release")
    previous: str | None = None
    for turn in range(6):
        body = {"input": f"turn {turn}", "max_output_tokens": 2, "previous_response_id": previous}
        if turn % 2:
            events = list(server.stream("/v1/responses", body))
            previous = events[-1]["response"]["id"]
        else:
            previous = server.post("/v1/responses", body).json()["id"]
        assert server.get(f"/v1/responses/{previous}").json()["status"] == "incomplete"
    items = server.get(f"/v1/responses/{previous}/input_items?limit=50").json()["data"]
    assert len(items) == 6 + 5
    deleted = server.get(f"/v1/responses/{previous}").json()["id"]
    with server.client() as client:
        assert client.delete(f"/v1/responses/{deleted}").json()["deleted"] is True
    gone = server.post("/v1/responses", {"input": "a", "previous_response_id": deleted})
    assert "previous_response_id" in error_of(gone, 400)
    server.fault_file.unlink()
    for number in range(6):
        answer = server.post(
            "/v1/completions", completion(2), headers={"x-request-id": f"mine-{number}"}
        )
        record = server.get(f"/v1/requests/mine-{number}").json()
        assert (record["response_id"], record["completion_tokens"]) == (answer.json()["id"], 2)
        assert record["engine"] == {"request_id": answer.json()["id"]}
    listed = server.get("/v1/requests?limit=6").json()["data"]
    assert [one["request_id"] for one in listed] == [f"mine-{5 - number}" for number in range(6)]
    assert server.get("/v1/requests/nobody").status_code == 404


def test_files_and_batches_go_through_any_worker(server: WorkersServer) -> None:
    line = {"method": "POST", "url": "/v1/completions", "body": completion(2)}
    data = "\n".join(json.dumps({"custom_id": str(i), **line}) for i in range(3)).encode()
    with server.client() as client:
        file = client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", data)}
        ).json()
        batch = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        name = client.post("/v1/batches", json=batch).json()["id"]
    done = wait_for(
        lambda: (b := server.get(f"/v1/batches/{name}").json())["status"] == "completed" and b, "it"
    )
    lines = server.get(f"/v1/files/{done['output_file_id']}/content").text.splitlines()
    assert [json.loads(one)["custom_id"] for one in lines] == ["0", "1", "2"]
    assert (
        httpx.post(server.url + "/v1/files", headers=HEADERS, content=b"x" * 100).status_code == 415
    )
    too_large = httpx.post(server.url + "/v1/elsewhere", headers=HEADERS, content=b"x" * 5_000_000)
    assert too_large.status_code in (404, 413)
    assert server.get("/openapi.json").json()["info"]["title"] == "Quire"
    with server.client() as client:
        assert client.head("/v1/models").status_code in (200, 405)


@pytest.mark.slow
def test_a_killed_worker_is_replaced(server: WorkersServer) -> None:
    counted = server.metric("vllm:generation_tokens_total")
    streams = [open_stream(server) for _ in range(8)]
    victim = server.workers[0]
    os.kill(victim, signal.SIGKILL)
    wait_for(
        lambda: f"(process {victim}) is gone: killed by SIGKILL" in server.log,
        "its end to be noticed",
    )
    told = (
        rf"HTTP worker (\d) \(process {victim}\) is gone: killed by SIGKILL; (\d) answers were lost"
    )
    named = re.search(told, server.log)
    assert named is not None
    server.fault_file.write_text("release")
    try:
        whole = broken = 0
        for client, response in streams:
            try:
                text = "".join(response.iter_text())
                assert text.endswith("data: [DONE]\n\n")
                whole += 1
            except httpx.TransportError:
                broken += 1
            client.close()
    finally:
        server.fault_file.unlink()
    assert (broken, whole) == (int(named[2]), 8 - int(named[2]))
    wait_for(lambda: len(server.workers) == 2 and victim not in server.workers, "a new one")
    assert server.metric("quire_http_worker_restarts_total") == 1
    assert server.metric("vllm:generation_tokens_total") == counted + 3 * whole
    wait_for(lambda: server.is_idle, "its requests to be gone")
    before = server.served_by()[f"worker-{named[1]}"]

    def is_back() -> bool:
        assert server.post("/v1/completions", completion(1)).status_code == 200
        return server.served_by()[f"worker-{named[1]}"] > before

    wait_for(is_back, "it to serve")
    # All of its places are free again.
    held = [open_stream(server) for _ in range(ROWS + QUEUE)]
    assert {response.status_code for _, response in held} == {200}
    for client, _ in held:
        client.close()
    wait_for(lambda: server.is_idle, "them to be gone")


def test_a_stream_through_a_worker_outlives_the_engine(server: WorkersServer) -> None:
    client, response = open_stream(server)
    old = server.engine_pid
    server.fault_file.write_text("exit")
    wait_for(lambda: not Path(f"/proc/{old}").exists(), "the engine's end")
    server.fault_file.write_text("release")
    events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    client.close()
    wait_for(lambda: server.health() == 200, "a new engine")
    wait_for(
        lambda: server.post("/v1/completions", completion(1)).status_code == 200,
        "workers to know of it",
    )


@pytest.mark.soak
@pytest.mark.skipif(not IS_LONG, reason="a server of its own: in make soak")
def test_workers_that_hang_are_replaced_and_all_end_with_the_server(
    small_model: str, tmp_path: Path
) -> None:
    with start(small_model, tmp_path, stall_seconds=4.0, hang_seconds=4.0) as server:
        assert server.process is not None
        victim = server.workers[1]
        os.kill(victim, signal.SIGSTOP)
        wait_for(lambda: "gave no sign of life" in server.log, "it to be noticed")
        wait_for(lambda: len(server.workers) == 2 and victim not in server.workers, "a new one")
        wait_for(
            lambda: server.post("/v1/completions", completion(1)).status_code == 200, "an answer"
        )
        workers, engine = server.workers, server.engine_pid
        server.process.kill()
        server.process.wait()
        for pid in (*workers, engine):
            wait_for(lambda pid=pid: not _runs(pid), "what it started to end")


def test_workers_end_when_their_requests_have(server: WorkersServer) -> None:
    """Last of all: it takes the server away."""
    assert server.process is not None
    streams = [open_stream(server) for _ in range(4)]
    workers = server.workers
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "no new requests" in server.log, "the signal")
    server.fault_file.write_text("release")
    for client, response in streams:
        assert "".join(response.iter_text()).endswith("data: [DONE]\n\n")
        client.close()
    assert server.process.wait(60) == 0
    assert not any(map(_runs, workers))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
