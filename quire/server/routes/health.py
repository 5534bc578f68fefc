"""GET /health, /ready and /version"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire import __version__
from quire.server.http_responses import JsonResponse
from quire.server.service import get_service

router = APIRouter()


@router.get("/health", tags=["operation"])
async def health(request: Request) -> Response:
    """200 while there is an engine, 503 while it is being replaced. Needs no key."""
    client = get_service(request).client
    return JsonResponse({"status": client.state}, 200 if client.state == "ready" else 503)


@router.get("/ready", tags=["operation"])
async def ready(request: Request) -> Response:
    """200 if requests make progress: send traffic here or not."""
    service = get_service(request)
    client = service.client
    body: dict[str, Any] = {"ready": client.is_ready and not service.is_draining, "engine": client.state}
    if client.is_stalled:
        body["why"] = f"the engine has work and gave no sign of life for {client.seconds_silent:.0f} s"
    elif service.is_draining:
        body["why"] = "the server is going down"
    return JsonResponse(body, 200 if body["ready"] else 503)


@router.get("/version", tags=["operation"])
async def version() -> Response:
    return JsonResponse({"version": __version__})
