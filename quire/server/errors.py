"""Every way a request can fail over HTTP: one exception, one place that makes bodies of it.

Routes raise `ApiError`; errors of the library (`quire.errors`) become one here. Bodies have the
shape of the protocol the path belongs to, and never show a path, an address or a trace: what nobody
foresaw is logged, and the client is told the request id to look it up by.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from quire.errors import CapacityError, EngineError, InvalidRequestError, QuireError, TemplateError

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Anthropic has names of its own for some.
_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
CANCELLED = "cancelled"
"""The code of what its own client ended."""
_MOST_SHOWN = 200
"""Characters of a value that a message repeats."""


class ContextLengthError(InvalidRequestError):
    """The prompt, alone or with the answer asked for, is longer than the model's context."""


class ApiError(Exception):
    """What a client is told: a status, a message that says what to do, and the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        field: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        more_headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(
            status, "invalid_request_error" if status < 500 else "server_error"
        )
        self.field = field
        self.code = code
        self.retry_after = retry_after
        self._more_headers = more_headers

    def headers(self) -> dict[str, str]:
        found = dict(self._more_headers)
        if self.retry_after is not None:
            found["retry-after"] = str(max(1, round(self.retry_after)))
        return found


def to_api_error(error: Exception) -> ApiError:
    """What a client is told about any exception. One that nobody foresaw is logged with its trace."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClientDisconnect):  # nobody reads this but the log
        return ApiError(499, "the client left before its request was complete")
    if isinstance(error, InvalidRequestError):
        code = (
            "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
        )
        return ApiError(400, _shortened(str(error)), field=error.field, code=code)
    if isinstance(error, TemplateError | CapacityError):
        return ApiError(400, _shortened(str(error)))
    if isinstance(error, ValidationError):
        return from_validation(
            error.errors(include_url=False, include_context=False, include_input=False)
        )
    if isinstance(error, RequestValidationError):  # of a path or query
        return from_validation(error.errors())
    if isinstance(error, HTTPException):
        if error.status_code == 404:
            return ApiError(
                404, "there is nothing at this address; /docs lists what there is", code="not_found"
            )
        if error.status_code == 405:
            return ApiError(
                405, "this address does not take this method; /docs lists what it takes"
            )
        return ApiError(error.status_code, _shortened(str(error.detail)))
    if isinstance(error, QuireError) and not isinstance(error, EngineError):
        return ApiError(
            500, "the server could not handle this request; its log says why, under the request id"
        )
    logger.error("unexpected error in a request", exc_info=error)
    return ApiError(500, "the server failed; its log says why, under the request id")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing pydantic found, named the way the client wrote it."""
    first = errors[0]
    field = field_name(first.get("loc", ()))
    message = str(first.get("msg", "is not valid"))
    message = message.removeprefix("Value error, ").removeprefix("Invalid JSON: ")
    if first.get("type") == "json_invalid":
        return ApiError(
            400, f"the body is not valid JSON: {_shortened(message)}", code="invalid_json"
        )
    others = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    text = f"{field}: {_shortened(message)}{others}" if field else f"{_shortened(message)}{others}"
    missing = first.get("type") == "missing"
    return ApiError(
        400,
        text,
        field=field or None,
        code="missing_required_parameter" if missing else "invalid_value",
    )


def field_name(location: Sequence[str | int]) -> str:
    """`messages[0].content` for pydantic's ("messages", 0, "content"). Its names of union branches,
    which are types and not fields, are left out.
    """
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and (part.islower() or not name):
            if part in (
                "str",
                "int",
                "float",
                "bool",
                "dict",
                "list",
                "none",
                "null",
                "is_instance",
            ):
                continue
            name += f".{part}" if name else part
    return name[:_MOST_SHOWN]


def error_body(path: str, error: ApiError, http_request_id: str) -> dict[str, Any]:
    """The body in the shape of the protocol the path belongs to."""
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC_TYPES.get(
            error.status, "api_error" if error.type == "server_error" else error.type
        )
        return {
            "type": "error",
            "error": {"type": kind, "message": error.message},
            "request_id": http_request_id,
        }
    if path.startswith("/api/"):
        return {"error": error.message, "request_id": http_request_id}
    fields = {
        "message": error.message,
        "type": error.type,
        "param": error.field,
        "code": error.code,
    }
    return {"error": {**fields, "request_id": http_request_id}}


def error_response(scope: Scope, error: ApiError) -> JSONResponse:
    """The response to a request that was given its id; the error is noted for the log."""
    scope["state"]["error"] = error
    http_request_id = scope["state"]["http_request_id"]
    headers = error.headers() | {"x-request-id": http_request_id}
    return JSONResponse(error_body(scope["path"], error, http_request_id), error.status, headers)


def install(app: FastAPI) -> None:
    """Makes every exception a body like the above."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return error_response(request.scope, to_api_error(error))

    foreseen = (
        ApiError,
        QuireError,
        ValidationError,
        RequestValidationError,
        HTTPException,
        ClientDisconnect,
    )
    for kind in (*foreseen, Exception):
        app.add_exception_handler(kind, handle)


def _shortened(text: str) -> str:
    return text if len(text) <= 4 * _MOST_SHOWN else text[: 4 * _MOST_SHOWN] + "…"
