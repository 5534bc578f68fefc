"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire.server.http_responses import JsonResponse
from quire.server.service import GenerationService, get_service

router = APIRouter()


@router.get("/v1/models", tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """The models served here."""
    service = get_service(request)
    return JsonResponse({"object": "list", "data": [_describe(service, name) for name in service.config.model_names]})


@router.get("/v1/models/{model_id:path}", tags=["OpenAI"])
async def get_model(request: Request, model_id: str) -> Response:
    """One of the models served here."""
    service = get_service(request)
    return JsonResponse(_describe(service, service.check_model(model_id)))


def _describe(service: GenerationService, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "quire",
        "root": service.config.model_names[0],
        "parent": None,
        "max_model_len": service.ready.max_model_len,
    }
