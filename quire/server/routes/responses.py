"""POST /v1/responses: stateless, text and tools."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire.errors import InvalidRequestError
from quire.server.connection import body_schema, cancel_on_disconnect, convert, read_body, response_headers
from quire.server.errors import ApiError, error_body
from quire.server.generation import FinishReason
from quire.server.json_response import JsonResponse
from quire.server.protocol.response_items import OutputItems, item_id, response_body, status_of
from quire.server.protocol.responses import FIELDS, ResponsesRequest
from quire.server.running import Generation
from quire.server.service import get_service, renamed
from quire.server.sse import EventStream, named_event

router = APIRouter()


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest), tags=["OpenAI"])
@cancel_on_disconnect
async def create_response(request: Request) -> Response:
    """An answer to a text or a conversation."""
    body = await read_body(request, ResponsesRequest)
    service = get_service(request)
    model = service.check_model(body.model)
    try:
        wanted = await convert(request, body.to_generation, item_id("resp"), request.state.request_id)
    except InvalidRequestError as error:
        raise renamed(error, FIELDS) from None
    generation = await service.start(wanted)
    request.state.record = generation.record
    ignored = (*generation.ignored, "store") if body.store else generation.ignored
    headers = response_headers(request, ignored)
    write = partial(response_body, body, wanted.response_id, model, int(time.time()))
    items = OutputItems(body.wants_logprobs)
    if body.stream:
        numbers = _Numbers()
        events = _events(generation, items, write, numbers)
        return EventStream(events, generation, headers=headers, on_error=numbers.error_event)
    reason: FinishReason = "stop"
    try:
        async for event in generation:
            for _ in items.take(event):
                pass
            reason = event.finish_reason or reason
    finally:
        generation.abort()
    for _ in items.finish(reason):
        pass
    return JsonResponse(write(status_of(reason), items.items, generation.usage), headers=headers)


class _Numbers:
    """Every event of a stream has its number."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, fields: dict[str, Any]) -> bytes:
        number = self._next
        self._next += 1
        return named_event(fields["type"], {**fields, "sequence_number": number})

    def error_event(self, path: str, error: ApiError, request_id: str) -> bytes:
        told = error_body(path, error, request_id)["error"]
        return self.event({"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]})


async def _events(generation: Generation, items: OutputItems, write: Any, numbers: _Numbers) -> AsyncIterator[bytes]:
    yield numbers.event({"type": "response.created", "response": write("in_progress")})
    yield numbers.event({"type": "response.in_progress", "response": write("in_progress")})
    async for event in generation:
        for out in items.take(event):
            yield numbers.event(out)
        if event.finish_reason is not None:
            for out in items.finish(event.finish_reason):
                yield numbers.event(out)
            status = status_of(event.finish_reason)
            response = write(status, items.items, generation.usage)
            yield numbers.event({"type": f"response.{status}", "response": response})
