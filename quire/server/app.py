"""Puts the HTTP application together: routes inside, then keys, limits, and the request's id around
them.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from quire import __version__
from quire.server import errors
from quire.server.api import (
    adapters,
    anthropic,
    chat,
    completions,
    embeddings,
    information,
    ollama,
    page,
    responses,
    stored,
    tokenize,
    vllm,
    weights,
)
from quire.server.batches import routes as batches
from quire.server.batches.queue import BatchQueue
from quire.server.guard.auth import AllowedHosts, Authentication
from quire.server.guard.limits import BodyLimits, RequestContext
from quire.server.guard.page_session import PageSessions
from quire.server.link.watch_hub import WatchHubs
from quire.server.service import GenerationService

_NO_REDIRECTS: dict[str, Any] = {"redirect_slashes": False}
"""They would lead to whatever the Host header says."""
ROUTERS = tuple(
    one.router
    for one in (
        chat,
        completions,
        responses,
        stored,
        anthropic,
        embeddings,
        tokenize,
        information,
        ollama,
        vllm,
        adapters,
        weights,
    )
)
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "Something is wrong with the request; the message says what."},
    "5XX": {"description": "The server could not do it; the log says why, under the request id."},
}


def create_app(service: GenerationService, queue: BatchQueue | None = None) -> ASGIApp:
    """The application around a service, and a queue of batches if it has one."""
    config = service.config
    api = FastAPI(
        title="Quire",
        version=__version__,
        description="An exact LLM inference server.",
        **_NO_REDIRECTS,
    )
    api.state.service = service
    for router in ROUTERS:
        api.include_router(router, responses=_ERRORS)
    uploads: dict[str, int] = {}
    if queue is not None:
        api.state.batches = queue
        api.include_router(batches.router, responses=_ERRORS)
        uploads["/v1/files"] = config.max_batch_bytes
    if config.page:
        api.state.watch_hubs = WatchHubs(
            service.client, service.records, lambda: service.is_draining
        )
        api.include_router(page.router)
    errors.install(api)
    api.openapi = lambda: _openapi(api)  # type: ignore[method-assign]
    # Only HTTP comes in: uvicorn runs without websockets and lifespan (`run`).
    app: ASGIApp = api
    if config.api_keys:
        sessions = (
            PageSessions(config.all_keys, config.tls_certificate is not None)
            if config.page
            else None
        )
        app = Authentication(app, config.api_keys, sessions, config.admin_keys)
    if config.cors_origins:
        # Outside of the keys: a browser asks first, and without one, whether it may ask.
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "x-quire-ignored", "x-quire-clamped"],
        )
    if config.allowed_hosts:
        app = AllowedHosts(app, config.allowed_hosts)
    app = BodyLimits(
        app,
        config.max_body_bytes,
        config.max_bodies_bytes,
        config.body_seconds,
        uploads,
        service.counts,
    )
    return RequestContext(app, service.metrics)


def _openapi(api: FastAPI) -> dict[str, Any]:
    """Bodies are read by our own code, so their schemas are put in by hand."""
    if api.openapi_schema is None:
        schema = get_openapi(
            title=api.title, version=api.version, description=api.description, routes=api.routes
        )
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        for path in schema["paths"].values():
            for operation in path.values():
                schemas.update(operation.pop("x-quire-definitions", {}))
        api.openapi_schema = schema
    return api.openapi_schema
