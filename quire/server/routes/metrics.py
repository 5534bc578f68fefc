"""GET /metrics, for Prometheus"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire.server.service import get_service

router = APIRouter()


@router.get("/metrics", tags=["operation"])
async def metrics(request: Request) -> Response:
    """Prometheus' text format; names are vLLM's where it has one."""
    return Response(get_service(request).metrics.text(), media_type="text/plain; version=0.0.4")
