"""Who may use the server: those who send one of its keys, under a name it answers to. Everything but /health is
behind the key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import ApiError, error_response

_OPEN_PATHS = frozenset({"/health"})


class ApiKeys:
    """Compares a key with all there are, in the same time whether and where it matches."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.strip().encode()).digest() for key in keys]

    def __contains__(self, key: bytes) -> bool:
        digest = hashlib.sha256(key).digest()
        found = False
        for one in self._digests:
            found |= hmac.compare_digest(one, digest)
        return found


class Authentication:
    """ASGI middleware. The path it decides on is the one the router will use, whatever Host or URL say."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = ApiKeys(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in _OPEN_PATHS:
            key = key_of(scope)
            if key is None or key not in self._keys:
                what = "no API key was sent" if key is None else "the API key is not known here"
                error = ApiError(401, f"{what}: send one as `Authorization: Bearer KEY`", code="invalid_api_key")
                response = error_response(scope, error)
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def owner_of(scope: Scope) -> str:
    """A name for whoever sent the key, from which the key can't be told."""
    return hashlib.sha256(b"owner of responses: " + (key_of(scope) or b"")).hexdigest()[:32]


class AllowedHosts:
    """ASGI middleware that serves requests for some names only: a page that lets its own name point here (DNS
    rebinding) gets nothing."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _host_of(scope) not in self._hosts:
            error = ApiError(421, "this server is not known by this name", code="unknown_host")
            await error_response(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _host_of(scope: Scope) -> str:
    host = next((value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"), "")
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def key_of(scope: Scope) -> bytes | None:
    """OpenAI's clients send `authorization: Bearer KEY`, Anthropic's `x-api-key: KEY`."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = value.partition(b" ")
            if kind.lower() == b"bearer":
                return bytes(key.strip())
        elif name == b"x-api-key":
            return bytes(value.strip())
    return None
