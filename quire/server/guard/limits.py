"""Limits on requests that hold before anything looks into them, and the line each leaves in the
log.

How headers and connections are limited is in `http_protocol`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.observe.prometheus import ServerMetrics
from quire.observe.request_records import RequestRecord
from quire.server.errors import ApiError, error_response, to_api_error
from quire.server.guard.counts import BODY_BYTES, Counts
from quire.server.guard.request_ids import http_request_id_of

logger = logging.getLogger("quire.server.access")

_UPLOAD_TIMES = 20
"""Times as long as other bodies uploads may take."""


class RequestContext:
    """Outermost: gives a request its id, catches what nobody caught, and logs how it went."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        came = time.time()
        reading = 0.0
        is_read = False
        state: dict[str, Any] = scope.setdefault("state", {})
        state["http_request_id"] = http_request_id_of(scope["headers"])
        status = 0

        async def timed_receive() -> Message:
            nonlocal reading, is_read
            if is_read:
                return await receive()  # waits for the client to leave
            began = time.monotonic()
            message = await receive()
            reading += time.monotonic() - began
            is_read = not message.get("more_body", False)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                header = state["http_request_id"].encode("latin-1")
                message["headers"] = [*headers, (b"x-request-id", header)]
                # where Anthropic's clients look for it
                if scope["path"].startswith("/v1/messages"):
                    message["headers"].append((b"request-id", header))
            await send(message)

        try:
            await self._app(scope, timed_receive, send_with_id)
        except Exception as error:
            if not status:
                await error_response(scope, to_api_error(error))(scope, timed_receive, send_with_id)
        finally:
            seconds = time.monotonic() - started
            if (record := state.get("record")) is not None:
                record.answered(seconds, reading, came + seconds, started)
            self._log(scope, status, seconds)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        state = scope["state"]
        # of known routes only, so that there are few
        path: str = getattr(scope.get("route"), "path", "") or "other"
        self._metrics.http_request(path, status)
        fields: dict[str, Any] = {
            "request_id": state["http_request_id"],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
        }
        record: RequestRecord | None = state.get("record")
        if record is not None:
            fields["id"] = record.response_id
            for name in ("state", "prompt_tokens", "cached_tokens", "completion_tokens"):
                fields[name] = getattr(record, name)
            fields["first_token"] = record.timings.get("first_token")
        error: ApiError | None = state.get("error")
        if error is not None:
            fields["error"] = error.message
        quiet = path in (
            "/health",
            "/ready",
            "/metrics",
            "/page/{name}",
            "/favicon.ico",
        ) and status in (200, 304)
        level = logging.DEBUG if quiet else logging.ERROR if status >= 500 else logging.INFO
        logger.log(level, "request", extra={"fields": fields})


class BodyLimits:
    """Bodies have to be small enough, alone and together, and arrive in time."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        max_total_bytes: int,
        seconds: float,
        uploads: Mapping[str, int] | None = None,
        counts: Counts | None = None,
    ) -> None:
        """`uploads`: paths whose bodies may be larger, since they go to the disk as they come, and
        take longer. `counts`: those of all processes that share these limits.
        """
        self._app = app
        self._uploads = uploads or {}
        self._max_bytes = max_bytes
        self._max_total = max_total_bytes
        self._seconds = seconds
        self._counts = counts or Counts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = self._uploads.get(scope["path"], self._max_bytes)
        is_upload = scope["path"] in self._uploads
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        is_read = length == b"0" and b"transfer-encoding" not in headers
        received = 0
        seconds = self._seconds * (_UPLOAD_TIMES if is_upload else 1)
        deadline = time.monotonic() + seconds
        pause = self._seconds
        """An upload may take long, but not stand still."""

        async def limited_receive() -> Message:
            nonlocal is_read, received
            if is_read:
                return await receive()  # waits for the client to leave
            try:
                async with asyncio.timeout(max(0.0, min(pause, deadline - time.monotonic()))):
                    message = await receive()
            except TimeoutError:
                if is_upload and time.monotonic() < deadline:
                    raise ApiError(408, f"nothing of the body arrived for {pause:g} s") from None
                raise ApiError(408, f"the body did not arrive within {seconds:g} s") from None
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                received += size
                total = self._counts.add(BODY_BYTES, 0 if is_upload else size)
                if received > most:
                    raise self._too_large(received, most)
                if total > self._max_total:
                    why = "too many large requests at a time; try again"
                    raise ApiError(503, why, code="too_busy", retry_after=1.0)
                is_read = not message.get("more_body", False)
            return message

        async def closing_send(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_read:
                # Whatever is still to come of the body is not worth reading.
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            if length.isdigit() and int(length) > most:
                await error_response(scope, self._too_large(int(length), most))(
                    scope, limited_receive, closing_send
                )
            else:
                await self._app(scope, limited_receive, closing_send)
        finally:
            self._counts.add(BODY_BYTES, 0 if is_upload else -received)

    def _too_large(self, size: int, most: int) -> ApiError:
        option = "--max-body-size" if most == self._max_bytes else "--max-batch-size"
        return ApiError(
            413, f"the body has {size} bytes or more; at most {most} are accepted ({option})"
        )
