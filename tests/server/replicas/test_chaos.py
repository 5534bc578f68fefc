"""Engines die at random under load of every kind. Every request is answered exactly once, as if nothing had happened,
or refused with a word; nothing is left behind. The long form (make soak) does it for two minutes to engines in
processes of their own, and kills the server itself as well."""

from __future__ import annotations

import asyncio
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

from quire.server.messages import Updates
from tests.long_runs import IS_LONG, short_or_long
from tests.server.harness import SMALL_ENGINE, Server, wait_for
from tests.server.replicas.local_engines import LocalEngines, LocalLink, LocalServer, local_links, seen_by_client
from tests.server.replicas.test_moves import BODIES

pytestmark = pytest.mark.soak

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
            answers = await asyncio.gather(*(seen_by_client(http, path, body) for path, body in alone.values()))
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


@pytest.mark.skipif(not IS_LONG, reason="runs for two minutes: make soak")
def test_processes_die_at_random(small_model: str) -> None:
    """Clients that come again when the server is gone, as clients do."""
    source = random.Random(0)
    everything = calls(0, 60)
    fields: dict[str, Any] = {"model": small_model, "engine": SMALL_ENGINE, "replicas": 2, "served_model_names": ["m"]}
    outcomes: Counter[str] = Counter()
    server = Server(**fields)
    stop = threading.Event()

    async def undisturbed() -> list[Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, verify=False) as http:
            return [await seen_by_client(http, path, body) for path, body in everything]

    def ask(number: int) -> None:
        async def main() -> None:
            own = random.Random(number)
            async with httpx.AsyncClient(base_url=server.url, timeout=120, verify=False) as http:
                while not stop.is_set():
                    which = own.randrange(len(everything))
                    try:
                        status, found = await seen_by_client(http, *everything[which])
                    except httpx.ConnectError:
                        outcomes["nobody there"] += 1
                        await asyncio.sleep(0.5)
                        continue
                    except (httpx.TransportError, AssertionError, ValueError):
                        outcomes["cut off"] += 1  # the server was killed in the middle of it
                        await asyncio.sleep(0.5)
                        continue
                    outcomes[str(status)] += 1
                    if status == 503:
                        assert found["error"]["code"] in ("engine_unavailable", "shutting_down")
                        await asyncio.sleep(0.2)
                    else:
                        assert (status, found) == wanted[which]

        try:
            asyncio.run(main())
        except BaseException as error:
            faults.append(repr(error))
            raise

    faults: list[str] = []
    with server:
        wanted = asyncio.run(undisturbed())
        clients = [threading.Thread(target=ask, args=(number,)) for number in range(AT_ONCE)]
        for client in clients:
            client.start()
        end, server_dies = time.monotonic() + 120, time.monotonic() + 60
        while time.monotonic() < end and not faults:
            time.sleep(source.uniform(1.0, 5.0))
            assert server.process is not None
            if time.monotonic() > server_dies:
                server_dies = end + 1
                engines = engine_processes(server.process.pid)
                server.process.kill()
                server.process.wait()
                wait_for(lambda pids=tuple(engines): not any(is_alive(pid) for pid in pids), 20, "engines to end")
                server.__enter__()
                continue
            victims = engine_processes(server.process.pid)
            if victims:
                os.kill(source.choice(victims), signal.SIGKILL)
        stop.set()
        for client in clients:
            client.join()
        assert not faults
        assert outcomes["200"] > 100, outcomes
        assert outcomes["cut off"] <= 2 * AT_ONCE, outcomes
        wait_for(lambda: server.metric("quire_replica_up") == 2, 60)
        wait_for(lambda: server.is_idle, 20, "all blocks to be free")


def engine_processes(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in children if b"engine" in Path(f"/proc/{one}/cmdline").read_bytes()]


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
