"""Ids of HTTP requests and of what is made for them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from fastapi import Request

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


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
