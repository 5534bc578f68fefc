"""/v1/files and /v1/batches, as OpenAI's client uses them; on a server with `--batches DIR`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import Field
from starlette.types import Receive, Scope, Send

from quire.errors import InvalidRequestError
from quire.server.api.body import Body, Metadata, body_schema
from quire.server.api.endpoint import ignored_header, read_body
from quire.server.batches.answers import ENDPOINTS
from quire.server.batches.entries import StoredBatch, StoredFile
from quire.server.batches.queue import BatchQueue
from quire.server.batches.store import BatchStore, Upload
from quire.server.batches.upload import FormReader
from quire.server.disk import disk_errors_for_client
from quire.server.guard.auth import owner_of, seen_by
from quire.server.guard.request_ids import new_id
from quire.server.http_responses import JsonResponse, LargeJsonResponse, list_page
from quire.server.service import get_service
from quire.server.tasks import in_thread

router = APIRouter(tags=["OpenAI"])
Limit = Annotated[int, Query(ge=1, le=10_000)]
After = Annotated[str | None, Query(max_length=128)]
_WRITTEN_AT_ONCE = 2**20
_READ_AT_ONCE = 256 * 1024
"""Bytes of a file."""


class CreateBatch(Body):
    """POST /v1/batches"""

    input_file_id: str = Field(max_length=128)
    endpoint: str = Field(max_length=128)
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "output_expires_after": "files stay until they are deleted"
    }


@router.post("/v1/files")
async def upload_file(request: Request) -> Response:
    """Stores a file of requests."""
    store = _queue(request).store
    declared = request.headers.get("content-length", "")
    expected = int(declared) if declared.isdigit() and len(declared) < 16 else 0
    with disk_errors_for_client():
        upload = await in_thread(store.new_upload, owner_of(request.scope), expected)
        try:
            form = FormReader(request.headers.get("content-type", ""), upload)
            held = bytearray()
            async for chunk in request.stream():
                held += chunk
                if len(held) >= _WRITTEN_AT_ONCE:
                    await in_thread(form.feed, bytes(held))
                    held.clear()
            await in_thread(form.feed, bytes(held))
            stored, ignored = await in_thread(_take_form, store, form, upload)
        finally:
            await in_thread(upload.discard)
    return JsonResponse(stored.shown(), headers=ignored_header(ignored))


def _take_form(store: BatchStore, form: FormReader, upload: Upload) -> tuple[StoredFile, list[str]]:
    filename = form.finish()
    purpose = form.fields.pop("purpose", None)
    if purpose != "batch":
        shown = None if purpose is None else purpose[:64]
        raise InvalidRequestError(
            "purpose", f"must be batch: files are for batches here, not for {shown!r}"
        )
    for name in form.fields:
        if name.partition("[")[0] == "expires_after":
            raise InvalidRequestError(
                "expires_after", "is not supported: files stay until they are deleted"
            )
    return store.add_file(upload, filename, purpose), list(form.fields)


@router.get("/v1/files")
async def list_files(
    request: Request,
    limit: Limit = 10_000,
    after: After = None,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """The files that were uploaded, and those that batches have written."""
    store = _queue(request).store
    owner = seen_by(request.scope)

    def list_them() -> Response:
        files = [one for one in store.files(owner) if purpose in (None, one.purpose)]
        return _page(files[::-1] if order == "desc" else files, limit, after)

    return await get_service(request).in_thread(list_them)


@router.get("/v1/files/{file_id}")
async def get_file(request: Request, file_id: str) -> Response:
    """What is known of a file."""
    return JsonResponse(_queue(request).store.file(seen_by(request.scope), file_id).shown())


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    """Deletes a file."""
    store = _queue(request).store
    with disk_errors_for_client():
        await in_thread(store.delete_file, seen_by(request.scope), file_id)
    return JsonResponse({"id": file_id, "object": "file", "deleted": True})


@router.get("/v1/files/{file_id}/content")
async def file_content(request: Request, file_id: str) -> Response:
    """A file's bytes."""
    store = _queue(request).store
    stored = store.file(seen_by(request.scope), file_id)
    with disk_errors_for_client():
        return OpenFileResponse(await in_thread(store.open_file, stored))


@router.post("/v1/batches", openapi_extra=body_schema(CreateBatch))
async def create_batch(request: Request) -> Response:
    """Begins to answer a file of requests, behind all live ones."""
    body = await read_body(request, CreateBatch)
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequestError("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    batch = StoredBatch(
        id=new_id("batch_"),
        owner=owner_of(request.scope),
        created_at=int(time.time()),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        metadata=body.metadata,
    )
    with disk_errors_for_client():
        await _queue(request).add(batch)
    return JsonResponse(batch.shown())


@router.get("/v1/batches")
async def list_batches(
    request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: After = None
) -> Response:
    """All batches, the newest first."""
    store = _queue(request).store
    owner = seen_by(request.scope)
    return await get_service(request).in_thread(
        lambda: _page(store.batches(owner)[::-1], limit, after)
    )


@router.get("/v1/batches/{batch_id}")
async def get_batch(request: Request, batch_id: str) -> Response:
    """How far a batch has come."""
    return JsonResponse(_queue(request).store.batch(seen_by(request.scope), batch_id).shown())


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Ends a batch; what is answered already can be had as its output."""
    queue = _queue(request)
    batch = queue.store.batch(seen_by(request.scope), batch_id)
    await queue.cancel(batch)
    return JsonResponse(batch.shown())


class OpenFileResponse(Response):
    """The bytes of an open file: whoever deletes it meanwhile takes nothing from its reader."""

    def __init__(self, number: int) -> None:
        """`number`: of its descriptor, which is closed when the answer is over."""
        self._number = number
        size = str(os.fstat(number).st_size)
        super().__init__(headers={"content-length": size}, media_type="application/jsonl")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = int(self.headers["content-length"])
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            while left:
                piece = await in_thread(os.read, self._number, min(left, _READ_AT_ONCE))
                left -= len(piece)
                if not piece:
                    raise OSError("the file was cut while it was read")
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            os.close(self._number)


def _page(entries: Sequence[StoredFile | StoredBatch], limit: int, after: str | None) -> Response:
    """Of a size that clients choose: to be called beside the event loop."""
    part, page = list_page([one.id for one in entries], limit, after)
    return LargeJsonResponse.of(lambda: {**page, "data": [one.shown() for one in entries[part]]})


def _queue(request: Request) -> BatchQueue:
    queue: BatchQueue = request.app.state.batches
    return queue
