"""Who may open the page: a browser can't send a key with its first request, so it is asked for one,
once, and gets a cookie for it.

Without a key or such a cookie there is nothing to see but the form (web/sign_in.html), which has no
script and needs no other file. The cookie is not the key: it says until when it counts and proves,
by a hash under the key, that whoever has it once sent that key. So the server keeps no sessions,
they outlive its restart, and they end with the key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import parse_qs

from starlette.responses import Response
from starlette.types import Receive, Scope

from quire.server.errors import ApiError
from quire.server.guard.host import split_host

SESSION_SECONDS = 7 * 24 * 3600
_MOST_FORM_BYTES = 8 * 1024
_MOST_FORM_FIELDS = 8
_FORM = (Path(__file__).parents[1] / "web" / "sign_in.html").read_text(encoding="utf-8")
_ORIGIN = re.compile(rb"https?://([^/?#@\s]+)")
_WRONG = '<p role="alert" id="wrong">Wrong key</p>'


def security_headers(style: str = "'self'", script: str = "'self'") -> dict[str, str]:
    """Nothing from elsewhere, nothing inline, no frames around it, and no text that becomes markup."""
    policy = {
        "default-src": "'none'",
        "script-src": script,
        "style-src": style,
        "img-src": "'self'",
        "connect-src": "'self'",
        "form-action": "'self'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }


def _form_headers() -> dict[str, str]:
    """The form's own style is inside of it, and allowed by its hash."""
    style = re.search(r"<style>(.*?)</style>", _FORM, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style.group(1).encode()).digest()).decode()
    return security_headers(style=f"'sha256-{digest}'", script="'none'") | {
        "cache-control": "no-store"
    }


_FORM_HEADERS = _form_headers()


class PageSessions:
    """Gives out cookies for keys, and finds the key behind a cookie."""

    def __init__(self, keys: Iterable[str], is_secure: bool) -> None:
        """`is_secure`: the server speaks HTTPS, so the cookie never goes over anything else."""
        self._is_secure = is_secure
        self._keys = [key.strip().encode() for key in keys]

    def key_behind(self, scope: Scope) -> bytes | None:
        """The key that a request's cookie was given for. What changes something must come from our
        own page: a page of another port of this host would be sent the cookie too.
        """
        if scope["method"] not in ("GET", "HEAD") and not _is_own_origin(scope):
            return None
        until, _, proof = _cookie(scope).partition(".")
        if not (
            until.isascii() and until.isdigit() and len(until) < 16 and int(until) > time.time()
        ):
            return None
        found = None
        for key in self._keys:
            if hmac.compare_digest(_proof(key, until), proof.encode()):
                found = key
        return found

    def signed_in(self, scope: Scope, key: bytes) -> Response:
        """Sends the browser to the page, with a cookie for a key that is right."""
        until = str(int(time.time()) + SESSION_SECONDS)
        response = Response(status_code=303, headers={"location": "/", "cache-control": "no-store"})
        self._set_cookie(response, scope, f"{until}.{_proof(key, until).decode()}", SESSION_SECONDS)
        return response

    def signed_out(self, scope: Scope) -> Response:
        response = Response(status_code=204, headers={"cache-control": "no-store"})
        self._set_cookie(response, scope, "", 0)
        return response

    def _set_cookie(self, response: Response, scope: Scope, value: str, seconds: int) -> None:
        name = cookie_name(scope)
        # Lax, not strict: a link to an answer may stand in somebody's mail. Only GET is sent the
        # cookie then.
        response.set_cookie(
            name, value, max_age=seconds, httponly=True, samesite="lax", secure=self._is_secure
        )


async def read_key(receive: Receive) -> bytes:
    """The key in the form that was sent; raises ApiError for a body that is too long to be one."""
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > _MOST_FORM_BYTES:
            raise ApiError(413, "a form with a key is shorter than this")
    try:
        given = parse_qs(body.decode(), max_num_fields=_MOST_FORM_FIELDS).get("key", [""])
        return given[0].strip().encode()
    except ValueError:  # too many fields, or no UTF-8
        raise ApiError(
            400, f"the form must be UTF-8 and have at most {_MOST_FORM_FIELDS} fields"
        ) from None


def wants_page(scope: Scope) -> bool:
    """Whether it is a browser that opens the page."""
    if scope["path"] != "/" or scope["method"] not in ("GET", "HEAD"):
        return False
    return b"text/html" in _header(scope, b"accept")


def sign_in_form(is_wrong: bool = False) -> Response:
    """401, and a form to do something about it."""
    body = _FORM.replace("<!--message-->", _WRONG if is_wrong else "")
    return Response(
        body, 401, _FORM_HEADERS | {"www-authenticate": "Bearer"}, "text/html; charset=utf-8"
    )


def cookie_name(scope: Scope) -> str:
    """Cookies know hosts but no ports: each server of a machine has a name of its own."""
    _, port = split_host(_header(scope, b"host"))
    return f"quire_page_{port}" if port else "quire_page"


def _proof(key: bytes, until: str) -> bytes:
    return hmac.digest(key, f"quire page until {until}".encode(), "sha256").hex().encode()


def _cookie(scope: Scope) -> str:
    name = cookie_name(scope)
    for header, value in scope["headers"]:
        if header == b"cookie":
            for part in value.decode("latin-1").split(";"):
                found, _, content = part.strip().partition("=")
                if found == name:
                    return str(content)
    return ""


def is_foreign(scope: Scope) -> bool:
    """Whether a browser says that another page sent this."""
    return bool(_header(scope, b"origin")) and not _is_own_origin(scope)


def _is_own_origin(scope: Scope) -> bool:
    origin = _ORIGIN.fullmatch(_header(scope, b"origin").lower())
    return origin is not None and bool(origin[1]) and origin[1] == _header(scope, b"host").lower()


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for header, value in scope["headers"] if header == name), b"")
