"""/v1/files and /v1/batches with OpenAI's own client: they survive restarts, give way, and can be
cancelled.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import QuireError
from quire.server.batches.room import FolderLimits, NoRoomError
from quire.server.batches.store import BatchStore
from quire.server.batches.upload import FormReader
from quire.server.errors import ApiError
from tests.late_import import LateModule
from tests.server.harness import Server, error_of, wait_for

openai: Any = LateModule("openai")
ENGINE = {"device": "cpu", "kv_cache_memory": "8MiB", "max_num_seqs": 4}
URL = "/v1/chat/completions"


def requests(count: int, tokens: int = 20) -> bytes:
    """Lines of chats, and at the end one that is wrong and one for another endpoint."""
    lines: list[dict[str, Any]] = [
        {
            "custom_id": f"id-{i}",
            "method": "POST",
            "url": URL,
            "body": {
                "messages": [{"role": "user", "content": f"say {i}"}],
                "max_tokens": tokens,
                "ignore_eos": True,
            },
        }
        for i in range(count)
    ]
    lines.append(
        {
            "custom_id": "wrong",
            "method": "POST",
            "url": URL,
            "body": {"messages": [], "max_tokens": -1},
        }
    )
    lines.append(
        {"custom_id": "other", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    )
    return "\n".join(map(json.dumps, lines)).encode()


def client_of(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def begin(client: Any, data: bytes) -> str:
    file = client.files.create(file=("requests.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(data), "requests.jsonl", "batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"a": "b"},
    )
    assert batch.metadata == {"a": "b"}
    return str(batch.id)


def ended(client: Any, batch_id: str, status: str) -> Any:
    def look() -> Any:
        batch = client.batches.retrieve(batch_id)
        assert batch.status in (status, "validating", "in_progress", "cancelling"), batch
        return batch if batch.status == status else None

    return wait_for(look, f"the batch to be {status}")


def lines_of(client: Any, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


@pytest.mark.slow
def test_a_batch_from_upload_to_answers_over_a_restart(small_model: str, tmp_path: Path) -> None:
    """The server is killed in the middle; the next one goes on, and live requests are answered
    meanwhile.
    """
    options: dict[str, Any] = {
        "model": small_model,
        "engine": ENGINE,
        "batches": str(tmp_path / "batches"),
    }
    with Server(**options) as server, client_of(server) as client:
        batch_id = begin(client, requests(60, 120))
        work = tmp_path / "batches" / "work" / f"{batch_id}.output"
        wait_for(lambda: work.exists() and work.read_bytes().count(b"\n") >= 3, "some answers")
        started = time.monotonic()
        assert server.complete(prompt="live", max_tokens=3)["choices"]
        assert time.monotonic() - started < 60
        assert client.batches.retrieve(batch_id).status == "in_progress"
        assert server.process is not None
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    before = work.read_bytes().count(b"\n")
    assert 3 <= before < 62
    with Server(**options) as server, client_of(server) as client:
        batch = ended(client, batch_id, "completed")
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (62, 60, 2)
        answers, errors = (
            lines_of(client, batch.output_file_id),
            lines_of(client, batch.error_file_id),
        )
        assert [one["custom_id"] for one in answers] == [f"id-{i}" for i in range(60)]
        assert all(one["response"]["body"]["usage"]["completion_tokens"] == 120 for one in answers)
        assert [one["custom_id"] for one in errors] == ["wrong", "other"]
        assert errors[0]["response"]["status_code"] == 400
        assert "the batch is for" in errors[1]["error"]["message"]
        assert [one.id for one in client.batches.list()] == [batch_id]
        check_cancelling(client)
        check_files(server, client)


def check_cancelling(client: Any) -> None:
    batch_id = begin(client, requests(200, 200))
    waiting = begin(client, requests(1))
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        client.files.delete(client.batches.retrieve(batch_id).input_file_id)
    client.batches.cancel(waiting)
    client.batches.cancel(batch_id)
    batch = ended(client, batch_id, "cancelled")
    assert batch.request_counts.completed < 200
    if batch.request_counts.completed:
        assert len(lines_of(client, batch.output_file_id)) == batch.request_counts.completed
    assert ended(client, waiting, "cancelled").request_counts.completed == 0


def check_files(server: Server, client: Any) -> None:
    assert [one.filename for one in client.files.list(purpose="batch")] == ["requests.jsonl"] * 3
    # page by page
    assert {one.purpose for one in client.files.list(limit=1)} == {"batch", "batch_output"}
    file = client.files.create(file=("x.jsonl", b"\r\n--not the boundary\r\n"), purpose="batch")
    assert client.files.content(file.id).read() == b"\r\n--not the boundary\r\n"
    assert client.files.retrieve(file.id).bytes == 22
    assert client.files.delete(file.id).deleted
    error_of(server.get(f"/v1/files/{file.id}"), 404, "file_id")
    error_of(server.get("/v1/batches/batch_none"), 404, "batch_id")
    body = {"input_file_id": "none", "endpoint": URL, "completion_window": "24h"}
    error_of(server.post("/v1/batches", body), 404, "file_id")
    error_of(server.post("/v1/batches", body | {"endpoint": "/v1/responses"}), 400, "endpoint")
    error_of(
        server.post("/v1/batches", body | {"completion_window": "1h"}), 400, "completion_window"
    )
    error_of(server.post("/v1/files", body), 415)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x.jsonl", b"{}"), purpose="fine-tune")


def store_of(folder: Path, num_bytes: int = 100_000, num_keys: int = 1) -> BatchStore:
    return BatchStore(folder, FolderLimits.of(num_bytes, num_keys))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    store = store_of(tmp_path / "batches")
    yield store
    store.close()


def read_form(
    store: BatchStore, body: bytes, content_type: str, step: int = 2**20
) -> tuple[FormReader, bytes]:
    """A form that comes `step` bytes at a time, and the file in it."""
    upload = store.new_upload("me")
    try:
        form = FormReader(content_type, upload)
        for start in range(0, len(body), step):
            form.feed(body[start : start + step])
        form.finish()
        return form, upload.path.read_bytes()
    finally:
        upload.discard()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"--b\r\n",
        b"--b\r\nno header\r\n--b--",
        b"--b--",
        b"--b\r\n\r\n\r\n--b--",
        b"x" * 1000,
    ],
)
def test_a_form_that_is_none_is_refused(body: bytes, store: BatchStore) -> None:
    with pytest.raises(ApiError) as caught:
        read_form(store, body, "multipart/form-data; boundary=b")
    assert caught.value.status == 400


@pytest.mark.parametrize("step", [1, 7, 2**20])
def test_a_form_is_taken_apart_however_it_comes(step: int, store: BatchStore) -> None:
    header = b'Content-Disposition: form-data; name="%s"'
    content = b"{}\r\n--bb\r\n--c\r\n"
    parts = [
        header % b"purpose" + b"\r\n\r\nbatch",
        header % b"file" + b'; filename="a.jsonl"\r\n\r\n' + content,
    ]
    body = b"--b\r\n" + b"\r\n--b\r\n".join(parts) + b"\r\n--b--\r\n"
    form, file = read_form(store, body, 'multipart/form-data; boundary="b"', step)
    assert form.fields == {"purpose": "batch"}
    assert form.filename == "a.jsonl"
    assert file == content


def test_the_folder_has_one_owner_and_is_bounded(tmp_path: Path) -> None:
    store = store_of(tmp_path / "batches", 10_000)
    with pytest.raises(QuireError, match="another server"):
        store_of(tmp_path / "batches")
    upload = store.new_upload("me")
    upload.write(b"x" * 6000)
    taken = store.room.taken("me")
    assert 6000 < taken < 10_000  # its record counts, too
    stored = store.add_file(upload, "a", "batch")
    assert store.room.taken("me") == taken
    with pytest.raises(NoRoomError, match="delete some"):
        store.new_upload("me", 5000)
    with pytest.raises(ApiError, match="another key"):
        store.file("you", stored.id)
    assert store.file(None, stored.id) == stored  # as an admin key sees it
    store.close()
    again = store_of(tmp_path / "batches")
    assert again.file("me", stored.id) == stored
    assert again.path_of(stored).read_bytes() == b"x" * 6000
    assert again.room.taken("me") == taken
    again.delete_file("me", stored.id)
    assert again.room.taken() == 0
    assert [
        path for path in again.folder.rglob("*") if path.is_file() and path.name != ".lock"
    ] == []
    again.close()
