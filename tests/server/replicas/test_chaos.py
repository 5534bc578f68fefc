"""Engines die at random under load of every kind. Every request is answered exactly once, as if
nothing had happened, or refused with a word; nothing is left behind. The long form (make soak) does
it for two minutes to processes: HTTP workers, engines, their ranks, and the server itself. Alone,
and for another time:

    QUIRE_LONG_TESTS=1 QUIRE_CHAOS_SECONDS=20 python -m pytest tests/server/replicas/test_chaos.py -k processes -s
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.server.link.messages import Updates
from tests.long_runs import IS_LONG, short_or_long
from tests.server.harness import SMALL_ENGINE, Server, engines_of, wait_for
from tests.server.replicas.local_engines import (
    LocalEngines,
    LocalLink,
    LocalServer,
    local_links,
    seen_by_client,
)
from tests.server.replicas.test_moves import BODIES

pytestmark = [pytest.mark.soak, pytest.mark.slow]

KINDS = ("greedy", "sampled", "penalties", "several", "echo", "chat", "schema")
AT_ONCE = 8


def calls(seed: int, count: int) -> list[tuple[str, dict[str, Any]]]:
    source = random.Random(seed)
    found = []
    for number in range(count):
        path, body = BODIES[source.choice(KINDS)]
        body = {**body, "seed": number % 5, "stream": source.random() < 0.5}
        found.append((path, body))
    return found


@pytest.mark.parametrize("seed", range(short_or_long(1, 40)))
def test_local_engines_die_at_random(small_model: str, seed: int) -> None:
    source = random.Random(seed)
    engines = LocalEngines(small_model, {"max_batched_tokens": 512})
    everything = calls(seed, short_or_long(12, 30))
    statuses: Counter[int] = Counter()

    def watch(link: LocalLink, event: Updates) -> bool:
        if source.random() < 0.04:
            link.kill()
            return source.random() < 0.5
        return True

    async def main() -> None:
        server = LocalServer(engines, 3)
        async with server as http:
            alone = {json.dumps([path, body]): (path, body) for path, body in everything}
            answers = await asyncio.gather(
                *(seen_by_client(http, path, body) for path, body in alone.values())
            )
            wanted = dict(zip(alone, answers, strict=True))
            engines.watch = watch
            free = asyncio.Semaphore(AT_ONCE)

            async def ask(path: str, body: dict[str, Any]) -> None:
                async with free:
                    status, found = await seen_by_client(http, path, body)
                    statuses[status] += 1
                    if status == 503:  # all engines were gone, or too many with this request
                        assert found["error"]["code"] == "engine_unavailable"
                    else:
                        assert (status, found) == wanted[json.dumps([path, body])]

            await asyncio.gather(*(ask(path, body) for path, body in everything))
            engines.watch = lambda link, event: True
            await server.all_up()
            server.assert_empty()
        assert server.moved() > 0

    with local_links(engines):
        asyncio.run(main())
    assert sum(statuses.values()) == len(everything)
    assert statuses[200] > len(everything) / 2


class Chaos:
    """A server of two HTTP workers and two engines of two ranks, and clients that come again when
    it is gone. All that is answered must be what it was before anybody died.
    """

    def __init__(self, model: str) -> None:
        engine = {**SMALL_ENGINE, "tensor_parallel_size": 2}
        self.server = Server(
            model=model, engine=engine, replicas=2, http_workers=2, served_model_names=["m"]
        )
        self.source = random.Random(0)
        self.everything = calls(0, 60)
        self.wanted: list[Any] = []
        self.outcomes: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self.faults: list[str] = []
        self._stop = threading.Event()

    def run(self, seconds: float) -> None:
        with self.server:
            self.wanted = asyncio.run(self._undisturbed())
            clients = [
                threading.Thread(target=self._ask, args=(number,)) for number in range(AT_ONCE)
            ]
            for client in clients:
                client.start()
            begun = time.monotonic()
            while (passed := time.monotonic() - begun) < seconds and not self.faults:
                if passed > seconds / 2 and not self.killed["server"]:
                    self._kill_server()
                else:
                    self._kill_one()
                time.sleep(self.source.uniform(0.5, 4.0))
            self._stop.set()
            for client in clients:
                client.join()
            assert not self.faults
            self._check_recovered()

    async def _undisturbed(self) -> list[Any]:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120, verify=False) as http:
            return [await seen_by_client(http, path, body) for path, body in self.everything]

    def _ask(self, number: int) -> None:
        try:
            asyncio.run(self._keep_asking(random.Random(number)))
        except BaseException as error:
            self.faults.append(repr(error))
            raise

    async def _keep_asking(self, source: random.Random) -> None:
        while not self._stop.is_set():
            which = source.randrange(len(self.everything))
            try:
                # A client of its own each time, so that the workers share them.
                async with httpx.AsyncClient(
                    base_url=self.server.url, timeout=120, verify=False
                ) as http:
                    status, found = await seen_by_client(http, *self.everything[which])
            except httpx.ConnectError:
                self.outcomes["nobody there"] += 1
                await asyncio.sleep(0.5)
                continue
            except (httpx.TransportError, AssertionError, ValueError):
                self.outcomes["cut off"] += 1  # who spoke to it was killed in the middle of it
                await asyncio.sleep(0.2)
                continue
            self.outcomes[str(status)] += 1
            if status == 503:
                assert found["error"]["code"] in ("engine_unavailable", "shutting_down"), found
                await asyncio.sleep(0.2)
            else:
                assert (status, found) == self.wanted[which]

    def _kill_one(self) -> None:
        kinds = self.processes()
        kind = self.source.choice(list(kinds))
        if kinds[kind]:
            self.killed[kind] += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.source.choice(kinds[kind]), signal.SIGKILL)

    def _kill_server(self) -> None:
        """None of its processes may survive it."""
        assert self.server.process is not None
        left = [pid for pids in self.processes().values() for pid in pids]
        self.killed["server"] += 1
        self.server.process.kill()
        self.server.process.wait()
        wait_for(lambda: not any(is_alive(pid) for pid in left), "its processes to end")
        self.server.__enter__()

    def processes(self) -> dict[str, list[int]]:
        assert self.server.process is not None
        children = children_of(self.server.process.pid)
        engines = list(engines_of(self.server.process.pid))
        ranks = [
            pid
            for engine in engines
            for pid in children_of(engine)
            if is_called(pid, b"quire.parallel.rank")
        ]
        return {
            "worker": [pid for pid in children if is_called(pid, b"workers.worker")],
            "engine": engines,
            "rank": ranks,
        }

    def _check_recovered(self) -> None:
        server, outcomes = self.server, self.outcomes
        print(f"\nkilled {dict(self.killed)}; requests {dict(outcomes)}")
        wait_for(lambda: server.metric("quire_replica_up") == 2, "both engines")
        wait_for(lambda: server.is_idle, "all blocks to be free")
        wait_for(
            lambda: [len(pids) for pids in self.processes().values()] == [2, 2, 2], "every process"
        )
        assert asyncio.run(self._undisturbed()) == self.wanted
        assert outcomes["200"] > sum(self.killed.values())
        # Only those whose HTTP process was killed, or the server, are left without an answer or a
        # refusal.
        assert outcomes["cut off"] <= AT_ONCE * (
            self.killed["worker"] + 2 * self.killed["server"]
        ), outcomes


@pytest.mark.skipif(not IS_LONG, reason="runs for two minutes: make soak")
def test_processes_die_at_random(small_model: str) -> None:
    Chaos(small_model).run(float(os.environ.get("QUIRE_CHAOS_SECONDS", "120")))


def children_of(pid: int) -> list[int]:
    """Those that any of its threads has started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def is_called(pid: int, name: bytes) -> bool:
    try:
        return name in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
