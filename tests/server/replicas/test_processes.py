"""Engines in processes of their own, killed for real; their tokens are made up
(tests/server/scripted_engine.py).
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.server.harness import Server, wait_for

COMPLETIONS = "/v1/completions"
COUNT = 100
BODY = {"prompt": [5, 6, 7], "max_tokens": COUNT, "return_token_ids": True}


def engines_of(server: Server) -> list[int]:
    """Their processes."""
    assert server.process is not None
    children = (
        Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    )
    return [
        int(pid)
        for pid in children
        if b"scripted_engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_engines_are_killed(small_model: str) -> None:
    """Both of them, one after the other, while answers are read: every answer is whole, each token
    once, and then there are two engines again. SIGTERM lets answers end, and nothing is left.
    """
    with Server(
        model=small_model, engine={}, replicas=2, engine_module="tests.server.scripted_engine"
    ) as server:
        kill_and_read(server)


def kill_and_read(server: Server) -> None:
    found: list[list[int]] = []

    def read() -> None:
        events = server.stream(COMPLETIONS, BODY)
        found.append([token for event in events for token in event["choices"][0]["token_ids"]])

    readers = [threading.Thread(target=read) for _ in range(6)]
    before = engines_of(server)
    assert len(before) == 2
    # so that there is something left to be read when the first is back
    server.fault_file.write_text("slow 0.3")
    for reader in readers:
        reader.start()
    wait_for(lambda: server.metric("vllm:num_requests_running") == 6, "all readers")
    wait_for(lambda: server.metric("vllm:generation_tokens_total") > 20)
    os.kill(before[0], signal.SIGKILL)
    wait_for(
        lambda: server.metric("quire_requests_moved_total") >= 1, "its requests to go on elsewhere"
    )
    wait_for(
        lambda: (
            len(set(engines_of(server)) - set(before)) == 1
            and server.metric("quire_replica_up") == 2
        )
    )
    os.kill(before[1], signal.SIGKILL)
    server.fault_file.unlink()
    for reader in readers:
        reader.join()
    assert found == [list(range(1, COUNT + 1))] * 6
    wait_for(lambda: server.metric("quire_replica_up") == 2)
    wait_for(lambda: server.metric("quire_engine_restarts_total") == 2)
    assert server.metric("vllm:request_success_total") == 6
    assert server.metric("vllm:generation_tokens_total") == 6 * COUNT
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0)
    assert [one["load"] for one in server.get("/health").json()["replicas"]] == [0, 0]
    # The end: what runs is finished, on both of them.
    found.clear()
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    wait_for(lambda: server.metric("vllm:generation_tokens_total") > 6 * COUNT + 4)
    after = engines_of(server)
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    for reader in readers:
        reader.join()
    assert found == [list(range(1, COUNT + 1))] * 2
    assert server.process.wait(60) == 0
    wait_for(lambda: not any(is_running(pid) for pid in after))
