"""A server whose engine has several ranks: a rank that dies is noticed even while nothing is
computed, and the engine is started again.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.server.harness import ENGINE, Server, wait_for

pytestmark = pytest.mark.slow


def ranks_of(pid: int) -> list[int]:
    """The rank processes that an engine has started, from whichever of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return [
        one for one in found if b"quire.parallel.rank" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]


def test_the_engine_is_started_again_when_a_rank_dies(random_model: Path) -> None:
    with Server(model=str(random_model), engine={**ENGINE, "tensor_parallel_size": 2}) as server:
        before, engine = server.canary(), server.engine_pid
        (rank,) = ranks_of(engine)
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{engine}").exists(), "the engine to end")
        wait_for(
            lambda: server.get("/ready").status_code == 200 and server.engine_pid != engine,
            "a new engine",
        )
        assert server.canary() == before
        assert f"rank 1 (process {rank}) is gone: killed by SIGKILL" in server.log
        pids = [server.engine_pid, *ranks_of(server.engine_pid)]
        assert len(pids) == 2
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all processes to end")
