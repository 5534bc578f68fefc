"""Logs for people or for machines, on stderr, the same from both processes."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

LOG_FORMATS = ("human", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


class _JsonFormatter(logging.Formatter):
    """One object per line; what a call gave as `extra={"fields": {…}}` stands beside the message."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _HumanFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        text = super().formatMessage(record)
        fields = getattr(record, "fields", {})
        # A client's text may hold anything: a line of log stays one line.
        return text + "".join(
            f" {name}={_one_line(value)}" for name, value in fields.items() if value is not None
        )


def set_up_logging(log_format: str, level: str, process: str) -> None:
    """Sends everything to stderr; `process` says in each line whose it is."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonFormatter(process) if log_format == "json" else _HumanFormatter(process)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # uvicorn's own lines about starting and stopping say what ours say.
    logging.getLogger("uvicorn.error").setLevel("WARNING")
    logging.getLogger("uvicorn.access").disabled = True
    for name in ("asyncio", "urllib3", "filelock", "httpx"):
        logging.getLogger(name).setLevel("WARNING")


def _one_line(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
