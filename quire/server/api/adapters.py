"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's fields; for administrators."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from quire.errors import InvalidRequestError
from quire.frontend.adapter_names import check_name
from quire.server.api.body import Body, body_schema
from quire.server.api.endpoint import read_body
from quire.server.errors import ApiError
from quire.server.guard.auth import seen_by
from quire.server.http_responses import JsonResponse
from quire.server.link.messages import AdapterFolder
from quire.server.service import GenerationService, get_service

logger = logging.getLogger(__name__)
router = APIRouter()


class LoadAdapterRequest(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1, max_length=4096)
    """A folder on the server's machine."""
    load_inplace: bool = False
    """Take the place of another adapter of this name."""


class UnloadAdapterRequest(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_int_id: int | None = None
    """vLLM's number of the adapter; the name is enough."""


@router.post(
    "/v1/load_lora_adapter",
    tags=["vLLM"],
    openapi_extra=body_schema(LoadAdapterRequest),
)
async def load_adapter(request: Request) -> Response:
    """Loads an adapter (a folder that PEFT wrote), which requests name as their model."""
    service = _administered(request)
    body = await read_body(request, LoadAdapterRequest)
    name = check_name(body.lora_name)
    if name in service.config.model_names:
        raise InvalidRequestError("lora_name", f"{name!r} is the model's own name")
    if not body.lora_path.startswith("/") or "\0" in body.lora_path:
        raise InvalidRequestError("lora_path", "must be the whole path of a folder")
    if service.adapters.find(name) is not None and not body.load_inplace:
        raise InvalidRequestError(
            "lora_name", f"{name!r} is loaded already: unload it, or send load_inplace"
        )
    adapter = AdapterFolder(name, body.lora_path.rstrip("/") or "/")
    try:
        found = await service.client.load_adapter(adapter)
    except TimeoutError as error:
        why = "the engine is too busy to read it; try again later"
        raise ApiError(503, why, code="engine_busy", retry_after=5.0) from error
    if "error" in found:
        raise ApiError(400, f"lora_path: {found['error']}", field="lora_path", code="invalid_value")
    service.adapters.add(adapter)
    await _tell_others(service)
    logger.info("adapter %s was loaded: rank %d", name, found["rank"])
    return JsonResponse({"status": "success", "lora_name": name, **found})


@router.post(
    "/v1/unload_lora_adapter",
    tags=["vLLM"],
    openapi_extra=body_schema(UnloadAdapterRequest),
)
async def unload_adapter(request: Request) -> Response:
    """Forgets an adapter; requests that have it are answered to their end."""
    service = _administered(request)
    body = await read_body(request, UnloadAdapterRequest)
    if not service.adapters.remove(body.lora_name):
        shown = body.lora_name[:100]
        raise ApiError(
            404, f"lora_name: there is no adapter {shown!r}", field="lora_name", code="not_found"
        )
    await _tell_others(service)
    service.client.unload_adapter(body.lora_name)
    logger.info("adapter %s was unloaded", body.lora_name)
    return JsonResponse({"status": "success", "lora_name": body.lora_name})


async def _tell_others(service: GenerationService) -> None:
    """Returns when every process that takes requests knows which adapters there are."""
    if service.other_processes is not None:
        await service.other_processes.share_adapters(service.adapters.known)


def _administered(request: Request) -> GenerationService:
    """The service, for those who may change what it serves: holders of an admin key; where there are
    no keys, clients on this machine.
    """
    service = get_service(request)
    config = service.config
    is_allowed = seen_by(request.scope) is None if config.api_keys else not config.is_public
    if not is_allowed:
        raise ApiError(
            403, "adapters are loaded with an admin key (--admin-key)", code="admin_key_needed"
        )
    return service
