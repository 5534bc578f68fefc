"""The Host header, read once and strictly: a name or an address, and perhaps a port."""

from __future__ import annotations

import re

_HOST = re.compile(rb"([A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Za-z:.%]+\])(?::([0-9]{0,5}))?")


def is_host(value: bytes) -> bool:
    """Whether a Host header may look like this. An empty one is allowed: a request may have no name
    for its server.
    """
    return _HOST.fullmatch(value) is not None


def split_host(value: bytes) -> tuple[str, str]:
    """Name and port, each empty if it is not there; both for what is no host at all."""
    found = _HOST.fullmatch(value)
    return (
        ("", "")
        if found is None
        else (found[1].decode("ascii").lower(), (found[2] or b"").decode("ascii"))
    )
