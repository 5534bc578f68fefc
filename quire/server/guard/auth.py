"""Who may use the server: those who send one of its keys, under a name it answers to. Everything
but /health is behind the key; a browser that asks for the page without one is asked for it
(`page_session`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import ApiError, error_response
from quire.server.guard.host import split_host
from quire.server.guard.page_session import (
    PageSessions,
    is_foreign,
    read_key,
    sign_in_form,
    wants_page,
)

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
    """ASGI middleware. The path it decides on is the one the router will use, whatever Host or URL
    say.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        sessions: PageSessions | None = None,
        admin_keys: Iterable[str] = (),
    ) -> None:
        """`sessions`: the page is served, so a cookie that was given for a key is as good as the
        key. `admin_keys` see what others asked for, too (`seen_by`).
        """
        admins = tuple(admin_keys)
        self._app = app
        self._keys = ApiKeys((*keys, *admins))
        self._admin_keys = ApiKeys(admins)
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        sessions = self._sessions
        if sessions is not None and scope["path"] == "/" and scope["method"] == "POST":
            if is_foreign(scope):
                raise ApiError(
                    403, "another site's page may not sign in here", code="foreign_origin"
                )
            key = await read_key(receive)
            response = (
                sessions.signed_in(scope, key) if key in self._keys else sign_in_form(is_wrong=True)
            )
            await response(scope, receive, send)
            return
        sent = key_of(scope)
        if sent is None and sessions is not None:
            sent = sessions.key_behind(scope)
        if sent is not None and sent in self._keys:
            scope["state"]["owner"] = owner_name(sent)
            scope["state"]["is_admin"] = sent in self._admin_keys
            await self._app(scope, receive, send)
        elif sessions is not None and wants_page(scope):
            await sign_in_form()(scope, receive, send)
        else:
            what = "no API key was sent" if sent is None else "wrong API key"
            error = ApiError(
                401, f"{what}: send one as `Authorization: Bearer KEY`", code="invalid_api_key"
            )
            refusal = error_response(scope, error)
            refusal.headers["www-authenticate"] = "Bearer"
            await refusal(scope, receive, send)


def owner_of(scope: Scope) -> str:
    """A name for whoever sent the key, from which the key can't be told; "" where there are no
    keys.
    """
    return str(scope["state"].get("owner", ""))


def seen_by(scope: Scope) -> str | None:
    """Whose requests, files and batches a client may see: its own key's, or, as None, everybody's."""
    return None if scope["state"].get("is_admin", False) else owner_of(scope)


def owner_name(key: bytes) -> str:
    """Of whoever sends this key."""
    return hashlib.sha256(b"owner of responses: " + key).hexdigest()[:32]


class AllowedHosts:
    """ASGI middleware that serves requests for some names only: a page that lets its own name point
    here (DNS rebinding) gets nothing.
    """

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
    return split_host(next((value for name, value in scope["headers"] if name == b"host"), b""))[0]


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
