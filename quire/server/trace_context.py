"""Lets a request's spans hang below those of whoever sent it."""

from __future__ import annotations

from opentelemetry import context
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.observe.tracing import context_of

_HEADERS = (b"traceparent", b"tracestate")


class TraceContext:
    """Reads the sender's trace from the headers; what is begun below it belongs to that trace."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS}
        token = context.attach(context_of(found))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)
