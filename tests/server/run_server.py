"""Runs a server with any configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from quire.errors import QuireError
from quire.server.config import ServerConfig
from quire.server.run import serve


def run(fields: dict[str, Any]) -> int:
    """Its status; what is wrong is said in one line, as the command line does."""
    fields = dict(fields)
    for name in ("api_keys", "admin_keys", "served_model_names", "cors_origins", "allowed_hosts"):
        if name in fields:
            fields[name] = tuple(fields[name])
    for name in ("tls_certificate", "tls_key", "store", "batches"):
        if name in fields:
            fields[name] = Path(fields[name])
    try:
        return serve(ServerConfig(**fields))
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
