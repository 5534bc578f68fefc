"""The life of one API call, the same for every API: its body is read and checked, the engine admits
it and works on it, a writer puts what comes back into the form of the API, streamed or whole, and
its end is recorded.

An API is a body (`ApiRequest`), a `Writer`, and the route that `endpoint` makes of the two.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic_core import from_json

from quire.errors import InvalidRequestError
from quire.server.api.body import body_schema, refuse_unsupported, unknown_fields
from quire.server.api.call_stream import CallStream
from quire.server.api.sampling import SamplingFields
from quire.server.api.writer import RequestT, Writer
from quire.server.calls.generation import GenerationRequest
from quire.server.errors import ApiError
from quire.server.guard.auth import owner_of
from quire.server.guard.request_ids import name_request, new_id
from quire.server.http_responses import JsonResponse, LargeJsonResponse, disconnected
from quire.server.service import get_service, renamed
from quire.server.tasks import running

_BodyT = TypeVar("_BodyT", bound=BaseModel)
_Made = TypeVar("_Made")
_Endpoint = Callable[..., Coroutine[Any, Any, Response]]
_LARGE_BODY = 64 * 1024
"""From here on a body is parsed in a thread, so that others are served meanwhile."""
_MOST_FIELDS = 256
_MOST_PARTS = 50_000
_MOST_VALUES = 200_000
"""Making more would keep everybody else waiting: the parser holds the interpreter's lock all the
while.
"""
_MOST_IGNORED = 1000
_MANY_EVENTS = 2000
"""Of a call that is answered as a whole: putting more together takes long."""


def cancel_on_disconnect(endpoint: _Endpoint) -> _Endpoint:
    """Cancels the endpoint when its client leaves before it has returned. Its `request` must be a
    parameter.

    The body must be read before the client can be watched, so it is read here.
    """

    @functools.wraps(endpoint)
    async def watched(*args: Any, request: Request, **kwargs: Any) -> Response:
        await request.body()
        async with running(
            endpoint(*args, request=request, **kwargs), disconnected(request.receive)
        ) as (work, _):
            if not work.done():
                raise ApiError(499, "the client left")
            response: Response = work.result()
            return response

    return watched


def endpoint(
    kind: type[RequestT], writer: type[Writer[RequestT]], name: str, about: str, tag: str
) -> APIRouter:
    """The route of an API; `name` and `about` are shown in /docs."""
    router = APIRouter()

    @cancel_on_disconnect
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
        openapi_extra=body_schema(kind),
        **options,
    )
    return router


async def answer(
    request: Request, kind: type[RequestT], writer_kind: type[Writer[RequestT]]
) -> Response:
    """One call from its body to its response."""
    body = await read_body(request, kind)
    service = get_service(request)
    model = service.check_model(body.served_name)
    body.check_model_limits(service.ready.hidden_size)
    http_request_id = name_request(
        request, body.request_id if isinstance(body, SamplingFields) else None
    )
    stored = service.responses_of(request)

    def make() -> GenerationRequest:
        body.recall(stored)
        body.use_defaults(service.tokenizer.sampling_defaults)
        return body.to_generation()

    try:
        # What was stored may be long, however short the body is.
        wanted = await (asyncio.to_thread(make) if body.recalls else convert(request, make))
    except InvalidRequestError as error:
        raise renamed(error, kind.FIELDS) from None
    wanted = service.for_model(wanted, model)
    owner = owner_of(request.scope)
    call = await service.start(
        wanted, new_id(kind.ID_PREFIX), http_request_id, owner, request.headers
    )
    request.state.record = call.record
    service.calls[owner, call.request_id] = call
    try:
        writer = writer_kind(body, call, model, service.ready.fingerprint, stored)
        headers = ignored_header([*request.state.ignored, *wanted.ignored, *call.ignored])
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


async def read_body(request: Request, model: type[_BodyT]) -> _BodyT:
    """The body as a checked `model`. Sizes and times were limited before (`limits`); depth is
    limited by the parser.

    Fields nobody knows are named in the response's x-quire-ignored (`ignored_header`).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, "the body must be JSON: send it with the header content-type: application/json"
        )
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "compressed bodies are not accepted: send it without content-encoding")
    body = await request.body()
    parsed: _BodyT = await convert(request, parse_body, body, model)
    refuse_unsupported(parsed)
    request.state.ignored = unknown_fields(parsed)
    return parsed


async def convert(request: Request, make: Callable[..., _Made], *args: object) -> _Made:
    """What `make` makes of a body that was read: beside the event loop if the body is large."""
    is_large = len(await request.body()) >= _LARGE_BODY
    return await asyncio.to_thread(make, *args) if is_large else make(*args)


def parse_body(body: bytes, model: type[_BodyT]) -> _BodyT:
    """JSON to a checked model. NaN and the like get as far as the field they are in, which is then
    named.
    """
    if _has_too_many_parts(body):
        limits = f"{_MOST_PARTS} lists, objects and strings, and {_MOST_VALUES} values"
        raise ApiError(
            400, f"the body has too many parts: at most {limits} are accepted", code="invalid_json"
        )
    try:
        # hostile keys are all different
        data = from_json(body, allow_inf_nan=True, cache_strings="none")
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if len(data) > _MOST_FIELDS:
        raise ApiError(400, f"the body has {len(data)} fields; at most {_MOST_FIELDS} are accepted")
    return model.model_validate(data)


def _has_too_many_parts(body: bytes) -> bool:
    """Whether JSON text holds so many values that making them would keep others waiting.

    A prompt may be full of brackets and quotes: whatever is inside of a string counts for nothing.
    """
    num_parts = body.count(b"[") + body.count(b"{") + body.count(b'"') // 2
    if num_parts <= _MOST_PARTS and body.count(b",") <= _MOST_VALUES:
        return False
    # Without escapes every quote begins or ends a string. A few calls over the whole text: a loop
    # in Python would take ten times as long, and so would a regular expression.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = plain.count(b'"') // 2
    if num_strings > _MOST_PARTS:
        return True
    outside = b"".join(plain.split(b'"')[::2])
    num_parts = num_strings + outside.count(b"[") + outside.count(b"{")
    return num_parts > _MOST_PARTS or outside.count(b",") > _MOST_VALUES


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """x-quire-ignored: fields that were sent and mean nothing here; safe whatever the names hold."""
    shown = ", ".join(re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", name[:64]) for name in names)
    return {"x-quire-ignored": shown[:_MOST_IGNORED]} if names else {}
