"""GET and DELETE /v1/responses/{id}, and GET /v1/responses/{id}/input_items: what was stored. POST
/v1/responses/{id}/cancel: what is being written."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from quire.errors import InvalidRequestError
from quire.server.api.endpoint import ignored_header
from quire.server.errors import CANCELLED, ApiError
from quire.server.guard.auth import owner_of
from quire.server.http_responses import JsonResponse, list_page
from quire.server.service import get_service
from quire.server.stored.store import StoredResponse

router = APIRouter(tags=["OpenAI"])
_UNUSED = ("include", "include[]", "starting_after", "include_obfuscation")
"""Parameters of OpenAI's that have nothing to change here."""
_CANCEL_TRIES, _CANCEL_SECONDS = 20, 0.02


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    """A stored response, without logprobs."""
    stored = _find(request, response_id)
    if request.query_params.get("stream") == "true":
        raise InvalidRequestError(
            "stream", "is not supported: a response is stored when it is over"
        )
    return Response(bytes(stored.body), headers=_ignored(request), media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Forgets a stored response."""
    if not get_service(request).responses_of(request).delete(response_id):
        raise _missing(response_id)
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends a response that is being written, and stores what there is of it."""
    service = get_service(request)
    call = service.calls.get((owner_of(request.scope), response_id))
    if call is None or call.is_over:
        status = _find(request, response_id).status()
        message = (
            f"the response is over ({status}): only one that is being written can be cancelled"
        )
        raise ApiError(400, message, field="response_id", code="invalid_value")
    call.fail(ApiError(499, "the response was cancelled", code=CANCELLED))
    for _ in range(_CANCEL_TRIES):  # it is stored by whoever writes it, if it is to be stored
        await asyncio.sleep(_CANCEL_SECONDS)
        stored = service.responses_of(request).get(response_id)
        if stored is not None:
            return Response(bytes(stored.body), media_type="application/json")
    return JsonResponse({"id": response_id, "object": "response", "status": "cancelled"})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    limit: int = Query(20, ge=1, le=100),
    order: Literal["asc", "desc"] = "desc",
    after: str | None = Query(None, max_length=128),
) -> Response:
    """What led to a stored response: the items of its call and of those before it."""
    stored = _find(request, response_id)
    service = get_service(request)
    chain, missing = service.responses_of(request).chain(response_id)
    if missing is not None:  # what is left of the conversation
        chain = [stored]
    # Its size is the client's to choose.
    return await service.in_thread(_page, chain, limit, order, after, _ignored(request))


def _page(
    chain: list[StoredResponse], limit: int, order: str, after: str | None, headers: dict[str, str]
) -> Response:
    items = _input_items(chain)
    if order == "desc":
        items.reverse()
    part, page = list_page([item["id"] for item in items], limit, after)
    return JsonResponse({**page, "data": items[part]}, headers=headers)


def _input_items(chain: list[StoredResponse]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for place, one in enumerate(chain):
        items += one.input()
        if place < len(chain) - 1:
            items += one.output()
    return items


def _find(request: Request, response_id: str) -> StoredResponse:
    stored = get_service(request).responses_of(request).get(response_id)
    if stored is None:
        raise _missing(response_id)
    return stored


def _missing(response_id: str) -> ApiError:
    shown = response_id[:128]
    message = f"there is no stored response {shown!r}: it was never stored, is too long ago, or belongs to another key"
    return ApiError(404, message, field="response_id", code="not_found")


def _ignored(request: Request) -> dict[str, str]:
    return ignored_header([name for name in _UNUSED if name in request.query_params])
