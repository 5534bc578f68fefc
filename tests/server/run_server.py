"""Runs a server with any configuration, given as JSON: `python -m tests.server.run_server '{"port": 1234}'`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from quire.errors import QuireError
from quire.server.config import ServerConfig
from quire.server.run import serve


def main() -> int:
    fields = json.loads(sys.argv[1])
    for name in ("api_keys", "served_model_names", "cors_origins", "allowed_hosts"):
        if name in fields:
            fields[name] = tuple(fields[name])
    for name in ("tls_certificate", "tls_key", "store", "batches"):
        if name in fields:
            fields[name] = Path(fields[name])
    return serve(ServerConfig(**fields))


def run_safely() -> int:
    """The status; what is wrong is said in one line, as the command line does."""
    try:
        return main()
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
