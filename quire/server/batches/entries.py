"""What the folder of `--batches` knows of a file and of a batch; each is a small file of JSON
there.
"""

from __future__ import annotations

from typing import Any

import msgspec

_OVER = ("completed", "cancelled", "failed")
_SHOWN = (
    *("id", "created_at", "endpoint", "input_file_id", "completion_window", "metadata", "status"),
    *("output_file_id", "error_file_id", "errors", "in_progress_at", "cancelling_at"),
)
"""Fields of a batch that its client sees as they are."""
RECORD_BYTES = 2048
"""What the JSON of an entry may grow to, beside what its client put into it."""


class StoredFile(msgspec.Struct, kw_only=True):
    """A file as its client sees it, and whose it is."""

    id: str
    owner: str
    created_at: int
    bytes: int
    filename: str
    purpose: str

    @property
    def counted_bytes(self) -> int:
        """That it takes in the folder."""
        return self.bytes + RECORD_BYTES

    def shown(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self) | {
            "object": "file",
            "status": "processed",
            "status_details": None,
        }
        del fields["owner"]
        return fields


class StoredBatch(msgspec.Struct, kw_only=True):
    """A batch, as far as it has come."""

    id: str
    owner: str
    created_at: int
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None = None
    status: str = "validating"
    outcome: str | None = None
    """The status it will have: its answers are being made its output files."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: dict[str, Any] | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    in_progress_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None

    @property
    def is_over(self) -> bool:
        return self.status in _OVER

    @property
    def counted_bytes(self) -> int:
        """That its record takes in the folder; its answers are counted as they come."""
        return RECORD_BYTES + len(msgspec.json.encode(self.metadata))

    def shown(self) -> dict[str, Any]:
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        ended = {
            f"{status}_at": self.ended_at if self.status == status else None for status in _OVER
        }
        fields = {name: getattr(self, name) for name in _SHOWN}
        unused = {"expires_at": None, "expired_at": None, "finalizing_at": None}
        return {"object": "batch", "request_counts": counts, **fields, **ended, **unused}

    def fail(self, message: str) -> None:
        """Why it will not be completed."""
        data = [{"code": "server_error", "message": message, "line": None, "param": None}]
        self.errors = {"object": "list", "data": data}
