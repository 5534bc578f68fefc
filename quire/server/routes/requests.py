"""GET /v1/requests/{id}: what happened to a request"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire.server.errors import ApiError
from quire.server.http_responses import JsonResponse
from quire.server.service import get_service

router = APIRouter()


@router.get("/v1/requests/{request_id:path}", tags=["operation"])
async def get_request(request: Request, request_id: str) -> Response:
    """By the id of the response or by x-request-id: where its time went, from the engine's step log (`engine`) as
    long as that remembers it."""
    service = get_service(request)
    record = service.records.find(request_id)
    if record is None:
        raise ApiError(404, "there is no request of this id, or it was too long ago", code="not_found")
    return JsonResponse({**record.describe(), "engine": await service.describe(record.response_id)})
