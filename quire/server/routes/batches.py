"""/v1/files and /v1/batches, as OpenAI's client uses them; on a server with `--batches DIR`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, Response
from pydantic import Field

from quire.errors import InvalidRequestError
from quire.server.batches.answers import ENDPOINTS
from quire.server.batches.queue import BatchQueue
from quire.server.batches.store import StoredBatch, StoredFile
from quire.server.batches.upload import keep_only, read_form, receive
from quire.server.guard.auth import owner_of
from quire.server.guard.connection import body_schema, new_id, read_body
from quire.server.http_responses import JsonResponse
from quire.server.protocol.common import Body
from quire.server.service import get_service

router = APIRouter(tags=["OpenAI"])
Limit = Annotated[int, Query(ge=1, le=10_000)]
After = Annotated[str | None, Query(max_length=128)]


class CreateBatch(Body):
    """POST /v1/batches"""

    input_file_id: str = Field(max_length=128)
    endpoint: str = Field(max_length=128)
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


@router.post("/v1/files")
async def upload_file(request: Request) -> Response:
    """Stores a file of requests."""
    queue, owner = _queue(request), _owner(request)
    service, store = get_service(request), queue.store
    upload = store.new_upload()
    try:
        room = await service.in_thread(lambda: store.room)
        await receive(request.stream(), upload, room)
        stored = await service.in_thread(_take_form, queue, owner, upload, request.headers.get("content-type", ""))
    finally:
        upload.unlink(missing_ok=True)
    return JsonResponse(stored.shown())


def _take_form(queue: BatchQueue, owner: str, upload: Any, content_type: str) -> StoredFile:
    form = read_form(upload, content_type)
    purpose = form.fields.get("purpose")
    if purpose != "batch":
        raise InvalidRequestError("purpose", f"must be batch: files are for batches here, not for {purpose!r}")
    kept = queue.store.new_upload()
    try:
        keep_only(upload, form.file, kept)
        return queue.store.add_file(owner, form.filename, purpose, kept)
    finally:
        kept.unlink(missing_ok=True)


@router.get("/v1/files")
async def list_files(
    request: Request,
    limit: Limit = 10_000,
    after: After = None,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """The files that were uploaded, and those that batches have written."""
    files = _queue(request).store.files(_owner(request))
    files = [one for one in files if purpose in (None, one.purpose)]
    return _page(files[::-1] if order == "desc" else files, limit, after)


@router.get("/v1/files/{file_id}")
async def get_file(request: Request, file_id: str) -> Response:
    """What is known of a file."""
    return JsonResponse(_queue(request).store.file(_owner(request), file_id).shown())


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    """Deletes a file."""
    queue = _queue(request)
    await get_service(request).in_thread(queue.store.delete_file, _owner(request), file_id)
    return JsonResponse({"id": file_id, "object": "file", "deleted": True})


@router.get("/v1/files/{file_id}/content")
async def file_content(request: Request, file_id: str) -> Response:
    """A file's bytes."""
    store = _queue(request).store
    return FileResponse(store.path_of(store.file(_owner(request), file_id)), media_type="application/jsonl")


@router.post("/v1/batches", openapi_extra=body_schema(CreateBatch))
async def create_batch(request: Request) -> Response:
    """Begins to answer a file of requests, behind all live ones."""
    body = await read_body(request, CreateBatch)
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequestError("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    batch = StoredBatch(
        id=new_id("batch_"),
        owner=_owner(request),
        created_at=int(time.time()),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        metadata=body.metadata,
    )
    await _queue(request).add(batch)
    return JsonResponse(batch.shown())


@router.get("/v1/batches")
async def list_batches(
    request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: After = None
) -> Response:
    """All batches, the newest first."""
    return _page(_queue(request).store.batches(_owner(request))[::-1], limit, after)


@router.get("/v1/batches/{batch_id}")
async def get_batch(request: Request, batch_id: str) -> Response:
    """How far a batch has come."""
    return JsonResponse(_queue(request).store.batch(_owner(request), batch_id).shown())


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Ends a batch; what is answered already can be had as its output."""
    queue = _queue(request)
    batch = queue.store.batch(_owner(request), batch_id)
    await queue.cancel(batch)
    return JsonResponse(batch.shown())


def _page(entries: Sequence[StoredFile | StoredBatch], limit: int, after: str | None) -> Response:
    ids = [one.id for one in entries]
    if after is not None and after not in ids:
        raise InvalidRequestError("after", "is the id of none of these")
    first = 0 if after is None else ids.index(after) + 1
    shown = [one.shown() for one in entries[first : first + limit]]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return JsonResponse({"object": "list", "data": shown, **ends, "has_more": first + limit < len(entries)})


def _queue(request: Request) -> BatchQueue:
    queue: BatchQueue = request.app.state.batches
    return queue


def _owner(request: Request) -> str:
    return owner_of(request.scope)
