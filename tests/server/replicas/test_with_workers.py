"""`--http-workers` and `--replicas` together: requests of HTTP workers go through the server's
process to a pool of engines, which die meanwhile. The links are real ones; workers and engines are
in the test's own process.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from typing import Any, cast

import httpx
import pytest

from quire.server.app import create_app
from quire.server.link.engine_client import Engines
from quire.server.link.replicas.open import metrics_for
from quire.server.link.workers.engines import RemoteEngines
from quire.server.link.workers.relay import WorkerLink
from quire.server.service import GenerationService
from tests.server.replicas.local_engines import (
    LocalEngines,
    LocalServer,
    local_links,
    seen_by_client,
)
from tests.server.replicas.test_moves import BODIES

KINDS = ("sampled", "several", "schema")


async def open_worker(
    server: LocalServer, stack: AsyncExitStack
) -> tuple[WorkerLink, httpx.AsyncClient]:
    """The server's end of the link to a worker, and a client of the worker."""
    ready = server.client.ready
    assert ready is not None
    ours, theirs = socket.socketpair()
    link = WorkerLink(server.client, server.service.responses, lambda link: None, lambda: None)
    await link.open(ours)
    stack.callback(link.lost)
    engines = RemoteEngines(ready)
    await engines.open(theirs)
    client, metrics = cast(Engines, engines), metrics_for(server.config)
    service = GenerationService(
        server.config, server.engines.model.tokenizer, client, ready, metrics
    )
    http = httpx.ASGITransport(create_app(service))
    return link, await stack.enter_async_context(
        httpx.AsyncClient(transport=http, base_url="http://test", timeout=60)
    )


@pytest.mark.slow
def test_engines_die_behind_workers(small_model: str) -> None:
    """Answers are those of the server's own process, undisturbed; nothing is left of requests, also
    of those whose worker is gone.
    """
    engines = LocalEngines(small_model)
    bodies = [
        (path, {**body, "stream": bool(n % 2)})
        for n, (path, body) in enumerate(BODIES[one] for one in KINDS)
    ]

    async def main() -> None:
        server = LocalServer(engines, 3)
        async with server as http, AsyncExitStack() as stack:
            wanted = [await seen_by_client(http, path, body) for path, body in bodies]
            opened = [await open_worker(server, stack) for _ in range(2)]
            workers = [http for _, http in opened]
            engines.kill_at(20, 90)
            asked = [(worker, *call) for call in bodies for worker in workers]
            found = await asyncio.gather(*(seen_by_client(*one) for one in asked))
            assert found == [answer for answer in wanted for _ in workers]
            assert server.moved() > 0
            engines.kill_at()
            await server.all_up()
            await _lose_a_worker(server, *opened[1])
            server.assert_empty()
            assert await seen_by_client(workers[0], *bodies[0]) == wanted[0]

    async def _lose_a_worker(
        server: LocalServer, link: WorkerLink, worker: httpx.AsyncClient
    ) -> None:
        body: dict[str, Any] = {"prompt": "on and on", "max_tokens": 900, "ignore_eos": True}
        asking = asyncio.create_task(worker.post("/v1/completions", json=body))
        async with asyncio.timeout(60):
            while not server.pool._relays:
                await asyncio.sleep(0.001)
        assert link.lost() == 1
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    with local_links(engines):
        asyncio.run(main())
