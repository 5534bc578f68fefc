"""Responses in JSON, written by msgspec: several times as fast as the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi.responses import Response


class JsonResponse(Response):
    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(msgspec.json.encode(content), status_code, headers)
