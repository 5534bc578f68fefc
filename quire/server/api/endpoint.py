"""The life of one API call, the same for every API: its body is read and checked, the engine admits
it and works on it, a writer puts what comes back into the form of the API, streamed or whole, and
its end is recorded.

An API is a body (`ApiRequest`), a `Writer`, and the route that `endpoint` makes of the two.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire.errors import InvalidRequestError
from quire.server.api.call_stream import CallStream
from quire.server.api.sampling import SamplingFields
from quire.server.api.writer import RequestT, Writer
from quire.server.calls.generation import GenerationRequest
from quire.server.guard import connection
from quire.server.guard.auth import owner_of
from quire.server.http_responses import JsonResponse, LargeJsonResponse
from quire.server.service import get_service, renamed

_MANY_EVENTS = 2000
"""Of a call that is answered as a whole: putting more together takes long."""


def endpoint(
    kind: type[RequestT], writer: type[Writer[RequestT]], name: str, about: str, tag: str
) -> APIRouter:
    """The route of an API; `name` and `about` are shown in /docs."""
    router = APIRouter()

    @connection.cancel_on_disconnect
    async def create(request: Request) -> Response:
        return await answer(request, kind, writer)

    options: dict[str, Any] = {"name": name, "description": about, "tags": [tag]}
    if "stream" in kind.model_fields and writer.STREAMS:
        events = {"text/event-stream": {"schema": {"type": "string"}}}
        options["responses"] = {
            200: {
                "description": "The answer, or its events if `stream` is true.",
                "content": events,
            }
        }
    router.add_api_route(
        kind.ENDPOINT,
        create,
        methods=["POST"],
        openapi_extra=connection.body_schema(kind),
        **options,
    )
    return router


async def answer(
    request: Request, kind: type[RequestT], writer_kind: type[Writer[RequestT]]
) -> Response:
    """One call from its body to its response."""
    body = await connection.read_body(request, kind)
    service = get_service(request)
    model = service.check_model(body.served_name)
    body.check_model_limits(service.ready.hidden_size)
    http_request_id = connection.name_request(
        request, body.request_id if isinstance(body, SamplingFields) else None
    )
    stored = service.responses_of(request)

    def make() -> GenerationRequest:
        body.recall(stored)
        body.use_defaults(service.tokenizer.sampling_defaults)
        return body.to_generation()

    try:
        # What was stored may be long, however short the body is.
        wanted = await (
            asyncio.to_thread(make) if body.recalls else connection.convert(request, make)
        )
    except InvalidRequestError as error:
        raise renamed(error, kind.FIELDS) from None
    wanted = service.for_model(wanted, model)
    owner = owner_of(request.scope)
    call = await service.start(
        wanted, connection.new_id(kind.ID_PREFIX), http_request_id, owner, request.headers
    )
    request.state.record = call.record
    service.calls[owner, call.request_id] = call
    try:
        writer = writer_kind(body, call, model, service.ready.fingerprint, stored)
        headers = connection.ignored_header(
            [*request.state.ignored, *wanted.ignored, *call.ignored]
        )
        headers |= service.quotas.headers(owner)
        if call.prompts[0].is_clamped:
            headers["x-quire-clamped"] = f"max_tokens={call.prompts[0].params.max_tokens}"
        if wanted.stream:

            def end() -> None:
                call.abort()
                writer.close()

            return CallStream(writer, end, {"content-type": writer.MEDIA_TYPE, **headers})
        events = await call.all()
    except BaseException:
        call.abort()
        raise

    if writer.is_long or len(events) > _MANY_EVENTS:
        return await service.in_thread(LargeJsonResponse.of, lambda: writer.whole(events), headers)
    return JsonResponse(writer.whole(events), headers=headers)
