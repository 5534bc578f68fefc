"""A server whose engine has several ranks: a rank that dies is noticed even while nothing is computed, and the engine
is started again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.server.harness import ENGINE, Server, wait_for


def ranks_of(pid: int) -> list[int]:
    """The rank processes that an engine has started, from whichever of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return [one for one in found if b"quire.parallel.rank" in Path(f"/proc/{one}/cmdline").read_bytes()]


def test_the_engine_is_started_again_when_a_rank_dies(random_model: Path) -> None:
    with Server(model=str(random_model), engine={**ENGINE, "tensor_parallel_size": 2}) as server:
        before, engine = server.canary(), server.engine_pid
        (rank,) = ranks_of(engine)
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{engine}").exists(), "the engine to end")
        wait_for(lambda: server.get("/ready").status_code == 200 and server.engine_pid != engine, "a new engine")
        assert server.canary() == before
        assert f"rank 1 (process {rank}) was killed by SIGKILL" in server.log
        pids = [server.engine_pid, *ranks_of(server.engine_pid)]
        assert len(pids) == 2
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all processes to end")


def test_streams_go_on_when_a_rank_dies(random_model: Path) -> None:
    """The engine is lost with it and started again; whoever reads sees a pause."""
    body = {"prompt": "Tell me.", "max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 4}
    body |= {"stream": True, "return_token_ids": True}

    def read(at_token: int = 0) -> list[int]:
        tokens: list[int] = []
        with server.client() as http, http.stream("POST", "/v1/completions", json=body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                    if 0 < at_token <= len(tokens):
                        at_token = 0
                        os.kill(ranks_of(server.engine_pid)[0], signal.SIGKILL)
        return tokens

    with Server(model=str(random_model), engine={**ENGINE, "tensor_parallel_size": 2}) as server:
        wanted = read()
        assert len(wanted) == 60
        assert read(at_token=10) == wanted
        assert "was killed by SIGKILL" in server.log
