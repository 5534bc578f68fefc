"""The page: GET /, its files under /page/, and GET /page/watch, what the engine does as server-sent
events.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Scope, Send

from quire import __version__
from quire.field_checks import Number, parameters
from quire.sampling_defaults import DEFAULTED
from quire.sampling_params import SamplingParams
from quire.server.api.chat import ChatCompletionRequest
from quire.server.errors import ApiError, error_body
from quire.server.guard.auth import seen_by
from quire.server.guard.page_session import PageSessions, security_headers
from quire.server.http_responses import EventStream, JsonResponse, named_event
from quire.server.link.others import OwnNames
from quire.server.link.watch_hub import WatchHub, WatchHubs
from quire.server.service import get_service

router = APIRouter(include_in_schema=False)

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".ico": "image/x-icon",
}
_HEADERS = security_headers()


class _File(NamedTuple):
    content: bytes
    kind: str
    tag: str


def _read_files() -> Mapping[str, _File]:
    """All of them, once: no path of a request ever reaches the file system."""
    files = {}
    for path in sorted((Path(__file__).parents[1] / "web").iterdir()):
        if path.suffix in _TYPES and path.name != "sign_in.html":
            content = path.read_bytes()
            files[path.name] = _File(
                content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:24]}"'
            )
    return MappingProxyType(files)


FILES = _read_files()


def _settings() -> list[dict[str, Any]]:
    """The form's fields: the parameters that are for the page, as chat completions take them."""
    found = []
    for name, line in parameters(SamplingParams).items():
        if line.page:
            default = (
                line.default
                if name in DEFAULTED
                else ChatCompletionRequest.model_fields[name].default
            )
            one = {"name": name, "help": f"{line.help} ({line.values})", "default": default}
            if isinstance(line.values, Number):
                one |= {"integer": line.values.kind is int, **line.values.limits()}
            found.append(one)
    return found


SETTINGS = _settings()


@router.get("/")
async def index(request: Request) -> Response:
    return _file(request, "index.html")


@router.get("/favicon.ico")
async def favicon(request: Request) -> Response:
    """For pages that name no icon: /docs, and whatever a browser opens first."""
    return _file(request, "favicon.ico")


@router.get("/page/about")
async def about(request: Request) -> Response:
    """What the page says about the server it belongs to."""
    service = get_service(request)
    ready = service.ready
    defaults = service.tokenizer.sampling_defaults
    body = {
        "version": __version__,
        "models": service.config.model_names,
        "fingerprint": ready.fingerprint,
        "max_model_len": ready.max_model_len,
        "has_keys": bool(service.config.api_keys),
        "engines": len(service.client.engines),
        "settings": [
            {**one, "default": defaults.get(one["name"], one["default"])} for one in SETTINGS
        ],
    }
    return JsonResponse(body, headers={"cache-control": "no-store"})


@router.get("/page/watch")
async def watch(request: Request, engine: int = 0) -> Response:
    """What an engine does: the last ten minutes as far as they are known, then a frame a few times
    a second.
    """
    hubs: WatchHubs = request.app.state.watch_hubs
    hub = hubs.of(engine)
    hub.check_room()
    owner = seen_by(request.scope)
    # without keys all is everybody's
    own = OwnNames(get_service(request).find_record, owner) if owner else None

    def failed(path: str, error: ApiError, http_request_id: str) -> bytes:
        return named_event("failed", error_body(path, error, http_request_id))

    return _WatchStream(hub, own, failed, lambda: None, {"cache-control": "no-store"})


class _WatchStream(EventStream):
    """Frame after frame, as long as somebody watches."""

    def __init__(self, hub: WatchHub, own: OwnNames | None, *rest: Any) -> None:
        super().__init__(*rest)
        self._hub = hub
        self._own = own

    async def _write_events(self, scope: Scope, send: Send) -> None:
        async with contextlib.aclosing(self._hub.follow(self._own)) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})


@router.post("/page/sign_out")
async def sign_out(request: Request) -> Response:
    """Takes the cookie back."""
    return PageSessions((), get_service(request).config.tls_certificate is not None).signed_out(
        request.scope
    )


@router.get("/page/{name}")
async def file(request: Request, name: str) -> Response:
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    found = FILES.get(name)
    if found is None:
        raise ApiError(404, "the page has no such file", code="not_found")
    headers = _HEADERS | {"etag": found.tag}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.kind)
