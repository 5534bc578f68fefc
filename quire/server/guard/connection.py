"""One HTTP request on its way in: its body, its id, and whether its client is still there."""

from __future__ import annotations

import asyncio
import functools
import re
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic_core import PydanticUndefined, from_json

from quire.errors import InvalidRequestError
from quire.server.errors import ApiError
from quire.server.http_responses import disconnected
from quire.server.tasks import running

_T = TypeVar("_T", bound=BaseModel)
_Made = TypeVar("_Made")
Endpoint = Callable[..., Coroutine[Any, Any, Response]]

_LARGE_BODY = 64 * 1024
"""From here on a body is parsed in a thread, so that others are served meanwhile."""
_MOST_FIELDS = 256
_MOST_PARTS = 50_000
_MOST_VALUES = 200_000
"""Making more would keep everybody else waiting: the parser holds the interpreter's lock all the
while.
"""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_MOST_IGNORED = 1000
_NEUTRAL = {"length_penalty": 1.0}
"""Values with which a field that is not supported changes nothing, besides null, false and empty
ones.
"""


def http_request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's x-request-id if it is a plain one, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return value.decode("latin-1")
    return new_id("req-")


def name_request(request: Request, given: str | None) -> str:
    """A body may name its request too; x-request-id goes first."""
    if given is not None and "x-request-id" not in request.headers and _REQUEST_ID.fullmatch(given):
        request.state.http_request_id = given
    return str(request.state.http_request_id)


def new_id(prefix: str) -> str:
    """`prefix` with its separator: "chatcmpl-", "msg_"."""
    return prefix + secrets.token_hex(12)


async def read_body(request: Request, model: type[_T]) -> _T:
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
    parsed: _T = await convert(request, parse_body, body, model)
    refuse_unsupported(parsed)
    request.state.ignored = unknown_fields(parsed)
    return parsed


async def convert(request: Request, make: Callable[..., _Made], *args: object) -> _Made:
    """What `make` makes of a body that was read: beside the event loop if the body is large."""
    is_large = len(await request.body()) >= _LARGE_BODY
    return await asyncio.to_thread(make, *args) if is_large else make(*args)


def parse_body(body: bytes, model: type[_T]) -> _T:
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


def refuse_unsupported(value: BaseModel, prefix: str = "") -> None:
    """A field that clients know and we can't honour is an error; left out or null, it is not there.

    Models list such fields in a class variable `UNSUPPORTED`: name to why, or to what to use
    instead.
    """
    unsupported: Mapping[str, str] = getattr(type(value), "UNSUPPORTED", {})
    extra = value.model_extra or {}
    for name in list(extra):
        if name not in unsupported:
            continue
        if extra[name] in (None, False, [], {}, "") or extra[name] == _NEUTRAL.get(name):
            del extra[name]
            continue
        raise InvalidRequestError(f"{prefix}{name}", f"is not supported: {unsupported[name]}")
    for name in type(value).model_fields:
        item = getattr(value, name, None)
        if isinstance(item, BaseModel):
            refuse_unsupported(item, f"{prefix}{name}.")


def unknown_fields(value: BaseModel, prefix: str = "") -> list[str]:
    """Fields that were sent and that no model here has, nested ones included."""
    names = [f"{prefix}{name}" for name in islice(value.model_extra or {}, _MOST_FIELDS)]
    for name in type(value).model_fields:
        item = getattr(value, name, PydanticUndefined)
        if isinstance(item, BaseModel):
            names += unknown_fields(item, f"{prefix}{name}.")
    return names


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """x-quire-ignored: fields that were sent and mean nothing here; safe whatever the names hold."""
    shown = ", ".join(re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", name[:64]) for name in names)
    return {"x-quire-ignored": shown[:_MOST_IGNORED]} if names else {}


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` for an endpoint that reads its body with `read_body`."""
    schema = model.model_json_schema(
        ref_template=f"#/components/schemas/{model.__name__}.{{model}}"
    )
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "x-quire-definitions": {
            f"{model.__name__}.{name}": one for name, one in definitions.items()
        },
    }


def cancel_on_disconnect(endpoint: Endpoint) -> Endpoint:
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
