"""The server as an application of Ray Serve:

    serve run quire.cluster.ray_app:build model=Qwen/Qwen3-8B gpus_per_replica=1 max_replicas=4
    serve deploy deploy/ray_serve.yaml

One deployment has the HTTP side, the same that `quire serve` has, and the router; its engines are
actors in placement groups, as many as the queue asks for. New settings reach it while it runs
(Serve's `user_config`): engines are replaced one after the other, and no stream is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.checkpoints.sources import resolve
from quire.cluster.ray_engine import RayLink
from quire.cluster.ray_pool import RayPool
from quire.cluster.settings import RaySettings
from quire.errors import QuireError
from quire.observe.prometheus import ALL_ENGINES, ServerMetrics
from quire.server.app import create_app
from quire.server.http_server import open_tokenizer
from quire.server.service import GenerationService

logger = logging.getLogger(__name__)

_FIXED = ("model", "server", "api_key_file", "http_cpus", "http_node")
"""Settings that need another deployment, or another application."""
_HEAD = "node:__internal_head__"
"""A resource that Ray gives the head's machine."""
_apps: dict[str, ASGIApp] = {}
"""The application of this process, where Serve looks for it."""


class QuireServer:
    """The HTTP side, in a replica of Serve's deployment."""

    def __init__(self, fixed: Mapping[str, Any]) -> None:
        """`fixed` are the settings that stay; the others come through `reconfigure`, before the
        first request.
        """
        self._fixed = dict(fixed)
        self._pool: RayPool | None = None
        self._changing = asyncio.Lock()

    async def reconfigure(self, changing: Mapping[str, Any]) -> None:
        """Called by Serve with the settings that may change: once at the start, and when they do."""
        settings = RaySettings.of({**self._fixed, **changing})
        async with self._changing:
            if self._pool is None:
                await self._start(settings)
            elif settings != self._pool.settings:
                self._pool.settings = settings
                await self._pool.replace_all(settings.config(settings.keys()), settings.rule())

    async def _start(self, settings: RaySettings) -> None:
        source = await asyncio.to_thread(resolve, settings.model)
        config = settings.config(settings.keys())
        metrics = ServerMetrics(config.model_names[0], ALL_ENGINES)
        pool = RayPool(config, metrics, _no_engine_left, settings)
        try:
            ready, tokenizer = await asyncio.gather(
                pool.start(), asyncio.to_thread(open_tokenizer, source, config)
            )
        except BaseException:
            await pool.stop()
            raise
        _apps["quire"] = create_app(GenerationService(config, tokenizer, pool, ready, metrics))
        self._pool = pool

    async def check_health(self) -> None:
        """Raises if Serve should replace this replica."""
        if self._pool is not None and self._pool.state == "failed":
            raise RuntimeError("no engine could be started")

    async def engine_pids(self) -> list[int]:
        """The processes of the engines, for tests."""
        assert self._pool is not None
        live = [replica for replica in self._pool.replicas if replica.state == "ready"]
        return [
            await one._link._actor.pid.remote() for one in live if isinstance(one._link, RayLink)
        ]

    async def __del__(self) -> None:
        """Serve calls this when the last request has ended, or the time for that is over."""
        if self._pool is not None:
            await self._pool.stop()


def _no_engine_left() -> None:
    logger.error("no engine could be started again: Serve replaces this replica")


def find_app() -> ASGIApp:
    """What Serve passes requests to: the application that is there when the first one comes."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _apps["quire"](scope, receive, send)
        while scope["type"] == "lifespan":
            what = (await receive())["type"]
            await send({"type": f"{what}.complete"})
            if what == "lifespan.shutdown":
                return

    return app


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application with these settings (`quire.cluster.settings.RaySettings`)."""
    try:
        settings = RaySettings.of(args)
    except QuireError as error:
        raise ValueError(str(error)) from None  # Serve shows it as it is
    given = settings.as_dict()
    fixed = {name: given[name] for name in _FIXED}
    deployment = serve.deployment(serve.ingress(find_app)(QuireServer)).options(
        name="QuireServer",
        num_replicas=1,
        max_ongoing_requests=100_000,  # our own limits answer with 429, and say when to come again
        user_config={name: value for name, value in given.items() if name not in _FIXED},
        graceful_shutdown_wait_loop_s=1.0,
        graceful_shutdown_timeout_s=settings.config(()).drain_seconds + 10.0,
        health_check_period_s=10.0,
        ray_actor_options={
            "num_cpus": settings.http_cpus,
            "runtime_env": {"env_vars": _environment()},
            **_place(settings, ray.nodes() if ray.is_initialized() else []),
        },
    )
    return deployment.bind(fixed)


def _place(settings: RaySettings, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keeps the HTTP side on the head's machine, if that has room for it: losing another one then
    cuts no stream.
    """
    if settings.http_node == "any":
        return {}
    heads = [one["Resources"] for one in nodes if one["Alive"] and _HEAD in one["Resources"]]
    if any(head.get("CPU", 0.0) >= settings.http_cpus for head in heads):
        return {"resources": {_HEAD: 0.001}}
    if nodes:
        logger.warning(
            "the head has no room for the HTTP side (http_cpus): the loss of its machine will cut streams"
        )
    return {}


def _environment() -> dict[str, str]:
    """What processes on other machines need of ours. Ray shows it to whoever looks: no tokens of
    the hub.
    """
    return {name: os.environ[name] for name in ("QUIRE_HOME", "HF_HOME") if name in os.environ}
